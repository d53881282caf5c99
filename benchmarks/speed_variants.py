"""The variants that ``python benchmarks/run.py speed`` compares.

A peer is measured as its authors recommend it: their recipe by name, compiled, in a process of its own, and it must
have changed the model. One that does not run is listed with its error, never measured in a slower form.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from benchmarks.own_plans import own_plan
from benchmarks.peers import has_torchao
from bitplan.analysis.memory.step import plan_for
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
Change = Callable[[nn.Module, Any], Attachment | None]

#: Options of torch's memory-optimal partitioner.
_RECOMPUTE = {"aggressive_recomputation": True}
_ACTIVATION_PASS = {
    "post_grad_fusion_options": {
        "activation_quantization_aten_pass": {"quant_type": "torch.float8_e4m3fn", "use_scaling": True}
    }
}


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
    #: Equal blocks are compiled once, and the rest of the model not at all.
    regional: bool = False
    #: Options of AOTAutograd and of Inductor while it compiles.
    functorch: Mapping[str, Any] = field(default_factory=dict)
    inductor: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return not self.is_peer and self.name != PLAIN

    def compile_options(self) -> AbstractContextManager[Any]:
        """The variant's options of torch.compile, for the steps that compile."""
        stack = ExitStack()
        for config, options in ((functorch_config, self.functorch), (inductor_config, self.inductor)):
            if options:
                stack.enter_context(config.patch(dict(options)))
        return stack


def planned(
    plan: Plan,
    model: nn.Module,
    x: Any,
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


def as_written(plan: Plan, model: nn.Module, x: Any) -> Attachment:
    """Attach the plan with the execution that it names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BitplanWarning)  # fallbacks are counted in the row
        return attach(model, plan, example=x)


def unchanged(model: nn.Module, x: Any) -> None:
    """Plain BF16."""


class Kind(Protocol):
    """What decides which peers a shape has."""

    full_step: bool
    is_grouped: bool


def variants_of(
    plans: Sequence[str],
    device: torch.device,
    shape: Kind,
    recompute: bool,
    fast_accumulation: bool,
    regional: bool = False,
) -> list[SpeedVariant]:
    """BF16, the plans, and other packages.

    :param recompute: every plan also with each other kind of recomputation.
    :param fast_accumulation: FP8 plans also with fast accumulation, in the forward pass, as in torchao, and in all.
    :param regional: every plan also with equal blocks compiled once.
    """
    variants = [SpeedVariant(PLAIN, unchanged)]
    for plan in plans:
        written = own_plan(plan)
        if written.execution is not None:
            # Forward and backward have no optimizer, whatever the plan says of its state.
            used = written if shape.full_step else plan_for(written, None)
            assert used is not None
            variants.append(SpeedVariant(plan, partial(as_written, used)))
            continue
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
    if regional:
        planned_ones = [variant for variant in variants if variant.is_ours]
        twins = [
            replace(v, name=f"{v.name}, equal blocks once", learns_as=v.learns_as or v.name, regional=True)
            for v in planned_ones
        ]
        variants += twins
    return [*variants, *(full_step_peers(device) if shape.full_step else peers(device, shape.is_grouped))]


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


def peers(device: torch.device, is_grouped: bool) -> Iterator[SpeedVariant]:
    """What torch itself and, if they are installed, other packages offer on a device.

    :param is_grouped: for the grouped products of experts.
    """
    peer = partial(SpeedVariant, is_peer=True)
    yield peer(f"{PLAIN}, aggressive recompute", unchanged, functorch=_RECOMPUTE)
    yield peer(f"{PLAIN}, activation budget 0.5", unchanged, functorch={"activation_memory_budget": 0.5})
    if device.type == "cuda":
        yield peer("torch activation pass e4m3", unchanged, inductor=_ACTIVATION_PASS)
        name = "torch activation pass e4m3, aggressive recompute"
        yield peer(name, unchanged, functorch=_RECOMPUTE, inductor=_ACTIVATION_PASS)
    if not has_torchao():
        return
    if is_grouped:
        if device.type == "cuda":
            yield peer("torchao fp8 rowwise, grouped (prototype)", _torchao_grouped)
        return
    if device.type == "cpu":
        yield peer("torchao int8", _torchao_int8)
    if device.type == "cuda":
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            yield peer(f"torchao fp8 {recipe}", partial(_torchao_float8, recipe))
        yield peer("torchao fp8 blockwise (prototype)", _torchao_blockwise)


def _torchao_int8(model: nn.Module, x: Any) -> None:
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True))
    if not any("Int8" in type(module).__name__ for module in model.modules()):
        raise BitplanError("torchao's INT8 training did not apply to this model.")


def _torchao_float8(recipe: str, model: nn.Module, x: Any) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=_is_body)
    if not any("Float8" in type(module).__name__ for module in model.modules()):
        raise BitplanError("torchao's FP8 training did not apply to this model.")


def _torchao_blockwise(model: nn.Module, x: Any) -> None:
    """Blocks of 1 x 128 for activations and gradients, 128 x 128 for weights."""
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear, Float8BlockwiseLinearConfig
    from torchao.quantization import quantize_

    quantize_(model, Float8BlockwiseLinearConfig(), filter_fn=_is_body_linear)
    if not any(isinstance(module, Float8BlockwiseLinear) for module in model.modules()):
        raise BitplanError("torchao's blockwise FP8 training did not apply to this model.")


def _torchao_grouped(model: nn.Module, x: Any) -> None:
    from torchao.prototype.moe_training.config import Float8TrainingOpConfig
    from torchao.quantization import quantize_

    def has_experts(module: nn.Module, path: str) -> bool:
        return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))

    quantize_(model, Float8TrainingOpConfig(), filter_fn=has_experts)
    if not any("Float8" in type(parameter.data).__name__ for parameter in model.parameters()):
        raise BitplanError("torchao's FP8 grouped training did not apply to this model.")


def _is_body(module: nn.Module, path: str) -> bool:
    """All but the head: its width need not be a multiple of 16, and torchao's recipes leave it in BF16."""
    return path.rpartition(".")[2] not in ("head", "lm_head")


def _is_body_linear(module: nn.Module, path: str) -> bool:
    return isinstance(module, nn.Linear) and _is_body(module, path)
