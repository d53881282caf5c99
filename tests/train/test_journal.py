from __future__ import annotations

from pathlib import Path

import pytest

from bitplan.lab.train.folder import Journal, read_lines

WHOLE = b'{"step": 1}\n{"step": 4}\n{"step": 4, "evaluation": true}\n{"step": 9, "loss": "NaN"}\n'


@pytest.mark.parametrize(
    ("data", "after", "kept"),
    [
        (WHOLE, 99, WHOLE),
        (WHOLE, 4, WHOLE[: WHOLE.index(b'{"step": 9')]),
        (WHOLE, 3, b'{"step": 1}\n'),
        (WHOLE, 0, b""),
        (WHOLE + b'{"step": 10, "lo', 99, WHOLE),
        (WHOLE + b'{"step": 10}', 99, WHOLE),  # whole, but its end was not written: nobody knows
        (b"torn\n" + WHOLE, 99, b""),
        (b"", 5, b""),
    ],
)
def test_later_and_torn_lines_are_cut_off(tmp_path: Path, data: bytes, after: int, kept: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(data)
    with Journal(path, after) as journal:
        assert path.read_bytes() == kept
        journal.add({"step": 100, "loss": float("inf")})
        assert path.read_bytes() == kept + b'{"step": 100, "loss": "Infinity"}\n'  # at once, not when it is closed
        journal.sync()


def test_a_journal_that_grows_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == []
    path.write_bytes(WHOLE + b'{"step": 10, "lo')
    assert [line["step"] for line in read_lines(path)] == [1, 4, 4, 9]
