"""The six slots of a product: what each operand is rounded to in each of its two passes, or cast to."""

from __future__ import annotations

import torch
from torch import Tensor

from bitplan.at_work.actions import PlaceAction, keeps_little
from bitplan.at_work.here import Here
from bitplan.at_work.observe import observe_amax
from bitplan.native.float8_cast import cast_float8
from bitplan.native.operands import BY_ROW, Codes, byte_of, codes_of
from bitplan.native.product import Kept
from bitplan.native.units import unit_named
from bitplan.plan import OPERANDS
from bitplan.plan.spec import QuantizerSpec
from bitplan.tracing import is_traced

#: The attribute by which a tensor of a graph in the making tells what :func:`_told_first` needs.
_REACHES = "_bitplan_reaches"


class Slots:
    """The rounding of the six slots of one product, as :class:`SlotProduct` asks for it."""

    def __init__(self, chosen: dict[str, tuple[PlaceAction, Here]], weight_key: Tensor | None) -> None:
        self.chosen = chosen
        self.weight_key = weight_key
        #: Whether x is kept as the weight's gradient wants it, rounded and packed, rather than as it came.
        self.keeps_rounded_x = "wgrad.x" in chosen and keeps_little(chosen["wgrad.x"][0])

    def round(self, slot: str, tensor: Tensor) -> Tensor:
        if slot not in self.chosen:
            return tensor
        action, here = self.chosen[slot]
        if keeps_little(action) and action.changes_nothing_in(tensor):
            return tensor  # not rounded again, so that the one packed copy serves this product, too
        return action.round(tensor.detach(), here, self.weight_key if slot.endswith(".w") else None)


class NativeSlots(Slots):
    """The same for products on low-precision units, which take elements and scales instead of rounded values."""

    def __init__(
        self,
        chosen: dict[str, tuple[PlaceAction, Here]],
        weight_key: Tensor | None,
        units: dict[str, str],
        casts_again: tuple[str, ...] = (),
        features: int = -1,
    ) -> None:
        """`features`: the axis of input and weight that the products see as features."""
        super().__init__(chosen, weight_key)
        self.units = {one: unit_named(name) for one, name in units.items()}
        self.casts_again = casts_again
        self.features = features

    def shares(self, operand: str) -> bool:
        chosen = [self.chosen[slot][0] for slot in OPERANDS[operand] if slot in self.chosen]
        return len(chosen) == 2 and chosen[0] is chosen[1]

    def kept(self, x: Tensor) -> Kept | None:
        if "wgrad.x" not in self.chosen or not x.numel():
            return None
        action, here = self.chosen["wgrad.x"]
        dtype = byte_of(action.spec)
        if dtype is None or (action.live_kind is not None and action.spec.bits is None):  # a format that may be set
            return None
        encoded, quantizer = action.encode(x, here)
        return Kept(encoded, quantizer, x, dtype)

    def codes(self, slots: list[str], tensor: Tensor, after: Tensor | None = None) -> list[Codes]:
        if len(slots) == 2 and not self._are_alike(*slots):
            return [*self.codes(slots[:1], tensor, after), *self.codes(slots[1:], tensor, after)]
        if not slots:
            return []
        action, here = self.chosen[slots[0]]
        dtype = self.units[slots[0].partition(".")[0]].dtype_of(action.spec.target)
        assert dtype is not None
        if action.is_plain_cast(tensor, dtype):
            return self._cast(slots, tensor, dtype, after)
        encoded, _ = action.encode(tensor, here, self.weight_key if slots[0].endswith(".w") else None)
        return [codes_of(encoded, dtype, self.features)] * len(slots)

    def _are_alike(self, one: str, other: str) -> bool:
        """Whether the two slots of a tensor get the same codes, with one scale."""
        action, another = self.chosen[one][0], self.chosen[other][0]
        if action is another:
            return True
        is_certain = not action.is_stochastic and not action.observes and action.live_kind is None
        return is_certain and action.spec == another.spec and action.spec.scale in (None, "tensor")

    def _cast(self, slots: list[str], tensor: Tensor, dtype: torch.dtype, after: Tensor | None) -> list[Codes]:
        """One reading of the tensor gives the layouts of all its slots."""
        action, here = self.chosen[slots[0]]
        spec = action.spec
        record, reach = action.remembered(here)
        if reach is not None and is_traced():
            reach = _told_first(tensor, spec, reach)
        gathers = action.is_delayed and record is not None and here.observing and after is None
        by_row = [slot in BY_ROW for slot in slots]
        cast = cast_float8(
            tensor.movedim(self.features, -1).reshape(-1, tensor.shape[self.features]),
            dtype,
            scaled=spec.scale is not None,
            power_of_two=spec.power_of_two,
            reach=reach,
            as_rows=any(by_row),
            as_columns=not all(by_row),
            gathers=gathers,
            after=after,
        )
        if gathers and record is not None:
            observe_amax(record, cast.tops.amax())
        return [Codes(cast.rows if is_by_row else cast.columns.t(), cast.scale) for is_by_row in by_row]


def _told_first(tensor: Tensor, spec: QuantizerSpec, reach: Tensor) -> Tensor:
    """While a graph is made: the reach that the first reader of a tensor with such a quantizer has.

    Readers of one tensor have met the same magnitudes, so theirs is the same number; as one and the same node of the
    graph it lets torch.compile see that their casts are one.
    """
    known: dict[QuantizerSpec, Tensor] = tensor.__dict__.setdefault(_REACHES, {})
    return known.setdefault(spec, reach)
