"""Run folders: where a run keeps everything, and what is refused there.

======================  ===================================================================================
``run.json``            what the run is: :class:`~bitplan.lab.train.config.RunConfig`
``plan.yaml``           the plan with all that it extends; absent without a plan
``metrics.jsonl``       loss, learning rate, bits, cost and figures by step: the same for the same run, always
``measurements.jsonl``  figures of every product at a cadence, if asked for: :mod:`bitplan.lab.train.monitor`
``times.jsonl``         seconds by step, which differ from one time to the next
``sites.json``          what every tensor got and, at the end, what rounding did to it
``summary.json``        what came of it; absent while the run is under way
``checkpoints/``        see :mod:`bitplan.lab.train.checkpoint`
``model.safetensors``   the trained weights under their own names
``tensorboard/``        events, where tensorboard is installed
``lock``                held by the process that is at work here; the system frees it when that process dies
======================  ===================================================================================
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from bitplan.errors import BitplanError, RunError
from bitplan.files import json_line, json_text
from bitplan.lab.train.config import VERSION, RunConfig
from bitplan.lab.train.summary import Status, Summary
from bitplan.plans import Plan

# --- Writing what must still be there after a crash, and sentences where that cannot be done


_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskError(RunError):
    """A file of a run that cannot be written."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While `path` is written: what goes wrong is told in a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskError(f"the disk is full and {path} could not be written: make room there.") from error
        reason = error.strerror or type(error).__name__
        raise DiskError(f"cannot write {path} ({reason}): name a folder you may write to.") from error


def as_os_error(error: Exception) -> OSError:
    """A library's own error as the operating system's: safetensors tells the number in its text."""
    number = re.search(r"os error (\d+)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code))


def write_durably(path: Path, text: str) -> None:
    """All of `text` or nothing, and on the disk when this returns."""
    with writing(path), fresh_file(path) as fresh:
        fresh.write_text(text, encoding="utf-8", newline="\n")


@contextmanager
def fresh_file(path: Path) -> Iterator[Path]:
    """A name to write under; at the end the file is made durable and takes the place of `path`."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield fresh
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    finally:
        fresh.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the file's contents, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make sure that the folder exists."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DiskError(f"cannot make the folder {path} ({reason}): name another one.") from error


# --- Files of JSON lines that only grow, until a resumed run cuts them back to where it goes on


class Journal:
    """One such file, open for more lines; each has a ``"step"``, and steps never go back."""

    def __init__(self, path: Path, after: int) -> None:
        """Keep the lines of up to step `after`; later ones, and a line that a crash tore, are cut off."""
        self.path = path
        with writing(path):
            # Unbuffered: what was written is with the operating system, and a killed process loses none of it.
            self._file: FileIO = open(path, "ab", buffering=0)  # noqa: SIM115 - closed at the run's end
            self._file.truncate(_length_of(path, after))

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line: all of it or, where the disk is full, a part that the next start cuts off."""
        with writing(self.path):
            data = memoryview(json_line(line).encode())
            while data:
                data = data[self._file.write(data) :]

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal that may be growing just now; none where it does not exist."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = [_parsed(line) for line in data.splitlines(keepends=True)]
    return [line for line in lines if line is not None]


def _length_of(path: Path, after: int) -> int:
    """Bytes of the leading lines that are whole and of no later step."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True):
        content = _parsed(line)
        if content is None or content["step"] > after:
            break
        length += len(line)
    return length


def _parsed(line: bytes) -> dict[str, Any] | None:
    """None where the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) and isinstance(content.get("step"), int) else None


log = logging.getLogger("bitplan")

#: Where runs are kept, unless told otherwise.
DEFAULT_PARENT = Path("runs")
#: How deep runs may lie beneath a folder that is asked about: runs/comparison/run.
_DEPTH = 3
#: How often a lock is tried for before it counts as held.
_TRIES = 5
#: Files under the names that we, and safetensors, write under at first.
_HALF_WRITTEN = re.compile(r"\..*\.tmp|\.tmp\w+")
#: What a process that died before its run began may have left.
_REMAINS = re.compile(rf"lock|plan\.yaml|checkpoints|{_HALF_WRITTEN.pattern}")


class RunFolder:
    """One run's folder, which may not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.run_file = self.path / "run.json"
        self.plan_file = self.path / "plan.yaml"
        self.metrics_file = self.path / "metrics.jsonl"
        self.times_file = self.path / "times.jsonl"
        self.measurements_file = self.path / "measurements.jsonl"
        self.sites_file = self.path / "sites.json"
        self.summary_file = self.path / "summary.json"
        self.model_file = self.path / "model.safetensors"
        self.checkpoints = self.path / "checkpoints"
        self.events = self.path / "tensorboard"
        self.lock_file = self.path / "lock"

    def __str__(self) -> str:
        return str(self.path)

    # --- reading ---

    @property
    def is_run(self) -> bool:
        return self.run_file.is_file()

    def config(self) -> RunConfig:
        """What the run is; a sentence where the folder holds none, or one of another version."""
        if not self.is_run:
            raise RunError(f"{self.path} is not a run folder (it has no run.json): name one that bitplan train made.")
        content = read_object(self.run_file)
        if content.get("bitplan_run") != VERSION:
            raise RunError(
                f"{self.path} is a run folder of version {content.get('bitplan_run')!r}, and this bitplan knows "
                f"version {VERSION}: use the bitplan that made it, or name another folder."
            )
        try:
            return RunConfig.from_dict(content)
        except (TypeError, ValueError) as error:
            raise _damaged(self.run_file) from error

    def plan(self) -> Plan | None:
        """The plan that the run follows."""
        return Plan.load(self.plan_file) if self.plan_file.exists() else None

    def summary(self) -> Summary | None:
        """What came of the run; None while it is under way, and where it was killed."""
        if not self.summary_file.exists():
            return None
        try:
            return Summary.from_dict(self.path, read_object(self.summary_file))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise _damaged(self.summary_file) from error

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` so far."""
        return read_lines(self.metrics_file)

    def status(self) -> Status | Literal["running", "unfinished"]:
        """*running*: a process is at work; *unfinished*: none is, and it can be resumed."""
        if self.is_locked():
            return "running"
        summary = self.summary()
        return "unfinished" if summary is None else summary.status

    # --- the lock ---

    def is_locked(self) -> bool:
        """Whether a process is at work here."""
        try:
            with self.lock_file.open("rb") as file:
                return not _locked(file)
        except OSError:
            return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other processes out of it; leave nothing behind where no run was begun."""
        existed = self.path.is_dir()
        make_folder(self.path)
        with writing(self.lock_file):
            file = self.lock_file.open("a+", encoding="utf-8")
        with file:
            if not _locked_soon(file):
                file.seek(0)
                raise RunError(
                    f"process {file.read().strip() or '(unknown)'} is at work in {self.path}: wait until it has ended, "
                    f"or name another folder."
                )
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            try:
                yield
            finally:
                if not self.is_run:
                    self._clear(existed)

    def _clear(self, existed: bool) -> None:
        self.lock_file.unlink(missing_ok=True)
        self.plan_file.unlink(missing_ok=True)
        if not existed and not any(self.path.iterdir()):
            self.path.rmdir()

    # --- writing ---

    def require_room_for(self, config: RunConfig, plan: Plan | None) -> bool:
        """Whether such a run lies here already; raises where something else does."""
        if not self.is_run:
            others = sorted(each.name for each in self.path.iterdir() if not _REMAINS.fullmatch(each.name))
            if others:
                raise RunError(
                    f"{self.path} holds {others[0]} and no run: name a folder that is empty or does not exist yet."
                )
            return False
        known = self.config()
        difference = known.difference(config)
        text = self.plan_file.read_text(encoding="utf-8") if self.plan_file.exists() else None
        if difference is None and text != _plan_text(plan):
            difference = f"the plan {known.plan or 'none'}, which says something else than {config.plan or 'none'}"
        if difference is not None:
            raise RunError(
                f"{self.path} holds a run with {difference}: name another folder, or ask for the same to go on with it."
            )
        self.require_task_file(config.task_source, config.task_sha256)
        return True

    def require_task_file(self, source: str, sha256: str | None) -> None:
        """Raise where a task's file, `source` with that SHA-256, is not the one that the run here was begun with."""
        recorded = self.config().task_sha256
        if recorded is not None and sha256 is not None and recorded != sha256:
            raise RunError(
                f"{self.path} was begun with a task file of SHA-256 {recorded}, and the file of {source} has {sha256}: "
                f"restore the file as it was then, or begin a new run in another folder."
            )

    def begin(self, config: RunConfig, plan: Plan | None) -> None:
        """Write what the run is; from now on the folder is a run's."""
        text = _plan_text(plan)
        if text is not None:
            write_durably(self.plan_file, text)
        make_folder(self.checkpoints)
        write_durably(self.run_file, json_text(config.to_dict()) + "\n")

    def write_sites(self, sites: list[dict[str, Any]]) -> None:
        write_durably(self.sites_file, json_text(sites) + "\n")

    def write_summary(self, summary: Summary) -> None:
        write_durably(self.summary_file, json_text(summary.to_dict()) + "\n")

    def sweep(self) -> None:
        """Remove what a killed process had half written."""
        for folder in (self.path, self.checkpoints):
            for left in folder.glob(".*"):
                if _HALF_WRITTEN.fullmatch(left.name):
                    with writing(left):
                        left.unlink(missing_ok=True)

    def forget_summary(self) -> None:
        """A run that goes on is no longer what its summary says."""
        with writing(self.summary_file):
            self.summary_file.unlink(missing_ok=True)


def fresh_folder(task: str, plan: str | None, seed: int, parent: Path = DEFAULT_PARENT) -> Path:
    """The first folder for such a run that does not exist: ``runs/digits-fp32-s0``, then ``runs/digits-fp32-s0-2``."""
    stem = re.sub(r"[^\w.+-]+", "_", f"{task}-{plan or 'fp32'}-s{seed}")
    path, number = parent / stem, 1
    while path.exists():
        number += 1
        path = parent / f"{stem}-{number}"
    return path


def find_runs(path: Path) -> list[RunFolder]:
    """The run folder `path`, or all in it and in the comparisons that it holds, by name."""
    if not path.is_dir():
        raise RunError(f"there is no folder {path}: name a run folder, or one that holds runs.")
    return list(_runs_beneath(path, _DEPTH))


def _runs_beneath(path: Path, depth: int) -> Iterator[RunFolder]:
    folder = RunFolder(path)
    if folder.is_run:
        yield folder
    elif depth:
        for child in sorted(each for each in path.iterdir() if each.is_dir()):
            yield from _runs_beneath(child, depth - 1)


def _plan_text(plan: Plan | None) -> str | None:
    return None if plan is None else plan.flattened().to_yaml()


def _locked_soon(file: IO[Any]) -> bool:
    """Who only asks whether a folder is locked holds the lock for a moment, too."""
    for _ in range(_TRIES):
        if _locked(file):
            return True
        time.sleep(0.02)
    return False


def _locked(file: IO[Any]) -> bool:
    """Try to lock an open file; freed when it is closed, or its process dies."""
    try:
        import fcntl
    except ImportError:  # Windows, where nothing guards a folder against a second process
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        log.warning("%s cannot be locked (%s): take care that no second process trains there.", file.name, error)
    return True


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, or a sentence about what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"cannot read {path} ({error.strerror}): mend that, or name another folder.") from error
    except ValueError as error:
        raise _damaged(path) from error
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def _damaged(path: Path) -> BitplanError:
    return RunError(f"{path} is damaged: restore it, leave it out of a report, or begin anew in another folder.")
