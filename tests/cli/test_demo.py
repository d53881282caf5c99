from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.names import NAMED

Bitplan = Callable[..., Any]


def test_demo_shows_the_table_and_ends_with_the_path_of_the_picture(bitplan: Bitplan, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    ran = bitplan("demo", "-o", folder)
    assert (ran.code, ran.err) == (0, "")
    assert all(name in ran.out for name in NAMED)
    written = Path(ran.out.split()[-1])
    assert written == folder / "formats.svg"
    assert written.read_text().startswith("<svg")


def test_demo_writes_beside_the_user_by_default(
    bitplan: Bitplan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bitplan("demo").code == 0
    assert (tmp_path / "bitplan-demo" / "formats.svg").exists()


def test_demo_as_json(bitplan: Bitplan, tmp_path: Path) -> None:
    ran = bitplan("demo", "-o", tmp_path, "--json")
    assert [record["name"] for record in ran.json["formats"]] == list(NAMED)
    assert Path(ran.json["picture"]).exists()
    assert ran.err == ""


def test_demo_into_a_place_that_cannot_be_a_folder(bitplan: Bitplan, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    ran = bitplan("demo", "-o", tmp_path / "taken")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("bitplan: cannot make the folder")
