from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_the_benchmark_counts_in_steps(bench: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "measure.json"
    document = bench("measure", "--target", "gpt-tiny", "--turns", 1, "-o", file, "--json").json
    (row,) = document["rows"]
    assert row["steps"] == row["probe_milliseconds"] / row["step_milliseconds"]
    assert row["reached"] == (row["steps"] <= document["limit"])
    assert row["products"] == 13
    assert file.exists()
