"""Run the zoo: every model, every check, every plan; print and write a Markdown page.

python tests/zoo/run.py --jobs 2 --out docs/zoo.md          # all of it: about an hour on two cores
python tests/zoo/run.py --only llama --check packed

Every model runs in a process of its own, which may crash or hang without harm to the others. Results are stored one by
one; a run that was interrupted goes on where it stopped, unless code has changed since (``--results``).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from zoo_checks import CHECKS, Check, Failure, NotChecked, ZooPlan
from zoo_models import MODELS, ZooModel, find_models

#: Seconds of CPU time that one check may take, and of wall time one model, which may share its core with others.
CHECK_LIMIT, MODEL_LIMIT = 900, 6 * 3600
REPOSITORY = Path(__file__).parents[2]

TEXT = """# Foreign models

`make zoo` attaches plans to {models} small models of other libraries and checks each combination; `make test` has a
sample. `python tests/zoo/run.py --only llama` runs one model, `--check packed` one check. {passed} of {cases}
combinations pass, {failed} fail{not_checked}{missing} (torch {torch}, one CPU thread, models of one or two layers and
random weights).

{checks}
The plan `operands` rounds `x` and `w` of every product to E4M3 and `dy` to E5M2, with power-of-two scales.
`weight+activation` rounds these two classes to E4M3 likewise. `unscaled` is `operands` without scales, so that the rows
of a batch are rounded independently. `int8 products` rounds the operands of linear layers and convolutions to INT8.

Products are observed below autograd by a `TorchDispatchMode` that shares no code with bitplan: grids are recognised by
torch's own float8 casts and by counting levels (`tests/zoo/zoo_spy.py`). Products of constants are left out, and under
plans for classes of tensors also the inputs of the model and the inside of fused recurrent layers.

## How far to trust the results

- All results are those of one version of the code: the runner stores them with a checksum of `src` and `tests/zoo`,
  and shows no others. They took {minutes:.0f} minutes of CPU time.
- An output may be off by 50 % of the one without a plan, because eight bits change a random network by so much; by 80 %
  for {tolerant}. A plan that is wrong in a small way is found by `products`, not by `values`.
- Compiled gradients may differ from eager ones by twice the effect of a change of 1e-7 in the weights. A value near the
  middle of two codes then rounds to the other one, and batch norm over a few images amplifies that: in MobileNetV3 to
  31 %, so that `compiled` shows little there. `native` does not depend on it: each layer is repeated by itself, with
  the inputs that it has in the model, and must agree with emulation to 1e-5 (MobileNetV3 does to 9e-7).
- Rows must be unchanged by padding only without scales, because scales are shared between rows.

## Results

{table}
An empty cell: the check does not apply to the model.

{unchecked}
## Failures

{failures}"""


@dataclass(frozen=True)
class Result:
    """What a check said of a model under a plan; an empty message is a pass."""

    model: str
    check: str
    plan: str
    message: str
    #: Of CPU time.
    seconds: float
    #: The check had nothing to compare with; the message says why.
    is_unchecked: bool = False
    #: Of the code that was checked.
    checksum: str = ""

    @property
    def has_failed(self) -> bool:
        return bool(self.message) and not self.is_unchecked

    @property
    def case(self) -> tuple[str, str, str]:
        return self.model, self.check, self.plan


def code_checksum() -> str:
    """A checksum of the code that results depend on, and of torch's version."""
    digest = hashlib.sha256(torch.__version__.encode())
    paths = [*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "src").rglob("*.yaml")]
    for path in sorted([*paths, *Path(__file__).parent.glob("zoo_*.py")]):
        digest.update(path.relative_to(REPOSITORY).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


# --- one model, in a process of its own ---


def run_model(zoo: ZooModel, cases: Iterable[tuple[Check, ZooPlan]], store: Callable[[Result], None]) -> None:
    """Checks of one model; every result is stored at once."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    checksum, parent = code_checksum(), os.getppid()
    for check, plan in cases:
        if os.getppid() != parent:
            return  # the run was killed
        start = time.process_time()
        message, is_unchecked = run_check(check, zoo, plan)
        seconds = round(time.process_time() - start, 2)
        store(Result(zoo.name, check.name, plan.name, message, seconds, is_unchecked, checksum))


def run_check(check: Check, zoo: ZooModel, plan: ZooPlan) -> tuple[str, bool]:
    """The sentence of a failure (an empty one is a pass), and whether there was nothing to compare with."""
    try:
        with redirect_stderr(io.StringIO()), _time_limit(CHECK_LIMIT):
            check.function(zoo, plan)
    except Failure as failure:
        return str(failure), False
    except NotChecked as reason:
        return str(reason), True
    except Exception as error:
        lines = " ".join(str(error).split("\n")[:2])
        return f"{type(error).__name__}: {lines[:160]}", False
    return "", False


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Failure(f"the check takes longer than {seconds} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# --- all of them ---


def cases_of(zoo: ZooModel, checks: list[str], plans: list[str]) -> list[tuple[Check, ZooPlan]]:
    return [
        (check, plan)
        for check in (CHECKS[name] for name in checks)
        if check.applies(zoo)
        for plan in check.plans
        if not plans or plan.name in plans
    ]


def run_in_process(zoo: ZooModel, options: argparse.Namespace, todo: list[tuple[str, str, str]]) -> list[Result]:
    """The results of one model by a process of its own; a case that it did not finish fails."""
    arguments = [part for check in options.check for part in ("--check", check)]
    arguments += [part for plan in options.plan for part in ("--plan", plan)] + ["--again"] * options.again
    command = [sys.executable, __file__, "--worker", zoo.name, "--results", str(options.results), *arguments]
    try:
        ran = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=MODEL_LIMIT, text=True)
        problem = f"the process ended with status {ran.returncode}: {ran.stderr.strip().splitlines()[-1:]}"
    except subprocess.TimeoutExpired:
        problem = f"the model takes longer than {MODEL_LIMIT} s"
    done = {result.case: result for result in read_results(options.results) if result.case in todo}
    for case in todo:
        if case not in done:
            done[case] = Result(*case, problem[:200], 0.0, False, code_checksum())
    return [done[case] for case in todo]


def read_results(path: Path) -> list[Result]:
    """The stored results of the code as it is now; the last one of a case counts."""
    if not path.exists():
        return []
    checksum = code_checksum()
    stored = (Result(**json.loads(line)) for line in path.read_text().splitlines() if line.endswith("}"))
    return [*{result.case: result for result in stored if result.checksum == checksum}.values()]


def store_result(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def page(results: list[Result], models: list[ZooModel]) -> str:
    """The page of the documentation: model by check, then a sentence for each failure."""
    failures = [result for result in results if result.has_failed]
    unchecked = [result for result in results if result.is_unchecked]
    missing = sum(len(check.plans) for zoo in models for check in CHECKS.values() if check.applies(zoo)) - len(results)
    rows = [[zoo.name, zoo.library, *(_cell(results, zoo.name, check) for check in CHECKS)] for zoo in models]
    checks = [[check.name, _meaning(check), ", ".join(plan.name for plan in check.plans)] for check in CHECKS.values()]
    return TEXT.format(
        models=len(models),
        cases=len(results),
        passed=len(results) - len(failures) - len(unchecked),
        failed=len(failures),
        not_checked=f", {len(unchecked)} have nothing to compare with" if unchecked else "",
        missing=f", {missing} were not run" if missing else "",
        torch=torch.__version__.split("+")[0],
        minutes=sum(result.seconds for result in results) / 60,
        tolerant=", ".join(zoo.name for zoo in MODELS.values() if zoo.output_tolerance > 0.5),
        checks=_table(["check", "holds if", "plans"], checks),
        table=_table(["model", "library", *CHECKS], rows),
        unchecked=_sentences("## Nothing to compare with", unchecked) + "\n" if unchecked else "",
        failures=_sentences("", failures).lstrip() if failures else "None.\n",
    )


def _cell(results: list[Result], model: str, check: str) -> str:
    of_case = [result for result in results if (result.model, result.check) == (model, check)]
    if not of_case:
        return ""
    if any(result.has_failed for result in of_case):
        return "fails"
    return "-" if any(result.is_unchecked for result in of_case) else "pass"


def _sentences(title: str, results: list[Result]) -> str:
    rows = [[result.model, result.check, result.plan, result.message.replace("|", "/")] for result in results]
    return f"{title}\n\n{_table(['model', 'check', 'plan', 'what happens'], rows)}"


def _meaning(check: Check) -> str:
    return " ".join((check.function.__doc__ or "").split()).rstrip(".")


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="a model or a library; may be repeated")
    parser.add_argument("--check", action="append", default=[], choices=[*CHECKS], help="a check; may be repeated")
    parser.add_argument("--plan", action="append", default=[], help="a plan; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--results", type=Path, default=REPOSITORY / "build" / "zoo.jsonl", help="the file that keeps results"
    )
    parser.add_argument("--again", action="store_true", help="run checks again whose results are stored")
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    done = set() if options.again else {result.case for result in read_results(options.results)}
    checks = options.check or [*CHECKS]

    def todo(zoo: ZooModel) -> list[tuple[Check, ZooPlan]]:
        cases = cases_of(zoo, checks, options.plan)
        return [(check, plan) for check, plan in cases if (zoo.name, check.name, plan.name) not in done]

    if options.worker:
        zoo = MODELS[options.worker]
        run_model(zoo, todo(zoo), lambda result: store_result(options.results, result))
        return 0
    models = find_models(options.only)

    def run(zoo: ZooModel) -> list[Result]:
        cases = [(zoo.name, check.name, plan.name) for check, plan in todo(zoo)]
        return run_in_process(zoo, options, cases) if cases else []

    results: list[Result] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for zoo, of_model in zip(models, pool.map(run, models), strict=True):
            for result in of_model:
                if result.message.startswith(("the process ended", "the model takes")):
                    store_result(options.results, result)
            stored = read_results(options.results)
            of_model = [result for result in stored if result.model == zoo.name and result.check in checks]
            results.extend(of_model)
            failures = [result for result in of_model if result.has_failed]
            seconds = sum(result.seconds for result in of_model)
            print(f"{zoo.name}: {len(of_model) - len(failures)} of {len(of_model)} pass, {seconds:.1f} s", flush=True)
            for result in failures:
                print(f"  {result.check}, {result.plan}: {result.message}", flush=True)
            if options.out:
                names = {result.model for result in stored}
                options.out.write_text(page(stored, [zoo for zoo in MODELS.values() if zoo.name in names]))
    return 1 if any(result.has_failed for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
