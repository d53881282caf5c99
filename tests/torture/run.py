"""Torture tests: kills, damaged run folders, fuzzed plans and fuzzed command lines, seeded, with a table of counts.

    python tests/torture/run.py --seconds 600 --seed 0
    python tests/torture/run.py --seed 0 --only folders --case 17     # one case again

What must hold:

kills     a ``bitplan train`` process that is killed at random moments and started again ends with the bytes of a run
          that nobody disturbed
folders   ``runs``, ``report`` and ``train --resume`` on a damaged run folder end with an exit code and no traceback,
          print no control characters, and a run that still finishes has the weights of the undamaged one
plans     a document is a plan or raises a BitplanError, within seconds
commands  a command line ends with an exit code and no traceback

Every case has a generator of its own, seeded by the seed, the area and its number. Commands run in forks of this
process, which has imported everything: a fork takes milliseconds where a new interpreter takes seconds. Some kills
start a real ``python -m bitplan`` instead.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
TASK = ROOT / "tests" / "train" / "tiny_task.py"
PLAN = """
version: 1
name: noisy
quantizers:
  w: {format: e3m2, rounding: stochastic}
  a: {format: int4, scale: tensor, range: minmax, eval: ema}
rules:
- {match: "*", weight: w, activation: a, grad_activation: {format: e5m2, rounding: stochastic}}
"""
#: A child that takes longer is killed, and the case counts as timed out; seconds.
PATIENCE = 20.0
#: Virtual memory of a child, so that a size that fits nowhere fails here.
MEMORY = 16 * 2**30
#: Values that no reader expects.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**40, 10**30, 1.5, float("inf"), float("nan"), "", " ", "x", "fp32", "NaN"),
    *("\x1b]0;title\x07\x1b[31m", "\u202e", "a" * 500, "../..", "e99m99", "int8 channel", [], [1], [[]], {}, {"a": 1}),
    *({"steps": 3}, [None] * 3),
)


class FailedCase(Exception):
    """A case that showed a defect."""


@dataclass
class Ended:
    """How a child process ended."""

    code: int
    text: str
    timed_out: bool = False

    def check(self, *allowed: int) -> Ended:
        """Raise where the child crashed, printed a traceback or control characters, or has another exit code."""
        if self.timed_out:
            return self
        problems = [
            *(["a traceback"] if "Traceback (most recent call last)" in self.text else []),
            *(["control characters"] if set("\x1b\x07\x00") & set(self.text) else []),
            *([f"exit code {self.code}"] if self.code not in allowed else []),
        ]
        if problems:
            raise FailedCase(f"{', '.join(problems)}\n{self.text[-3000:]}")
        return self


def child(arguments: list[str], folder: Path, real: bool = False, kill_after: float | None = None) -> Ended:
    """Run ``bitplan`` on `arguments` in `folder`.

    :param real: start a new interpreter instead of a fork.
    :param kill_after: seconds after which the process is killed, which is then no time-out.
    """
    with tempfile.TemporaryFile() as output:
        if real:
            environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
            command = [sys.executable, "-m", "bitplan", *arguments]
            number = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output).pid
        else:
            number = os.fork()
            if number == 0:
                _be_child(arguments, folder, output.fileno())
        status = _wait(number, PATIENCE * (3 if real else 1) if kill_after is None else kill_after)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status is None:
        return Ended(-signal.SIGKILL, text, timed_out=kill_after is None)
    return Ended(os.waitstatus_to_exitcode(status), text)


def _wait(number: int, seconds: float) -> int | None:
    """The status of a child; None where it had to be killed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(number, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.002)
    os.kill(number, signal.SIGKILL)
    _, status = os.waitpid(number, 0)
    return None if os.WIFSIGNALED(status) else status


def _be_child(arguments: list[str], folder: Path, output: int) -> NoReturn:
    code = 70
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(folder)
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        from bitplan.cli import main

        try:
            main(arguments)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


# --- kills


class Kills:
    """A run that is killed until it has finished."""

    share = 0.4

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "plan.yaml").write_text(PLAN)
        began = time.monotonic()
        child([*self._command("whole"), "--checkpoint-every", "5"], folder).check(0)
        self.seconds = time.monotonic() - began
        self.expected = fingerprint(folder / "whole")
        self.kills = 0

    def _command(self, name: str) -> list[str]:
        settings = [part for key in ("steps=60", "evaluate_every=20") for part in ("--set", key)]
        return ["train", f"{TASK}:Tiny", "--plan", "plan.yaml", "--out", name, *settings]

    def case(self, number: int, draw: random.Random) -> str:
        run = self.folder / "parts"
        shutil.rmtree(run, ignore_errors=True)
        command = [*self._command("parts"), "--checkpoint-every", str(draw.choice([1, 2, 5, 20]))]
        kills = 0
        for attempt in range(100):
            is_real = number % 10 == 0 and attempt == 0
            patience = None if attempt >= 8 else draw.uniform(0.2, 1.2) * (self.seconds + 6 * is_real)
            ended = child(command, self.folder, is_real, patience)
            if ended.timed_out:
                raise FailedCase(f"the resumed run did not end\n{ended.text[-3000:]}")
            if ended.code == 0:
                break
            ended.check(-signal.SIGKILL)
            kills += 1
        if fingerprint(run) != self.expected:
            raise FailedCase(f"after {kills} kills the run ended with other bytes")
        left = [path.name for path in run.rglob("*") if path.name.endswith(".tmp")]
        tensors, records = ({path.stem for path in run.glob(f"checkpoints/*.{end}")} for end in ("safetensors", "json"))
        if left or tensors != records:
            raise FailedCase(f"files were left behind: {left}, {sorted(tensors ^ records)}")
        self.kills += kills
        return f"finished after {min(kills, 3)}{'+' if kills > 2 else ''} kills"


def fingerprint(run: Path) -> dict[str, str]:
    """Hashes of all that a finished run computed."""
    newest = max(run.glob("checkpoints/step-*.safetensors"))
    files = (newest, newest.with_suffix(".json"), run / "metrics.jsonl", run / "model.safetensors")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


# --- damaged run folders


class Folders:
    """A stopped and a finished run, each damaged in one place."""

    share = 0.25

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "plan.yaml").write_text(PLAN)
        settings = ["--set", "steps=24", "--measure-every", "8"]
        command = ["train", f"{TASK}:Tiny", "--plan", "plan.yaml", *settings]
        child([*command, "--out", "good/finished"], folder).check(0)
        self.expected = (folder / "good" / "finished" / "model.safetensors").read_bytes()
        # What a killed process leaves: the checkpoints of steps 6 and 12, and lines of later steps.
        shutil.copytree(folder / "good" / "finished", folder / "good" / "stopped")
        self._unfinish(folder / "good" / "stopped", [*command, "--out", "good/earlier", "--checkpoint-every", "6"])

    def _unfinish(self, stopped: Path, command: list[str]) -> None:
        # One process that writes checkpoints every 6 steps, killed once it has the second.
        earlier = self.folder / "good" / "earlier"
        number = os.fork()
        if number == 0:
            with tempfile.TemporaryFile() as output:
                _be_child(command, self.folder, output.fileno())
        while not (earlier / "checkpoints" / "step-00000012.json").exists():
            if os.waitpid(number, os.WNOHANG)[0]:
                break
            time.sleep(0.001)
        else:
            os.kill(number, signal.SIGKILL)
            os.waitpid(number, 0)
        shutil.rmtree(stopped)
        earlier.rename(stopped)
        for path in (*stopped.glob("checkpoints/step-0000001[38]*"), *stopped.glob("checkpoints/step-0000002*")):
            path.unlink()
        for name in ("summary.json", "model.safetensors"):
            (stopped / name).unlink(missing_ok=True)

    def case(self, number: int, draw: random.Random) -> str:
        damaged = self.folder / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(self.folder / "good", damaged / "runs")
        run = damaged / "runs" / draw.choice(["finished", "stopped", "stopped"])
        what = damage(run, draw)
        listed = child(["runs", "runs"], damaged).check(0, 2)
        other = "stopped" if run.name == "finished" else "finished"
        if not listed.timed_out and other not in listed.text:
            raise FailedCase(f"{what}: the good run is not listed\n{listed.text}")
        child(["report", "runs", "-o", "page.html"], damaged).check(0, 2)
        resumed = child(["train", "--resume", f"runs/{run.name}", "--task", f"{TASK}:Tiny"], damaged).check(0, 2)
        if resumed.timed_out or listed.timed_out:
            raise FailedCase(f"{what}: a command did not end")
        model = run / "model.safetensors"
        if resumed.code == 0 and run.name == "stopped" and model.read_bytes() != self.expected:
            raise FailedCase(f"{what}: the run ended with other weights and said\n{resumed.text}")
        return "refused" if resumed.code else "went on"


def damage(run: Path, draw: random.Random) -> str:
    """Damage one file of a run folder; returns what was done."""
    files = sorted(path for path in run.rglob("*") if path.is_file() and path.name != "lock")
    files = [path for path in files if "tensorboard" not in path.parts]
    texts = [path for path in files if path.suffix in (".json", ".jsonl")]
    how = draw.choice(["field", "field", "field", "field", "cut", "delete", "bytes", "replace"])
    path = draw.choice(texts if how == "field" else files)
    name = path.relative_to(run)
    if how == "delete":
        path.unlink()
    elif how == "cut":
        content = path.read_bytes()
        path.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif how == "bytes":
        content = bytearray(path.read_bytes())
        for _ in range(draw.choice([1, 1, 8, 100])):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
    elif how == "replace":
        path.write_bytes(draw.choice([b"", b"null", b"[" * 100_000, b"{}", b"[]", b"\xff\xfe", b'"' + b"9" * 500]))
    elif path.suffix == ".json":
        content, where = mutated(json.loads(path.read_text()), draw)
        path.write_text(json.dumps(content))
        return f"{name}: {where}"
    else:
        lines = path.read_text().splitlines()
        position = draw.randrange(len(lines))
        content, where = mutated(json.loads(lines[position]), draw)
        lines[position] = json.dumps(content)
        path.write_text("\n".join(lines) + "\n")
        return f"{name}:{position}: {where}"
    return f"{name}: {how}"


def mutated(content: Any, draw: random.Random) -> tuple[Any, str]:
    """A copy of a JSON document with one value changed, removed or added; and where."""
    whole = copy.deepcopy(content)
    places = list(_places(whole))
    if not places:
        return draw.choice(ODD), "everything"
    container, key = draw.choice(places)
    how = draw.choice(["change", "change", "change", "remove", "add"])
    if how == "remove":
        del container[key]
    elif how == "add" and isinstance(container, dict):
        container[draw.choice(["extra", "$tensor", "step", ""])] = draw.choice(ODD)
    else:
        container[key] = draw.choice(ODD)
    return whole, f"{how} {key!r}"


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(items):
        yield content, key
        yield from _places(value)


# --- plans


class Plans:
    """Documents that are nearly plans."""

    share = 0.15
    #: Texts that mean something in YAML.
    inserted = ("", ":", "-", "{", "}", "[", "*", "&a", "\t", "\n", "!!python/object:x", "9" * 400, "\0")
    #: Documents of a case, which has one process.
    documents = 50

    def __init__(self, folder: Path) -> None:
        from bitplan.plans import preset_names
        from bitplan.plans.loading import find_plan

        self.folder = folder
        self.presets = [find_plan(name).flattened() for name in preset_names()]

    def case(self, number: int, draw: random.Random) -> str:
        texts = [self._document(draw) for _ in range(self.documents)]
        report = self.folder / "plans.json"
        report.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            _read_plans(texts, report)
        if _wait(pid, PATIENCE) is None:
            raise FailedCase(f"{self.documents} documents took more than {PATIENCE:g} s")
        if not report.exists():
            raise FailedCase("the process ended without a report")
        refused, failures = json.loads(report.read_text())
        if failures:
            raise FailedCase(failures[0])
        return f"{10 * (10 * refused // len(texts))} % refused"

    def _document(self, draw: random.Random) -> str:
        plan = draw.choice(self.presets)
        if draw.random() < 0.3:
            text = plan.to_yaml()
            for _ in range(draw.choice([1, 1, 3])):
                position = draw.randrange(len(text))
                inserted = draw.choice(self.inserted)
                text = text[:position] + inserted + text[position + draw.randrange(3) :]
            return text
        content = plan.to_dict()
        for _ in range(draw.choice([1, 1, 2, 4])):
            content, _ = mutated(content, draw)
        return json.dumps(content)


def _read_plans(texts: list[str], report: Path) -> NoReturn:
    from bitplan.errors import BitplanError
    from bitplan.plans import Plan

    refused, failures = 0, []
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        for text in texts:
            for read in _readings(text):
                try:
                    plan = read(Plan)
                    Plan.from_yaml(plan.to_yaml())
                except BitplanError:
                    refused += 1
                except BaseException:
                    failures.append(f"{text[:2000]}\n{traceback.format_exc()[-2000:]}")
        report.write_text(json.dumps([refused, failures]))
    finally:
        os._exit(0)


def _readings(text: str) -> list[Callable[[Any], Any]]:
    """As YAML, and as a mapping where it is JSON."""
    try:
        content = json.loads(text)
    except ValueError:
        return [lambda plan: plan.from_yaml(text)]
    return [lambda plan: plan.from_dict(content)]


# --- command lines


class Commands:
    """Command lines with wrong values."""

    share = 0.2
    values = (
        *("", "-1", "0", "1", "3", "1e23", "nan", "inf", "99999999999999999999", "70%", "1:2", "x", "n" * 300),
        *("fp8-all", "int8", "e4m3", "digits", "resnet20", "gpt-tiny", "cpu", "cuda", "cuda:99", "abc", "float16"),
        *("good/run", "missing", "plan.yaml", "/proc", "/dev/full", "broken.py:T", "broken.py", "folder", "out.html"),
        *("\x1b[31m", "\u202e", "\udcff", "steps=1", "steps=-1", "batch=0", "a=b", "=", "packed", "native"),
        *("-", "--", "--json", "-h", "--seed"),
    )

    def __init__(self, folder: Path) -> None:
        from bitplan.cli.app import whole_group

        self.folder = folder
        (folder / "plan.yaml").write_text(PLAN)
        (folder / "broken.py").write_text("raise ValueError('broken')\n")
        (folder / "folder").mkdir()
        settings = ["--set", "steps=2", "--set", "batch=8", "--out", "good/run"]
        child(["train", f"{TASK}:Tiny", *settings], folder).check(0)
        self.commands = dict(_commands(whole_group()))
        #: These take longer than a case may, however they are called.
        for slow in (("demo",), ("crossover",)):
            self.commands.pop(slow, None)

    def case(self, number: int, draw: random.Random) -> str:
        path = draw.choice(sorted(self.commands))
        parameters = self.commands[path]
        line = [*path]
        options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
        for parameter in parameters:
            if parameter.param_type_name == "argument" and draw.random() < 0.9:
                line += [self._value(parameter, draw) for _ in range(draw.choice([1, 1, 1, 2]))]
        for parameter in draw.sample(options, min(len(options), draw.randrange(5))):
            line.append(draw.choice(parameter.opts))
            if not getattr(parameter, "is_flag", False) and draw.random() < 0.95:
                line.append(self._value(parameter, draw))
        if draw.random() < 0.1:
            line.insert(draw.randrange(1, len(line) + 1), draw.choice(self.values))
        for name in ("runs", "out"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        try:
            ended = child(line, self.folder).check(0, 1, 2)
        except FailedCase as failure:
            raise FailedCase(f"bitplan {line}: {failure}") from None
        return "timed out" if ended.timed_out else f"exit code {ended.code}"

    def _value(self, parameter: Any, draw: random.Random) -> str:
        """Mostly one that the parameter may take, else any."""
        if draw.random() < 0.2:
            return draw.choice(self.values)
        if isinstance(parameter.default, (int, float)):
            return draw.choice(["1", "2", "3", "4", "64", "0", "-1", "1000000", "0.5", "1e23", "9" * 20, "nan"])
        plausible = {
            "task": [f"{TASK}:Tiny", "digits", "graph", "broken.py:T", "lm"],
            "target": ["resnet20", "gpt-tiny", f"{TASK}:Tiny", "broken.py", "digits"],
            "plan": ["fp8-all", "int8-linear", "plan.yaml", "missing", "good/run/run.json"],
            "settings": ["steps=1", "steps=2", "batch=4", "batch=0", "lr=nan", "steps=1e30", "data=/proc"],
            "runs": ["good", "good/run", "missing", "plan.yaml", "/proc"],
            "formats": ["int8", "e4m3", "e99m99", "int4 channel", "x"],
            "to": ["torchao", "megatron", "te-debug", "compressed-tensors", "modelopt", "torchtitan"],
            "from_": ["torchao", "megatron", "compressed-tensors"],
            "source": ["rowwise", "plan.yaml", "good/run/run.json", "broken.py:config", "good", "missing"],
            "model": ["resnet20", "gpt-tiny", f"{TASK}:Tiny", "broken.py", "digits"],
        }
        return draw.choice(plausible.get(str(parameter.name), self.values))


def _commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), list(command.params)


# --- all of it

AREAS: dict[str, type[Any]] = {"kills": Kills, "folders": Folders, "plans": Plans, "commands": Commands}


@dataclass
class Tally:
    """What came of the cases of an area."""

    cases: int = 0
    results: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)
    seconds: float = 0.0


def torture(name: str, seed: int, seconds: float, cases: int, only: int | None, folder: Path) -> Tally:
    """Run the cases of an area until the time or the number of cases is spent."""
    tally, began = Tally(), time.monotonic()
    area = AREAS[name](folder)
    numbers = range(cases) if only is None else range(only, only + 1)
    for number in numbers:
        if only is None and time.monotonic() - began > seconds:
            break
        tally.cases += 1
        try:
            tally.results[area.case(number, random.Random(f"{seed}/{name}/{number}"))] += 1
        except FailedCase as failure:
            tally.results["FAILED"] += 1
            tally.failures.append((number, str(failure)))
    if name == "kills":
        tally.results["kills in all"] = area.kills
    tally.seconds = time.monotonic() - began
    return tally


def _warm_up(folder: Path) -> None:
    """Import, once and for all forks, what commands import while they run."""
    from bitplan.cli import main as bitplan_main

    (folder / "plan.yaml").write_text(PLAN)
    train = ["train", f"{TASK}:Tiny", "--plan", str(folder / "plan.yaml"), "--measure-every", "20"]
    for arguments in ([*train, "--out", str(folder / "run")], ["report", str(folder), "-o", str(folder / "page.html")]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            bitplan_main(arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all areas together")
    parser.add_argument("--cases", type=int, default=10**9, help="of each area, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=AREAS, help="this area")
    parser.add_argument("--case", type=int, help="this case of the area")
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["BITPLAN_CACHE"] = tempfile.gettempdir()  # the user's own table of native execution is left alone
    sys.path[:0] = [str(ROOT / "src")]
    import bitplan.cli.app

    bitplan.cli.app.whole_group()
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        _warm_up(Path(folder))
    areas = [chosen.only] if chosen.only else list(AREAS)
    shares = {name: AREAS[name].share for name in areas}
    failed = False
    print(f"seed {chosen.seed}, {chosen.seconds:g} seconds")
    print(f"{'area':<10} {'cases':>6} {'failed':>6} {'seconds':>8}  results")
    for name in areas:
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            seconds = chosen.seconds * shares[name] / sum(shares.values())
            tally = torture(name, chosen.seed, seconds, chosen.cases, chosen.case, Path(folder))
        results = ", ".join(f"{count} {result}" for result, count in sorted(tally.results.items()))
        print(f"{name:<10} {tally.cases:>6} {len(tally.failures):>6} {tally.seconds:>8.0f}  {results}", flush=True)
        for number, text in tally.failures[:10]:
            again = f"--seed {chosen.seed} --only {name} --case {number}"
            print(f"--- {again}\n{text}\n", file=sys.stderr, flush=True)
        failed |= bool(tally.failures)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
