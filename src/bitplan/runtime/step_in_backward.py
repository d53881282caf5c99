"""Optimizer steps inside the backward pass: a gradient is used as soon as it is complete, and then freed.

Without that all gradients are alive at the end of the backward pass: as many bytes as the weights have. Every
parameter has an optimizer of its own here, whose step a hook of torch's makes when the parameter's gradient is
accumulated. Updates are those of one optimizer after the backward pass, bit for bit, for optimizers that treat
parameters independently.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bitplan.capture.planned_classes import unwrapped
from bitplan.errors import PlanError
from bitplan.runtime.optimizers import load_plain_state, plain_state
from bitplan.runtime.sharding import is_distributed

if TYPE_CHECKING:
    from bitplan.runtime.attachment import Attachment

#: The attribute of a parameter that is updated in the backward pass.
_IS_STEPPED = "_bitplan_is_stepped_in_backward"


class StepInBackward:
    """Updates every parameter of a model in the backward pass; :meth:`step` ends a training step.

    >>> model = nn.Linear(2, 2)
    >>> optimizer = StepInBackward(model, lambda parameter: torch.optim.SGD([parameter], lr=0.1))
    >>> model(torch.ones(1, 2)).sum().backward()
    >>> model.weight.grad is None
    True
    >>> optimizer.step()
    """

    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[nn.Parameter], Optimizer], run: Attachment | None = None
    ) -> None:
        """
        :param make_optimizer: makes the optimizer of one parameter: ``lambda p: torch.optim.AdamW([p], lr=1e-3)``.
        :param run: a plan that is attached to the model, whose steps :meth:`step` counts. Each optimizer then has
            low-bit state where the plan asks for it, as by :meth:`bitplan.Attachment.optimizer`.
        """
        self._run = run
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise PlanError(
                "DistributedDataParallel reduces gradients after the hooks that would use them: step the optimizer "
                "after the backward pass."
            )
        if run is not None and run.optimizers:
            raise PlanError(
                "attach(optimizer=) counts the steps of this run: attach without optimizer=, and give run= here."
            )
        #: Name of a parameter -> its optimizer.
        self.optimizers: dict[str, Optimizer] = {}
        self._stepped: set[str] = set()
        handles: list[Any] = []
        parameters: list[weakref.ref[nn.Parameter]] = []
        for name, parameter in unwrapped(model).named_parameters():
            if parameter.requires_grad:
                self.optimizers[name] = self._make(name, parameter, make_optimizer)
        if run is not None:
            self.optimizers = run._optimizer_state.make_for_each(self.optimizers)
        for name, parameter in unwrapped(model).named_parameters():
            if name in self.optimizers:
                hook = _update_of(weakref.ref(self), name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                setattr(parameter, _IS_STEPPED, True)
                parameters.append(weakref.ref(parameter))
        self._remove = weakref.finalize(self, _remove_hooks, handles, parameters)
        self._remove.atexit = False

    @staticmethod
    def _make(name: str, parameter: nn.Parameter, make: Callable[[nn.Parameter], Optimizer]) -> Optimizer:
        if is_distributed(parameter):
            raise PlanError(f"{name} is split over several processes, which reduce gradients after these hooks.")
        if parameter.dtype == torch.float16:
            raise PlanError(
                f"{name} is in float16, whose gradients a GradScaler has to unscale before a step: use bfloat16, or "
                f"step after the backward pass."
            )
        if hasattr(parameter, _IS_STEPPED):
            raise PlanError(f"{name} is updated by another StepInBackward already: call its remove() first.")
        if parameter.grad is not None:
            raise PlanError(f"{name} has a gradient already: call zero_grad() before its optimizer is made.")
        optimizer = make(parameter)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if len(own) != 1 or own[0] is not parameter:
            raise PlanError(
                f"make_optimizer() made an optimizer of {len(own)} parameters for {name}: make one of the parameter "
                f"that it is given."
            )
        return optimizer

    def _update(self, name: str, parameter: Tensor) -> None:
        if name in self._stepped:
            parameter.grad = None
            raise PlanError(
                f"{name} got a second gradient in one training step, and its first one is used already: call step() "
                f"after every backward pass; gradients cannot be accumulated here."
            )
        self._stepped.add(name)
        self.optimizers[name].step()
        parameter.grad = None

    def step(self) -> None:
        """End a training step, after its backward pass: the run counts it."""
        if not self._stepped:
            raise PlanError("step() found no gradient: call it once, after the backward pass.")
        self._stepped.clear()
        if self._run is not None:
            self._run.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: gradients are freed as soon as they are used."""

    def clip_grad_norm_(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not possible: the norm of all gradients is known only when the first of them are gone."""
        raise PlanError(
            "the norm of all gradients is known after the backward pass, when they are used already: clip by an "
            "optimizer that steps after it."
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, one for each parameter: a schedule sets ``lr`` in each of them."""
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The state of every optimizer by the name of its parameter, in plain tensors and numbers."""
        return {name: plain_state(optimizer) for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken; nothing is changed where the parameters differ."""
        different = sorted(set(self.optimizers).symmetric_difference(state))
        if different:
            raise PlanError(
                f"the state is of other parameters than this model trains ({different[0]}): load it into the model "
                f"that it was saved with."
            )
        for name, optimizer in self.optimizers.items():
            load_plain_state(optimizer, state[name])

    def remove(self) -> None:
        """Stop updating parameters in the backward pass, as when nobody holds this object any more."""
        self._remove()


def _update_of(owner: weakref.ref[StepInBackward], name: str) -> Callable[[Tensor], None]:
    """A hook that does not keep its owner alive: Python finds no cycles through the hooks of a tensor."""

    def update(parameter: Tensor) -> None:
        alive = owner()
        if alive is not None:
            alive._update(name, parameter)

    return update


def _remove_hooks(handles: Sequence[Any], parameters: Sequence[weakref.ref[nn.Parameter]]) -> None:
    for handle, reference in zip(handles, parameters, strict=True):
        handle.remove()
        parameter = reference()
        if parameter is not None:
            delattr(parameter, _IS_STEPPED)
