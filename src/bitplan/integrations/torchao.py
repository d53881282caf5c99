"""A plan for every framework that calls torchao's ``quantize_``:

    quantize_(model, BitplanConfig("fp8-linear"))

``quantize_`` hands over one linear layer at a time, without its path. Each layer becomes an attachment of its own that
rounds the operands of its products. So a plan may say what linear layers multiply and no more; everything else raises
when the config is made. A layer counts the steps of the optimizer that has its weight. :class:`LayerRuns` finds the
attachments in a model again: their state for a checkpoint, and detaching.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bitplan.capture.scopes import is_planned, state_of
from bitplan.errors import PlanError, RunError
from bitplan.integrations.trainer_support import PlanSettings, PlanSource, missing_package
from bitplan.plans import SLOTS, Plan
from bitplan.plans.execution import ExecutionOptions
from bitplan.plans.match import KEYS, compile_match
from bitplan.plans.spec import Rule
from bitplan.runtime.attachment import Attachment

# torchao warns about kernels that were built for other versions, and that bitplan does not use.
_level = logging.root.manager.disable
logging.disable(logging.WARNING)
try:
    from torchao.core.config import AOBaseConfig
    from torchao.quantization.transform_module import register_quantize_module_handler
except ImportError as error:
    raise missing_package("torchao", "torchao") from error
finally:
    logging.disable(_level)

__all__ = ["BitplanConfig", "LayerRuns"]

_INSTEAD = "bitplan.attach(model, plan) does all of it"


@dataclass(frozen=True)
class BitplanConfig(AOBaseConfig):  # type: ignore[misc]  # torchao has no types
    """A plan for the linear layers that ``quantize_`` visits; ``filter_fn`` chooses them.

    :param plan: a plan, a preset's name, a file or a mapping, whose rules have ``match: "*"``, an ``op`` that includes
        linear, and formats for operands of products.
    :param execution: as in :func:`bitplan.attach`; by default the plan's own.
    :param seed: of stochastic rounding; each layer gets one of its own, in the order of the visits.
    """

    plan: PlanSource
    execution: str | ExecutionOptions | None = None
    seed: int = 0
    settings: PlanSettings = field(init=False, repr=False, compare=False)
    _numbers: Iterator[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", PlanSettings(self.plan, self.execution))
        object.__setattr__(self, "_numbers", itertools.count())
        _require_linear(self.settings.plan)
        _unused.add(self)

    def apply_to(self, layer: nn.Module) -> nn.Module:
        """Attach the plan to one layer."""
        if not isinstance(layer, nn.Linear):
            raise PlanError(
                f"filter_fn chose a {type(layer).__name__}, and a BitplanConfig is for nn.Linear: {_INSTEAD}."
            )
        _unused.discard(self)
        example = torch.zeros(1, layer.in_features, dtype=layer.weight.dtype, device=layer.weight.device)
        settings = PlanSettings(self.settings.plan, self.execution, seed=self.seed + next(self._numbers))
        run = settings.attach(layer, example)
        state_of(layer).attachment = run  # nobody else holds it
        run.count_steps_of_first_optimizer()
        return layer

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@register_quantize_module_handler(BitplanConfig)  # type: ignore[untyped-decorator, unused-ignore]
def _attach_to_layer(module: nn.Module, config: BitplanConfig) -> nn.Module:
    return config.apply_to(module)


class LayerRuns:
    """The attachments that ``quantize_`` has made in a model, by the path of their layer."""

    def __init__(self, model: nn.Module) -> None:
        self.runs: dict[str, Attachment] = {}
        for path, module in model.named_modules():
            run = state_of(module).attachment if is_planned(module) else None
            if isinstance(run, Attachment) and run.model is module:
                self.runs[path] = run
        if not self.runs:
            raise PlanError("no layer of this model has a plan: call quantize_(model, BitplanConfig(plan)) first.")

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs where the plan has stochastic rounding, delayed scales or promotion."""
        return {path: run.state_dict() for path, run in self.runs.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        if set(state) != set(self.runs):
            raise RunError(
                f"this state is of {len(state)} layers, and {len(self.runs)} layers of this model have the plan: call "
                f"quantize_ with the same filter_fn as in the run that was saved."
            )
        for path, run in self.runs.items():
            run.load_state_dict(state[path])

    def detach(self) -> None:
        """Leave the model as it was before ``quantize_``."""
        for run in self.runs.values():
            state_of(run.model).attachment = None
            run.detach()
        self.runs = {}


# --- What a plan may say


def _require_linear(plan: Plan) -> None:
    """Raise where a plan says something that ``quantize_`` does not hand over."""
    beyond = {
        "has no rules, so nothing would be rounded": not plan.all_rules,
        "changes over time, and quantize_ knows no steps": plan.moves,
        "computes the loss in chunks": plan.declared_loss is not None,
        "stores the state of optimizers": plan.optimizer_rule is not None,
    }
    for what, is_true in beyond.items():
        if is_true:
            raise PlanError(f"this plan {what}, and quantize_ hands over single linear layers: {_INSTEAD}.")
    for index, rule in enumerate(plan.all_rules):
        reason = _why_beyond_linear(rule)
        if reason is not None:
            raise PlanError(f"{rule.where or f'rules[{index}]'}: {reason}; {_INSTEAD}.")


def _why_beyond_linear(rule: Rule) -> str | None:
    if rule.has_selectors:
        return "select needs the whole model, and quantize_ hands over single layers"
    if set(rule.match) != {"*"}:
        return 'quantize_ does not tell the path of a layer: write match: "*" and choose layers by its filter_fn'
    if not rule.op or not compile_match(rule)("", "linear.0"):
        return "the rule is about operations that are no linear layers: write op: linear"
    roles = [key for key, _ in rule.quantizers if not set(KEYS[key]) <= set(SLOTS)]
    if roles:
        return f"{roles[0]} is no operand of a product, and the tensors around a layer are not handed over"
    return None


# --- Plans that found no layer


#: Configs that have met no layer yet.
_unused: set[BitplanConfig] = set()


def _require_use(*_: Any) -> None:
    """Before an optimizer's step: raise where ``quantize_`` found no layer for a plan."""
    if _unused:
        _unused.clear()
        raise PlanError(
            "quantize_ handed no layer to a BitplanConfig, so nothing would be rounded: check its filter_fn, which "
            "chooses nn.Linear modules by default, and drop configs that you do not use."
        )


register_optimizer_step_pre_hook(_require_use)
