from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bitplan.errors import TaskError
from bitplan.lab.sources.texts import read_tables
from bitplan.lab.tasks.registry import find_task

SST = 'sentence\tlabel\na "fine" film \t1\ndull\t0\n'
XNLI = "language\tgold_label\tsentence1\tsentence2\n" + "".join(
    f"{language}\t{label}\tone {language}\ttwo\n"
    for language in ("de", "fr")
    for label in ("neutral", "contradiction", "entailment", "-")
)


def written(folder: Path, training: str, held_out: str, names: tuple[str, str] = ("train.tsv", "dev.tsv")) -> str:
    for name, text in zip(names, (training, held_out), strict=True):
        content = text.encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return str(folder)


@pytest.mark.parametrize("names", [("sst2.train.tsv.gz", "sst2.dev.tsv.gz"), ("train.tsv", "validation.tsv")])
def test_sst2(tmp_path: Path, names: tuple[str, str]) -> None:
    data = find_task("sst2", [f"data={written(tmp_path, SST, SST, names)}"]).data  # type: ignore[attr-defined]
    assert data.training.samples == (('a "fine" film', ""), ("dull", ""))
    assert data.training.labels == (1, 0)
    assert list(data.classes) == ["negative", "positive"]


def test_xnli_in_one_language_without_the_undecided(tmp_path: Path) -> None:
    folder = written(tmp_path, XNLI, XNLI)
    data = find_task("xnli", [f"data={folder}"]).data  # type: ignore[attr-defined]
    assert data.training.samples == (("one de", "two"),) * 3
    assert data.training.labels == (1, 2, 0)
    french = find_task("xnli", [f"data={folder}", "language=fr"]).data  # type: ignore[attr-defined]
    assert french.held_out.samples[0] == ("one fr", "two")
    with pytest.raises(TaskError, match=r"has no text in the language 'sw': set language= to one that it has\."):
        find_task("xnli", [f"data={folder}", "language=sw"]).data  # type: ignore[attr-defined] # noqa: B018


def test_json_lines_and_a_file_for_each_language(tmp_path: Path) -> None:
    lines = [{"premise": "a", "hypothesis": "b", "label": 2}, {"premise": "c", "hypothesis": "d", "label": "neutral"}]
    text = "\n".join(map(json.dumps, lines))
    written(tmp_path, "", "", ("xnli.fr.train.jsonl", "xnli.fr.dev.jsonl"))
    folder = written(tmp_path, text, text, ("xnli.de.train.jsonl", "xnli.de.dev.jsonl"))
    data = find_task("xnli", [f"data={folder}"]).data  # type: ignore[attr-defined]
    assert (data.training.samples, data.training.labels) == ((("a", "b"), ("c", "d")), (2, 1))


def test_classes_of_your_own_come_from_the_training_texts(tmp_path: Path) -> None:
    table = "text\tlabel\nspam it is\tspam\nno\tham\n"
    task = find_task("text-classification", [f"data={written(tmp_path, table, table)}"])
    assert list(task.data.classes) == ["ham", "spam"]  # type: ignore[attr-defined]
    assert task.classes == 2  # type: ignore[attr-defined]
    assert read_tables(written(tmp_path, SST, SST)).classes == ["0", "1"]


@pytest.mark.parametrize(
    ("training", "held_out", "sentence"),
    [
        (
            "a\tlabel\nx\t1\n",
            SST,
            r"train\.tsv has no column sentence or text or premise or sentence1; it has a, label",
        ),
        ("text\tclass\nx\t1\n", SST, r"has no column label or gold_label"),
        ("text\tlabel\nx\n", SST, r"train\.tsv:2 has 1 columns, and the first line has 2: mend it\."),
        ("text\tlabel\n", SST, r"train\.tsv has no lines"),
        (SST, "sentence\tlabel\nx\t7\n", r"has the label '7', and the classes are negative, positive\."),
        (SST, "sentence\tlabel\nx\tgood\n", r"has the label 'good'"),
    ],
)
def test_damaged_tables_are_told_of(tmp_path: Path, training: str, held_out: str, sentence: str) -> None:
    folder = written(tmp_path, training, held_out)
    with pytest.raises(TaskError, match=sentence):
        find_task("sst2", [f"data={folder}"]).data  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.parametrize(
    ("line", "sentence"),
    [("{", r"\.jsonl:1 is not JSON"), ("[1]", r"is not a JSON object"), ('{"text": "x"}', "has no column label")],
)
def test_damaged_json_lines_are_told_of(tmp_path: Path, line: str, sentence: str) -> None:
    folder = written(tmp_path, line, line, ("train.jsonl", "dev.jsonl"))
    with pytest.raises(TaskError, match=sentence):
        read_tables(folder)
    full = '{"text": "x", "label": 1}'
    written(tmp_path, f'{full}\n{{"label": 0}}', full, ("train.jsonl", "dev.jsonl"))
    with pytest.raises(TaskError, match=r"train\.jsonl:2 has no text"):
        read_tables(folder)


def test_folders_without_a_pair_are_told_of(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"and .* has none: name such a folder\."):
        read_tables(str(tmp_path))
    written(tmp_path, SST, SST)
    written(tmp_path, SST, SST, ("b.train.tsv", "b.dev.tsv"))
    with pytest.raises(TaskError, match=r"has more than one \(b\.train\.tsv or train\.tsv\)"):
        read_tables(str(tmp_path))
    with pytest.raises(TaskError, match=r"there is no folder absent"):
        read_tables("absent")
    with pytest.raises(TaskError, match=r"sst2 is not here: set data= to a folder with sst2\.train\.tsv"):
        find_task("sst2").batch(0)
