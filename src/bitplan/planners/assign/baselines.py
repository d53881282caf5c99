"""What assignments are compared with.

==================  ===========================================================================================
``fp32``            nothing is rounded
``all-high``        everything at the highest level
``uniform-low``     everything at the lowest level, first and last layers too
``operator``        HFP8 (Sun et al. 2019): the operands of products are low in both passes, which are the parameters
                    of products, every v that a product reads, and dv at a product's output. High stay the data, all
                    tensors of the first product, the last group, and what that group reads
``operator-prime``  what products read *and* what they return is low in both passes, with the same exceptions. Lee,
                    Sharma & Aiken 2023 name this baseline after automatic mixed precision and their code does not
                    define it: this is **our reading**
==================  ===========================================================================================
"""

from __future__ import annotations

from bitplan.errors import PlanError, nearest_names
from bitplan.planners.assign.assignment import Assignment
from bitplan.planners.assign.groups import Account, Unit, is_product, place_of
from bitplan.planners.assign.levels import Formats

BASELINES = ("fp32", "all-high", "uniform-low", "operator", "operator-prime")
#: What is said beside a baseline's name.
REMARKS = {"operator-prime": "our reading: inputs and outputs of products low in both passes"}


def baseline(name: str, account: Account, formats: Formats) -> Assignment:
    """The assignment of that name."""
    if name not in BASELINES:
        raise PlanError(f"there is no baseline {name!r}; {nearest_names(name, BASELINES)}")
    story = {"baseline": name, "formats": formats.name}
    if name in REMARKS:
        story["remark"] = REMARKS[name]
    if name == "fp32":
        return Assignment(account, formats, None, story=story)
    if name in ("all-high", "uniform-low"):
        level = 0 if name == "all-high" else formats.low
        groups = (level,) * len(account.groups)
        return Assignment(account, formats, (level,) * len(account.units), groups, story)
    low = _LowUnits(account, with_both_sides=name == "operator-prime")
    levels = tuple(formats.low if low.has(unit) else 0 for unit in account.units)
    return Assignment(account, formats, levels, story=story)


class _LowUnits:
    """Which units are low because of the products they belong to."""

    def __init__(self, account: Account, with_both_sides: bool) -> None:
        operations, group_of = account.operations, account.group_of
        products = [number for number, operation in enumerate(operations) if is_product(operation)]
        last = max(group_of)
        in_last = {number for number, group in enumerate(group_of) if group == last}
        spared = {products[0]} | in_last | {source for number in in_last for source in operations[number].inputs}
        read = {source for number in products for source in operations[number].inputs}
        made = set(products)
        forward = (read | made if with_both_sides else read) - spared
        backward = (read | made if with_both_sides else made) - spared
        self.forward = {place_of(operations[number]) for number in forward}
        self.backward = {place_of(operations[number]) for number in backward}
        self.weighted = {place_of(operations[number]) for number in made - {products[0]} - in_last}

    def has(self, unit: Unit) -> bool:
        places = {
            "input": set[tuple[str, str]](),
            "activation": self.forward,
            "grad_activation": self.backward,
            "weight": self.weighted,
        }[unit.kind]
        return all(place in places for place in unit.places)
