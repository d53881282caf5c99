"""Every code block of the README and of the documentation works.

Blocks of a page run in order, in one namespace and one empty folder: ``python`` blocks are executed, ``yaml`` blocks
are loaded as plans, and every ``bitplan`` command line of an ``sh`` block is parsed and run. A command whose comment
says "seconds" or "minutes", or that needs a GPU, is only parsed. The terminal has 80 columns, which no line and no
table may exceed. A block with a title (``title="my_task.py"``) is written to that file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bitplan.analysis.measure import Measurement
from bitplan.cli import main
from bitplan.cli.app import whole_group
from bitplan.cli.output import FittedTable, _total
from bitplan.lab.compare import find_suite
from bitplan.plans import Plan

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
README = PAGES[0].read_text()
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    language: str
    title: str
    code: str


def blocks(page: Path) -> list[Block]:
    return [
        Block(language, "".join(re.findall(r'title="([^"]+)"', options)), code)
        for language, options, code in FENCE.findall(page.read_text())
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# Code.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with the examples in it, and short trainings for everything that trains to measure."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for a script in that folder
    monkeypatch.setenv("COLUMNS", "80")
    fit = FittedTable._fit

    def fitted(table: FittedTable, shown: Any, available: int) -> Any:
        headings, widths = fit(table, shown, available)
        movable = any(table._columns[index].is_optional for index in shown)
        assert _total(widths) <= available or movable, f"a table is too wide for {available} columns: {headings}"
        return headings, widths

    monkeypatch.setattr(FittedTable, "_fit", fitted)
    monkeypatch.setattr("bitplan.lab.train.stages.STEPS", 3)
    return tmp_path


def lines_of(block: Block) -> Iterator[tuple[list[str], str]]:
    """The arguments and the comment of every command line."""
    for line in block.code.splitlines():
        argv = shlex.split(line, comments=True)
        if argv:
            yield argv, line.partition(" #")[2]


def run_commands(block: Block) -> None:
    for argv, comment in lines_of(block):
        if argv[0] != "bitplan" or re.search("seconds|minutes", comment) or "cuda" in argv:
            continue
        shown = io.StringIO()
        with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(shown):
            main(argv[1:])
        print(shown.getvalue(), end="")
        assert not ended.value.code, " ".join(argv)
        if not {"--json", "schema", "show", "export"} & set(argv):  # plans and files, whose lines have no width
            text, _, _ = shown.getvalue().partition("version: 1\n")
            long = [line for line in text.splitlines() if len(line.rstrip()) > 80]
            # A command that is meant to be copied stays on one line.
            assert [line for line in long if not line.startswith(("command:", "bitplan report"))] == [], " ".join(argv)


def run_page(page: Path) -> tuple[dict[str, Any], str]:
    """The names that a page's Python defines, and everything it prints."""
    names: dict[str, Any] = {"__name__": "page"}
    shown = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(shown):
        for block in blocks(page):
            if block.title:
                Path(block.title).write_text(block.code)
            elif block.language == "python":
                exec(compile(block.code, name_of(page), "exec"), names)
            if block.language == "sh" and page.name != "cli.md":  # its commands are run on the pages it links to
                run_commands(block)
            elif block.language == "yaml":
                Plan.from_yaml(block.code)
    return names, shown.getvalue()


RUN = [page for page in PAGES if any(block.language in ("python", "sh", "yaml") for block in blocks(page))]


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_the_code_of_every_page_runs(page: Path, folder: Path) -> None:
    names, shown = run_page(page)
    check = CHECKS.get(name_of(page).removeprefix("docs/"))
    if check is not None:
        check(names, shown)


# What single pages promise about their output.


def check_formats(names: dict[str, Any], shown: str) -> None:
    text = (DOCS / "how-to" / "formats.md").read_text()
    for code, promised in re.findall(r"^print\((.+)\)  # (.+)$", text, flags=re.MULTILINE):
        assert eval(code, names) == eval(promised.partition(":")[0]), code


def check_cost(names: dict[str, Any], shown: str) -> None:
    planned, fp32 = re.findall(r"GBitOPs +(\S+) +(\S+)", shown)[-1]
    assert float(planned.replace(",", "")) < float(fp32.replace(",", "")) / 10


def check_memory(names: dict[str, Any], shown: str) -> None:
    plain, packed, measured = (names[name].activations for name in ("plain", "packed", "measured"))
    assert packed == pytest.approx(measured, rel=0.02)
    assert plain > 3 * packed


def check_runs(names: dict[str, Any], shown: str) -> None:
    assert Path("runs/digits-fp32-s0").is_dir()
    assert "int8-minmax" in shown
    assert all(torch.equal(tensor, names["weights"][name]) for name, tensor in names["same"].items())
    assert set(names["same"]) == set(names["weights"])
    assert names["summary"].status == "finished"
    assert names["losses"]


def check_tasks(names: dict[str, Any], shown: str) -> None:
    accuracies = re.findall(r"spirals, .*? accuracy (0\.\d+|1\.0+) ", shown)
    assert len(accuracies) == 2
    assert all(float(accuracy) > 0.9 for accuracy in accuracies)


def check_schedules(names: dict[str, Any], shown: str) -> None:
    assert names["cr"].bits(0, 64000) == 3
    assert names["cr"].summary(64000).relative_cost == 0.633375
    assert names["mine"].table(4).tolist() == [4, 4, 8, 8]
    assert '"relative_cost": 0.399' in shown
    assert "int CR 3-8 x8" in shown


def check_range_test(names: dict[str, Any], shown: str) -> None:
    assert "lowest bits" in shown or "no bound" in shown


def check_compare(names: dict[str, Any], shown: str) -> None:
    assert "On digits (2 seeds, 5 steps), " in shown
    assert "<table" in names["report"]._repr_html_()


def check_measure(names: dict[str, Any], shown: str) -> None:
    assert Measurement.load("measurement.json").stages == ["early", "middle", "late"]
    assert Path("measurement.html").is_file()
    assert names["latest"].rows


def check_advise(names: dict[str, Any], shown: str) -> None:
    assert Plan.from_yaml(Path("plan.yaml").read_text()).all_rules
    assert names["advice"].reasons


def check_packed(names: dict[str, Any], shown: str) -> None:
    assert "activations" in shown


def check_report(names: dict[str, Any], shown: str) -> None:
    assert Path("all.html").is_file()
    assert Path("all.csv").is_file()
    (experiment,) = names["report"].experiments
    assert experiment.answer in shown


def check_doctor(names: dict[str, Any], shown: str) -> None:
    assert "The cause is 4/linear.0:dgrad.dy (e2m1), in the backward pass" in shown
    assert names["diagnosis"].plan is not None


def check_start(names: dict[str, Any], shown: str) -> None:
    assert names["losses"][-1] < names["losses"][0]
    assert type(names["model"]) is torch.nn.Sequential


CHECKS = {
    "getting-started.md": check_start,
    "how-to/formats.md": check_formats,
    "how-to/cost.md": check_cost,
    "how-to/memory.md": check_memory,
    "how-to/measure.md": check_measure,
    "how-to/advise.md": check_advise,
    "how-to/packed.md": check_packed,
    "how-to/report.md": check_report,
    "how-to/runs.md": check_runs,
    "how-to/tasks.md": check_tasks,
    "how-to/schedules.md": check_schedules,
    "how-to/range-test.md": check_range_test,
    "how-to/compare.md": check_compare,
    "how-to/doctor.md": check_doctor,
}


def test_the_diff_of_the_readme_trains_with_and_without_its_lines(folder: Path) -> None:
    (diff,) = (block.code for block in blocks(PAGES[0]) if block.language == "diff")
    lines = diff.splitlines()
    added = [line for line in lines if line.startswith("+")]
    assert len(added) == 4
    losses = {}
    for which, kept in (("planned", lines), ("plain", [line for line in lines if line not in added])):
        names: dict[str, Any] = {}
        code = "\n".join(line[1:] for line in kept).replace("    loss.backward()", "    record(loss); loss.backward()")
        names["record"] = losses.setdefault(which, []).append
        torch.manual_seed(0)
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            exec(code, names)
        assert ("fprop.x" in shown.getvalue()) == (which == "planned")
        assert type(names["model"]) is torch.nn.Sequential
    differences = [
        abs(float(a.detach()) - float(b.detach())) for a, b in zip(losses["planned"], losses["plain"], strict=True)
    ]
    assert len(differences) == 20
    assert all(difference > 0 for difference in differences)
    assert max(differences) < 0.1
    assert losses["planned"][-1] < losses["planned"][0]


# Commands.


def commands_of(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command by its path, such as ("plan", "show")."""
    commands: dict[tuple[str, ...], Any] = {}
    for name, command in group.commands.items():
        command_path = (*path, name)
        commands.update(commands_of(command, command_path) if hasattr(command, "commands") else {command_path: command})
    return commands


COMMANDS = commands_of(whole_group())
SHOWN = [
    (name_of(page), shlex.join(argv))
    for page in PAGES
    for block in blocks(page)
    if block.language in ("sh", "")
    for argv, _ in lines_of(block)
    if argv[0] == "bitplan"
]


def command_of(arguments: list[str]) -> tuple[str, ...]:
    return next(path for path in COMMANDS if tuple(arguments[: len(path)]) == path)


@pytest.mark.parametrize(("page", "line"), SHOWN)
def test_every_command_exists_and_takes_its_arguments(page: str, line: str) -> None:
    arguments = shlex.split(line)[1:]
    command = command_of(arguments)
    COMMANDS[command].make_context(" ".join(command), arguments[len(command) :])  # parsed, not run


def test_every_suite_that_is_compared_exists() -> None:
    compared = [shlex.split(line) for _, line in SHOWN if line.startswith("bitplan compare") and "--suite" in line]
    for argv in compared:
        suite = argv[argv.index("--suite") + 1]
        assert ".py:" in suite or find_suite(suite).description


def test_the_reference_has_every_command() -> None:
    shown = {command_of(shlex.split(line)[1:]) for page, line in SHOWN if page == "docs/cli.md"}
    assert shown == set(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_script_and_make_target_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(page):
        if block.language != "sh":
            continue
        for argv, _ in lines_of(block):
            if argv[0] == "python" and argv[1].endswith(".py"):
                assert (ROOT / argv[1]).is_file(), argv
            elif argv[0] == "python":
                assert importlib.util.find_spec(argv[2]) is not None, argv
            elif argv[0] == "make":
                assert re.search(rf"^{argv[1]}:", makefile, flags=re.MULTILINE), argv


# Links and navigation.


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", FENCE.sub("", linked.read_text()), flags=re.MULTILINE)
            assert anchor in {slug(heading) for heading in headings}, link


def slug(heading: str) -> str:
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in DOCS.rglob("*.md"):
        assert f": {path.relative_to(DOCS)}\n" in navigation, path.name


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_pictures_are_small() -> None:
    for picture in (DOCS / "images").iterdir():
        assert picture.stat().st_size < 250_000, picture.name
