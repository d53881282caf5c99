"""From precisions of units to the rules of a plan: few, readable, and exact.

Everything gets the commonest precision by one rule for all. Then whole modules are named where all their operations
agree, and single operations where they do not. What comes out is compared with what was meant, place by place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bitplan.capture.decompositions import decision_for, inner_operations
from bitplan.errors import PlanError
from bitplan.numerics.formats import BlockFormat
from bitplan.planners.assign.groups import Account, place_of
from bitplan.planners.assign.levels import Formats
from bitplan.plans import KEEP, Plan, QuantizerSpec, Rule, compile_match
from bitplan.plans.quantizer_use import Use
from bitplan.plans.spec import Promotion

#: The role of each kind of unit.
_ROLES = ("weight", "activation", "grad_activation")
#: (weight, activation, grad_activation) -> level; None where the operation has no such tensor.
Wanted = tuple[int | None, ...]
_NOTHING: Wanted = (None, None, None)


@dataclass(frozen=True)
class _Entry:
    """A module, some of its operations or all, and what they get."""

    path: str
    #: Nothing here means every operation, also of modules beneath.
    ops: tuple[str, ...]
    wanted: Wanted
    #: Entries that name numbered operations come after those for all of that name.
    comes_late: bool = False


def rules_of(
    account: Account, formats: Formats, levels: Sequence[int], promotion: float | None = None
) -> tuple[dict[str, QuantizerSpec], list[Rule]]:
    """(names, rules) of a plan in which each unit has the level given.

    :param promotion: the share from which on a low tensor is promoted to the highest level; None: none is.
    """
    return _Writing(account, formats, levels, promotion).written()


class _Writing:
    def __init__(self, account: Account, formats: Formats, levels: Sequence[int], promotion: float | None) -> None:
        self.account, self.formats, self.levels = account, formats, levels
        self.wanted = _wanted(account, levels)
        self.trained = {
            place_of(operation)
            for operation in account.operations
            if any(tensor.requires_grad for _, tensor in operation.parameters)
        }
        self.base = _agreed(self.wanted.values()) or (0, 0, 0)
        self.names, self.specs = _named(formats, promotion)

    def written(self) -> tuple[dict[str, QuantizerSpec], list[Rule]]:
        rules = [self._rule(("*",), (), self.base, list(self.wanted), is_base=True)]
        entries = [*self._entries(""), *self._openings()]
        together: dict[tuple[bool, Wanted, tuple[str, ...]], list[str]] = {}
        for entry in sorted(entries, key=lambda entry: entry.comes_late):
            paths = together.setdefault((entry.comes_late, entry.wanted, entry.ops), [])
            paths.append(entry.path)
        for (comes_late, wanted, ops), paths in together.items():
            match = tuple(self._exact(path, ops) if ops else path for path in dict.fromkeys(paths))
            meant = Rule(match, ops, keep=True)
            speaks_of = [place for place in self.wanted if compile_match(meant)(*place)]
            rules.append(self._rule(match, ops, wanted, speaks_of, says_all=comes_late))
        written_rules = [rule for rule in [*rules, *self._of_data()] if rule is not None]
        used = {use for rule in written_rules for _, use in rule.quantizers if isinstance(use, str)}
        promotions = [spec.promote for name, spec in self.names.items() if name in used and spec.promote is not None]
        used |= {promotion.to for promotion in promotions if isinstance(promotion.to, str)}
        names = {name: spec for name, spec in self.names.items() if name in used}
        self._check(Plan(tuple(written_rules), quantizers=names))
        return names, written_rules

    # --- which modules, which operations ---

    def _entries(self, path: str) -> list[_Entry]:
        beneath = {place: want for place, want in self.wanted.items() if _lies_in(place[0], path)}
        agreed = _agreed(beneath.values())
        if agreed is not None and path:
            return [] if _fits(agreed, self.base) else [_Entry(path, (), agreed)]
        own = {place: want for place, want in beneath.items() if place[0] == path}
        children = dict.fromkeys(_child(place[0], path) for place in beneath if place[0] != path)
        return [*self._of_operations(path, own), *(entry for child in children for entry in self._entries(child))]

    def _of_operations(
        self, path: str, own: Mapping[tuple[str, str], Wanted], named: Iterable[str] | None = None
    ) -> list[_Entry]:
        """Entries for the operations of one module: all of a name together, and those that differ by their numbers.

        :param named: speak of these operations only, and also where the rule for all says enough.
        """
        by_name: dict[str, dict[str, Wanted]] = {}
        for (_, op), want in own.items():
            by_name.setdefault(op.partition(".")[0], {})[op] = want
        alike: dict[Wanted, list[str]] = {}
        apart: dict[Wanted, list[str]] = {}
        for name, wants in by_name.items():
            if named is not None and name not in named:
                continue
            common = Counter(wants.values()).most_common(1)[0][0]
            if named is not None or not _fits(common, self.base):
                alike.setdefault(common, []).append(name)
            for op, want in wants.items():
                if want != common:
                    apart.setdefault(want, []).append(op)
        return [
            *(_Entry(path, tuple(ops), want) for want, ops in alike.items()),
            *(_Entry(path, tuple(ops), want, comes_late=True) for want, ops in apart.items()),
        ]

    def _openings(self) -> list[_Entry]:
        """What is written out in a plan's own account must be named there, or it stays whole."""
        entries: list[_Entry] = []
        opened = dict.fromkeys((op.module, op.inside) for op in self.account.operations if op.inside is not None)
        for path, inside in opened:
            own = {place: want for place, want in self.wanted.items() if place[0] == path}
            entries += self._of_operations(path, own, named=inner_operations(inside))
        return entries

    def _exact(self, path: str, ops: tuple[str, ...]) -> str:
        """A pattern for this module's own operations alone."""
        plain = path or "*"
        meant = Rule((plain,), ops, keep=True)
        strangers = [place for place in self.wanted if place[0] != path and compile_match(meant)(*place)]
        if not strangers:
            return plain
        return f"re:{re.escape(path)}" if path else "re:^$"

    # --- what they get ---

    def _rule(
        self,
        match: tuple[str, ...],
        ops: tuple[str, ...],
        wanted: Wanted,
        places: Sequence[tuple[str, str]],
        is_base: bool = False,
        says_all: bool = False,
    ) -> Rule | None:
        uses: dict[str, Use] = {}
        for position, role in enumerate(_ROLES):
            number = wanted[position]
            is_there = any(self.wanted[place][position] is not None for place in places)
            if number is None or not is_there or (number == self.base[position] and not (is_base or says_all or ops)):
                continue
            uses[role] = self.specs[number][role]
            if role == "weight" and any(place in self.trained for place in places):
                gradient = self.specs[number]["grad_weight"]
                if is_base or self.base[0] is None or gradient != self.specs[self.base[0]]["grad_weight"]:
                    uses["grad_weight"] = gradient
        if is_base:
            uses = {role: use for role, use in uses.items() if use != KEEP}
        if not uses:
            return None
        grad_at = self.formats.grad_at if "grad_activation" in uses else None
        return Rule(match, ops, tuple(uses.items()), grad_at=grad_at)

    def _of_data(self) -> list[Rule]:
        """Data is rounded where products read it."""
        together: dict[tuple[int, str], list[str]] = {}
        for unit, number in zip(self.account.units, self.levels, strict=True):
            if unit.kind == "input" and self.specs[number]["activation"] != KEEP:
                for module, op in unit.places:
                    together.setdefault((number, op), []).append(self._exact(module, (op,)))
        return [
            Rule(tuple(dict.fromkeys(paths)), (op,), (("x", self.specs[number]["activation"]),))
            for (number, op), paths in together.items()
        ]

    # --- is it so? ---

    def _check(self, plan: Plan) -> None:
        inside = {place_of(operation): operation.inside for operation in self.account.operations}
        for place, wants in self.wanted.items():
            decision = decision_for(plan.decide, *place, inside[place])
            for role, number in zip(_ROLES, wants, strict=True):
                if number is None:
                    continue
                meant = getattr(self.formats.levels[number], role)
                decided = decision[role].quantizer
                if (None if decided is None else replace(decided, promote=None)) != meant:
                    raise PlanError(
                        f"the plan would give {'/'.join(place)}:{role} {decision[role].words} in place of {meant}; "
                        f"this is a mistake of bitplan's: please report it."
                    )


def _wanted(account: Account, levels: Sequence[int]) -> dict[tuple[str, str], Wanted]:
    """What each operation gets, in the order they run."""
    found: dict[tuple[str, str], list[int | None]] = {
        place_of(operation): list(_NOTHING) for operation in account.operations
    }
    for unit, number in zip(account.units, levels, strict=True):
        if unit.kind != "input":
            for place in unit.places:
                found[place][_ROLES.index(unit.kind)] = number
    return {place: tuple(wants) for place, wants in found.items()}


def _agreed(wants: Iterable[Wanted]) -> Wanted | None:
    """What all of them get, where none contradicts another."""
    merged: list[int | None] = list(_NOTHING)
    for want in wants:
        for position, number in enumerate(want):
            if number is None:
                continue
            if merged[position] not in (None, number):
                return None
            merged[position] = number
    return tuple(merged)


def _fits(want: Wanted, base: Wanted) -> bool:
    """Whether everything wanted is what the rule for all gives."""
    return all(number is None or number == base_level for number, base_level in zip(want, base, strict=True))


def _lies_in(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def _child(module: str, path: str) -> str:
    """The module beneath `path` that `module` lies in.

    >>> _child("layer1.0.conv1", "layer1"), _child("layer1.0", "")
    ('layer1.0', 'layer1')
    """
    rest = module.removeprefix(f"{path}.") if path else module
    name = rest.partition(".")[0]
    return f"{path}.{name}" if path else name


def _promoted(spec: QuantizerSpec, high: str | QuantizerSpec, share: float) -> QuantizerSpec:
    """Where a scale follows the data nothing overflows, and what becomes zero is watched instead."""
    is_scaled = spec.scale is not None or isinstance(spec.target, BlockFormat)
    return replace(spec, promote=Promotion(high, underflow=share) if is_scaled else Promotion(high, overflow=share))


def _named(
    formats: Formats, promotion: float | None
) -> tuple[dict[str, QuantizerSpec], list[dict[str, str | QuantizerSpec]]]:
    """(name -> quantizer, for each level what stands in a rule); plain formats need no name."""
    names: dict[str, QuantizerSpec] = {}
    uses: list[dict[str, str | QuantizerSpec]] = []
    suffixes = {"activation": "", "weight": "_weight", "grad_activation": "_gradient", "grad_weight": "_grad_weight"}
    for number, level in enumerate(formats.levels):
        lead = "high" if number == 0 else "low" if number == formats.low else f"middle{number}"
        named: dict[str, str | QuantizerSpec] = {}
        for role, suffix in suffixes.items():
            spec: QuantizerSpec | None = getattr(level, role)
            if spec is not None and number > 0 and promotion is not None and role in ("activation", "weight"):
                spec = _promoted(spec, uses[0][role], promotion)
            if spec is None:
                named[role] = KEEP
            elif isinstance(spec.to_data(), str):
                named[role] = spec
            else:
                existing = next((name for name, other in names.items() if other == spec), None)
                named[role] = existing or f"{lead}{suffix}"
                names[existing or f"{lead}{suffix}"] = spec
        uses.append(named)
    return names, uses
