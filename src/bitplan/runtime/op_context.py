"""Where and when a plan rounds something: the place of an operation, with what lies beside its weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitplan.capture.scopes import state_of
from bitplan.compiler.tracing import is_traced
from bitplan.numerics.wire_format import consumer_site, parameter_suffix
from bitplan.runtime.module_state import REACH, RECORD, TABLE


class Here:
    """Where and when something is rounded: one operation in one call of a module."""

    #: The row of the record, where tracing has looked it up already.
    seen: int | None = None
    #: Which of the operation's weights, as sites are named: ``(bias)``, or nothing for the one called weight.
    part = ""
    is_recorded = True

    def __init__(self, site: str, module: nn.Module) -> None:
        #: The operation and its number in the module: ``conv2d.0``.
        self.site = site
        #: What tells its random bits from those of others in the module.
        self.salt = site
        self.module: nn.Module | None = module
        self.training = module.training
        self.table = self._record = self._reach = None
        if not torch.compiler.is_compiling() or state_of(module).has_buffers:
            self.table = module._buffers.get(TABLE)
            self._record = module._buffers.get(RECORD)
            self._reach = module._buffers.get(REACH)
        # Evaluation, and forwards that nothing will learn from, leave no trace in what was observed.
        self.observing = module.training and torch.is_grad_enabled()

    @property
    def record(self) -> Tensor | None:
        """Looked up late: eagerly it may have grown between the forward pass and the backward pass."""
        if not self.is_recorded:
            return None
        return self._record if self.module is None or is_traced() else self.module._buffers.get(RECORD)

    @property
    def reach(self) -> Tensor | None:
        """For which magnitudes scales make room, a number for each row of the record; looked up as late as that."""
        if not self.is_recorded:
            return None
        return self._reach if self.module is None or is_traced() else self.module._buffers.get(REACH)

    @property
    def tensor(self) -> str:
        """The site and the part."""
        return self.site + self.part

    def of_parameter(self, name: str) -> Here:
        """This place for one of several weights."""
        assert self.module is not None
        other = Here(self.site, self.module)
        other.part = parameter_suffix(name)
        return other

    def unrecorded(self, follows: bool = False) -> Here:
        """This place for one more tensor in it, beside the one whose record is kept.

        :param follows: it is promoted when that one is.
        """
        assert self.module is not None
        other = Here(self.site, self.module)
        other.is_recorded, other.observing = follows, False
        return other

    def towards(self, consumer: Here) -> Here:
        """This place for what comes back from one of its consumers, with random bits of its own."""
        assert self.module is not None
        back = Here(self.site, self.module)
        back.salt = consumer_site(self.site, consumer.site)
        return back
