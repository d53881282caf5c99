"""The page as text; what a browser makes of it is in test_page_in_browser.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.report.page import page_html
from bitplan.lab.report.summaries import Report

WriteRun = Callable[..., Path]
EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>\"'&amp;"


class Outline(HTMLParser):
    """Tags with their attributes, and the texts of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(*folders: Path) -> Outline:
    return Outline(page_html(Report.of(folders)))


def test_the_page_has_all_its_parts(write_run: WriteRun, tmp_path: Path) -> None:
    sites = [{"site": "a/linear.0:weight", "role": "weight", "format": "int8", "rule": None, "error": 0.1}]
    write_run(tmp_path / "a", value=0.9)
    write_run(tmp_path / "b", plan="int8", value=0.9, cost=0.1, sites=sites, memory=1000.0)
    page = page_of(tmp_path)
    text = page.text.replace("\xa0", " ")
    assert "the mean accuracy of int8 is no worse than that of fp32 (90.0 % against 90.0 %)" in text
    assert "but one seed decides nothing" in text
    assert "1.0 % of the reference's accuracy: a plan keeps it if" in text
    assert "badge undecided" in {attributes.get("class") for attributes in page.all("span")}
    assert "steps 30, lr 0.1" in page.text
    charts = [attributes for attributes in page.all("div") if attributes.get("class") == "chart"]
    assert [chart["aria-label"] for chart in charts if "Chart: " in (chart["aria-label"] or "")] != []
    assert len(charts) == 7
    assert all(chart["role"] == "img" for chart in charts)
    assert len(page.all("figcaption")) == len(charts)
    assert page.text.count("Data as a table") == len(charts)
    data = json.loads(page.scripts[0])
    assert set(data["drawings"]) == {chart["id"] for chart in charts}
    for command in ("bitplan train digits --seed 0", "bitplan train digits --plan int8 --seed 0"):
        assert page.text.count(command) == 2  # under its plan, and under its run
    sorted_tables = [table for table in page.all("table") if "data-sorts" in table]
    assert len(sorted_tables) == 2
    assert {head["aria-sort"] for head in page.all("th") if "aria-sort" in head} == {"none"}


def test_the_page_asks_the_network_for_nothing(write_run: WriteRun, tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a"))
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "http" not in policy
    assert not [tag for tag, attributes in page.tags if {"src", "href"} & set(attributes)]


def test_everything_that_users_gave_is_escaped(write_run: WriteRun, tmp_path: Path) -> None:
    evil: dict[str, Any] = {
        "plan": EVIL,
        "task": EVIL,
        "settings": {"name": EVIL, EVIL: 1},
        "command": f"bitplan train {EVIL}",
        "versions": {EVIL: EVIL},
        "machine": {"cpu": EVIL},
        "device": EVIL,
        "execution": EVIL,
        "metric": {"name": EVIL, "better": "higher", "trivial": 0.1},
    }
    sites = [{"site": EVIL, "role": EVIL, "format": f"{EVIL}", "rule": EVIL, "error": 0.5}]
    write_run(tmp_path / "a", **evil, sites=sites, status="stopped", summary={"why": EVIL, "memory": {EVIL: 5.0}})
    write_run(tmp_path / "b", **(evil | {"plan": None}))
    page = page_of(tmp_path)
    assert len(page.scripts) == 3  # data, plotly, our own: no name made a fourth
    assert not page.all("img")
    assert EVIL in page.text
    assert not re.search(r"[<>&]", page.scripts[0])  # no text in the data ends the script or begins a comment
    assert "&lt;/script&gt;" in str(json.loads(page.scripts[0]))  # plotly reads a little HTML, and gets none


@pytest.mark.parametrize("status", ["stopped", "diverged", "unfinished"])
def test_runs_that_did_not_finish_are_shown_as_such(write_run: WriteRun, tmp_path: Path, status: str) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", plan="odd", status=status, value=None)
    page = page_of(tmp_path)
    assert any(span.get("class") == f"badge {status}" for span in page.all("span"))
    assert f"1 of 1 {status}" in page.text


def test_a_hundred_plans_are_all_there(write_run: WriteRun, tmp_path: Path) -> None:
    for number in range(100):
        write_run(tmp_path / f"{number:03}", plan=f"plan-{number:03}", cost=1 / (number + 1))
    page = page_of(tmp_path)
    entries = [button for button in page.all("button") if button.get("class") == "entry"]
    assert len(entries) == 100
    assert all(f"bitplan train digits --plan plan-{number:03} --seed 0" in page.text for number in range(100))


def test_several_tasks_have_a_section_each(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(
        tmp_path / "b", task="letters", metric={"name": "perplexity", "better": "lower", "trivial": 9.0}, value=3.0
    )
    page = page_of(tmp_path)
    assert [section["id"] for section in page.all("section")] == ["e0", "e1"]
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_an_emulated_saving_is_not_called_one(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", plan="p")
    assert "nothing was saved yet" in page_of(tmp_path).text


def test_charts_of_bytes_are_left_out_where_no_plan_changes_any(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", plan="operands", cost=0.1)
    page = page_of(tmp_path)
    assert "No plan changes the bytes" in page.text
    assert "accuracy against bytes" not in page.text
    assert "tensor bytes" not in page.text.replace("No plan changes the bytes of a step's tensors", "")
    assert "its tensors' bytes" not in page.text
    write_run(tmp_path / "c", plan="stored", cost=0.1, memory=1000.0)
    assert "accuracy against bytes" in page_of(tmp_path).text


def test_measured_time_and_memory_stand_beside_what_was_counted(write_run: WriteRun, tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    run = write_run(tmp_path / "b", plan="int8")
    lines = [{"step": step, "seconds": seconds, "peak": 10**8} for step, seconds in ((1, 9.0), (10, 9.9), (20, 11.0))]
    (run / "times.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (experiment,) = Report.of([tmp_path]).experiments
    assert experiment.plans[1].step_seconds == pytest.approx(0.105)  # without the first step, which compiles
    page = page_of(tmp_path)
    assert "105 ms" in page.text
    assert "95.4 MiB" in page.text
    assert "time a step and peak memory" in page.text
