"""Turn the levels of units into the rules of a plan.

One rule for all operations gives the most common levels. Further rules name whole modules where all their operations
agree, and single operations where they do not. The decisions of the finished plan are compared with the levels.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bitplan.capture.decompositions import decision_for, inner_operations
from bitplan.errors import PlanError
from bitplan.planners.assign.groups import OperationKey, StepTensors, operation_key
from bitplan.planners.assign.levels import Formats, is_scaled
from bitplan.plans import KEEP, Plan, QuantizerSpec, Rule, compile_match
from bitplan.plans.quantizer_use import Use
from bitplan.plans.spec import Promotion

_ROLES = ("weight", "activation", "grad_activation")
#: The levels of an operation's weight, activation and grad_activation; None where it has no such tensor.
RoleLevels = tuple[int | None, ...]
_NO_LEVELS: RoleLevels = (None, None, None)


@dataclass(frozen=True)
class _Entry:
    """A module, all or some of its operations, and their levels."""

    path: str
    #: Empty: all operations, also those of submodules.
    ops: tuple[str, ...]
    levels: RoleLevels
    #: Whether `ops` have numbers. Rules for numbered operations come after those for all operations of a name.
    is_numbered: bool = False


def write_rules(
    step_tensors: StepTensors, formats: Formats, levels: Sequence[int], promotion: float | None = None
) -> tuple[dict[str, QuantizerSpec], list[Rule]]:
    """The named quantizers and the rules of a plan that gives each unit its level.

    :param promotion: the share of values at which a low tensor is promoted to the highest level; None: never.
    """
    return _RuleWriter(step_tensors, formats, levels, promotion).write()


class _RuleWriter:
    def __init__(
        self, step_tensors: StepTensors, formats: Formats, levels: Sequence[int], promotion: float | None
    ) -> None:
        self.step_tensors, self.formats, self.unit_levels = step_tensors, formats, levels
        self.op_levels = _levels_by_operation(step_tensors, levels)
        self.trained = {
            operation_key(operation)
            for operation in step_tensors.operations
            if any(tensor.requires_grad for _, tensor in operation.parameters)
        }
        self.base = _merge_levels(self.op_levels.values()) or (0, 0, 0)
        self.names, self.specs = _name_quantizers(formats, promotion)

    def write(self) -> tuple[dict[str, QuantizerSpec], list[Rule]]:
        rules = [self._make_rule(("*",), (), self.base, list(self.op_levels), is_base=True)]
        entries = [*self._module_entries(""), *self._decomposed_entries()]
        paths_by_rule: dict[tuple[bool, RoleLevels, tuple[str, ...]], list[str]] = {}
        for entry in sorted(entries, key=lambda entry: entry.is_numbered):
            paths_by_rule.setdefault((entry.is_numbered, entry.levels, entry.ops), []).append(entry.path)
        for (is_numbered, levels, ops), paths in paths_by_rule.items():
            match = tuple(self._exact_pattern(path, ops) if ops else path for path in dict.fromkeys(paths))
            matched = self._matched(match, ops)
            rules.append(self._make_rule(match, ops, levels, matched, is_complete=is_numbered))
        operand_rules = [*self._data_rules(), *self._part_rules()]
        effective_rules = [rule for rule in [*rules, *operand_rules] if rule is not None]
        used = {use for rule in effective_rules for _, use in rule.quantizers if isinstance(use, str)}
        promotions = [spec.promote for name, spec in self.names.items() if name in used and spec.promote is not None]
        used |= {promotion.to for promotion in promotions if isinstance(promotion.to, str)}
        names = {name: spec for name, spec in self.names.items() if name in used}
        self._check(Plan(tuple(effective_rules), quantizers=names))
        return names, effective_rules

    # --- modules and operations that rules match ---

    def _module_entries(self, path: str) -> list[_Entry]:
        inside = {key: levels for key, levels in self.op_levels.items() if _is_inside(key[0], path)}
        common = _merge_levels(inside.values())
        if common is not None and path:
            return [] if _agrees_with_base(common, self.base) else [_Entry(path, (), common)]
        own = {key: levels for key, levels in inside.items() if key[0] == path}
        children = dict.fromkeys(_child_path(key[0], path) for key in inside if key[0] != path)
        return [
            *self._operation_entries(path, own),
            *(entry for child in children for entry in self._module_entries(child)),
        ]

    def _operation_entries(
        self, path: str, own: Mapping[OperationKey, RoleLevels], only: Iterable[str] | None = None
    ) -> list[_Entry]:
        """Entries for a module's own operations: by name, and by number for those that differ.

        :param only: entries for these names only, also where they agree with the base rule.
        """
        by_name: dict[str, dict[str, RoleLevels]] = {}
        for (_, op), levels in own.items():
            by_name.setdefault(op.partition(".")[0], {})[op] = levels
        by_common_levels: dict[RoleLevels, list[str]] = {}
        by_other_levels: dict[RoleLevels, list[str]] = {}
        for name, numbered in by_name.items():
            if only is not None and name not in only:
                continue
            common = Counter(numbered.values()).most_common(1)[0][0]
            if only is not None or not _agrees_with_base(common, self.base):
                by_common_levels.setdefault(common, []).append(name)
            for op, levels in numbered.items():
                if levels != common:
                    by_other_levels.setdefault(levels, []).append(op)
        return [
            *(_Entry(path, tuple(ops), levels) for levels, ops in by_common_levels.items()),
            *(_Entry(path, tuple(ops), levels, is_numbered=True) for levels, ops in by_other_levels.items()),
        ]

    def _decomposed_entries(self) -> list[_Entry]:
        """Operations of a decomposition need a rule that names them; without one it is not decomposed."""
        entries: list[_Entry] = []
        operations = self.step_tensors.operations
        decomposed = dict.fromkeys((op.module, op.inside) for op in operations if op.inside is not None)
        for path, inside in decomposed:
            own = {key: levels for key, levels in self.op_levels.items() if key[0] == path}
            entries += self._operation_entries(path, own, only=inner_operations(inside))
        return entries

    def _exact_pattern(self, path: str, ops: tuple[str, ...]) -> str:
        """A pattern that matches these operations of this module and of no other."""
        pattern = path or "*"
        if all(module == path for module, _ in self._matched((pattern,), ops)):
            return pattern
        return f"re:{re.escape(path)}" if path else "re:^$"

    def _matched(self, match: tuple[str, ...], ops: tuple[str, ...]) -> list[OperationKey]:
        is_match = compile_match(Rule(match, ops, keep=True))
        return [key for key in self.op_levels if is_match(*key)]

    # --- quantizers of a rule ---

    def _make_rule(
        self,
        match: tuple[str, ...],
        ops: tuple[str, ...],
        levels: RoleLevels,
        matched: Sequence[OperationKey],
        is_base: bool = False,
        is_complete: bool = False,
    ) -> Rule | None:
        """A rule for the operations in `matched`; None if it would change nothing.

        :param is_complete: also name the quantizers that equal those of the base rule.
        """
        uses: dict[str, Use] = {}
        for position, role in enumerate(_ROLES):
            level = levels[position]
            is_present = any(self.op_levels[key][position] is not None for key in matched)
            is_redundant = level == self.base[position] and not (is_base or is_complete or ops)
            if level is None or not is_present or is_redundant:
                continue
            uses[role] = self.specs[level][role]
            if role == "weight" and any(key in self.trained for key in matched):
                gradient = self.specs[level]["grad_weight"]
                if is_base or self.base[0] is None or gradient != self.specs[self.base[0]]["grad_weight"]:
                    uses["grad_weight"] = gradient
        if is_base:
            uses = {role: use for role, use in uses.items() if use != KEEP}
        if not uses:
            return None
        grad_at = self.formats.grad_at if "grad_activation" in uses else None
        return Rule(match, ops, tuple(uses.items()), grad_at=grad_at)

    def _data_rules(self) -> list[Rule]:
        """Data is rounded as the ``x`` operand of the products that read it."""
        paths_by_rule: dict[tuple[int, str], list[str]] = {}
        for unit, level in zip(self.step_tensors.units, self.unit_levels, strict=True):
            if unit.kind == "input" and self.specs[level]["activation"] != KEEP:
                for module, op in unit.operations:
                    paths_by_rule.setdefault((level, op), []).append(self._exact_pattern(module, (op,)))
        return [
            Rule(tuple(dict.fromkeys(paths)), (op,), (("x", self.specs[level]["activation"]),))
            for (level, op), paths in paths_by_rule.items()
        ]

    def _part_rules(self) -> list[Rule]:
        """A part of a split that is lower than the whole is rounded as an operand of the products that read it."""
        paths_by_rule: dict[tuple[int, str, str], list[str]] = {}
        for unit, level in zip(self.step_tensors.units, self.unit_levels, strict=True):
            if unit.kind == "part" and unit.whole is not None and level > self.unit_levels[unit.whole]:
                for (module, op), operand in zip(unit.operations, unit.operands, strict=True):
                    path = self._exact_pattern(module, (op,))
                    paths_by_rule.setdefault((level, op, operand), []).append(path)
        return [
            Rule(tuple(dict.fromkeys(paths)), (op,), ((operand, self.specs[level]["activation"]),))
            for (level, op, operand), paths in paths_by_rule.items()
        ]

    def _check(self, plan: Plan) -> None:
        """Compare the plan's decisions with the levels."""
        inside = {operation_key(operation): operation.inside for operation in self.step_tensors.operations}
        for key, levels in self.op_levels.items():
            decision = decision_for(plan.decide, *key, inside[key])
            for role, level in zip(_ROLES, levels, strict=True):
                if level is None:
                    continue
                expected = getattr(self.formats.levels[level], role)
                decided = decision[role].quantizer
                if (None if decided is None else replace(decided, promote=None)) != expected:
                    raise PlanError(
                        f"the plan would give {'/'.join(key)}:{role} {decision[role].words} instead of {expected}; "
                        f"this is a bug in bitplan: please report it."
                    )


def _levels_by_operation(step_tensors: StepTensors, unit_levels: Sequence[int]) -> dict[OperationKey, RoleLevels]:
    """The levels of each operation, in execution order."""
    op_levels: dict[OperationKey, list[int | None]] = {
        operation_key(operation): list(_NO_LEVELS) for operation in step_tensors.operations
    }
    for unit, level in zip(step_tensors.units, unit_levels, strict=True):
        if unit.kind in _ROLES:
            for key in unit.operations:
                op_levels[key][_ROLES.index(unit.kind)] = level
    return {key: tuple(levels) for key, levels in op_levels.items()}


def _merge_levels(op_levels: Iterable[RoleLevels]) -> RoleLevels | None:
    """The levels that all operations share; None if two of them differ."""
    merged: list[int | None] = list(_NO_LEVELS)
    for levels in op_levels:
        for position, level in enumerate(levels):
            if level is None:
                continue
            if merged[position] not in (None, level):
                return None
            merged[position] = level
    return tuple(merged)


def _agrees_with_base(levels: RoleLevels, base: RoleLevels) -> bool:
    return all(level is None or level == base_level for level, base_level in zip(levels, base, strict=True))


def _is_inside(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def _child_path(module: str, path: str) -> str:
    """The direct child of `path` that contains `module`.

    >>> _child_path("layer1.0.conv1", "layer1"), _child_path("layer1.0", "")
    ('layer1.0', 'layer1')
    """
    prefix = f"{path}." if path else ""
    return prefix + module.removeprefix(prefix).partition(".")[0]


def _add_promotion(spec: QuantizerSpec, high: str | QuantizerSpec, share: float) -> QuantizerSpec:
    """Promote on underflow where scales prevent overflow, otherwise on overflow."""
    promotion = Promotion(high, underflow=share) if is_scaled(spec) else Promotion(high, overflow=share)
    return replace(spec, promote=promotion)


def _name_quantizers(
    formats: Formats, promotion: float | None
) -> tuple[dict[str, QuantizerSpec], list[dict[str, str | QuantizerSpec]]]:
    """(name -> quantizer, the entries of a rule for each level); plain formats need no name."""
    names: dict[str, QuantizerSpec] = {}
    specs: list[dict[str, str | QuantizerSpec]] = []
    suffixes = {"activation": "", "weight": "_weight", "grad_activation": "_gradient", "grad_weight": "_grad_weight"}
    for number, level in enumerate(formats.levels):
        prefix = "high" if number == 0 else "low" if number == formats.low else f"middle{number}"
        level_specs: dict[str, str | QuantizerSpec] = {}
        for role, suffix in suffixes.items():
            spec: QuantizerSpec | None = getattr(level, role)
            if spec is not None and number > 0 and promotion is not None and role in ("activation", "weight"):
                spec = _add_promotion(spec, specs[0][role], promotion)
            if spec is None:
                level_specs[role] = KEEP
            elif isinstance(spec.to_data(), str):
                level_specs[role] = spec
            else:
                name = next((name for name, named in names.items() if named == spec), f"{prefix}{suffix}")
                level_specs[role] = name
                names[name] = spec
        specs.append(level_specs)
    return names, specs
