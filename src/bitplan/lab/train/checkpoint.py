"""Checkpoints: the whole state of a run in two files; reading them executes no code.

``step-00000200.safetensors`` holds every tensor, those of the model under ``model.`` and their own names;
``step-00000200.json`` holds all other values, the identity of the run, the SHA-256 of the tensors' file and its own. It
is written last, so that an incomplete pair is detected after a crash, and the checkpoint before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from bitplan.errors import BitplanWarning, RunError
from bitplan.files import fresh_file, parse_json
from bitplan.lab.train.config import first_difference
from bitplan.lab.train.folder import as_os_error, write_durably, writing
from bitplan.runtime.state_file import decode_state, encode_state, storable_tensors

#: Version 1 has neither the run's identity nor a SHA-256 of the JSON; it is still read.
VERSION = 2
#: The number of newest checkpoints to keep.
KEPT = 2

_NAME = re.compile(r"step-([0-9]{8,15})\.json")


class ForeignCheckpointError(RunError):
    """A whole checkpoint of another run."""


@dataclass(frozen=True)
class Checkpoint:
    """The pair of files of one step."""

    folder: Path
    step: int

    @property
    def tensors_file(self) -> Path:
        return self.folder / f"step-{self.step:08d}.safetensors"

    @property
    def json_file(self) -> Path:
        return self.folder / f"step-{self.step:08d}.json"

    def exists(self) -> bool:
        """Whether both files are there, whole or not."""
        return self.json_file.is_file() and self.tensors_file.is_file()

    def save(self, state: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> None:
        """Write `state`, which holds tensors and plain values in mappings, lists and tuples.

        :param run: the identity of the run, as of :meth:`bitplan.lab.train.config.RunConfig.identity`.
        """
        tensors: dict[str, Tensor] = {}
        plain = {part: encode_state(value, part, tensors) for part, value in state.items()}
        save_tensors(self.tensors_file, tensors)
        head = {"bitplan_checkpoint": VERSION, "step": self.step, "sha256": sha256(self.tensors_file), "run": run}
        content = {**head, "state": plain}
        write_durably(self.json_file, _text_of({**content, "json_sha256": _text_sha256(content)}) + "\n")

    def load(self, run: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The saved state; raises :class:`RunError` where the files are incomplete, damaged or of another run.

        :param run: the identity that the checkpoint must have; None: any.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            content = parse_json(self.json_file.read_bytes())
            version, checksum = content["bitplan_checkpoint"], content.pop("json_sha256", None)
            if version not in (1, VERSION) or content["step"] != self.step:
                raise RunError(f"{self.json_file} is of another version or another step.")
            if checksum != _text_sha256(content) and not (version == 1 and checksum is None):
                raise RunError(f"{self.json_file} is damaged: its SHA-256 differs.")
            if content["sha256"] != sha256(self.tensors_file):
                raise RunError(f"{self.tensors_file} is damaged: its SHA-256 differs.")
            # Copies, since the pages of the file are read-only and not aligned as torch aligns.
            tensors = {name: tensor.clone() for name, tensor in load_file(self.tensors_file).items()}
            state = {part: decode_state(value, tensors) for part, value in content["state"].items()}
            if run is not None:
                self._require_run(run, content.get("run"), state)
            return state
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise RunError(f"{self.json_file} cannot be read ({type(error).__name__}).") from error

    def _require_run(
        self, run: Mapping[str, Any], recorded: Mapping[str, Any] | None, state: Mapping[str, Any]
    ) -> None:
        """Raise where the checkpoint was written by another run; of older ones only the seed is known."""
        if recorded is None:
            recorded = {**run, "seed": state["attachment"]["seed"]} if "attachment" in state else run
        difference = first_difference(recorded, json.loads(_text_of(run)))
        if difference is not None:
            raise ForeignCheckpointError(
                f"{self.json_file} was written by a run with {difference}: restore the run's own files, or start a new "
                f"run in another folder."
            )

    def remove(self) -> None:
        """Remove both files, the JSON first: tensors alone are no checkpoint."""
        with writing(self.json_file):
            self.json_file.unlink(missing_ok=True)
            self.tensors_file.unlink(missing_ok=True)


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """All checkpoints in a folder, whole or not, newest first."""
    names = (_NAME.fullmatch(path.name) for path in folder.glob("step-*.json"))
    return [Checkpoint(folder, step) for step in sorted((int(name[1]) for name in names if name), reverse=True)]


def newest_whole(
    folder: Path,
    run: Mapping[str, Any] | None = None,
    *,
    broken: Callable[[Mapping[str, Any]], str | None] = lambda state: None,
    last: float = math.inf,
) -> tuple[int, dict[str, Any]] | None:
    """Step and state of the newest checkpoint that is whole and finite; None where there is none.

    :param run: the identity that it must have, as in :meth:`Checkpoint.load`.
    :param broken: the name of a tensor of a state that must be finite and is not; None where there is none.
    :param last: the last step whose checkpoint will do.
    """
    damaged: list[RunError] = []
    newest = None
    for checkpoint in checkpoints_in(folder):
        if checkpoint.step > last:
            continue
        try:
            state = checkpoint.load(run)
            name = broken(state)
            if name is not None:
                raise RunError(f"{checkpoint.tensors_file} holds NaN or infinity in {name}, so no run resumes from it.")
            newest = checkpoint.step, state
            break
        except ForeignCheckpointError:
            raise
        except RunError as error:
            damaged.append(error)
    consequence = (
        "No checkpoint is whole: the run starts again at step 0."
        if newest is None
        else f"The checkpoint of step {newest[0]} is used."
    )
    for damage in damaged:
        warnings.warn(f"{damage} {consequence}", BitplanWarning, stacklevel=2)
    return newest


def remove_older(folder: Path, step: int) -> None:
    """Keep the newest checkpoints up to `step`; later ones are left from another attempt and will be overwritten."""
    older = [checkpoint for checkpoint in checkpoints_in(folder) if checkpoint.step <= step][KEPT:]
    for checkpoint in older:
        checkpoint.remove()


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, which is complete and on disk when this returns."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with writing(path), fresh_file(path) as fresh:
        fresh.touch()
        mode = fresh.stat().st_mode  # from the user's umask; safetensors would make it private
        try:
            save_file(storable_tensors(tensors), fresh)
            fresh.chmod(mode)
        except SafetensorError as error:
            raise as_os_error(error) from error


def _text_of(content: Mapping[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)


def _text_sha256(content: Mapping[str, Any]) -> str:
    """Of the values, as JSON writes them: reading and writing again gives the same text."""
    return hashlib.sha256(_text_of(content).encode()).hexdigest()


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
