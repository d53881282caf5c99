"""What a notebook shows: the notebooks in examples/ run cell by cell, and results have short texts and tables."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitplan as bp
from bitplan.lab.report import formats_picture
from bitplan.lab.report.summaries import Report
from bitplan.tables import MOST_ROWS, Table, plain_table

EXAMPLES = Path(__file__).parents[1] / "examples"


EIGHT = {"format": "int8", "scale": "channel"}


def displayed(value: Any) -> str:
    """What a notebook shows of a value, by the richest of its representations."""
    for method in ("_repr_html_", "_repr_svg_"):
        if hasattr(value, method):
            return str(getattr(value, method)())
    return repr(value)


def run_notebook(path: Path) -> list[str]:
    """Run the code cells in order in one namespace; what each one displays."""
    shown: list[str] = []
    names: dict[str, Any] = {"__name__": "notebook", "display": lambda value: shown.append(displayed(value))}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [], "notebooks are stored without outputs"
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, path.name, "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(displayed(eval(compile(ast.Expression(last.value), path.name, "eval"), names)))
    return shown


def test_the_notebook_for_engineers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    shown = run_notebook(EXAMPLES / "engineer.ipynb")
    assert len(shown) == 9
    assert "e4m3" in shown[0]
    assert any("worse than that of fp32" in text and "one seed decides nothing" in text for text in shown)
    assert "step 20: Plan &#x27;fp8-linear&#x27;" in shown[6]


def test_the_notebook_for_researchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("plotly")
    monkeypatch.chdir(tmp_path)
    shown = run_notebook(EXAMPLES / "researcher.ipynb")
    assert len(shown) == 8
    assert shown[0].startswith("<svg")
    assert "CR 3-8 x4" in shown[3]
    assert all(name in shown[6] for name in ("fp32", "int8-all", "cyclic"))
    assert len(Report.of(["runs/study"]).runs) == 6


def test_plans_have_a_line_and_a_table() -> None:
    plan = bp.Plan.from_dict(
        {
            "version": 1,
            "name": "<mine>",
            "rules": [
                {"match": "*", "weight": EIGHT, "activation": EIGHT},
                {"match": "head", "op": "linear", "keep": True},
            ],
        }
    )
    assert repr(plan) == "<Plan '<mine>': 2 rules>"
    assert plan.table().to_dict() == {
        "modules": ["*", "head"],
        "operations": ["all", "linear"],
        "formats": ["weight, activation: int8 channel", "kept as they are"],
    }
    assert "&lt;mine&gt;" in plan._repr_html_()
    assert "<mine>" not in plan._repr_html_()
    assert repr(bp.Plan()) == "<Plan: 0 rules>"
    for name in ("fp8-train", "lora-4bit", "int8-all"):
        assert len(repr(bp.Plan.preset(name))) < 200
        assert bp.Plan.preset(name)._repr_html_().count("<tr>") == len(bp.Plan.preset(name).all_rules) + 1


def test_attachments_say_where_they_are() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bp.attach(model, "int8-all", optimizer=optimizer, steps=10) as run:
        assert repr(run) == "<Attachment to Sequential, emulate, step 0 of 10: Plan 'int8-all': 1 rule>"
        assert "cost" not in run._repr_html_()  # nothing has run yet
        model(x).sum().backward()
        optimizer.step()
        assert "step 1 of 10" in repr(run)
        cells = re.findall(r">([^<>]+)</td>", run._repr_html_())
        assert float(cells[cells.index("cost") + 1]) < 1


def test_measurements_compare_candidates() -> None:
    torch.manual_seed(0)
    measurement = bp.measure(
        nn.Linear(8, 8), [torch.randn(4, 8)], candidates=["int8 tensor", "e4m3 tensor"], target="a<b"
    )
    assert repr(measurement) == "<Measurement of a<b: 1 product, 2 candidates, 1 stage>"
    table = measurement.comparison()
    assert table.columns == ("product", "pass", "int8 tensor", "e4m3 tensor")
    row = next(row for row in measurement.rows if row.pass_ == "fprop" and row.candidate == "e4m3 tensor")
    assert table.to_dict()["e4m3 tensor"][0] == row.median
    assert measurement._repr_html_().count("<tr>") == len(table) + 1


def test_long_tables_are_displayed_in_part() -> None:
    long = Table(range(1000), {"number": lambda row: row})
    assert repr(long).count("\n") == MOST_ROWS + 1
    assert repr(long).endswith("... and 940 more rows: print() shows all.")
    assert str(long).count("\n") == 1000
    assert long._repr_html_().count("<tr>") == MOST_ROWS + 1
    short = Table(range(3), {"number": lambda row: row})
    assert repr(short) == str(short)


def test_a_picture_of_formats(tmp_path: Path) -> None:
    picture = formats_picture("e4m3", bp.get_format("int4"))
    picture.save(tmp_path / "formats.svg")
    assert (tmp_path / "formats.svg").read_text() == picture._repr_svg_()
    assert "e4m3: 126 positive values" in picture.svg
    assert len(repr(picture)) < 60


def test_a_table_breaks_texts_between_words_before_it_breaks_names() -> None:
    name = "encoder.layers.11.attention.output.dense:weight"
    text = plain_table({"site": [name], "why": ["the error is small enough for it to be rounded to few bits"]}, 80)
    assert name in text
    assert max(map(len, text.splitlines())) <= 80
    assert max(map(len, plain_table({"site": [name], "why": ["word"]}, 40).splitlines())) <= 40
