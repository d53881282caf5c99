"""One operation in one call of a module, as rounding sees it: its name, its random keys, its rows of statistics."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bitplan.capture.scopes import state_of
from bitplan.compiler.tracing import is_traced
from bitplan.errors import PlanError, QuantizeError
from bitplan.numerics.wire_format import consumer_site, parameter_suffix, place_key, site_path
from bitplan.runtime.module_state import AMAX_HISTORY_MAX, RECORD, TABLE

if TYPE_CHECKING:
    from bitplan.runtime.rounding_op import OpRounding, RoundingOp
    from bitplan.runtime.sharding import Ranks


class OpContext:
    """Where and when something is rounded: one operation in one call of a module."""

    def __init__(self, site: str, module: nn.Module, rounding: OpRounding | None = None) -> None:
        #: The operation and its number in the module: ``conv2d.0``.
        self.site = site
        #: Distinguishes its random bits from those of other operations in the module.
        self.salt = site
        self.module: nn.Module | None = module
        #: What the plan does with the operation; holds the rows of its statistics.
        self.rounding = rounding
        #: The row of the record, where tracing has looked it up already.
        self.row: int | None = None
        #: Which of the operation's weights, as sites are named: ``(bias)``, or nothing for the one called weight.
        self.part = ""
        self.is_recorded = True
        #: Whether the operation returns masked scores: their gradient is rounded, their values are not.
        self.is_mask = False
        self.training = module.training
        #: The processes over which the tensor is split, or may be; None: this process has all of it.
        self.split_over: Ranks | None = None
        #: Whether that is known: of DTensors it is.
        self.knows_split = False
        self.table: Tensor | None = None
        self._record: Tensor | None = None
        self._amax_history_max: Tensor | None = None
        if not torch.compiler.is_compiling():
            self.table = module._buffers.get(TABLE)  # the other two are looked up when they are needed
            self.split_over = state_of(module).interceptor.split_over
        elif state_of(module).has_buffers:
            buffers = module._buffers
            self.table, self._record = buffers.get(TABLE), buffers.get(RECORD)
            self._amax_history_max = buffers.get(AMAX_HISTORY_MAX)
        # Evaluation, and forwards that nothing will learn from, leave no trace in what was observed.
        self.observing = module.training and torch.is_grad_enabled()

    @classmethod
    def in_graph(
        cls, call: tuple[str, str, bool, bool], row: int, buffers: tuple[Tensor | None, Tensor | None, Tensor | None]
    ) -> OpContext:
        """The context that a graph in the making is given: names and tensors, without the module.

        :param call: site, salt, training and observing.
        :param row: of the record; -1 where the tensor has none.
        """
        context = cls.__new__(cls)
        context.module = context.rounding = None
        context.site, context.salt, context.training, context.observing = call
        context.table, context._record, context._amax_history_max = buffers
        context.row = None if row < 0 else row
        context.part, context.is_recorded, context.is_mask = "", True, False
        context.split_over, context.knows_split = None, False
        return context

    @property
    def record(self) -> Tensor | None:
        """Looked up late: eagerly it may have grown between the forward pass and the backward pass."""
        if not self.is_recorded:
            return None
        return self._record if self.module is None or is_traced() else self.module._buffers.get(RECORD)

    @property
    def amax_history_max(self) -> Tensor | None:
        """For delayed scales: the largest magnitude of past steps in each row of the record; looked up as late."""
        if not self.is_recorded:
            return None
        return (
            self._amax_history_max if self.module is None or is_traced() else self.module._buffers.get(AMAX_HISTORY_MAX)
        )

    @property
    def tensor(self) -> str:
        """The site and the part."""
        return self.site + self.part

    def record_row(self, op: RoundingOp) -> int | None:
        """The row of the record that holds what is observed of the tensor that `op` rounds."""
        if self.module is None:
            return self.row
        row: int | None = None
        if self.rounding is not None and op.has_records and self.record is not None:
            row = self.rounding.state_of(op.place).records.get(self.tensor)
        if row is None and self.observing and op.observes and torch.compiler.is_compiling():
            raise missing_record(self.site)
        return row

    def is_promoted(self, place: str) -> bool:
        """Whether packed execution has promoted the tensor in that place."""
        return self.rounding is not None and self.tensor in self.rounding.state_of(place).promoted

    def quantizer_module(self, op: RoundingOp, x: Tensor) -> nn.Module:
        """The object of the user's own class that rounds this tensor; made when it is first met."""
        if self.module is None or self.rounding is None:
            raise not_compilable(op)
        modules, name = self.rounding.modules, site_path(state_of(self.module).path, place_key(self.tensor, op.place))
        if name not in modules:
            assert op.function is not None
            made = op.function()
            if not isinstance(made, nn.Module):
                raise PlanError(f"{op.spec.function} is no subclass of torch.nn.Module: name one, or a function.")
            modules[name] = made
            modules.restore(name, made)
        module = modules[name]
        parameter = next(module.parameters(), None)
        if parameter is not None and parameter.device != x.device and not x.is_meta:
            module.to(x.device)
        return module.train(self.training)

    def of_parameter(self, name: str) -> OpContext:
        """This context for one of several weights."""
        assert self.module is not None
        other = OpContext(self.site, self.module, self.rounding)
        other.part = parameter_suffix(name)
        return other

    def unrecorded(self, follows: bool = False) -> OpContext:
        """This context for one more tensor, beside the one whose statistics are kept.

        :param follows: it is promoted when that one is.
        """
        assert self.module is not None
        other = OpContext(self.site, self.module, self.rounding)
        other.is_recorded, other.observing, other.is_mask = follows, False, self.is_mask
        return other

    def of_shard(self, ranks: Ranks | None) -> OpContext:
        """This context for what a process holds of a tensor that is split over `ranks`."""
        other = copy.copy(self)
        other.split_over, other.knows_split = ranks, True
        return other

    def towards(self, consumer: OpContext) -> OpContext:
        """This context for a gradient that comes back from one of its consumers, with random bits of its own."""
        assert self.module is not None
        back = OpContext(self.site, self.module, self.rounding)
        back.salt = consumer_site(self.site, consumer.site)
        return back


def not_compilable(op: RoundingOp) -> PlanError:
    return PlanError(
        f"{op.spec.function} is a class with parameters, which compiled code cannot hold: run the model uncompiled, or "
        f"name a function."
    )


def missing_record(site: str) -> QuantizeError:
    return QuantizeError(
        f"compiled code cannot make room for what is observed at {site}: give attach() an example= batch."
    )
