"""Promotion: a tensor that its format serves badly gets a better one, alone, for the rest of the run.

Lee, Sharma & Aiken 2023 (arXiv 2301.13464) promote where too many values overflow: after a training step, if the share
of values at or over the format's overflow threshold is at least theta = 0.01, the tensor is high from the next step on.
A scale that follows the data leaves nothing to overflow, so other signs are watched there: the share of values that
became zero, or the relative error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bitplan.errors import PlanError

if TYPE_CHECKING:
    from bitplan.plan.spec import QuantizerSpec
    from bitplan.plan.uses import Use

#: What can be watched, and what is reached when a tensor is promoted.
MEASURES = ("overflow", "underflow", "error")
#: The paper's share of values that overflow.
DEFAULT_OVERFLOW = 0.01


@dataclass(frozen=True)
class Promotion:
    """``promote: {to: high, underflow: 0.05}``: the sign to watch, and what the tensor becomes.

    >>> Promotion("high").measure, Promotion("high").limit
    ('overflow', 0.01)
    """

    #: The quantizer of a promoted tensor, or its name; ``keep`` leaves it alone from then on.
    to: Use
    #: Share of values at or over the format's overflow threshold.
    overflow: float | None = None
    #: Share of values that are not zero and become zero.
    underflow: float | None = None
    #: Root of (mean squared error / mean square).
    error: float | None = None
    #: What `to` stands for, alone in a tuple, once the plan has looked it up.
    found: tuple[QuantizerSpec | None, ...] = ()

    def __post_init__(self) -> None:
        given = [name for name in MEASURES if getattr(self, name) is not None]
        if len(given) > 1:
            raise PlanError(f"a promotion watches one sign, not {' and '.join(given)}: drop all but one.")
        if not given:
            object.__setattr__(self, "overflow", DEFAULT_OVERFLOW)
        if isinstance(self.limit, bool) or not isinstance(self.limit, (int, float)) or not 0 < self.limit <= 1:
            raise PlanError(f"{self.measure} is a share above 0, at most 1, not {self.limit!r}.")
        object.__setattr__(self, self.measure, float(self.limit))

    @property
    def measure(self) -> str:
        """The sign that is watched: one of :data:`MEASURES`."""
        return next(name for name in MEASURES if getattr(self, name) is not None)

    @property
    def limit(self) -> float:
        """A tensor is promoted where the sign reaches this."""
        limit: float = getattr(self, self.measure)
        return limit

    @property
    def target(self) -> QuantizerSpec | None:
        """What the tensor becomes; None where it is left alone from then on."""
        if not self.found:
            raise PlanError(f"what {self.to!r} stands for is not looked up yet: ask the plan for its quantizers.")
        return self.found[0]

    def require_can_fire(self, *, scaled: bool) -> None:
        """Raise where the sign can never be seen."""
        if self.measure == "overflow" and scaled:
            raise PlanError(
                "a scale that follows the data leaves nothing to overflow, so that this promotion could never fire: "
                "watch underflow or error, such as promote: {to: bf16, underflow: 0.05}."
            )

    def looked_up(self, low: QuantizerSpec, target: QuantizerSpec | None) -> Promotion:
        """The same with what `to` stands for; `low` is the quantizer that is promoted."""
        if target is not None:
            if target.promote is not None:
                raise PlanError("a promoted tensor is not promoted again: promote to a quantizer without promote.")
            if target.history is not None:
                raise PlanError("a promoted tensor has no past: promote to a quantizer without history.")
            if isinstance(target.bits, str) or target.moved_by is not None:
                raise PlanError("a promoted tensor keeps its format: promote to a quantizer that follows no schedule.")
            if not isinstance(low.bits, str) and low.target.bits_per_value > target.target.bits_per_value:
                raise PlanError(
                    f"{target.target.name} has fewer bits than {low.target.name}: promote to a quantizer with more."
                )
            if replace(low, promote=None) == target:
                raise PlanError("this promotes to the same quantizer: name another one.")
        return replace(self, found=(target,))

    def to_data(self) -> dict[str, Any]:
        """As a plan writes it."""
        to = self.to if isinstance(self.to, str) else self.to.to_data()
        return {"to": to, self.measure: self.limit}

    def __str__(self) -> str:
        to = "unrounded" if self.found == (None,) else str(self.found[0] if self.found else self.to)
        return f"to {to} at {self.measure} {self.limit:g}"
