from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bitplan as package
from bitplan.cli.output import command_output, json_text, make_folder, write_file
from bitplan.errors import BitplanError


def test_what_json_has_no_number_for_becomes_a_string_that_reads_back() -> None:
    content = {"a": [math.nan, math.inf, (-math.inf, 1.5)], "b": {"c": math.inf}}
    read = json.loads(json_text(content))
    assert read == {"a": ["NaN", "Infinity", ["-Infinity", 1.5]], "b": {"c": "Infinity"}}
    assert float(read["b"]["c"]) == math.inf


def test_paths_and_keys_become_text() -> None:
    assert json.loads(json_text({8: Path("a") / "b"})) == {"8": str(Path("a") / "b")}


def test_floats_survive_exactly() -> None:
    values = [2.0**-149, 0.1, 3.4028234663852886e38]
    assert json.loads(json_text(values)) == values


def test_under_json_prints_and_console_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with command_output(True) as output:
        print("a library's remark")
        output.console.print("for people")
        output.document([1])
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [1]
    assert captured.err == "a library's remark\nfor people\n"


def test_without_json_the_document_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with command_output(False) as output:
        output.console.print("for people")
        output.note("for the log")
        output.document([1])
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("for people\n", "bitplan: for the log\n")


def test_a_failed_command_prints_no_document(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        with command_output(True) as output:
            output.document([1])
            raise BitplanError("no")

    with pytest.raises(BitplanError):
        fail()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("documents", [0, 2])
def test_a_json_command_must_say_exactly_one_document(documents: int, capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        with command_output(True) as output:
            for _ in range(documents):
                output.document([1])

    with pytest.raises(ValueError, match="values to unpack"):
        speak()
    assert capsys.readouterr().out == ""


def test_even_what_a_child_process_prints_stays_off_stdout() -> None:
    code = """
import subprocess, sys
from bitplan.cli.output import command_output
held = sys.stdout
with command_output(True) as output:
    subprocess.run([sys.executable, "-c", "print('child')"], check=True)
    held.write("held\\n")
    output.document({"one": 1})
"""
    # An unbuffered stdout would hide what the held stream keeps back.
    environment = {**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[1]), "PYTHONUNBUFFERED": ""}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    assert json.loads(ran.stdout) == {"one": 1}
    assert sorted(ran.stderr.split()) == ["child", "held"]


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(BitplanError, match=r"cannot write .*absent.*name a file in a folder"):
        write_file(tmp_path / "absent" / "x.svg", "")


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(BitplanError, match=r"cannot make the folder .*taken.*name another one"):
        make_folder(tmp_path / "taken")
