"""Candidates: what both operands of a product might be rounded to.

A product has a left and a right operand (Rasquinha & Tabak 2023, arXiv 2408.02897; the facts are in
``docs/measure.md``): x and w in fprop, dy and w in dgrad, dy and x in wgrad. A candidate gives each side a format, both
one granularity of scales, and a rounding, which may differ for the gradient.
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

#: In a candidate's words: no scale at all.
UNSCALED = "unscaled"
#: Behind a rounding in a candidate's words: of the gradient alone.
_OF_GRADIENT = "-dy"

_SCALES = ("tensor", "vector", "channel")


class Tried(Hashable, Protocol):
    """What can be tried on a product."""

    def specs(self, pass_: str) -> tuple[QuantizerSpec, QuantizerSpec]:
        """What the left and the right operand of that pass get."""
        ...

    def is_of_its_own(self, pass_: str) -> bool:
        """Whether there is anything to measure in that pass."""
        ...


@dataclass(frozen=True)
class Candidate:
    """A pair of formats with their scales and roundings.

    >>> str(Candidate("e5m2", "e4m3")), str(Candidate.of("int8 vector stochastic-dy"))
    ('e5m2/e4m3 tensor', 'int8 vector stochastic-dy')
    """

    left: str
    right: str
    #: Which elements share a scale; a vector is one that the product sums over. None: nothing is scaled.
    scale: Granularity | None = "tensor"
    rounding: Rounding = "nearest"
    #: Of dy, where it is the left operand; None: as the others.
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
        """The candidate that a text describes.

        ``FORMAT[/FORMAT] [tensor|vector|channel|unscaled] [ROUNDING] [ROUNDING-dy]``: one format is both operands'; the
        scale is the tensor's if not given, and a block format brings its own.
        """
        if isinstance(text, Candidate):
            return text
        first, *options = text.split() or [""]
        left, slash, right = first.partition("/")
        scale: Granularity | None = "tensor"
        rounding: Rounding = "nearest"
        gradient: Rounding | None = None
        known_options = (*_SCALES, UNSCALED, *ROUNDINGS, *(f"{each}{_OF_GRADIENT}" for each in ROUNDINGS))
        for word in options:
            if word in (*_SCALES, UNSCALED):
                scale = next((each for each in get_args(Granularity) if each == word), None)
            elif word.removesuffix(_OF_GRADIENT) in ROUNDINGS:
                asked = next(each for each in ROUNDINGS if each == word.removesuffix(_OF_GRADIENT))
                rounding, gradient = (rounding, asked) if word.endswith(_OF_GRADIENT) else (asked, gradient)
            else:
                raise MetricError(
                    f"a candidate such as {text!r} cannot say {word!r}; {nearest_names(word, known_options)}"
                )
        return cls(left, right if slash else left, scale, rounding, gradient)

    def specs(self, pass_: str) -> tuple[QuantizerSpec, QuantizerSpec]:
        """What the left and the right operand of that pass get."""
        of_left = self.gradient_rounding if self.gradient_rounding and has_gradient(pass_) else self.rounding
        return self._spec(self.left, of_left), self._spec(self.right, self.rounding)

    def _spec(self, name: str, rounding: Rounding) -> QuantizerSpec:
        scale = None if isinstance(get_format(name), BlockFormat) else self.scale
        return QuantizerSpec(name, scale=scale, rounding=rounding)

    def is_of_its_own(self, pass_: str) -> bool:
        """Whether it differs in that pass from the same candidate without a rounding for gradients."""
        return self.gradient_rounding is None or has_gradient(pass_)

    def __str__(self) -> str:
        parts = [self.left if self.left == self.right else f"{self.left}/{self.right}"]
        parts += [self.scale or UNSCALED]
        parts += [] if self.rounding == "nearest" else [self.rounding]
        parts += [] if self.gradient_rounding is None else [f"{self.gradient_rounding}{_OF_GRADIENT}"]
        return " ".join(parts)


def has_gradient(pass_: str) -> bool:
    """Whether the left operand of that pass is the gradient dy."""
    return OPERAND_OF_SLOT[PASSES[pass_][0]].tensor == "dy"


#: What is measured where nothing else is asked for: an integer and two floats of 8 bits and an integer of 4, with a
#: scale for each tensor and for each vector; FP8 as it is mostly used, with the gradient in E5M2; floats against
#: integer weights; and stochastic rounding of the gradient.
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


def checked_candidates(candidates: Iterable[str | Candidate] | None) -> tuple[Candidate, ...]:
    """Candidates, each once; the default set where none is given."""
    checked = DEFAULT_CANDIDATES if candidates is None else tuple(dict.fromkeys(map(Candidate.of, candidates)))
    if not checked:
        raise MetricError("name at least one candidate, such as 'e4m3 tensor' or 'int8 vector'.")
    return checked


# --- The formats that a plan gives a product, as one more candidate


#: How rows call it.
PLANNED = "plan"
#: What changes nothing.
_AS_IT_IS = QuantizerSpec("fp32")
#: The role whose quantizer an operand without one of its own has when it arrives.
_ROLES = {"w": "weight", "dy": "grad_activation"}


@dataclass(frozen=True)
class Planned:
    """What a plan decides for the slots of one product; a weight or a gradient that is rounded before counts, too."""

    #: Slot -> quantizer, of those that have one.
    slots: tuple[tuple[str, QuantizerSpec], ...]

    @classmethod
    def of(cls, plan: Plan, module: str, op: str, inside: str | None) -> Planned | None:
        """None where the plan leaves the product alone. `op` carries its number."""
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
        return spec_of.get(left, _AS_IT_IS), spec_of.get(right, _AS_IT_IS)

    def is_of_its_own(self, pass_: str) -> bool:
        return any(slot in PASSES[pass_] for slot, _ in self.slots)

    def __str__(self) -> str:
        return PLANNED
