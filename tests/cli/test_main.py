"""The front door: exit codes, one sentence per mistake, and the real processes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import bitplan as package
from bitplan._version import __version__
from bitplan.cli.app import COMMANDS, app, load_command
from bitplan.cli.output import command_output

SRC = Path(package.__file__).parents[1]


def process(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "bitplan"]), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.fixture
def quiet_log() -> Iterator[logging.Logger]:
    log = logging.getLogger("bitplan")
    handlers, level = list(log.handlers), log.level
    yield log
    log.handlers[:] = handlers
    log.setLevel(level)


def test_version(bitplan: Callable[..., Any]) -> None:
    ran = bitplan("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"bitplan {__version__}\n", "")


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_every_command(bitplan: Callable[..., Any], flag: str) -> None:
    ran = bitplan(flag)
    assert ran.code == 0
    assert all(command in ran.out for command in ("formats", "demo", "--version", "--verbose"))
    assert "\x1b[" not in ran.out


def test_the_app_also_runs_under_typers_own_runner() -> None:
    result = CliRunner().invoke(app, ["formats", "e4m3", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["max"] == 448.0


@pytest.mark.parametrize("arguments", [["no-such-command"], ["formats", "--no-such-option"], ["demo", "surplus"], []])
def test_usage_errors_exit_with_2_and_keep_stdout_for_results(
    bitplan: Callable[..., Any], arguments: list[str]
) -> None:
    ran = bitplan(*arguments)
    assert ran.code == 2
    if arguments:  # with no arguments the help is the result
        assert ran.out == ""
        assert ran.err


def test_a_bug_is_not_hidden_as_a_users_mistake(bitplan: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("bitplan.cli.formats.print_table", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        bitplan("formats")


@pytest.mark.parametrize(("flags", "shown"), [([], set()), (["-v"], {"info"}), (["-vv"], {"info", "debug"})])
def test_verbose_shows_the_log_on_stderr(
    bitplan: Callable[..., Any],
    quiet_log: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    shown: set[str],
) -> None:
    def chatty(*_: object) -> None:
        quiet_log.info("an info")
        quiet_log.debug("a debug")

    monkeypatch.setattr("bitplan.cli.formats.print_table", chatty)
    ran = bitplan(*flags, "formats")
    assert ran.out == ""
    assert {word for word in ("info", "debug") if word in ran.err} == shown


def test_verbose_twice_in_one_process_shows_each_line_once(
    bitplan: Callable[..., Any], quiet_log: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bitplan.cli.formats.print_table", lambda *_: quiet_log.info("once"))
    bitplan("-v", "formats")
    assert bitplan("-v", "formats").err == "bitplan: once\n"


def test_a_command_module_is_added_by_its_register_function() -> None:
    group = typer.Typer()

    @group.command("formats")
    def measure() -> None:
        with command_output(True) as output:
            output.document({"measured": True})

    @group.command("other")
    def other() -> None: ...

    host = typer.Typer()
    host.add_typer(group, name="bench")
    result = CliRunner().invoke(host, ["bench", "formats"])
    assert json.loads(result.stdout) == {"measured": True}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_do_not_wait_for_torch(option: str) -> None:
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    ran = process(option, code=check + "from bitplan.cli import main; main()")
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "False")


def test_help_groups_the_commands(bitplan: Callable[..., Any]) -> None:
    out = bitplan("--help").out
    headings = [out.index(f"─ {panel} ─") for panel in ("Plan", "Understand", "Choose", "Lab", "Environment")]
    assert headings == sorted(headings)
    assert (
        headings[1] < out.index("│ memory") < headings[2] < out.index("│ assign") < headings[3] < out.index("│ train")
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_of_the_table_has_help_of_its_own(name: str) -> None:
    assert load_command(name).help


def test_process_prints_one_json_document() -> None:
    ran = process("formats", "e4m3", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout)["name"] == "e4m3"


def test_process_answers_a_mistake_with_one_sentence_and_exit_code_2() -> None:
    ran = process("formats", "e4m33x", "--json")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("bitplan: there is no number format 'e4m33x'; did you mean")
    assert ran.stderr.count("\n") == 1


def test_process_without_typer_says_what_to_install() -> None:
    ran = process("formats", code="import sys; sys.modules['typer'] = None; from bitplan.cli import main; main()")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert (
        ran.stderr == "bitplan: the command line needs typer, which is not installed: run 'pip install typer rich'.\n"
    )


def test_importing_the_library_needs_neither_typer_nor_rich_nor_the_command_line() -> None:
    without = "import sys; sys.modules['typer'] = sys.modules['rich'] = None; "
    ran = process(code=without + "import bitplan; bitplan.attach; print('bitplan.cli' in sys.modules)")
    assert (ran.returncode, ran.stdout) == (0, "False\n"), ran.stderr


def test_process_offers_completion_of_commands_and_format_names() -> None:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "_BITPLAN_COMPLETE": "complete_bash"}
    for text, place, expected in (("bitplan for", "1", "formats"), ("bitplan formats nv", "2", "nvfp4")):
        ran = subprocess.run(
            [sys.executable, "-m", "bitplan"],
            capture_output=True,
            text=True,
            timeout=120,
            env={**environment, "COMP_WORDS": text, "COMP_CWORD": place},
            check=False,
        )
        assert ran.stdout.split() == [expected]
