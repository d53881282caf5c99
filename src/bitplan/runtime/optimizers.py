"""Optimizers whose state lies in few bits: torchao's twins of Adam and AdamW, where a plan asks for them.

torchao keeps a moment in few bits where it has at least 4,096 values in whole blocks (256 values that share a scale,
128 for int4), and in full where not: biases and norms are kept in full. Its step is compiled at the first call, once
for each shape of parameter.
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


#: torchao's class of a moment -> the plan's word for it.
_FORMATS = {"OptimState8bit": "int8", "OptimState4bit": "int4", "OptimStateFp8": "e4m3"}
#: What a group of parameters says of torch's ways to make the same step.
_IMPLEMENTATION = ("foreach", "fused", "capturable")
#: The dtypes that a state may name: it may come from a file, and looking any name up in torch would import submodules.
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}


def _format_of(value: object) -> str | None:
    """The format of a moment that torchao keeps in few bits. Told by its class's name: torchao may be missing."""
    return _FORMATS.get(type(value).__name__) if type(value).__module__.startswith("torchao.") else None


def is_small(value: object) -> bool:
    """Whether this is a moment in few bits, or one device's part of it."""
    return _format_of(getattr(value, "_local_tensor", value)) is not None


def plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state in plain tensors and numbers; of torch's own optimizers their ``state_dict()``.

    As with torch's, the tensors are those that the next step changes: write them, or clone them, before.
    """
    state = optimizer.state_dict()
    per_parameter = {key: {name: _plain(value) for name, value in each.items()} for key, each in state["state"].items()}
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
    """The values of one moment of :func:`plain_state`, by the formula of this module's words."""
    codes, scale = plain["codes"], plain["scale"]
    if plain["format"] == "int4":
        codes = torch.stack([codes >> 4, codes & 15], dim=-1)
    values: Tensor = codes.float() if plain["format"] == "e4m3" else plain["qmap"][codes.int()]
    scaled: Tensor = values.view(len(scale), -1) * scale.view(-1, 1)
    return scaled.view(plain["shape"])


def load_plain_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Let `optimizer` go on, bit for bit, where :func:`plain_state` was taken from one of its kind."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    small = {
        key: {name: _small(value, optimizer) for name, value in each.items()} for key, each in state["state"].items()
    }
    _require_fit(optimizer, parameters, small)
    groups = [dict(group) for group in state["param_groups"]]
    # How a step is made is this optimizer's own affair: the state may come from another device, or an older version.
    for group, own in zip(groups, optimizer.param_groups, strict=False):  # torch says where they do not fit
        group.update({name: own[name] for name in _IMPLEMENTATION if name in own})
    optimizer.load_state_dict({**state, "state": small, "param_groups": groups})
    _lie_as_parameters(optimizer)
    if _block_size(optimizer) is not None:
        for group in optimizer.param_groups:  # torchao wants a tensor, which steps may not be shared with
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).clone()


def _lie_as_parameters(optimizer: Optimizer) -> None:
    """Give moments the memory layout of their parameters, which files do not know, and fused steps rely on."""
    for parameter, each in optimizer.state.items():
        for name, value in each.items():
            is_moment = isinstance(value, Tensor) and value.shape == parameter.shape and not is_small(value)
            if is_moment and value.stride() != parameter.stride():
                each[name] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _block_size(optimizer: Any) -> int | None:
    """How many values share a scale; None of optimizers that keep their state in full."""
    return optimizer.block_size if type(optimizer).__module__.startswith("torchao.") else None


def _small(value: Any, optimizer: Optimizer) -> Any:
    """torchao's form of a plain moment; other values as they are."""
    if not isinstance(value, Mapping) or "codes" not in value:
        return value.clone() if isinstance(value, Tensor) else value
    if _block_size(optimizer) is None:
        raise PlanError(
            f"this state was kept in {value['format']}, and {type(optimizer).__name__} keeps its state in full: make "
            f"the optimizer by run.optimizer() with the plan of then."
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


def _require_fit(optimizer: Any, parameters: list[Tensor], state: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise where a moment has another form than this optimizer would have given it."""
    if _block_size(optimizer) is None:
        return
    for key, each in state.items():
        for name, value in each.items():
            if name == "step" or key >= len(parameters):
                continue
            wanted = optimizer._new_buffer(parameters[key].detach(), name == "exp_avg")
            same = type(wanted) is type(value) and wanted.shape == value.shape
            if not same or (is_small(value) and wanted.block_size != value.block_size):
                raise PlanError(
                    f"the state's {name} of parameter {key} is kept otherwise than {type(optimizer).__name__} does: "
                    f"load the state of an optimizer of the same kind, for the same parameters."
                )


# --- The steps that optimizers make, as a run notices them: each of them is to be told to the run before the next


class OptimizerSteps:
    """Which optimizers train a model, and which of them have made a step that nobody has told of."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._untold: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        #: Those that have parameters of the model, which none of them loses again.
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._warned = False

    def is_of_model(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has any of the model's parameters."""
        if optimizer not in self._known:
            mine = {id(parameter) for parameter in self.model.parameters()}
            if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                return False
            self._known.add(optimizer)
        return True

    def begin(self, optimizer: Optimizer) -> None:
        """An optimizer is about to make a step; warns once where its last one was not told of."""
        if optimizer in self._untold and not self._warned:
            self._warned = True
            warnings.warn(
                "two optimizer steps passed without run.step(): call it after optimizer.step(), or the plan's "
                "schedules and random bits stand still.",
                BitplanWarning,
                stacklevel=5,
            )
        self._untold.add(optimizer)

    def tell(self) -> None:
        """What was made so far is told."""
        self._untold.clear()


#: How many hooks of ours are running, and the handles of hooks to be removed when none is: torch raises where a hook is
#: removed while it goes through them, and a garbage collection may happen at any time.
_running = 0

_unneeded: list[Any] = []


def before_every_step(method: Callable[[Optimizer], None]) -> Callable[[], object]:
    """Call a bound method before each step of any optimizer, until its object is gone or the result is called."""
    watcher = weakref.WeakMethod(method)
    watching_object: object = method.__self__  # type: ignore[attr-defined]

    def hook(optimizer: Optimizer, *_: Any) -> None:
        global _running
        watching = watcher()
        if watching is None:
            return
        _running += 1
        try:
            watching(optimizer)
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
    """Calls a bound method after a training step of the optimizers, until its object is gone or it is removed.

    Several optimizers that step in turn make one training step: it is counted when the first of them steps, and the
    next one when an optimizer steps again. So an optimizer that skips an iteration, as under a ``GradScaler``, neither
    delays the count nor loses it.
    """

    def __init__(self, optimizers: Iterable[Optimizer], count: Callable[[], None]) -> None:
        counting = weakref.WeakMethod(count)
        stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()

        def hook(optimizer: Optimizer, *_: Any) -> None:
            count_step = counting()
            if count_step is None:
                return
            is_new_step = not stepped or optimizer in stepped
            if is_new_step:
                stepped.clear()
            stepped.add(optimizer)
            if is_new_step:
                count_step()

        unique = {id(optimizer): optimizer for optimizer in optimizers}
        self._handles = [optimizer.register_step_post_hook(hook) for optimizer in unique.values()]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


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
