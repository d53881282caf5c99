"""Optimizers whose state lies in few bits: torchao's twins of Adam and AdamW, where a plan asks for them.

torchao keeps a moment in few bits where it has at least 4,096 values in whole blocks (256 values that share a scale,
128 for int4), and in full where not: biases and norms are kept in full. Its step is compiled at the first call, once
for each shape of parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.optim import Adam, AdamW, Optimizer

from bitplan.errors import PlanError
from bitplan.optimizer_state import is_small
from bitplan.plan import Plan
from bitplan.plan.optimizer import OptimizerRule

#: Format -> torchao's twins of Adam and of AdamW.
_TWINS = {"int8": ("Adam8bit", "AdamW8bit"), "int4": ("Adam4bit", "AdamW4bit"), "e4m3": ("AdamFp8", "AdamWFp8")}
#: What the twins know of a group of parameters.
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad")
#: Settings of torch's optimizers that change the result, and that the twins do not have.
_LACKING = ("maximize", "differentiable")
#: Fewer values than this are kept in full.
_LEAST = 4096


def require_torchao(rule: OptimizerRule) -> None:
    """Raise where torchao is missing."""
    if find_spec("torchao") is None:
        raise PlanError(
            f"{rule.where or 'optimizer'}: state in {rule.state} is kept by torchao, which is not installed: "
            f"pip install torchao."
        )


def small_twin(plain: Optimizer, rule: OptimizerRule) -> Optimizer:
    """An optimizer with the groups and settings of `plain`, which has made no step yet, and its state in few bits."""
    require_torchao(rule)
    if type(plain) in _classes(rule):
        return plain
    if type(plain) not in (Adam, AdamW):
        raise PlanError(
            f"{rule.where or 'optimizer'}: {type(plain).__name__} has no twin with its state in {rule.state}: use "
            f"torch.optim.AdamW or Adam, or drop optimizer: from the plan."
        )
    if plain.state:
        raise PlanError("this optimizer has made steps already: give run.optimizer() a new one, or its class.")
    for name in _LACKING:
        if any(group.get(name) for group in plain.param_groups):
            raise PlanError(
                f"{rule.where or 'optimizer'}: {type(plain).__name__} with {name}=True has no twin with its state in "
                f"{rule.state}: drop {name}, or drop optimizer: from the plan."
            )
    decoupled = {bool(group.get("decoupled_weight_decay", type(plain) is AdamW)) for group in plain.param_groups}
    if len(decoupled) > 1:
        raise PlanError("groups with and without decoupled_weight_decay cannot share one optimizer: make two.")
    twin: Optimizer = _classes(rule)[int(decoupled.pop())]([_group(group) for group in plain.param_groups])
    if not any(_is_kept_small(p, twin) for group in twin.param_groups for p in group["params"]):
        block: int = twin.block_size  # type: ignore[attr-defined]
        raise PlanError(
            f"{rule.where or 'optimizer'}: state in {rule.state} has no effect here: no parameter has {_LEAST} values "
            f"or more in whole blocks of {block}, and smaller ones are kept in full; drop optimizer: from the plan."
        )
    return twin


def _group(group: dict[str, Any]) -> dict[str, Any]:
    parameters = group["params"]
    if "param_names" in group:
        parameters = list(zip(group["param_names"], parameters, strict=True))
    settings = {name: group[name] for name in _SETTINGS}
    if isinstance(settings["lr"], Tensor):
        settings["lr"] = settings["lr"].clone()
    return {"params": parameters, **settings}


def _classes(rule: OptimizerRule) -> tuple[Any, ...]:
    optim = _torchao_optim()
    return tuple(getattr(optim, name) for name in _TWINS[rule.state])


@lru_cache(maxsize=1)
def _torchao_optim() -> Any:
    """torchao's optimizers. Importing it warns of kernels that this machine has no use for, and that we do not use."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import torchao.optim
        import torchao.optim.subclass_4bit as four
        import torchao.optim.subclass_8bit as eight

        # Lookup tables are made once, and read as numbers: not while tensors are fake.
        with unset_fake_temporarily():
            for module in (four, eight):
                module.get_qmap_signed(), module.get_qmap_unsigned()
    finally:
        logging.disable(before)
    return torchao.optim


def _is_kept_small(parameter: Tensor, twin: Any) -> bool:
    return parameter.numel() >= _LEAST and parameter.numel() % twin.block_size == 0


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Change a group's learning rate, which torchao's optimizers hold in a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class OptimizerPromise:
    """What a plan has promised of the optimizer's state, and whether it is kept."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.rule = plan.optimizer_rule
        self.model = model
        #: Whether state in few bits has been seen, after which nothing is looked at any more.
        self.is_kept = self.rule is None
        self._served: Optimizer | None = None
        self._steps_without = 0
        if self.rule is not None:
            require_torchao(self.rule)

    def make(self, kind: Any, params: Iterable[Any] | None, settings: dict[str, Any]) -> Optimizer:
        """See :meth:`bitplan.attach.Attachment.optimizer`."""
        if isinstance(kind, Optimizer):
            if params is not None or settings:
                raise PlanError("this optimizer is made already: give its class to say parameters and settings.")
            plain = kind
        elif isinstance(kind, type) and issubclass(kind, Optimizer):
            trained = (p for p in self.model.parameters() if p.requires_grad) if params is None else params
            plain = kind(trained, **settings)
        else:
            raise PlanError(f"run.optimizer() takes an optimizer's class, such as torch.optim.AdamW, not {kind!r}.")
        return plain if self.rule is None else small_twin(plain, self.rule)

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise where an optimizer of the model's parameters keeps its state in full."""
        if self.is_kept or self.rule is None:
            return
        if not isinstance(optimizer, _classes(self.rule)):
            raise PlanError(
                f"{self.rule.where or 'optimizer'}: the plan keeps optimizer state in {self.rule.state}, and this "
                f"{type(optimizer).__name__} keeps it in full: make it by run.optimizer(torch.optim.AdamW, lr=...)."
            )
        self._served = optimizer

    def after_step(self) -> None:
        """Look at the state that a step has left; raise where there is still none after two steps."""
        if self.is_kept or self.rule is None:
            return
        state = {} if self._served is None else self._served.state
        if any(is_small(value) for each in state.values() for value in each.values()):
            self.is_kept, self._served = True, None
            return
        self._steps_without += 1
        if self._steps_without < 2:  # a GradScaler may have skipped the first
            return
        if state:
            raise PlanError(
                f"{self.rule.where or 'optimizer'}: after a step all of the optimizer's state is kept in full: no "
                f"parameter with a gradient is large enough for {self.rule.state}; drop optimizer: from the plan."
            )
        if self._served is None:
            raise PlanError(
                f"{self.rule.where or 'optimizer'}: the plan keeps optimizer state in {self.rule.state}, and no such "
                f"optimizer has made a step: make it by run.optimizer(torch.optim.AdamW, lr=...)."
            )
