"""Candidates: pairs of formats for the two operands of a product.

A product has a left and a right operand (Rasquinha & Tabak 2023, arXiv 2408.02897): x and w in fprop, dy and w in
dgrad, dy and x in wgrad. A candidate has a format for each side, a granularity of scales for both, and a rounding,
which may differ for the gradient.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Protocol, get_args

from bitplan.capture.decompositions import decision_for
from bitplan.errors import BitplanError, MetricError, nearest_names
from bitplan.numerics.formats import BlockFormat, get_format
from bitplan.numerics.reference import ROUNDINGS, Rounding
from bitplan.numerics.scaling import Granularity
from bitplan.numerics.wire_format import OPERAND_OF_SLOT
from bitplan.plans import Plan
from bitplan.plans.match import PASSES
from bitplan.plans.spec import QuantizerSpec

#: The option of a candidate's text for no scale.
UNSCALED = "unscaled"
#: Suffix of a rounding that applies to the gradient only.
_GRADIENT_SUFFIX = "-dy"

_SCALES = ("tensor", "vector", "channel")


class FormatPair(Hashable, Protocol):
    """The quantizers of both operands of a product, in each pass."""

    def specs(self, pass_: str) -> tuple[QuantizerSpec, QuantizerSpec]:
        """The quantizers of the left and the right operand in the pass."""
        ...

    def applies_to(self, pass_: str) -> bool:
        """Whether there is anything to measure in the pass."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A pair of formats with their scales and roundings.

    >>> str(Candidate("e5m2", "e4m3")), str(Candidate.of("int8 vector stochastic-dy"))
    ('e5m2/e4m3 tensor', 'int8 vector stochastic-dy')
    """

    left: str
    right: str
    #: The elements that share a scale; a vector lies along the summed axis. None: no scale.
    scale: Granularity | None = "tensor"
    rounding: Rounding = "nearest"
    #: The rounding of dy; None: as the other operands.
    gradient_rounding: Rounding | None = None

    def __post_init__(self) -> None:
        try:
            for side in ("left", "right"):
                object.__setattr__(self, side, get_format(getattr(self, side)).name)
            if self.scale not in (None, *_SCALES):
                raise MetricError(f"a candidate's scale is {', '.join(_SCALES)} or None, not {self.scale!r}.")
            for pass_ in PASSES:
                self.specs(pass_)
        except MetricError:
            raise
        except BitplanError as error:
            raise MetricError(f"the candidate {self.left}/{self.right} does not work: {error}") from error
        if self.gradient_rounding == self.rounding:
            object.__setattr__(self, "gradient_rounding", None)

    @classmethod
    def of(cls, text: str | Candidate) -> Candidate:
        """Parse the text of a candidate.

        ``FORMAT[/FORMAT] [tensor|vector|channel|unscaled] [ROUNDING] [ROUNDING-dy]``: a single format is that of both
        operands; the default scale is per tensor; block formats have their own scales.
        """
        if isinstance(text, Candidate):
            return text
        first, *options = text.split() or [""]
        left, slash, right = first.partition("/")
        scale: Granularity | None = "tensor"
        rounding: Rounding = "nearest"
        gradient: Rounding | None = None
        option_names = (*_SCALES, UNSCALED, *ROUNDINGS, *(f"{name}{_GRADIENT_SUFFIX}" for name in ROUNDINGS))
        for option in options:
            if option in (*_SCALES, UNSCALED):
                scale = next((name for name in get_args(Granularity) if name == option), None)
            elif option.removesuffix(_GRADIENT_SUFFIX) in ROUNDINGS:
                named = next(name for name in ROUNDINGS if name == option.removesuffix(_GRADIENT_SUFFIX))
                rounding, gradient = (rounding, named) if option.endswith(_GRADIENT_SUFFIX) else (named, gradient)
            else:
                raise MetricError(
                    f"the candidate {text!r} has an unknown option {option!r}; {nearest_names(option, option_names)}"
                )
        return cls(left, right if slash else left, scale, rounding, gradient)

    def specs(self, pass_: str) -> tuple[QuantizerSpec, QuantizerSpec]:
        """The quantizers of the left and the right operand in the pass."""
        left_rounding = self.gradient_rounding if self.gradient_rounding and has_gradient(pass_) else self.rounding
        return self._spec(self.left, left_rounding), self._spec(self.right, self.rounding)

    def _spec(self, name: str, rounding: Rounding) -> QuantizerSpec:
        scale = None if isinstance(get_format(name), BlockFormat) else self.scale
        return QuantizerSpec(name, scale=scale, rounding=rounding)

    def applies_to(self, pass_: str) -> bool:
        """Whether it differs in the pass from the same candidate without a rounding for gradients."""
        return self.gradient_rounding is None or has_gradient(pass_)

    def __str__(self) -> str:
        parts = [self.left if self.left == self.right else f"{self.left}/{self.right}"]
        parts += [self.scale or UNSCALED]
        parts += [] if self.rounding == "nearest" else [self.rounding]
        parts += [] if self.gradient_rounding is None else [f"{self.gradient_rounding}{_GRADIENT_SUFFIX}"]
        return " ".join(parts)


def has_gradient(pass_: str) -> bool:
    """Whether the left operand of the pass is the gradient dy."""
    return OPERAND_OF_SLOT[PASSES[pass_][0]].tensor == "dy"


#: Default candidates: INT8, both FP8 formats and INT4 with scales per tensor and per vector; FP8 with the gradient in
#: E5M2, as it is mostly used; floats with integer weights; and stochastic rounding of the gradient.
DEFAULT_CANDIDATES: tuple[Candidate, ...] = tuple(
    map(
        Candidate.of,
        (
            *(f"{name} {scale}" for scale in ("tensor", "vector") for name in ("int8", "e4m3", "e5m2", "int4")),
            "e5m2/e4m3 tensor",
            "e4m3/int8 vector",
            "e4m3 tensor stochastic-dy",
            "int8 vector stochastic-dy",
        ),
    )
)


def check_candidates(candidates: Iterable[str | Candidate] | None) -> tuple[Candidate, ...]:
    """The distinct candidates; the default set for None."""
    checked = DEFAULT_CANDIDATES if candidates is None else tuple(dict.fromkeys(map(Candidate.of, candidates)))
    if not checked:
        raise MetricError("name at least one candidate, such as 'e4m3 tensor' or 'int8 vector'.")
    return checked


# --- The formats of a plan as a candidate


#: Its name in rows.
PLANNED = "plan"
_UNROUNDED = QuantizerSpec("fp32")
#: The role whose quantizer rounds an operand before it reaches the product.
_ROLES = {"w": "weight", "dy": "grad_activation"}


@dataclass(frozen=True)
class Planned:
    """The quantizers that a plan gives the slots of a product, including those of the weight and of the gradient."""

    #: (slot, quantizer) of the slots that are rounded.
    slots: tuple[tuple[str, QuantizerSpec], ...]

    @classmethod
    def of(cls, plan: Plan, module: str, op: str, inside: str | None) -> Planned | None:
        """The candidate for a numbered operation; None if the plan rounds none of its operands."""
        decision = decision_for(plan.decide, module, op, inside)
        specs = []
        for slot in (slot for pair in PASSES.values() for slot in pair):
            spec = decision[slot].quantizer
            role = _ROLES.get(OPERAND_OF_SLOT[slot].tensor)
            if spec is None and role is not None:
                spec = decision[role].quantizer
            if spec is not None:
                specs.append((slot, spec))
        return cls(tuple(specs)) if specs else None

    def specs(self, pass_: str) -> tuple[QuantizerSpec, QuantizerSpec]:
        spec_of = dict(self.slots)
        left, right = PASSES[pass_]
        return spec_of.get(left, _UNROUNDED), spec_of.get(right, _UNROUNDED)

    def applies_to(self, pass_: str) -> bool:
        return any(slot in PASSES[pass_] for slot, _ in self.slots)

    def __str__(self) -> str:
        return PLANNED
