"""What a measurement says of each operand slot: how every quantizer that was tried does there, at its worst stage."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from bitplan.errors import PlanError
from bitplan.measure import Candidate, Measurement, Row
from bitplan.measure.figures import OperandFigures
from bitplan.plan.places import PASSES
from bitplan.plan.spec import QuantizerSpec

#: A configuration that is known to train: its measured level is what others are held to.
REFERENCE = Candidate.of("e4m3 tensor")
#: Of the reference's levels over all products, the share that lies below the default tau.
REFERENCE_SHARE = 0.9
#: Fused operations that a plan rounds as a whole.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class Option:
    """One quantizer in one slot."""

    spec: QuantizerSpec
    #: The median backward error with this operand alone quantised, times the root of the sums' length.
    level: float
    figures: OperandFigures


@dataclass(frozen=True)
class Slot:
    """One operand slot of one product, or of all products in a recurrent layer."""

    #: Such as ``layer3.0.conv1/conv2d.0``; of a recurrent layer ``rnn/lstm``.
    product: str
    slot: str
    options: tuple[Option, ...]
    #: The fused operation that it lies in.
    inside: str | None = None

    @property
    def elements(self) -> int:
        return self.options[0].figures.elements

    def option(self, words: str) -> Option | None:
        """The quantizer of these words, if it was tried."""
        return next((each for each in self.options if str(each.spec) == words), None)


#: Both slots of one pass.
Pair = tuple[Slot, Slot]


def pairs_of(measurement: Measurement) -> list[Pair]:
    """The two slots of every pass of every product; of several stages the worst of each quantizer counts."""
    gathered: dict[tuple[str, str], tuple[dict[str, Option], dict[str, Option]]] = {}
    insides: dict[str, str | None] = {}
    for row in measurement.rows:
        product = f"{row.module}/{row.inside}" if row.inside in RECURRENT else row.product
        insides[product] = row.inside
        sides = gathered.setdefault((product, row.pass_), ({}, {}))
        for known, spec, figures in zip(
            sides, Candidate.of(row.candidate).specs(row.pass_), (row.left, row.right), strict=True
        ):
            option = Option(spec, figures.median * math.sqrt(max(row.nonzero, 1.0)), figures)
            before = known.get(figures.quantizer)
            if before is None or not option.level <= before.level:  # NaN is worst of all
                known[figures.quantizer] = option
    pairs = []
    for (product, pass_), sides in gathered.items():
        left, right = (
            Slot(product, slot, tuple(side.values()), insides[product])
            for slot, side in zip(PASSES[pass_], sides, strict=True)
        )
        pairs.append((left, right))
    return pairs


def default_tau(measurement: Measurement) -> float:
    """The level below which the reference stays in nine of ten products, passes and stages."""
    levels = sorted(row.level for row in reference_rows(measurement.rows) if math.isfinite(row.level))
    if not levels:
        raise PlanError(f"tau follows from {REFERENCE}, which was not measured: measure it, too, or give tau.")
    return levels[min(math.ceil(REFERENCE_SHARE * len(levels)), len(levels)) - 1]


def reference_rows(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row.candidate == str(REFERENCE)]
