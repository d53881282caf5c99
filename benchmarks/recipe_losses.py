"""``python benchmarks/recipe_losses.py TEXT``: losses under the presets of FP8 and FP4 recipes, beside BF16.

    python benchmarks/recipe_losses.py tinyshakespeare.txt --json benchmarks/results/recipe-losses-cpu.json

Trains the task ``lm`` (a small GPT on the bytes of a text) under each preset, emulated, with the same seeds, and
compares the losses on held-out text. An interruption loses nothing: the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from bitplan.files import strict
from bitplan.lab.compare import Choice, Update, compare
from bitplan.machine import describe_machine
from bitplan.significance import Difference

REFERENCE = "bf16-all"
PLANS = ("fp32", REFERENCE, "deepseek-v3", "nvfp4", "fp8-attention")
STEPS = 1000
#: What the losses are of, in the summaries of runs.
_LOSS = "validation_loss"


@dataclass(frozen=True)
class Row:
    """One plan over its seeds."""

    plan: str
    losses: dict[int, float]
    #: The mean loss less the reference's with the same seed, and its interval of 95 %; None for the reference.
    gap: float | None = None
    low: float | None = None
    high: float | None = None


def rows_of(losses: Mapping[str, Mapping[int, float]]) -> list[Row]:
    """
    >>> rows = rows_of({"bf16-all": {0: 2.0, 1: 2.2}, "nvfp4": {0: 2.1, 1: 2.3}})
    >>> round(rows[1].gap, 6), rows[0].gap
    (0.1, None)
    """
    reference, rows = losses[REFERENCE], []
    for plan, own in losses.items():
        seeds = sorted(set(own) & set(reference))
        if plan == REFERENCE or not seeds:
            rows.append(Row(plan, dict(own)))
            continue
        gap = Difference.of([own[seed] for seed in seeds], [reference[seed] for seed in seeds])
        rows.append(Row(plan, dict(own), gap.mean, gap.low, gap.high))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a file of text")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=Path, default=Path("runs/recipe-losses"), help="where the runs lie")
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args(words)
    recipe = [f"steps={options.steps}", f"evaluate_every={options.steps}", "batch=8"]
    summaries = compare(
        "lm",
        [Choice(plan, None if plan == "fp32" else plan) for plan in PLANS],
        folder=options.runs,
        seeds=range(options.seeds),
        settings=[*recipe, f"data={options.text}"],
        jobs=options.jobs,
        device=options.device,
        on_update=_note,
    )
    losses: dict[str, dict[int, float]] = {plan: {} for plan in PLANS}
    for summary in summaries:
        plan, _, seed = summary.folder.name.rpartition("-s")
        losses[plan][int(seed)] = summary.metrics[_LOSS]
    rows = rows_of(losses)
    for row in rows:
        mean = statistics.fmean(row.losses.values())
        spread = f"±{statistics.stdev(row.losses.values()):.4f}" if len(row.losses) > 1 else ""
        gap = "" if row.gap is None else f"{row.gap:+.4f} ({row.low:+.4f} to {row.high:+.4f})"
        print(f"{row.plan:14} {mean:.4f} {spread}  {gap}")
    if options.json is not None:
        document = document_of(rows, recipe, options.text, options.device)
        options.json.write_text(json.dumps(strict(document), indent=1) + "\n", encoding="utf-8")


def _note(update: Update) -> None:
    if update.summary is not None:
        print(f"{update.job.label}, seed {update.job.seed}: {update.summary.metrics[_LOSS]:.4f}", flush=True)


def document_of(rows: Sequence[Row], recipe: Sequence[str], text: Path, device: str) -> dict[str, Any]:
    """Everything that the results say."""
    return {
        "benchmark": "recipe losses",
        "command": f"python benchmarks/recipe_losses.py {text.name}",
        "machine": describe_machine(torch.device(device)),
        "task": "lm",
        "settings": list(recipe),
        "text": {"name": text.name, "bytes": text.stat().st_size},
        "loss": "validation_loss after the last step",
        "reference": REFERENCE,
        "rows": [vars(row) for row in rows],
    }


if __name__ == "__main__":
    main()
