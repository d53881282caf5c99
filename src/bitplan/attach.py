"""A plan at work on a model: :func:`attach` and what it returns.

``execution="emulate"`` rounds values and computes in the model's own precision: the numbers of low precision, none of
its savings in memory or time.
"""

from __future__ import annotations

import logging
import warnings
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bitplan.actions import Action
from bitplan import checkpointing
from bitplan.errors import BitplanWarning, PlanError
from bitplan.intercept import ModuleState, Scope, install, is_planned, state_of, uninstall
from bitplan.noise import key_of
from bitplan.opened import INNER_OPS, OPENED
from bitplan.ops import PRODUCTS
from bitplan.plan import Plan, compile_match, unmatched_message
from bitplan.rounder import ANY, KEY, Rounder

log = logging.getLogger("bitplan")

#: The path of the tensors of a loss that was brought in.
LOSS_PATH = "loss"


class Attachment:
    """A plan at work. Made by :func:`attach`; also a context manager that detaches at its end."""

    def __init__(self, model: nn.Module, plan: Plan, steps: int | None, seed: int) -> None:
        self.plan = plan
        self.model = model
        self.steps = steps
        self.seed = seed
        self._step = 0
        self._rounder = Rounder(plan if has_patterns(plan) else None)
        self._seen: set[tuple[str, str]] = set()
        self._checked = False
        self._optimizer_steps = 0
        self._warned = False
        self._modules: list[tuple[str, nn.Module]] = []
        self._keyed: list[tuple[str, nn.Module]] = []
        self._hooks: list[Any] = []
        if plan.all_rules:
            self._install()

    # --- life ---

    def _install(self) -> None:
        unseen = [path for path, module in self.model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
        for path in unseen:
            self._refuse_unseen(path)
        self._modules = install(self.model, self._rounder)
        checkpointing.exchange()
        for path, module in self._modules:
            self._decide(path, module)
        self._rounder.on_site = self._record
        watcher = weakref.WeakMethod(self._before_optimizer_step)
        self._hooks.append(register_optimizer_step_pre_hook(lambda *given: (watcher() or _nothing)(*given)))

    def _decide(self, path: str, module: nn.Module) -> None:
        """Fill in what the plan says of every operation that may happen in this module."""
        state = state_of(module)
        state.actions.update(actions_of(self.plan, path))
        actions = [action for action in state.actions.values() if isinstance(action, Action)]
        self._rounder.tags_gradients |= any(a.at_consumer and "grad_activation" in a.places for a in actions)
        if any(action.needs_key for action in actions):
            anchor = next(self.model.parameters(), torch.empty(0))
            key = torch.tensor(self._key(path), dtype=torch.int32, device=anchor.device)
            module.register_buffer(KEY, key, persistent=False)
            self._keyed.append((path, module))

    def _refuse_unseen(self, path: str) -> None:
        for rule in self.plan.all_rules:
            if compile_match(rule).matches_module(path) and not rule.keep and "*" not in rule.match:
                raise PlanError(
                    f"{path} is a scripted module, whose operations cannot be seen: attach before scripting, or "
                    f"leave it out of the rule that matches {', '.join(rule.match)}."
                )
        log.warning("%s is a scripted module: nothing in it is rounded.", path)

    def detach(self) -> None:
        """Leave the model exactly as it was."""
        if self._modules:
            uninstall(self._modules)
            for _, module in self._modules:
                module._buffers.pop(KEY, None)
                module._non_persistent_buffers_set.discard(KEY)
            checkpointing.restore()
        self._rounder.enabled = False  # copies that were made of the model become plain, too
        self._modules = []
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()

    # --- the loop ---

    def step(self) -> None:
        """Tell that an optimizer step is done: the schedule moves, the noise changes."""
        self.check()
        self._step += 1
        self._optimizer_steps = 0
        self._write_keys()

    def _key(self, path: str) -> tuple[int, int]:
        return key_of(self.seed, self._step, zlib.crc32(path.encode()))

    def _write_keys(self) -> None:
        """New random bits for the new step: one small copy to the device, which nothing waits for."""
        buffers = [buffer for _, module in self._keyed if (buffer := module._buffers[KEY]) is not None]
        if buffers:
            keys = torch.tensor([self._key(path) for path, _ in self._keyed], dtype=torch.int32)
            torch._foreach_copy_(buffers, list(keys.to(buffers[0].device, non_blocking=True).unbind()))

    def _before_optimizer_step(self, *given: object) -> None:
        self.check()
        if not self._checked:
            raise PlanError(
                "compiled code cannot be watched for rules that match nothing: give attach() an example= batch."
            )
        self._optimizer_steps += 1
        if self._optimizer_steps > 2 and not self._warned:
            self._warned = True
            warnings.warn(
                "several optimizer steps passed without run.step(): call it after optimizer.step(), or the plan's "
                "schedules and random bits stand still.",
                BitplanWarning,
                stacklevel=3,
            )

    # --- what happened ---

    def _record(self, module: nn.Module, op: str, index: int) -> None:
        if not self._checked:
            self._seen.add((state_of(module).path, f"{op}.{index}"))

    def check(self) -> None:
        """Raise where a rule matched nothing in what has run so far; does nothing before the first forward."""
        if self._checked:
            return
        if self._seen:
            self._checked = True
            self._rounder.on_site = None
            self.require_matches(self._seen)

    def require_matches(self, seen: set[tuple[str, str]]) -> None:
        for rule in self.plan.all_rules:
            matches = compile_match(rule)
            if any(matches(path, op) for path, op in seen):
                continue
            message = unmatched_message(rule, {path for path, _ in seen}, {op.split(".")[0] for _, op in seen})
            if rule.strict:
                raise PlanError(message)
            warnings.warn(message, BitplanWarning, stacklevel=2)

    def loss(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function` with its tensors brought in as sites of the module path ``loss``."""
        if not self.plan.all_rules:
            return function
        holder = nn.Module()
        holder.__dict__["_bitplan"] = ModuleState(self._rounder, LOSS_PATH)
        self._decide(LOSS_PATH, holder)
        rounder = self._rounder

        def planned_loss(*args: Any, **kwargs: Any) -> Tensor:
            with Scope(rounder, holder):
                return function(*args, **kwargs)

        return planned_loss

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: plain numbers only."""
        return {"step": self._step, "seed": self.seed, "plan": self.plan.flattened().to_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["plan"] != self.plan.flattened().to_dict():
            raise PlanError("this state belongs to another plan: attach the plan it was saved with.")
        self._step, self.seed = int(state["step"]), int(state["seed"])
        self._write_keys()


def _nothing(*given: object) -> None:
    return None


def actions_of(plan: Plan, path: str) -> dict[str, Any]:
    """Operation -> action in the module at `path`; under ``ANY`` what every operation gets that is not named."""
    named = [op for rule in plan.all_rules for op in rule.op]
    fused_asked = any(
        rule.op and not rule.keep and compile_match(rule).matches_module(path) and _names_inner(rule.op)
        for rule in plan.all_rules
    )
    found: dict[str, Any] = {}
    for op in dict.fromkeys([*PRODUCTS, *OPENED, *named]):
        decision = plan.decide(path, op)
        found[op] = None if decision.changes_nothing else Action(decision, op.split(".")[0])
    for op in OPENED:
        if fused_asked and found[op] is None:
            found[op] = Action(plan.decide(path, op), op)
        found[f"open {op}"] = fused_asked
    any_other = plan.decide(path, "")
    found[ANY] = None if any_other.changes_nothing else Action(any_other, "")
    return found


def _names_inner(ops: tuple[str, ...]) -> bool:
    return any(op.split(".")[0] in INNER_OPS for op in ops)


def has_patterns(plan: Plan) -> bool:
    """Whether operations are matched by globs or expressions, so that a new name must be looked up when it is met."""
    return any(sign in op for rule in plan.all_rules for op in rule.op for sign in "*?[:")


def attach(
    model: nn.Module,
    plan: Plan | str,
    steps: int | None = None,
    example: Any = None,
    *,
    seed: int = 0,
    execution: str = "emulate",
) -> Attachment:
    """Put `plan` (a plan, a preset's name or a file) to work on `model`.

    :param steps: optimizer steps of the whole run, for schedules.
    :param example: a batch; with one, everything is checked at once on fake tensors. Without, the first forward lists
        the operations, and a rule that matched none raises before the first optimizer step.
    :param seed: of stochastic rounding.
    """
    if execution != "emulate":
        raise PlanError(f"there is no execution {execution!r} in this version: use 'emulate'.")
    if isinstance(plan, str):
        from bitplan.plan import preset_names

        plan = Plan.preset(plan) if plan in preset_names() else Plan.load(plan)
    if any(is_planned(module) for module in model.modules()):
        raise PlanError("a plan is attached to this model already: detach it first.")
    run = Attachment(model, plan, steps, seed)
    log.info("plan attached, execution emulate: values are rounded, but no memory or time is saved.")
    return run
