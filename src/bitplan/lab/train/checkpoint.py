"""Checkpoints: the whole state of a run in two files; reading them executes no code.

``step-00000200.safetensors`` holds every tensor, those of the model under ``model.`` and their own names;
``step-00000200.json`` holds all other values, and the SHA-256 of the tensors' file. It is written last, so that an
incomplete pair is detected after a crash, and the checkpoint before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitplan.errors import BitplanWarning, RunError
from bitplan.lab.train.folder import as_os_error, fresh_file, write_durably, writing

VERSION = 1
#: The number of newest checkpoints to keep.
KEPT = 2

# Keys that mark values without a JSON type.
_TENSOR, _TUPLE, _ITEMS, _FLOAT = "$tensor", "$tuple", "$items", "$float"


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

    def save(self, state: Mapping[str, Any]) -> None:
        """Write `state`, which holds tensors and plain values in mappings, lists and tuples."""
        tensors: dict[str, Tensor] = {}
        plain = {part: _encoded(value, part, tensors) for part, value in state.items()}
        save_tensors(self.tensors_file, tensors)
        head = {"bitplan_checkpoint": VERSION, "step": self.step, "sha256": sha256(self.tensors_file)}
        write_durably(self.json_file, json.dumps({**head, "state": plain}, allow_nan=False) + "\n")

    def load(self) -> dict[str, Any]:
        """The saved state; raises :class:`RunError` where the files are incomplete or damaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            content = json.loads(self.json_file.read_text(encoding="utf-8"))
            if content["bitplan_checkpoint"] != VERSION or content["step"] != self.step:
                raise RunError(f"{self.json_file} is of another version or another step.")
            if content["sha256"] != sha256(self.tensors_file):
                raise RunError(f"{self.tensors_file} is damaged: its SHA-256 differs.")
            # Copies, since the pages of the file are read-only and not aligned as torch aligns.
            tensors = {name: tensor.clone() for name, tensor in load_file(self.tensors_file).items()}
            return {part: _decoded(value, tensors) for part, value in content["state"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise RunError(f"{self.json_file} cannot be read ({type(error).__name__}).") from error

    def remove(self) -> None:
        """Remove both files, the JSON first: tensors alone are no checkpoint."""
        with writing(self.json_file):
            self.json_file.unlink(missing_ok=True)
            self.tensors_file.unlink(missing_ok=True)


def checkpoints_in(folder: Path) -> list[Checkpoint]:
    """All checkpoints in a folder, whole or not, newest first."""
    steps = {path.name.removeprefix("step-").removesuffix(".json") for path in folder.glob("step-*.json")}
    return [Checkpoint(folder, step) for step in sorted((int(s) for s in steps if s.isdigit()), reverse=True)]


def newest_whole(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """Step and state of the newest checkpoint that is whole; None where there is none."""
    for checkpoint in checkpoints_in(folder):
        try:
            return checkpoint.step, checkpoint.load()
        except RunError as error:
            message = f"{error} The checkpoint before it is used."
            warnings.warn(message, BitplanWarning, stacklevel=2)
    return None


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
            save_file(_storable(tensors), fresh)
            fresh.chmod(mode)
        except SafetensorError as error:
            raise as_os_error(error) from error


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors that share no memory: tied weights are written under each of their names."""
    storable: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise RunError(f"a checkpoint cannot hold {name}, a tensor of layout {tensor.layout}: make it dense.")
        plain = tensor.detach().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        storable[name] = plain.clone() if address in taken else plain
        taken.add(address)
    return storable


def sha256(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; its tensors go into `tensors`, named by their path."""
    if isinstance(value, Tensor):
        while name in tensors:  # {"a.b": x, "a": {"b": y}} would give one name to both
            name += "~"
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _encoded(item, f"{name}.{key}", tensors) for key, item in value.items()}
        pairs = [[_encoded(k, name, tensors), _encoded(v, f"{name}.{k}", tensors)] for k, v in value.items()]
        return {_ITEMS: pairs}
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, f"{name}.{position}", tensors) for position, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    raise RunError(
        f"a checkpoint cannot hold {name}, a {type(value).__name__}: keep tensors, numbers, texts, lists and mappings."
    )


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(_decoded(item, tensors) for item in value[_TUPLE])
    if _ITEMS in value:
        return {_decoded(key, tensors): _decoded(item, tensors) for key, item in value[_ITEMS]}
    if _FLOAT in value:
        return float(value[_FLOAT])
    return {key: _decoded(item, tensors) for key, item in value.items()}
