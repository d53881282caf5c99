"""What is random in a task's data, as a pure function of the seed and of where it is used.

A stream that goes on from call to call would have to be saved and put back; these draws depend on nothing that came
before, so a run that was killed goes on with the data that it would have seen.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def generator(*where: int | str) -> torch.Generator:
    """A fresh generator on the CPU whose stream belongs to `where`, such as ``("crop", seed, step)``."""
    digest = hashlib.blake2b(repr(where).encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)


def shuffled(step: int, batch: int, count: int, seed: int) -> Tensor:
    """The indices, of `count` samples, that make up the batch of `step`.

    Every epoch is an order of its own in which each sample comes once; a batch may lie across two epochs.
    """
    places = torch.arange(step * batch, (step + 1) * batch)
    epochs = places // count
    chosen = torch.empty_like(places)
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        here = epochs == epoch
        chosen[here] = _order(count, seed, epoch)[places[here] % count]
    return chosen


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(count, generator=generator("order", seed, epoch))
