"""Run the zoo: every model, every check, every plan; print and write a Markdown table.

python tests/zoo/run.py --only llama --only bert --jobs 1 --out docs/zoo.md
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from zoo_checks import CHECKS, Check, Failure, ZooPlan
from zoo_models import MODELS, ZooModel, find_models

TEXT = """# Foreign models

`make zoo` attaches plans to {models} small models of other libraries and checks each combination; `make test` has a
sample. `python tests/zoo/run.py --only llama` runs one model, `--check packed` one check. {passed} of {cases}
combinations pass{missing} (torch {torch}, one CPU thread, models of one or two layers and random weights).

{checks}
The plan `operands` rounds `x` and `w` of every product to E4M3 and `dy` to E5M2, with power-of-two scales.
`weight+activation` rounds these two classes to E4M3 likewise. `unscaled` is `operands` without scales, so that the rows
of a batch are rounded independently. `int8 products` rounds the operands of linear layers and convolutions to INT8.

Products are observed below autograd by a `TorchDispatchMode` that shares no code with bitplan: grids are recognised by
torch's own float8 casts and by counting levels (`tests/zoo/zoo_spy.py`). Products of constants are left out, and under
plans for classes of tensors also the inputs of the model and the inside of fused recurrent layers.

## Results

{table}
An empty cell: the check does not apply to the model. A model that does not compile without a plan passes `compiled`.

## Failures

{failures}"""


@dataclass(frozen=True)
class Result:
    """What a check said of a model under a plan; an empty message is a pass."""

    model: str
    check: str
    plan: str
    message: str
    seconds: float


def run_model(name: str, checks: list[str], plans: list[str]) -> list[Result]:
    """All checks of one model."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    zoo = MODELS[name]
    results = []
    for check in (CHECKS[check_name] for check_name in checks):
        if not check.applies(zoo):
            continue
        for plan in check.plans:
            if plans and plan.name not in plans:
                continue
            start = time.perf_counter()
            message = run_check(check, zoo, plan)
            results.append(Result(name, check.name, plan.name, message, time.perf_counter() - start))
    return results


def run_check(check: Check, zoo: ZooModel, plan: ZooPlan) -> str:
    """The sentence of a failure; an empty one is a pass."""
    try:
        with redirect_stderr(io.StringIO()):
            check.function(zoo, plan)
    except Failure as failure:
        return str(failure)
    except Exception as error:
        lines = " ".join(str(error).split("\n")[:2])
        return f"{type(error).__name__}: {lines[:160]}"
    return ""


def run_all(models: list[ZooModel], checks: list[str], plans: list[str], jobs: int) -> Iterator[list[Result]]:
    if jobs == 1:
        for zoo in models:
            yield run_model(zoo.name, checks, plans)
        return
    with get_context("spawn").Pool(jobs, maxtasksperchild=8) as pool:
        yield from pool.imap(partial(run_model, checks=checks, plans=plans), [zoo.name for zoo in models])


def page(results: list[Result], models: list[ZooModel]) -> str:
    """The page of the documentation: model by check, then a sentence for each failure."""
    failures = [result for result in results if result.message]
    missing = sum(len(check.plans) for zoo in models for check in CHECKS.values() if check.applies(zoo)) - len(results)
    cases = {(result.model, result.check) for result in results}
    failed = {(result.model, result.check) for result in failures}
    rows = [
        [
            zoo.name,
            zoo.library,
            *(("fails" if case in failed else "pass") if case in cases else "" for case in _cases_of(zoo)),
        ]
        for zoo in models
    ]
    sentences = [[result.model, result.check, result.plan, result.message.replace("|", "/")] for result in failures]
    checks = [[check.name, _meaning(check), ", ".join(plan.name for plan in check.plans)] for check in CHECKS.values()]
    return TEXT.format(
        models=len(models),
        cases=len(results),
        passed=len(results) - len(failures),
        missing=f", {missing} were not run" if missing else "",
        torch=torch.__version__.split("+")[0],
        checks=_table(["check", "holds if", "plans"], checks),
        table=_table(["model", "library", *CHECKS], rows),
        failures=_table(["model", "check", "plan", "what happens"], sentences) if sentences else "None.\n",
    )


def _cases_of(zoo: ZooModel) -> list[tuple[str, str]]:
    return [(zoo.name, check) for check in CHECKS]


def _meaning(check: Check) -> str:
    return " ".join((check.function.__doc__ or "").split()).rstrip(".")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def merge(path: Path | None, results: list[Result]) -> list[Result]:
    """These results, and those of the file for other cases; the file is written anew."""
    if path is None:
        return results
    stored = [Result(**fields) for fields in json.loads(path.read_text())] if path.exists() else []
    # The last result of a case replaces those before it.
    merged = [*{(result.model, result.check, result.plan): result for result in [*stored, *results]}.values()]
    path.write_text(json.dumps([asdict(result) for result in merged], indent=0))
    return merged


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a model or a library; may be repeated")
    parser.add_argument("--check", action="append", default=[], choices=[*CHECKS], help="a check; may be repeated")
    parser.add_argument("--plan", action="append", default=[], help="a plan; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--results", type=Path, help="a JSON file that keeps the results of earlier calls")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    options = parser.parse_args(arguments)
    models = find_models(options.only)
    checks = options.check or [*CHECKS]
    results: list[Result] = []
    for zoo, of_model in zip(models, run_all(models, checks, options.plan, options.jobs), strict=True):
        results = merge(options.results, [*results, *of_model])
        seconds = sum(result.seconds for result in of_model)
        failures = [result for result in of_model if result.message]
        print(f"{zoo.name}: {len(of_model) - len(failures)} of {len(of_model)} pass, {seconds:.1f} s", flush=True)
        for result in failures:
            print(f"  {result.check}, {result.plan}: {result.message}", flush=True)
    if options.out:
        names = {result.model for result in results}
        options.out.write_text(page(results, [zoo for zoo in MODELS.values() if zoo.name in names]))
    return 1 if any(result.message for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
