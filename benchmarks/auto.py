"""``python benchmarks/auto.py``: ``bitplan auto`` on models of transformers, timm and torchvision.

Models are searched for one after the other, or several at a time: quicker, but times are those of a busy machine,
because candidates make their first steps while others are measured. Several limits of one model follow each other and
share what was measured. Writes one JSON document with every candidate of every search, and prints a short table.

    python benchmarks/auto.py --models vit_b resnet50 --json benchmarks/results/auto-h200.json
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.foreign_models import MODELS, load_problem
from bitplan.files import strict
from bitplan.machine import describe_machine
from bitplan.planners.assign.budget import Budget
from bitplan.planners.auto import Limits, LocalTrials, ProcessTrials, search

#: Seconds between interruptions, and between looks at the searches.
_GRACE, _POLL = 10.0, 0.2


def search_one(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """One search; a memory limit may stand behind a colon."""
    name, _, memory = model.partition(":")
    limits = Limits(Budget.parse(memory) if memory else None, options.slowdown)
    problem = load_problem(name)
    trials = ProcessTrials(load_problem, (name,), options.jobs) if options.jobs > 1 else LocalTrials(problem)
    result = search(problem, limits, trials, steps=options.steps, seeds=options.seeds, report=_note)
    return {"model": name, "memory": memory or None, **result.to_dict()}


def _note(sentence: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {sentence}", file=sys.stderr, flush=True)


def start(searches: list[str], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """The searches for one model, in a process of their own: a JSON document in each line of its output."""
    command = [sys.executable, __file__, "--one", *searches, "--jobs", str(options.jobs), "--seeds", str(options.seeds)]
    command += [] if options.steps is None else ["--steps", str(options.steps)]
    command += ["--slowdown", str(options.slowdown)] if options.slowdown else []
    name = searches[0].partition(":")[0]
    output, log = (options.folder / f"{name}.{suffix}" for suffix in ("jsonl", "log"))
    with output.open("wb") as stdout, log.open("wb") as stderr:
        return subprocess.Popen(command, stdout=stdout, stderr=stderr)


def run_all(groups: Mapping[str, list[str]], options: argparse.Namespace) -> None:
    """Search for every model, `--together` at a time; after `--minutes` interrupt those that run and start no other."""
    waiting, running = list(groups), dict[str, subprocess.Popen[bytes]]()
    deadline = math.inf if options.minutes is None else time.perf_counter() + 60 * options.minutes
    while waiting or running:
        while waiting and len(running) < options.together:
            name = waiting.pop(0)
            running[name] = start(groups[name], options)
        time.sleep(_POLL)
        running = {name: process for name, process in running.items() if process.poll() is None}
        if time.perf_counter() > deadline:
            waiting, deadline = [], time.perf_counter() + _GRACE
            for process in running.values():
                process.send_signal(signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", default=list(MODELS), help="names, or NAME:MEMORY such as llama_2048:6GiB"
    )
    parser.add_argument(
        "--one", nargs="+", metavar="MODEL", help="search in this process, and print a JSON document each"
    )
    parser.add_argument("--jobs", type=int, default=6, help="candidates of a search that compile at a time")
    parser.add_argument("--together", type=int, default=1, help="searches at a time, whose first steps disturb others")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--slowdown", type=float)
    parser.add_argument("--minutes", type=float, help="end searches after so long: they tell the best so far")
    parser.add_argument("--folder", type=Path, default=Path("auto-results"))
    parser.add_argument("--json", type=Path, help="where to write all documents together")
    options = parser.parse_args()
    if options.one is not None:
        for model in options.one:
            print(json.dumps(strict(search_one(model, options))), flush=True)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    by_model: dict[str, list[str]] = {}
    for model in options.models:
        by_model.setdefault(model.partition(":")[0], []).append(model)
    run_all(by_model, options)
    documents: dict[str, Any] = {}
    for name in by_model:
        output = options.folder / f"{name}.jsonl"
        lines = output.read_text(encoding="utf-8").splitlines() if output.exists() else []
        for model, line in zip(by_model[name], lines, strict=False):
            documents[model] = json.loads(line)
            show(model, documents[model])
        if len(lines) < len(by_model[name]):
            log = options.folder / f"{name}.log"
            why = log.read_text(encoding="utf-8")[-1500:] if log.exists() else "not begun"
            print(f"== {by_model[name][len(lines)]} failed: {why}")
    print(f"{time.perf_counter() - began:.0f} s in all")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"benchmark": "auto", "machine": describe(), "searches": documents}, indent=1) + "\n",
            encoding="utf-8",
        )


def describe() -> dict[str, Any]:
    """The machine of the searches."""
    return describe_machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def show(model: str, document: dict[str, Any]) -> None:
    """The candidates of a model."""
    print(f"== {model}: {document['summary']}")
    for row in document["candidates"]:
        trial, gap = row["trial"], row["loss_gap"]
        figures = f"{row['failure']}"
        if trial is not None:
            figures = f"{trial['milliseconds']:8.2f} ms {trial['peak'] / 2**30:6.2f} GiB  spread {trial['spread']:.3f}"
        shown_gap = "" if gap is None else f"  gap {gap['gap']:+.4f} ({gap['low']} {gap['high']})"
        print(f"   {row['name'][:46]:46} {figures}{shown_gap}  {row['verdict']}", flush=True)


if __name__ == "__main__":
    main()
