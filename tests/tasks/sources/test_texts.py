from __future__ import annotations

import gzip
import sys
import sysconfig
import types
from pathlib import Path

import pytest

from bitplan.errors import TaskError
from bitplan.lab.sources import texts
from bitplan.lab.sources.texts import Text, fetched_wikitext, library_text, read_texts, split


def test_the_library_s_text_is_this_python_s_own() -> None:
    text = library_text()
    folder = Path(sysconfig.get_path("stdlib"))
    assert text.training.startswith((folder / "argparse.py").read_text(encoding="utf-8"))
    assert (folder / "textwrap.py").read_text(encoding="utf-8") in text.held_out
    assert 1_000_000 < len(text.training) <= texts.MOST_CHARACTERS
    assert len(text.held_out) > 50_000
    assert text.held_out[:5000] not in text.training


def test_every_module_is_in_this_python() -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    modules = (*texts.TRAINING_MODULES, *texts.HELD_OUT_MODULES)
    assert [module for module in modules if not (folder / f"{module}.py").is_file()] == []
    assert len(set(modules)) == len(modules)


def test_a_python_without_sources_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    library_text.cache_clear()
    with pytest.raises(TaskError, match=r"no sources of its standard library in .*: set data= to a text file"):
        library_text()


def test_the_end_of_a_text_is_held_out(tmp_path: Path) -> None:
    assert split("a" * 90 + "b" * 10) == Text("a" * 90, "b" * 10)
    (tmp_path / "book.txt.gz").write_bytes(gzip.compress(b"a" * 90 + b"b" * 10))
    assert read_texts(str(tmp_path / "book.txt.gz")) == Text("a" * 90, "b" * 10)


@pytest.mark.parametrize(
    "names",
    [
        ("ptb.train.txt", "ptb.valid.txt"),
        ("ptb.train.txt.gz", "ptb.valid.txt.gz"),
        ("wiki.train.tokens", "wiki.valid.tokens"),
        ("train.txt", "dev.txt"),
    ],
)
def test_a_folder_brings_its_parts(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, content in (
        *zip(names, (b"learn", b"hold"), strict=True),
        ("other.valid.txt", b"no"),
        ("x.test.txt", b"no"),
    ):
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert read_texts(str(tmp_path)) == Text("learn", "hold")


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ([], r"has none: name such a folder, or a single file\."),
        (["ptb.train.txt"], r"has none"),
        (["ptb.train.txt", "wiki.valid.txt"], r"has none"),
        (
            ["a.train.txt", "a.val.txt", "b.train.txt", "b.val.txt"],
            r"has more than one \(a\.train\.txt or b\.train\.txt\)",
        ),
    ],
)
def test_folders_that_do_not_fit_are_one_sentence(tmp_path: Path, names: list[str], sentence: str) -> None:
    for name in names:
        (tmp_path / name).write_text("x")
    with pytest.raises(TaskError, match=sentence):
        read_texts(str(tmp_path))


def test_what_is_not_there_or_empty_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(TaskError, match=r"there is no file or folder .*absent"):
        read_texts(str(tmp_path / "absent"))
    with pytest.raises(TaskError, match=r"the text leaves nothing to learn from: name a longer one\."):
        read_texts(str(tmp_path / "empty.txt"))


def test_wikitext_comes_by_the_downloader(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[str, ...]] = []

    def load_dataset(*names: str) -> dict[str, dict[str, list[str]]]:
        requests.append(names)
        if len(requests) > 1:
            raise ConnectionError("no network")
        return {"train": {"text": [" = A = \n", " b c \n"]}, "validation": {"text": [" d \n"]}}

    library = types.ModuleType("datasets")
    library.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert fetched_wikitext() == Text(" = A = \n b c \n", " d \n")
    with pytest.raises(TaskError, match=r"WikiText-2 could not be fetched \(no network\): set data="):
        fetched_wikitext()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match="download=true needs the package datasets, which is not installed"):
        fetched_wikitext()
