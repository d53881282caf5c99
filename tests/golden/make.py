"""Makes or checks the stored goldens.

Goldens are never made again in a commit that changes code: they say that a change of the code changed no number. New
cases, a new torch version or a new machine are added from a commit whose numbers are trusted, in a commit of their own.

    python tests/golden/make.py                              # add all cases that are not stored yet
    python tests/golden/make.py --only eager                 # those whose id contains "eager"
    python tests/golden/make.py --check tests/golden/stored/NAME.json
    python tests/golden/make.py --device cuda --out FILE     # the cases of an accelerator, into a file
    python tests/golden/make.py --device cuda --check FILE

Run from the repository root with PYTHONPATH=src, or where bitplan is installed. All cases run twice, in two processes
with compiler caches of their own, and only what is equal in both is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import golden_store as store
import torch
from golden_cases import Case, cpu_cases, cuda_cases, skipped
from golden_harness import initial_digests, train


def main() -> int:
    arguments = _arguments()
    cases = [case for case in _cases(arguments.device) if arguments.only in case.id]
    if arguments.record:
        ids = json.loads(arguments.record.read_text())
        return _record([case for case in cases if case.id in ids], arguments.device, arguments.record)
    if arguments.check:
        return _check(cases, arguments.device, arguments.check)
    return _make(cases, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--only", default="", help="only cases whose id contains this")
    parser.add_argument("--out", type=Path, help="the file to write; by default the one of this torch and machine")
    parser.add_argument("--check", type=Path, help="compare to this file instead of writing one")
    parser.add_argument("--force", action="store_true", help="replace cases that are stored already")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _cases(device: str) -> list[Case]:
    return cpu_cases() if device == "cpu" else cuda_cases()


def _record(cases: list[Case], device: str, path: Path) -> int:
    """Train cases in this process, one of the two of :func:`_make`, and write results where their ids were read."""
    results: dict[str, Any] = {}
    for case in cases:
        started = time.perf_counter()
        results[case.id] = train(case, device).stored()
        loss = float.fromhex(results[case.id]["losses"][-1])
        print(f"{case.id:58} last loss {loss:8.5f} {time.perf_counter() - started:6.1f} s", flush=True)
    path.write_text(json.dumps(results))
    return 0


def _make(cases: list[Case], arguments: argparse.Namespace) -> int:
    path: Path = arguments.out or store.path_of(arguments.device)
    stored = store.read(path) if path.is_file() else _header(arguments.device)
    if stored["probe"] != store.probe(arguments.device):
        print(f"{path} was made where torch computes other last bits; give --out another file.")
        return 1
    if not arguments.force:
        already = [case for case in cases if case.id in stored["cases"]]
        cases = [case for case in cases if case not in already]
        if already:
            print(f"{len(already)} cases are stored already and stay as they are (--force replaces them).")
    if arguments.device == "cpu" and ("initial" not in stored or arguments.force):
        stored = {"initial": initial_digests()} | stored
    first, second = (_in_own_process(cases, arguments.device) if cases else {} for _ in range(2))
    unstable = []
    for case in cases:
        equal = {name: value for name, value in first[case.id].items() if second[case.id][name] == value}
        if equal:
            stored["cases"][case.id] = equal
        if len(equal) < len(first[case.id]):
            unstable.append(f"{case.id}: only {', '.join(equal) or 'nothing'}")
    store.write(path, stored)
    print(f"{len(cases) - len(unstable)} of {len(cases)} new cases are equal in two processes; written to {path}.")
    for line in unstable:
        print(f"not deterministic, stored {line}")
    return 0


def _in_own_process(cases: list[Case], device: str) -> dict[str, Any]:
    """The results of the cases by id, from a new process with empty compiler caches."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "results.json"
        record.write_text(json.dumps([case.id for case in cases]))
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        command = [sys.executable, __file__, "--device", device, "--record", str(record)]
        subprocess.run(command, check=True, env=os.environ | caches)
        results: dict[str, Any] = json.loads(record.read_text())
        return results


def _check(cases: list[Case], device: str, path: Path) -> int:
    reason = store.why_not_comparable(path, device)
    if reason:
        print(reason)
        return 1
    stored = store.read(path)["cases"]
    cases = [case for case in cases if case.id in stored]
    equal = 0
    for case in cases:
        different = store.difference(stored[case.id], train(case, device).stored())
        equal += different is None
        print(f"{case.id:58} {different or 'equal'}", flush=True)
    print(f"{equal} of {len(cases)} equal")
    return int(equal < len(cases))


def _header(device: str) -> dict[str, Any]:
    header: dict[str, Any] = {
        "torch": torch.__version__,
        "hardware": store.hardware(device),
        "python": platform.python_version(),
        "probe": store.probe(device),
        "cases": {},
    }
    return header | ({"skipped": skipped()} if device == "cpu" else {})


if __name__ == "__main__":
    # Deterministic cuBLAS; read when its first handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sys.exit(main())
