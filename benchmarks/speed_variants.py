"""The variants that ``python benchmarks/run.py speed`` compares."""

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
from bitplan.plans import Plan
from bitplan.plans.execution import RECOMPUTE, Native
from bitplan.plans.match import PASSES
from bitplan.runtime.attach import Attachment, attach

#: The benchmark's own plans, for forward and backward and for a full training step.
OWN_PLANS = ("native-int8", "native-int8-tensor", "native-fp8", "native-fp8-delayed", "native-fp8-packed")
OWN_FULL_PLANS = ("native-fp8-gpt",)
#: Plans that reduce memory -> their kinds of recomputation: the default, and others that are always measured.
_OWN_RECOMPUTE = dict.fromkeys(("native-fp8-packed", "native-fp8-gpt"), ("inputs", "activations"))
PLAIN = "bf16"
#: Suffix of a row's name -> passes of FP8 GEMMs with fast accumulation.
_FAST_ACCUMULATION: dict[str, tuple[str, ...]] = {
    "": (),
    ", fast accumulation": ("fprop",),
    ", fast accumulation throughout": tuple(PASSES),
}

#: Changes a model in place, for such inputs; returns the attachment, if any.
Change = Callable[[nn.Module, Tensor], Attachment | None]


@dataclass(frozen=True)
class SpeedVariant:
    """One variant."""

    name: str
    change: Change
    #: What native execution recomputes in the backward pass.
    recompute: str = "no"
    #: Another package.
    is_peer: bool = False
    #: torchao's AdamW with 8-bit state, in a full training step. (A plan decides for itself.)
    small_optimizer: bool = False
    #: The variant that computes the same, whose losses it shares; empty: its own.
    learns_as: str = ""

    @property
    def is_ours(self) -> bool:
        return not self.is_peer and self.name != PLAIN


def planned(
    plan: Plan,
    model: nn.Module,
    x: Tensor,
    execution: str = "native",
    fast_accumulation: Sequence[str] = (),
    recompute: Sequence[str] = (),
) -> Attachment:
    """Attach the plan with native execution of all GEMMs, however small."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BitplanWarning)  # fallbacks are counted in the row
        if execution != "native":
            return attach(model, plan, example=x, execution=execution)
        native = Native(min_macs=0, fast_accumulation=fast_accumulation, recompute=recompute)
        return attach(model, plan, example=x, execution=native)


def emulated(name: str) -> SpeedVariant:
    """A plan in emulation: the same roundings, multiplied in BF16."""
    return SpeedVariant(f"{name}, emulated", partial(planned, own_plan(name), execution="emulate"))


def unchanged(model: nn.Module, x: Tensor) -> None:
    """Plain BF16."""


def variants_of(
    plans: Sequence[str], device: torch.device, recompute: bool, fast_accumulation: bool, full_step: bool
) -> list[SpeedVariant]:
    """BF16, the plans, and other packages.

    :param recompute: every plan also with each other kind of recomputation.
    :param fast_accumulation: FP8 plans also with fast accumulation, in the forward pass, as in torchao, and in all.
    """
    variants = [SpeedVariant(PLAIN, unchanged)]
    for plan in plans:
        default, *always = _OWN_RECOMPUTE.get(plan, ("no",))
        others = [kind for kind in ("no", *RECOMPUTE) if kind in always or (recompute and kind != "no")]
        has_fast = fast_accumulation and _has_float8(own_plan(plan))
        for suffix, passes in _FAST_ACCUMULATION.items() if has_fast else [("", ())]:
            name = f"{plan}{suffix}"
            for kind in dict.fromkeys((default, *others)):
                recomputed = () if kind == "no" else (kind,)
                change = partial(planned, own_plan(plan), fast_accumulation=passes, recompute=recomputed)
                title = name if kind == default else f"{name}, recompute {kind}"
                variants.append(SpeedVariant(title, change, kind, learns_as=name))
    if full_step:
        return [*variants, *full_step_peers(device)]
    return [*variants, *(SpeedVariant(name, change, is_peer=True) for name, change in peers(device).items())]


def _has_float8(plan: Plan) -> bool:
    """Whether a plan has a format of FP8 units, which alone have fast accumulation.

    >>> [_has_float8(own_plan(name)) for name in ("native-int8", "native-fp8")]
    [False, True]
    """
    document = json.dumps(plan.to_dict())
    return any(f'"{name}"' in document for name in ("e4m3", "e5m2"))


def full_step_peers(device: torch.device) -> Iterator[SpeedVariant]:
    """Other packages' full training steps, if they are installed."""
    if not has_torchao():
        return
    yield SpeedVariant("torchao AdamW8bit", unchanged, is_peer=True, small_optimizer=True)
    if device.type == "cuda":
        float8 = partial(_torchao_float8, "tensorwise")
        yield SpeedVariant("torchao fp8 tensorwise, AdamW8bit", float8, is_peer=True, small_optimizer=True)


def peers(device: torch.device) -> dict[str, Change]:
    """Other packages' variants for a device, if they are installed."""
    if not has_torchao():
        return {}
    changes: dict[str, Change] = {"torchao int8": _torchao_int8}
    if device.type == "cuda":
        changes |= {f"torchao fp8 {recipe}": partial(_torchao_float8, recipe) for recipe in ("tensorwise", "rowwise")}
    return changes


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
