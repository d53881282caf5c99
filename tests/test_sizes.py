from __future__ import annotations

import pytest

from bitplan.errors import BitplanError
from bitplan.files import byte_text, read_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [("6GiB", 6 * 2**30), ("6 gib", 6 * 2**30), ("500MB", 500_000_000), ("1.5KiB", 1536), ("12", 12), (".5kb", 500)],
)
def test_bytes_are_read_in_both_kinds_of_units(text: str, count: int) -> None:
    assert read_bytes(text) == count


@pytest.mark.parametrize("text", ["", "six", "6 gigs", "-1GiB", "0", "1e3", "GiB", "0.2"])
def test_what_is_no_number_of_bytes_says_how_to_write_one(text: str) -> None:
    with pytest.raises(BitplanError, match="write it as 6GiB, 500MB or 1000000"):
        read_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**50, "1024.0 TiB"), (5 * 2**20, "5.0 MiB")]
)
def test_bytes_are_written_in_the_largest_unit_they_fill(count: int, text: str) -> None:
    assert byte_text(count) == text
