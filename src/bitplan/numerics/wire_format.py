"""The strings and numbers that are hashed into random bits, and how they are combined.

They are wire format: a run that is resumed, repeated or compared with an older one draws the same random bits only as
long as every string below is unchanged, byte for byte. Code, classes and files may be renamed; these values may not,
and `tests/test_wire_format.py` pins each of them. Three kinds of hash use them:

- stochastic rounding: a CRC-32 of the module's path, or of :func:`parameter_key` for a parameter, gives the key of a
  (seed, step); a CRC-32 of :func:`place_key` distinguishes the tensors of one module (`bitplan.runtime`);
- data: the ``repr`` of a tuple of a label and Python integers, by BLAKE2b (`bitplan.lab.tasks.task`);
- measurement: a CRC-32 of a product's :func:`site_path` and one of its pass (`bitplan.gemm.sampling`).

Also wire format, but defined elsewhere: the names of operations and their numbering (`bitplan.capture.ops`), the order
in which built-in models create their parameters, the entries of ``run.state_dict()`` and the columns of its records,
and ``plan.to_dict()``, which resuming compares. The same test pins them.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

# --- Tensors of training, and operands of products

ROLES: tuple[str, ...] = ("weight", "activation", "grad_activation", "grad_weight")
FPROP, DGRAD, WGRAD = "fprop", "dgrad", "wgrad"
SLOTS: tuple[str, ...] = ("fprop.x", "fprop.w", "dgrad.dy", "dgrad.w", "wgrad.dy", "wgrad.x")


class Operand(NamedTuple):
    """One operand of one of a layer's three GEMMs."""

    #: fprop, dgrad or wgrad.
    pass_: str
    #: x, w or dy.
    tensor: str

    def __str__(self) -> str:
        return f"{self.pass_}.{self.tensor}"


#: The operand that a slot's name stands for. Names are keys of plans and of hashes; code reads the fields.
OPERAND_OF_SLOT: dict[str, Operand] = {slot: Operand(*slot.split(".")) for slot in SLOTS}

#: The path of the loss, which is no module of the model.
LOSS_PATH = "loss"

# --- Seeds of torch's generator in a step

TRAINING, EVALUATION = 1, 2

# --- Labels of random data

ORDER = "order"
MIRROR = "mirror"
AUGMENTATION = "augmentation"
WINDOWS = "windows"
WINDOWS_AND_MASKS = "windows and masks"
HELD_OUT_MASKS = "held-out masks"
NEIGHBOURS = "neighbours"
DIGITS_GRAPH = "digits graph"
GRAPH_SPLIT = "graph split"
DIGIT_SCENE = "digit scene"
EPISODE, HELD_OUT_EPISODE, RANDOM_EPISODE = "episode", "held-out episode", "random episode"
ACTIONS, RANDOM_ACTIONS = "actions", "random actions"
TRAINING_SET, HELD_OUT_SET = "training", "held out"

#: The signs that a Hadamard rotation flips.
SIGNS = "hadamard signs"


def text_hash(text: str) -> int:
    """The CRC-32 of a text.

    >>> text_hash("conv2d.0:weight")
    3159603005
    """
    return zlib.crc32(text.encode())


def reduction_site(site: str, sender: int, call: int) -> str:
    """What the random bits of a gradient on the wire depend on, beside seed and step."""
    return f"reduce {site} from {sender}, {call}"


def op_site(op: str, index: int) -> str:
    """An operation and its number among its equals in one call of a module: ``conv2d.0``."""
    return f"{op}.{index}"


def site_path(path: str, site: str) -> str:
    """An operation of the whole model: ``layer1.0.conv1/conv2d.0``."""
    return f"{path}/{site}"


def place_key(site: str, place: str) -> str:
    """A tensor of an operation: ``conv2d.0:activation``. Weights are the same in all operations: ``:weight``."""
    return f"{site}:{place}"


def consumer_site(site: str, consumer: str) -> str:
    """The gradient that one consumer of an operation's result sends back: ``relu.0>conv2d.0``."""
    return f"{site}>{consumer}"


def parameter_key(name: str) -> str:
    """A parameter by its name in the whole model: ``parameter layer1.0.conv1.weight``."""
    return f"parameter {name}"


def parameter_suffix(name: str) -> str:
    """What tells the parameters of one operation apart: nothing for its weight, ``(bias)`` for its bias."""
    return "" if name == "weight" else f"({name})"
