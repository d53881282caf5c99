"""Run folders: the files of a run, how they are written durably, and the lock.

======================  ===================================================================================
``run.json``            the configuration: :class:`~bitplan.lab.train.config.RunConfig`
``plan.yaml``           the plan with everything it extends; absent without a plan
``metrics.jsonl``       loss, learning rate, bits, cost and metrics by step: reproducible to the byte
``measurements.jsonl``  measurements of every product, on request: :mod:`bitplan.lab.train.monitor`
``times.jsonl``         seconds and peak memory by step
``statistics.jsonl``    statistics of the rounding of every tensor by step, of recorded loops
``sites.json``          the format of every tensor and, at the end, statistics of its rounding
``summary.json``        the result; absent while the run is not finished
``checkpoints/``        see :mod:`bitplan.lab.train.checkpoint`
``model.safetensors``   the trained weights under their own names
``tensorboard/``        events, where tensorboard is installed
``lock``                held by the process that trains here; the system frees it when that process ends
======================  ===================================================================================
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from bitplan.errors import BitplanError, RunError
from bitplan.files import fresh_file, json_line, json_text, parse_json
from bitplan.lab.train.config import VERSION, RunConfig
from bitplan.lab.train.summary import Status, Summary
from bitplan.plans import Plan

# --- Durable writes

_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskError(RunError):
    """A file of a run that cannot be written."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report errors in writing `path` as a :class:`DiskError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskError(f"the disk is full and {path} could not be written: free some space there.") from error
        reason = error.strerror or type(error).__name__
        raise DiskError(f"cannot write {path} ({reason}): name a folder you may write to.") from error


def as_os_error(error: Exception) -> OSError:
    """An error of safetensors as the operating system's, whose number is in its text."""
    number = re.search(r"os error (\d+)", str(error))
    code = int(number[1]) if number else errno.EIO
    return OSError(code, os.strerror(code))


def write_durably(path: Path, text: str) -> None:
    """Write all of `text` or nothing; it is on disk when this returns."""
    with writing(path), fresh_file(path) as fresh:
        fresh.write_text(text, encoding="utf-8", newline="\n")


def make_folder(path: Path) -> None:
    """Create a folder, unless it exists."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DiskError(f"cannot make the folder {path} ({reason}): name another one.") from error


# --- Files of JSON lines, which a resumed run truncates to the step it resumes from


class Journal:
    """A file of JSON lines, open for appending; every line has a ``"step"``, and steps never decrease."""

    def __init__(self, path: Path, after: int) -> None:
        """Keep the lines up to step `after`; later ones and an incomplete line are removed."""
        self.path = path
        require_regular(path)
        with writing(path):
            # Unbuffered, so that a killed process loses no line.
            self._file: FileIO = open(path, "ab", buffering=0)  # noqa: SIM115 - closed at the run's end
            self._file.truncate(_length_of(path, after))

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line; where the disk is full, the next start removes what was written of it."""
        with writing(self.path):
            data = memoryview(json_line(line).encode())
            while data:
                data = data[self._file.write(data) :]

    def sync(self) -> None:
        """Wait until all lines are on disk."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal, which may be growing; none where it does not exist."""
    if not path.exists():
        return []
    require_regular(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot read {path} ({error.strerror}): fix that, or leave the run out.") from error
    lines = [_parsed(line) for line in data.splitlines(keepends=True)]
    return [line for line in lines if line is not None]


def _length_of(path: Path, after: int) -> int:
    """Bytes of the leading lines that are complete and of no later step."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True):
        content = _parsed(line)
        if content is None or content["step"] > after:
            break
        length += len(line)
    return length


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The content of a line; None where it is incomplete or no line of a journal."""
    if not line.endswith(b"\n"):
        return None
    try:
        content = parse_json(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) and type(content.get("step")) is int else None


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a number; truth values are none."""
    return type(value) in (int, float)


log = logging.getLogger("bitplan")

#: The default folder of runs.
DEFAULT_PARENT = Path("runs")
#: The depth of runs beneath a named folder, at most: runs/comparison/run.
_DEPTH = 3
#: Attempts to take a lock before it counts as held.
_TRIES = 5
#: Names of the temporary files of bitplan and of safetensors.
_HALF_WRITTEN = re.compile(r"\..*\.tmp|\.tmp\w+")
#: Names of the tensors' files of checkpoints.
_TENSORS = re.compile(r"step-[0-9]{8,}\.safetensors")
#: Files that a process may leave that was killed before its run began.
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
        self.statistics_file = self.path / "statistics.jsonl"
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
        return os.path.isfile(self.run_file)  # unlike pathlib's, false where the folder may not be read

    def config(self) -> RunConfig:
        """The configuration; raises where the folder holds no run, or one of another version."""
        if not self.is_run:
            raise RunError(f"{self.path} is not a run folder (it has no run.json): name one that bitplan train made.")
        content = read_object(self.run_file)
        if content.get("bitplan_run") != VERSION:
            raise RunError(
                f"{self.path} is a run folder of version {content.get('bitplan_run')!r}, and this bitplan reads "
                f"version {VERSION}: use the bitplan that made it, or name another folder."
            )
        try:
            return RunConfig.from_dict(content)
        except ValueError as error:
            raise _damaged(self.run_file, str(error)) from error

    def plan_text(self) -> str | None:
        """The content of ``plan.yaml``; None: no plan."""
        return read_text(self.plan_file) if self.plan_file.exists() else None

    def plan(self) -> Plan | None:
        """The plan of the run."""
        if not self.plan_file.exists():
            return None
        require_regular(self.plan_file)
        return Plan.load(self.plan_file)

    def summary(self) -> Summary | None:
        """The result of the run; None while it is running, and where it was killed."""
        if not self.summary_file.exists():
            return None
        try:
            return Summary.from_dict(self.path, read_object(self.summary_file))
        except (KeyError, TypeError, ValueError, AttributeError, RunError) as error:
            raise _damaged(self.summary_file) from error

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` so far."""
        return read_lines(self.metrics_file)

    def status(self) -> Status | Literal["running", "unfinished"]:
        """*running*: a process trains here; *unfinished*: none does, and the run can be resumed."""
        if self.is_locked():
            return "running"
        summary = self.summary()
        return "unfinished" if summary is None else summary.status

    # --- the lock ---

    def is_locked(self) -> bool:
        """Whether a process trains here."""
        try:
            with self.lock_file.open("rb") as file:
                return not _locked(file)
        except OSError:
            return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder and lock it; remove both at the end where no run was started."""
        existed = self.path.is_dir()
        make_folder(self.path)
        with writing(self.lock_file):
            file = self.lock_file.open("a+", encoding="utf-8")
        with file:
            if not _locked_soon(file):
                file.seek(0)
                raise RunError(
                    f"process {file.read().strip() or '(unknown)'} trains in {self.path}: wait until it has ended, "
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
        with suppress(OSError):  # somebody else may have removed or renamed the folder
            if not existed and not any(self.path.iterdir()):
                self.path.rmdir()

    # --- writing ---

    def require_room_for(self, config: RunConfig, plan: Plan | None) -> bool:
        """Whether the folder holds such a run already; raises where it holds anything else."""
        if not self.is_run:
            others = sorted(entry.name for entry in self.path.iterdir() if not _REMAINS.fullmatch(entry.name))
            if others:
                raise RunError(
                    f"{self.path} holds {others[0]} and no run: name a folder that is empty or does not exist yet."
                )
            return False
        recorded = self.config()
        difference = recorded.difference(config)
        if difference is None and self.plan_text() != _plan_text(plan):
            difference = (
                f"the plan {recorded.plan or 'none'}, whose content differs from that of {config.plan or 'none'}"
            )
        if difference is not None:
            raise RunError(
                f"{self.path} holds a run with {difference}: name another folder, or use the same options to resume it."
            )
        self.require_task_file(config.task_source, config.task_sha256)
        return True

    def require_task_file(self, source: str, sha256: str | None) -> None:
        """Raise where the task's file, `source` with that SHA-256, is not the one that the run was started with."""
        recorded = self.config().task_sha256
        if recorded is not None and sha256 is not None and recorded != sha256:
            raise RunError(
                f"{self.path} was started with a task file of SHA-256 {recorded}, and the file of {source} has "
                f"{sha256}: restore the file, or start a new run in another folder."
            )

    def begin(self, config: RunConfig, plan: Plan | None) -> None:
        """Write the configuration, which makes the folder a run folder."""
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
        """Remove what a killed process has left: temporary files, and tensors of a checkpoint without its JSON."""
        left = [path for folder in (self.path, self.checkpoints) for path in folder.glob(".*")]
        left = [path for path in left if _HALF_WRITTEN.fullmatch(path.name)]
        tensors = (path for path in self.checkpoints.glob("step-*") if _TENSORS.fullmatch(path.name))
        for path in [*left, *(path for path in tensors if not path.with_suffix(".json").exists())]:
            with writing(path):
                path.unlink(missing_ok=True)

    def forget_summary(self) -> None:
        """Remove the summary of a run that is resumed."""
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
    """The run folder `path`, or all run folders beneath it, by name."""
    if not path.is_dir():
        raise RunError(f"there is no folder {path}: name a run folder, or one that holds runs.")
    return list(_runs_beneath(path, _DEPTH))


def _runs_beneath(path: Path, depth: int) -> Iterator[RunFolder]:
    folder = RunFolder(path)
    if folder.is_run:
        yield folder
    elif depth:
        for child in folders_in(path):
            yield from _runs_beneath(child, depth - 1)


def folders_in(path: Path) -> list[Path]:
    """The folders in a folder, by name; none where it may not be read."""
    try:
        return sorted(entry for entry in path.iterdir() if os.path.isdir(entry))
    except OSError as error:
        log.info("%s is left out: %s", path, error)
        return []


def _plan_text(plan: Plan | None) -> str | None:
    return None if plan is None else plan.flattened().to_yaml()


def _locked_soon(file: IO[Any]) -> bool:
    """Try several times, since :meth:`RunFolder.is_locked` of another process holds the lock briefly."""
    for _ in range(_TRIES):
        if _locked(file):
            return True
        time.sleep(0.02)
    return False


def _locked(file: IO[Any]) -> bool:
    """Try to lock an open file; freed when it is closed, or its process dies."""
    try:
        import fcntl
    except ImportError:  # Windows, which has no such lock
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        log.warning("%s cannot be locked (%s): make sure that no second process trains there.", file.name, error)
    return True


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises where it cannot be read."""
    try:
        content = parse_json(read_text(path))
    except ValueError as error:
        raise _damaged(path) from error
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def read_text(path: Path) -> str:
    """The text of a file; raises where it cannot be read."""
    require_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot read {path} ({error.strerror}): fix that, or name another folder.") from error
    except ValueError as error:
        raise _damaged(path) from error


def require_regular(path: Path) -> None:
    """Raise where `path` is a folder, or a pipe or device that could be read for ever."""
    if path.exists() and not path.is_file():
        raise _damaged(path, "not a regular file")


def _damaged(path: Path, detail: str = "") -> BitplanError:
    reason = f" ({detail})" if detail else ""
    return RunError(
        f"{path} is damaged{reason}: restore it, leave it out of a report, or begin anew in another folder."
    )
