"""Optimizers with low-bit state, by torchao's versions of Adam and AdamW, and counting of optimizer steps.

torchao stores a moment in few bits if it has at least 4,096 values in whole blocks (256 values share a scale, 128 for
int4). Smaller ones, such as those of biases and norms, stay in full precision. Its step is compiled at the first call,
once for each shape of parameter.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bitplan.compiler.torch_private import unset_fake_temporarily
from bitplan.errors import BitplanWarning, PlanError
from bitplan.plans import Plan
from bitplan.plans.spec import OptimizerRule

# --- Optimizer state in plain tensors and numbers, that any program can read without bitplan or torchao


#: torchao's class of a moment -> the plan's name of its format.
_FORMATS = {"OptimState8bit": "int8", "OptimState4bit": "int4", "OptimStateFp8": "e4m3"}
#: Settings of a parameter group that choose among torch's implementations of the same step.
_IMPLEMENTATION = ("foreach", "fused", "capturable")
#: The dtypes that a state may name: it may come from a file, and looking any name up in torch would import submodules.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def _format_of(value: object) -> str | None:
    """The format of a low-bit moment, by the name of its class: torchao may not be installed."""
    return _FORMATS.get(type(value).__name__) if type(value).__module__.startswith("torchao.") else None


def is_low_bit(value: object) -> bool:
    """Whether this is a low-bit moment, or one device's shard of it."""
    return _format_of(getattr(value, "_local_tensor", value)) is not None


def plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state in plain tensors and numbers; of torch's own optimizers their ``state_dict()``.

    As with torch's, the tensors are those that the next step changes: write them, or clone them, before.
    """
    state = optimizer.state_dict()
    per_parameter = {
        key: {name: _plain(value) for name, value in moments.items()} for key, moments in state["state"].items()
    }
    return {**state, "state": per_parameter}


def _plain(value: Any) -> Any:
    target = _format_of(value)
    if target is None:
        return value
    plain: dict[str, Any] = {"format": target, "codes": value.codes, "scale": value.scale}
    if target != "e4m3":
        plain |= {"qmap": value.qmap, "signed": value.signed}
    return {**plain, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}


def decoded(plain: Mapping[str, Any]) -> Tensor:
    """The values of one moment of :func:`plain_state`."""
    codes, scale = plain["codes"], plain["scale"]
    if plain["format"] == "int4":
        codes = torch.stack([codes >> 4, codes & 15], dim=-1)
    values: Tensor = codes.float() if plain["format"] == "e4m3" else plain["qmap"][codes.int()]
    scaled: Tensor = values.view(len(scale), -1) * scale.view(-1, 1)
    return scaled.view(plain["shape"])


def load_plain_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load what :func:`plain_state` returned for an optimizer of the same class: training continues bit for bit."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    loaded = {
        key: {name: _low_bit(value, optimizer) for name, value in moments.items()}
        for key, moments in state["state"].items()
    }
    _require_same_storage(optimizer, parameters, loaded)
    groups = [dict(group) for group in state["param_groups"]]
    # The implementation of a step is not part of the state, which may come from another device or an older version.
    for group, own in zip(groups, optimizer.param_groups, strict=False):  # torch says where they do not fit
        group.update({name: own[name] for name in _IMPLEMENTATION if name in own})
    optimizer.load_state_dict({**state, "state": loaded, "param_groups": groups})
    _match_parameter_layouts(optimizer)
    if _block_size(optimizer) is not None:
        for group in optimizer.param_groups:  # torchao needs a tensor of its own
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).clone()


def _match_parameter_layouts(optimizer: Optimizer) -> None:
    """Give moments the memory format of their parameters: files do not hold it, and fused steps need it."""
    for parameter, moments in optimizer.state.items():
        for name, value in moments.items():
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape and not is_low_bit(value)
            if is_moment and value.stride() != parameter.stride():
                moments[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _block_size(optimizer: Any) -> int | None:
    """How many values share a scale; None for optimizers with full-precision state."""
    return optimizer.block_size if type(optimizer).__module__.startswith("torchao.") else None


def _low_bit(value: Any, optimizer: Optimizer) -> Any:
    """torchao's tensor for a plain moment; other values unchanged."""
    if not isinstance(value, Mapping) or "codes" not in value:
        return value.clone() if isinstance(value, Tensor) else value
    if _block_size(optimizer) is None:
        raise PlanError(
            f"this state is stored in {value['format']}, and {type(optimizer).__name__} has full-precision state: make "
            f"the optimizer by run.optimizer() with the plan that the state was saved with."
        )
    import torchao.optim.subclass_4bit as four
    import torchao.optim.subclass_8bit as eight
    import torchao.optim.subclass_fp8 as float8

    dtype = _DTYPES[value["dtype"]]
    codes, scale = value["codes"].clone(), value["scale"].clone()
    if value["format"] == "e4m3":
        return float8.OptimStateFp8(codes, scale, dtype)
    qmap = value["qmap"].clone()
    if value["format"] == "int4":
        return four.OptimState4bit(codes, scale, qmap, value["signed"], torch.Size(value["shape"]), dtype)
    return eight.OptimState8bit(codes, scale, qmap, value["signed"], dtype)


def _require_same_storage(optimizer: Any, parameters: list[Tensor], state: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise if a moment is stored differently than this optimizer would store it."""
    if _block_size(optimizer) is None:
        return
    for key, moments in state.items():
        for name, value in moments.items():
            if name == "step" or key >= len(parameters):
                continue
            own = optimizer._new_buffer(parameters[key].detach(), name == "exp_avg")
            is_same = type(own) is type(value) and own.shape == value.shape
            if not is_same or (is_low_bit(value) and own.block_size != value.block_size):
                raise PlanError(
                    f"{name} of parameter {key} is stored differently than {type(optimizer).__name__} stores it: "
                    f"load the state of an optimizer of the same class, for the same parameters."
                )


# --- Counting optimizer steps


class OptimizerSteps:
    """Which optimizers train a model, and which of them have made a step that was not counted by ``run.step()``."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._uncounted: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        #: Optimizers that have parameters of the model.
        self._of_model: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._warned = False

    def is_of_model(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has any of the model's parameters."""
        if optimizer not in self._of_model:
            own = {id(parameter) for parameter in self.model.parameters()}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return False
            self._of_model.add(optimizer)
        return True

    def before_step(self, optimizer: Optimizer) -> None:
        """Warn, once, if the last step of this optimizer was not counted."""
        if optimizer in self._uncounted and not self._warned:
            self._warned = True
            warnings.warn(
                "two optimizer steps passed without run.step(): call it after optimizer.step(), or the plan's "
                "schedules and random bits stand still.",
                BitplanWarning,
                stacklevel=5,
            )
        self._uncounted.add(optimizer)

    def mark_counted(self) -> None:
        """All steps so far are counted."""
        self._uncounted.clear()


#: How many of our hooks are running, and handles of hooks to be removed once none is: torch raises if a hook is removed
#: while it iterates over them, and a garbage collection may happen at any time.
_running = 0

_unneeded: list[Any] = []


def before_every_step(method: Callable[[Optimizer, bool], None]) -> Callable[[], object]:
    """Call a bound method before each step of any optimizer, until its object is gone or the result is called.

    It is told whether the step has a closure, which runs the model.
    """
    watcher = weakref.WeakMethod(method)
    watching_object: object = method.__self__  # type: ignore[attr-defined]

    def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        global _running
        watching = watcher()
        if watching is None:
            return
        _running += 1
        try:
            watching(optimizer, any(map(callable, (*args[1:], kwargs.get("closure")))))
        finally:
            _running -= 1

    remove = weakref.finalize(watching_object, _remove, register_optimizer_step_pre_hook(hook))
    remove.atexit = False
    return remove


def _remove(handle: Any) -> None:
    _unneeded.append(handle)
    while _unneeded and not _running:
        _unneeded.pop().remove()


class StepCounter:
    """Calls a function after a training step of the optimizers, until it is removed.

    The optimizers keep the function, and with it the attachment that it counts for: a script may drop its own.

    Several optimizers that step in turn make one training step: it is counted when the first of them steps, and the
    next one when an optimizer steps again. So an optimizer that skips an iteration, as under a ``GradScaler``, neither
    delays the count nor loses it.
    """

    def __init__(self, optimizers: Iterable[Optimizer], count: Callable[[], None]) -> None:
        stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

        def hook(optimizer: Optimizer, *_: Any) -> None:
            is_new_step = not stepped or optimizer in stepped
            if is_new_step:
                stepped.clear()
            stepped.add(optimizer)
            if is_new_step:
                count()

        unique = {id(optimizer): optimizer for optimizer in optimizers}
        self._handles = [optimizer.register_step_post_hook(hook) for optimizer in unique.values()]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


#: Format -> torchao's versions of Adam and of AdamW.
_TORCHAO_CLASSES = {
    "int8": ("Adam8bit", "AdamW8bit"),
    "int4": ("Adam4bit", "AdamW4bit"),
    "e4m3": ("AdamFp8", "AdamWFp8"),
}
#: Settings of a parameter group that torchao's classes have.
_SETTINGS = ("lr", "betas", "eps", "weight_decay", "amsgrad")
#: Settings of torch's optimizers that change the result, and that torchao's classes do not have.
_LACKING = ("maximize", "differentiable")
#: Moments with fewer values than this stay in full precision.
_LEAST = 4096


def require_torchao(rule: OptimizerRule) -> None:
    """Raise where torchao is missing."""
    if find_spec("torchao") is None:
        raise PlanError(
            f"{rule.where or 'optimizer'}: state in {rule.state} needs torchao, which is not installed: "
            f"pip install torchao."
        )


def low_bit_optimizer(plain: Optimizer, rule: OptimizerRule) -> Optimizer:
    """An optimizer with low-bit state and the groups and settings of `plain`, which has made no step yet."""
    low_bit = _torchao_twin(plain, rule)
    _require_effect([low_bit], rule)
    return low_bit


def _require_effect(low_bit: Iterable[Any], rule: OptimizerRule) -> None:
    """Raise if none of torchao's optimizers has a parameter whose moments it stores in few bits."""
    block = _LEAST
    for optimizer in low_bit:
        block = optimizer.block_size
        sizes = [parameter.numel() for group in optimizer.param_groups for parameter in group["params"]]
        if any(size >= _LEAST and size % block == 0 for size in sizes):
            return
    raise PlanError(
        f"{rule.where or 'optimizer'}: state in {rule.state} has no effect here: no parameter has {_LEAST} values "
        f"or more in whole blocks of {block}, and smaller ones stay in full precision: drop optimizer: from the plan."
    )


def _torchao_twin(plain: Optimizer, rule: OptimizerRule) -> Optimizer:
    """torchao's version of `plain`, whether or not it has a parameter that is large enough for low-bit state."""
    require_torchao(rule)
    if type(plain) in _classes(rule):
        return plain
    if type(plain) not in (Adam, AdamW):
        raise PlanError(
            f"{rule.where or 'optimizer'}: {type(plain).__name__} has no version with state in {rule.state}: use "
            f"torch.optim.AdamW or Adam, or drop optimizer: from the plan."
        )
    if plain.state:
        raise PlanError("this optimizer has made steps already: give run.optimizer() a new one, or its class.")
    for name in _LACKING:
        if any(group.get(name) for group in plain.param_groups):
            raise PlanError(
                f"{rule.where or 'optimizer'}: {type(plain).__name__} with {name}=True has no version with state in "
                f"{rule.state}: drop {name}, or drop optimizer: from the plan."
            )
    decoupled = {bool(group.get("decoupled_weight_decay", type(plain) is AdamW)) for group in plain.param_groups}
    if len(decoupled) > 1:
        raise PlanError("groups with and without decoupled_weight_decay cannot share one optimizer: make two.")
    low_bit: Optimizer = _classes(rule)[int(decoupled.pop())]([_group(group) for group in plain.param_groups])
    return low_bit


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
    return tuple(getattr(optim, name) for name in _TORCHAO_CLASSES[rule.state])


@lru_cache(maxsize=1)
def _torchao_optim() -> Any:
    """torchao's optimizers, imported without its warnings about kernels that bitplan does not use."""
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


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Change a group's learning rate, which torchao's optimizers hold in a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class OptimizerStateCheck:
    """Makes the optimizer that a plan's ``optimizer:`` asks for, and checks that its state really is low-bit."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self.rule = plan.optimizer_rule
        self.model = model
        #: Whether low-bit state has been seen; then nothing is checked any more.
        self.is_verified = self.rule is None
        #: Those that have made a step: one, or one for each parameter.
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._steps_without = 0
        if self.rule is not None:
            require_torchao(self.rule)

    def make(self, kind: Any, params: Iterable[Any] | None, settings: dict[str, Any]) -> Optimizer:
        """See :meth:`bitplan.attach.Attachment.optimizer`."""
        if isinstance(kind, Optimizer):
            if params is not None or settings:
                raise PlanError("this optimizer exists already: give its class to pass parameters and settings.")
            plain = kind
        elif isinstance(kind, type) and issubclass(kind, Optimizer):
            trained = (p for p in self.model.parameters() if p.requires_grad) if params is None else params
            plain = kind(trained, **settings)
        else:
            raise PlanError(f"run.optimizer() takes an optimizer's class, such as torch.optim.AdamW, not {kind!r}.")
        return plain if self.rule is None else low_bit_optimizer(plain, self.rule)

    def make_for_each(self, plain: Mapping[str, Optimizer]) -> dict[str, Optimizer]:
        """The optimizers of single parameters, whose state is low-bit where the parameter is large enough."""
        if self.rule is None:
            return dict(plain)
        made = {name: _torchao_twin(optimizer, self.rule) for name, optimizer in plain.items()}
        _require_effect(made.values(), self.rule)
        return made

    def before_step(self, optimizer: Optimizer) -> None:
        """Raise if an optimizer of the model's parameters has full-precision state."""
        if self.is_verified or self.rule is None:
            return
        if not isinstance(optimizer, _classes(self.rule)):
            raise PlanError(
                f"{self.rule.where or 'optimizer'}: the plan asks for optimizer state in {self.rule.state}, and this "
                f"{type(optimizer).__name__} has it in full precision: make it by "
                f"run.optimizer(torch.optim.AdamW, lr=...)."
            )
        self._optimizers.add(optimizer)

    def after_step(self) -> None:
        """Look for low-bit state after a step; raise if there is none after two steps."""
        if self.is_verified or self.rule is None:
            return
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        if any(is_low_bit(value) for state in states for value in state.values()):
            self.is_verified = True
            self._optimizers.clear()
            return
        self._steps_without += 1
        if self._steps_without < 2:  # a GradScaler may have skipped the first
            return
        if states:
            raise PlanError(
                f"{self.rule.where or 'optimizer'}: after a step all optimizer state is in full precision: no "
                f"parameter with a gradient is large enough for {self.rule.state}; drop optimizer: from the plan."
            )
        if not self._optimizers:
            raise PlanError(
                f"{self.rule.where or 'optimizer'}: the plan asks for optimizer state in {self.rule.state}, and no "
                f"such optimizer has made a step: make it by run.optimizer(torch.optim.AdamW, lr=...)."
            )
