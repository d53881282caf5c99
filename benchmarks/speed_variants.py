"""The ways to compute that ``python benchmarks/run.py speed`` holds against each other."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.own_plans import own_plan
from benchmarks.peers import has_torchao
from bitplan.errors import BitplanError, BitplanWarning
from bitplan.executions.native.gemm import PASSES
from bitplan.plans import Plan
from bitplan.plans.execution import RECOMPUTE, Native
from bitplan.runtime.attach import Attachment, attach

#: The plans that come with the benchmark, for forward and backward and for a full training step.
OWN_PLANS = ("native-int8", "native-int8-tensor", "native-fp8", "native-fp8-delayed", "native-fp8-packed")
OWN_FULL_PLANS = ("native-fp8-gpt",)
#: Plans that are for little memory -> how that is spared, if nothing else is asked for: the first as their own way.
_OWN_SPARING = dict.fromkeys(("native-fp8-packed", "native-fp8-gpt"), ("inputs", "activations"))
PLAIN = "bf16"
#: What a row's name says of passes whose FP8 products add up with fewer bits -> these passes.
_FAST_SUMS: dict[str, tuple[str, ...]] = {
    "": (),
    ", fast sums": ("fprop",),
    ", fast sums throughout": tuple(PASSES),
}

#: Changes a model in place, for inputs like that; a plan at work comes back.
Change = Callable[[nn.Module, Tensor], Attachment | None]


@dataclass(frozen=True)
class SpeedVariant:
    """One way to compute."""

    name: str
    change: Change
    #: What native execution recomputes in the backward pass.
    spare_memory: str = "no"
    #: What others offer.
    is_peer: bool = False
    #: torchao's AdamW with a state of 8 bits, in a full training step. (Where a plan is at work it decides.)
    small_optimizer: bool = False
    #: The variant whose losses it has, for it computes the same; empty: its own.
    learns_as: str = ""

    @property
    def is_ours(self) -> bool:
        return not self.is_peer and self.name != PLAIN


def planned(
    plan: Plan,
    model: nn.Module,
    x: Tensor,
    execution: str = "native",
    fast_sums: Sequence[str] = (),
    recompute: Sequence[str] = (),
) -> Attachment:
    """The plan at work, all its products on units that suit them, however small."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BitplanWarning)  # fallbacks are counted in the row
        if execution != "native":
            return attach(model, plan, example=x, execution=execution)
        native = Native(min_macs=0, fast_accumulation=fast_sums, recompute=recompute)
        return attach(model, plan, example=x, execution=native)


def emulated(name: str) -> SpeedVariant:
    """A plan emulated: the same roundings, multiplied in BF16."""
    return SpeedVariant(f"{name}, emulated", partial(planned, own_plan(name), execution="emulate"))


def unchanged(model: nn.Module, x: Tensor) -> None:
    """BF16 as it is."""


def variants_of(
    plans: Sequence[str], device: torch.device, sparing: bool, fast_sums: bool, full_step: bool
) -> list[SpeedVariant]:
    """BF16, the plans, and what others offer.

    :param sparing: every plan also with each other way to spare memory.
    :param fast_sums: those in FP8 also with fast sums in forward products, as torchao's FP8 has them, and in all three.
    """
    found = [SpeedVariant(PLAIN, unchanged)]
    for plan in plans:
        first, *more = _OWN_SPARING.get(plan, ("no",))
        others = [what for what in ("no", *RECOMPUTE) if what != first and (what in more or (sparing and what != "no"))]
        for summed, passes in _FAST_SUMS.items() if fast_sums and _has_float8(own_plan(plan)) else [("", ())]:
            name = f"{plan}{summed}"
            for recomputed in (first, *others):
                recompute = () if recomputed == "no" else (recomputed,)
                change = partial(planned, own_plan(plan), fast_sums=passes, recompute=recompute)
                title = name if recomputed == first else f"{name}, sparing {recomputed}"
                found.append(SpeedVariant(title, change, recomputed, learns_as=name))
    if full_step:
        return [*found, *full_step_peers(device)]
    return [*found, *(SpeedVariant(name, change, is_peer=True) for name, change in peers(device).items())]


def _has_float8(plan: Plan) -> bool:
    """Whether a plan has any format that FP8 units multiply: there are no fast sums of others.

    >>> [_has_float8(own_plan(name)) for name in ("native-int8", "native-fp8")]
    [False, True]
    """
    told = json.dumps(plan.to_dict())
    return any(f'"{name}"' in told for name in ("e4m3", "e5m2"))


def full_step_peers(device: torch.device) -> Iterator[SpeedVariant]:
    """What others offer for a training step with its optimizer, where they are installed."""
    if not has_torchao():
        return
    yield SpeedVariant("torchao AdamW8bit", unchanged, is_peer=True, small_optimizer=True)
    if device.type == "cuda":
        float8 = partial(_torchao_float8, "tensorwise")
        yield SpeedVariant("torchao fp8 tensorwise, AdamW8bit", float8, is_peer=True, small_optimizer=True)


def peers(device: torch.device) -> dict[str, Change]:
    """What others offer on such a device, where they are installed."""
    if not has_torchao():
        return {}
    known: dict[str, Change] = {"torchao int8": _torchao_int8}
    if device.type == "cuda":
        known |= {f"torchao fp8 {recipe}": partial(_torchao_float8, recipe) for recipe in ("tensorwise", "rowwise")}
    return known


def _torchao_int8(model: nn.Module, x: Tensor) -> None:
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True))
    if not any("Int8" in type(module).__name__ for module in model.modules()):
        raise BitplanError("torchao's INT8 training did not apply to this model.")


def _torchao_float8(recipe: str, model: nn.Module, x: Tensor) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, path: path != "head")
    if not any("Float8" in type(module).__name__ for module in model.modules()):
        raise BitplanError("torchao's FP8 training did not apply to this model.")
