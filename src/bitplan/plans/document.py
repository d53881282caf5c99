"""The plan itself: ordered rules over named quantizers, what they decide for an operation, and its texts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from bitplan.errors import PlanError
from bitplan.files import write_whole
from bitplan.numerics.formats import register_format, registered_format
from bitplan.numerics.wire_format import ROLES
from bitplan.plans.code import CodeReference, not_allowed
from bitplan.plans.communication import Communication
from bitplan.plans.execution import ExecutionOptions, execution_options
from bitplan.plans.fields import Anything
from bitplan.plans.frozen import FrozenSpec
from bitplan.plans.match import KEYS, OPERANDS, PASSES, PLACES, GradAt, Matcher, compile_match
from bitplan.plans.presets import is_preset_name
from bitplan.plans.quantizer_use import (
    Choosing,
    Names,
    OverTime,
    Switch,
    Use,
    leaves,
    map_quantizers,
    over_time,
    switches,
    use_data,
    with_imported_function,
    written_quantizers,
)
from bitplan.plans.schedules import Position, Schedule
from bitplan.plans.spec import KEEP, OptimizerRule, QuantizerSpec, Rule, check_name, check_quantizer_name
from bitplan.plans.tree import tree_from_data, yaml_text
from bitplan.tables import Table

if TYPE_CHECKING:
    from bitplan.integrations.export import Export

#: The case of each switch that is at work, and perhaps the bits of each schedule.
Phase = tuple[int, ...]

#: The version of the plan language that this package reads and writes.
VERSION = 1


@dataclass(frozen=True)
class Choice:
    """What one place gets, and which rule said so."""

    #: None: the place is left alone. Where the whole quantizer changes over time: the first that is not None.
    quantizer: QuantizerSpec | None = None
    #: The index in :attr:`Plan.all_rules` of the rule that spoke last; None where no rule spoke.
    rule: int | None = None
    #: The name it has in the plan's `quantizers`; None where the rule spells it out.
    name: str | None = None
    #: Slots of one operation with the same share get one tensor, rounded once; None where nothing is shared.
    share: str | None = None
    #: Where the whole quantizer changes over time: the whole story in words.
    over_time: str | None = None

    @property
    def words(self) -> str | None:
        """What the place gets, in one line; None where it is left alone."""
        return self.over_time or (None if self.quantizer is None else str(self.quantizer))


@dataclass(frozen=True)
class Decision:
    """What every place of one operation gets: ``decision["fprop.x"]``."""

    choices: Mapping[str, Choice]
    #: Where ``grad_activation`` rounds.
    grad_at: GradAt = "producer"
    #: Whether constants, such as rotary angles, are rounded like activations.
    constants: bool = False

    def __getitem__(self, place: str) -> Choice:
        return self.choices[place]

    @property
    def shared(self) -> dict[str, str]:
        """Operand -> the slot whose quantizer rounds it once for both of its products."""
        shares = {operand: [self[slot].share for slot in pair] for operand, pair in OPERANDS.items()}
        return {
            operand: OPERANDS[operand][0] for operand, (first, second) in shares.items() if first and first == second
        }

    def without(self, places: Iterable[str]) -> Decision:
        """The same with these places left alone."""
        left_alone = {place: replace(self[place], quantizer=None, share=None, over_time=None) for place in places}
        return replace(self, choices={**self.choices, **left_alone})

    @property
    def changes_nothing(self) -> bool:
        return all(choice.quantizer is None for choice in self.choices.values())


#: ``chunked``: the head's product and the cross-entropy are computed in chunks of tokens, and logits are not returned.
LOSSES = ("chunked", "whole")


@dataclass(frozen=True)
class Plan:
    """Which tensors of a training run get which number format.

    >>> rules = [{"match": "*", "weight": "e3m2"}, {"match": "fc", "keep": True}]
    >>> plan = Plan.from_dict({"version": 1, "rules": rules})
    >>> [str(plan.decide(path, op)["weight"].quantizer) for path, op in [("conv1", "conv2d"), ("fc", "linear")]]
    ['e3m2', 'None']
    """

    #: The plan's own rules; those of what it extends come first, in :attr:`all_rules`.
    rules: tuple[Rule, ...] = ()
    quantizers: Mapping[str, Use] = field(default_factory=dict)
    #: A file or a preset, as written; `base` is the plan that was found there.
    extends: str | None = None
    base: Plan | None = None
    name: str | None = None
    description: str | None = None
    #: Who or what made the plan: kept, never interpreted.
    made_by: str | Mapping[str, Any] | None = None
    version: int = VERSION
    #: Name -> how the bits of the quantizers that name it move.
    schedules: Mapping[str, Schedule] = field(default_factory=dict)
    #: What the optimizer's state is kept in; the plan's own replaces the base's.
    optimizer: OptimizerRule | None = None
    #: How the plan is computed where ``attach()`` does not say; the plan's own replaces the base's. None: emulated.
    execution: ExecutionOptions | None = None
    #: How the loss of a language model is computed: one of :data:`LOSSES`; the plan's own replaces the base's.
    loss: str | None = None
    #: The formats in which processes exchange weights and gradients; the plan's own replaces the base's.
    communication: Communication | None = None
    #: The file it was loaded from.
    origin: Path | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise PlanError(f"this bitplan knows plans of version {VERSION}, not {self.version!r}.")
        if (self.extends is None) != (self.base is None):
            raise PlanError("extends names the plan that base holds: give both or neither.")
        object.__setattr__(self, "quantizers", dict(self.quantizers))
        object.__setattr__(self, "schedules", dict(self.schedules))
        if self.execution is not None:
            object.__setattr__(self, "execution", execution_options(self.execution))
        if self.loss not in (None, *LOSSES):
            raise PlanError(f"loss is {' or '.join(LOSSES)}, not {self.loss!r}.")
        for name in self.schedules:
            check_name(name)
        if self.made_by is not None:
            # A copy of plain values, so that what can be made can also be written.
            object.__setattr__(self, "made_by", Anything("").read(tree_from_data(self.made_by, "made_by")))
        for name, use in self.quantizers.items():
            check_quantizer_name(name)
            self._check(use, f"quantizers.{name}")
        for index, rule in enumerate(self.all_rules):
            for key, use in rule.quantizers:
                self._check(use, f"{rule.where or f'rules[{index}]'}.{key}", key)

    @cached_property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules that count, in order: the base's, then the plan's own."""
        return (*self.base.all_rules, *self.rules) if self.base else self.rules

    @cached_property
    def has_selectors(self) -> bool:
        """Whether a rule chooses tensors by what they are: the rules must then be expanded for a model."""
        return any(rule.has_selectors for rule in self.all_rules)

    @cached_property
    def all_quantizers(self) -> dict[str, Use]:
        """Every name that rules may use. The plan's own replace the base's, in the base's rules too."""
        return {**(self.base.all_quantizers if self.base else {}), **self.quantizers}

    @cached_property
    def all_schedules(self) -> dict[str, Schedule]:
        """Every schedule that quantizers may name. The plan's own replace the base's."""
        return {**(self.base.all_schedules if self.base else {}), **self.schedules}

    @cached_property
    def optimizer_rule(self) -> OptimizerRule | None:
        """What counts for the optimizer's state; None where it is left alone."""
        rule = self.optimizer or (self.base.optimizer_rule if self.base else None)
        return None if rule is None or rule.state == KEEP else rule

    @property
    def declared_execution(self) -> ExecutionOptions | None:
        """The execution that the plan, or else its base, names; None where neither does."""
        return self.execution or (self.base.declared_execution if self.base else None)

    @cached_property
    def names(self) -> Names:
        """What every name of the plan stands for."""
        return Names(self.all_quantizers, self.all_schedules)

    @cached_property
    def _matchers(self) -> tuple[Matcher, ...]:
        for rule in self.all_rules:
            if rule.has_selectors:
                raise PlanError(
                    f"{rule.where or 'a rule'}: the tensors that are {rule.selection} are known from a model's "
                    f"operations only: expand the plan with bitplan.capture.selectors.expand_selectors() first."
                )
        return tuple(map(compile_match, self.all_rules))

    def quantizer(self, use: Use) -> QuantizerSpec | None:
        """The quantizer that stands behind a name; None for ``keep``. Over time: the first that is not None."""
        return next((spec for spec in leaves(use, self.names) if spec is not None), None)

    def _check(self, use: Use, where: str, key: str = "") -> None:
        try:
            check_use(use, self.names, key)
        except PlanError as error:
            raise PlanError(f"{where}: {error}") from None

    def decide(self, module: str, op: str) -> Decision:
        """What the rules, later ones over earlier ones and place by place, say of `op` in the module at that path.

        The same object wherever the same rules match.
        """
        matching = tuple(index for index, matches in enumerate(self._matchers) if matches(module, op))
        if matching not in self._decisions:
            self._decisions[matching] = self._decide(matching)
        return self._decisions[matching]

    @cached_property
    def _decisions(self) -> dict[tuple[int, ...], Decision]:
        """Indices of the rules that match -> what they decide."""
        return {}

    def _decide(self, matching: tuple[int, ...]) -> Decision:
        choices = dict.fromkeys(PLACES, Choice())
        turns: dict[str, Any] = {}
        grad_at: GradAt = "producer"
        constants = False
        for index in matching:
            rule = self.all_rules[index]
            if rule.keep:
                choices, turns = dict.fromkeys(PLACES, Choice(None, index)), {}
            constants = not rule.keep and (constants or rule.constants)
            for key, use in rule.quantizers:
                spec = self.quantizer(use)
                share = f"{key} of rules[{index}]" if key in OPERANDS and spec else None
                name = use if isinstance(use, str) and use in self.all_quantizers else None
                story = over_time(use, self.names)
                choices |= dict.fromkeys(KEYS[key], Choice(spec, index, name, share, story))
                turns |= dict.fromkeys(KEYS[key], _rotation_of(use, self.names))
                if key == "grad_activation":
                    grad_at = rule.grad_at or "producer"
        self._require_pairs(choices, turns)
        return Decision(_without_lonely_shares(choices), grad_at, constants)

    def _require_pairs(self, choices: Mapping[str, Choice], turns: Mapping[str, Any]) -> None:
        """Raise where one operand of a product is rotated and the other is not, or otherwise, at some time of a run."""
        for first, second in PASSES.values():
            if turns.get(first) == turns.get(second):
                continue
            lone, other = (first, second) if turns.get(first) else (second, first)
            rule = choices[lone].rule
            where = "" if rule is None else f"{self.all_rules[rule].where or f'rules[{rule}]'}: "
            raise PlanError(
                f"{where}{lone} is rotated ({choices[lone].words}) and {other} is not in the same way "
                f"({choices[other].words or 'left alone'}), which would change their product: give both the same "
                f"rotate and rotate_size."
            )

    def frozen_at(self, module: str, op: str) -> tuple[FrozenSpec | None, int | None]:
        """What a weight that is not trained, and that `op` in the module at that path reads, is stored in.

        And the index of the rule that said so last; None where none did.
        """
        spec, last = None, None
        for index, (rule, matches) in enumerate(zip(self.all_rules, self._matchers, strict=True)):
            if (rule.frozen is not None or rule.keep) and matches(module, op):
                spec, last = (rule.frozen if isinstance(rule.frozen, FrozenSpec) else None), index
        return spec, last

    @cached_property
    def has_frozen(self) -> bool:
        """Whether a rule says what weights that are not trained are stored in."""
        return any(isinstance(rule.frozen, FrozenSpec) for rule in self.all_rules)

    @property
    def declared_loss(self) -> str | None:
        """How the plan, or else its base, says that the loss is computed; None where neither does."""
        return self.loss or (self.base.declared_loss if self.base else None)

    @property
    def declared_communication(self) -> Communication | None:
        """The formats on the wire of the plan, or else of its base; None where neither names any."""
        return self.communication or (self.base.declared_communication if self.base else None)

    def flattened(self) -> Plan:
        """The same plan with nothing to extend: a text that stands alone."""
        return replace(
            self,
            rules=self.all_rules,
            quantizers=self.all_quantizers,
            schedules=self.all_schedules,
            optimizer=self.optimizer_rule,
            execution=self.declared_execution,
            loss=self.declared_loss,
            communication=self.declared_communication,
            extends=None,
            base=None,
        )

    # --- for people ---

    def __repr__(self) -> str:
        parts = [f"{len(self.all_rules)} rule{'s' * (len(self.all_rules) != 1)}"]
        parts += [f"extends {self.extends}"] if self.extends else []
        parts += [f"schedules {', '.join(map(str, self.followed.values()))}"] if self.followed else []
        parts += [f"optimizer state in {self.optimizer_rule.state}"] if self.optimizer_rule else []
        parts += [f"executed {self.declared_execution.kind}"] if self.declared_execution else []
        return f"<Plan{f' {self.label!r}' if self.label else ''}: {', '.join(parts)}>"

    @property
    def label(self) -> str | None:
        """The plan's name, or that of the preset or the file that its first rule is from; None without either."""
        for rule in self.all_rules[:1]:
            source, *place = (rule.where or "").split(":")  # preset int8-all:14: rules[0]
            if self.name is None and len(place) > 1:
                return Path(source.removeprefix("preset ")).stem
        return self.name

    def table(self) -> Table[Rule]:
        """The rules that count, in order: where each holds, and what it gives to the tensors there."""
        columns: dict[str, Callable[[Rule], str]] = {
            "modules": lambda rule: ", ".join(rule.match),
            "operations": lambda rule: ", ".join(filter(None, [*rule.op, rule.selection])) or "all",
            "formats": self._formats_text,
        }
        return Table(self.all_rules, columns, empty="no rules: nothing is rounded")

    def _formats_text(self, rule: Rule) -> str:
        if rule.keep:
            return "kept as they are"
        texts: dict[str, list[str]] = {}
        for key, use in rule.quantizers:
            quantizer = over_time(use, self.names) or str(self.quantizer(use) or KEEP)
            texts.setdefault(quantizer, []).append(key)
        parts = [f"{', '.join(keys)}: {quantizer}" for quantizer, keys in texts.items()]
        return "; ".join([*parts, *([] if rule.frozen is None else [f"frozen: {rule.frozen}"])])

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self).strip('<>'))}</p>{self.table()._repr_html_()}"

    # --- what the user adds: code books, functions and classes

    @cached_property
    def code(self) -> tuple[CodeReference, ...]:
        """The functions and classes of the user's own that the plan names."""
        uses = [*self.all_quantizers.values(), *(use for rule in self.all_rules for _, use in rule.quantizers)]
        specs = [spec for use in uses for spec in written_quantizers(use)]
        references = [spec.function for spec in specs if spec.function is not None]
        references += [reference for schedule in self.all_schedules.values() for reference in schedule.code()]
        return tuple(dict.fromkeys(references))

    def with_code(self) -> Plan:
        """The same plan with the code that it names imported. Call it for plans that you trust only."""

        def resolved(use: Use) -> Use:
            return map_quantizers(use, with_imported_function)

        return replace(
            self,
            rules=tuple(
                replace(rule, quantizers=tuple((key, resolved(use)) for key, use in rule.quantizers))
                for rule in self.rules
            ),
            quantizers={name: resolved(use) for name, use in self.quantizers.items()},
            schedules={name: schedule.with_code() for name, schedule in self.schedules.items()},
            base=None if self.base is None else self.base.with_code(),
        )

    def require_code(self) -> None:
        """Raise where the plan names code that has not been imported."""
        missing = [reference.name for reference in self.code if reference.target is None]
        if missing:
            raise not_allowed(", ".join(missing))

    @cached_property
    def _own_formats(self) -> dict[str, list[float]]:
        """The values of formats that were registered, of the plan's own rules and quantizers."""
        uses = [*self.quantizers.values(), *(use for rule in self.rules for _, use in rule.quantizers)]
        names = [spec.format for use in uses for spec in written_quantizers(use)]
        names += [rule.frozen.format for rule in self.rules if isinstance(rule.frozen, FrozenSpec)]
        formats = {name: registered_format(name) for name in names}
        return {name: list(made.book) for name, made in formats.items() if made is not None}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own_formats": self._own_formats}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, values in state["_own_formats"].items():  # in another process they are unknown
            register_format(name, values)
        self.__dict__.update(state)

    # --- over time ---

    @cached_property
    def switches(self) -> tuple[OverTime, ...]:
        """Everything in the plan that changes its whole quantizer during a run."""
        uses = [*self.all_quantizers.values(), *(use for rule in self.all_rules for _, use in rule.quantizers)]
        return tuple(dict.fromkeys(switch for use in uses for switch in switches(use)))

    @cached_property
    def followed(self) -> dict[str, Schedule]:
        """The schedules that some rule's quantizer follows."""
        specs = [spec for rule in self.all_rules for _, use in rule.quantizers for spec in leaves(use, self.names)]
        moving = {spec.moved_by for spec in specs if spec is not None}
        choosing = {switch.by for switch in self.switches if isinstance(switch, Choosing)}
        return {
            name: schedule for name, schedule in self.all_schedules.items() if schedule in moving or name in choosing
        }

    @property
    def moves(self) -> bool:
        """Whether anything changes while a run goes on."""
        return bool(self.switches or self.followed)

    def phase_at(self, position: Position, *, fixed: bool = False) -> Phase:
        """Which case of each switch is at work there; `fixed`: and how many bits each schedule gives."""
        cases = tuple(switch.case_at(position, self.all_schedules) for switch in self.switches)
        if not fixed:
            return cases
        return (*cases, *(schedule.bits(position.step, position.total) for schedule in self.followed.values()))

    def at(self, position: Position, *, fixed: bool = False) -> Plan:
        """The plan as it stands at that position of a run: no quantizer changes as a whole any more.

        :param fixed: bits do not move any more either.
        """
        return self.in_phase(self.phase_at(position, fixed=fixed))

    def periods(self, total: int) -> dict[Phase, int]:
        """How many steps of a run of `total` are made in each phase, bits fixed."""
        columns = [switch.cases_in(total, self.all_schedules) for switch in self.switches]
        columns += [schedule.table(total) for schedule in self.followed.values()]
        if not columns:
            return {(): total}
        phases, counts = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
        return {tuple(phase): int(count) for phase, count in zip(phases.tolist(), counts, strict=True)}

    def widest(self) -> Plan:
        """The plan with every quantizer at the most bits it ever has: what a run's memory must have room for."""

        def bits(use: Use) -> float:
            quantizers = leaves(use, self.names)
            return max(float("inf") if spec is None else spec.target.bits_per_value for spec in quantizers)

        cases = []
        for switch in self.switches:
            widths = [bits(case) for case in switch.cases]
            cases.append(widths.index(max(widths)))
        return self.in_phase((*cases, *(schedule.highest for schedule in self.followed.values())))

    def in_phase(self, phase: Phase) -> Plan:
        """The plan of a phase, as :meth:`phase_at` gives it."""
        count = len(self.switches)
        cases = dict(zip(self.switches, phase[:count], strict=True))
        widths = dict(zip(self.followed, phase[count:], strict=True)) if len(phase) > count else {}

        def now(use: Use) -> Use:
            while not isinstance(use, (str, QuantizerSpec)):
                use = use.cases[cases[use]]
            if isinstance(use, QuantizerSpec) and isinstance(use.bits, str) and use.bits in widths:
                return use.with_bits(widths[use.bits], self.all_schedules[use.bits].highest)
            return use

        whole = self.flattened()
        rules = (
            replace(rule, quantizers=tuple((key, now(use)) for key, use in rule.quantizers)) for rule in whole.rules
        )
        quantizers = {name: now(use) for name, use in whole.quantizers.items()}
        return replace(whole, rules=tuple(rules), quantizers=quantizers)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """The plan in a file: JSON if its name ends in ``.json``, YAML otherwise."""
        from bitplan.plans.loading import load_file

        return load_file(Path(path))

    @classmethod
    def preset(cls, name: str) -> Plan:
        """A plan that comes with bitplan."""
        from bitplan.plans.loading import load_preset

        return load_preset(name)

    @classmethod
    def from_yaml(cls, text: str, source: str = "plan") -> Plan:
        """The plan in a YAML text. `source` is what messages call it, and files it extends lie beside that path."""
        from bitplan.plans.loading import load_text

        return load_text(text, source, "yaml", Path(source))

    @classmethod
    def from_json(cls, text: str, source: str = "plan") -> Plan:
        """The plan in a JSON text; `source` as in :meth:`from_yaml`."""
        from bitplan.plans.loading import load_text

        return load_text(text, source, "json", Path(source))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], source: str = "plan") -> Plan:
        """The plan that a mapping says, as YAML or JSON would have given it; `source` as in :meth:`from_yaml`."""
        from bitplan.plans.loading import load_data

        return load_data(data, source, Path(source))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, without what is default; ``Plan.from_dict`` gives the same plan back."""
        data: dict[str, Any] = {"version": self.version}
        for key in ("name", "description", "extends", "made_by"):
            if (value := getattr(self, key)) is not None:
                data[key] = value
        if self._own_formats:
            data["formats"] = self._own_formats
        if self.schedules:
            data["schedules"] = {name: schedule.to_data() for name, schedule in self.schedules.items()}
        if self.quantizers:
            data["quantizers"] = {name: use_data(use) for name, use in self.quantizers.items()}
        if self.optimizer is not None:
            data["optimizer"] = self.optimizer.to_data()
        if self.execution is not None:
            data["execution"] = self.execution.to_data()
        if self.loss is not None:
            data["loss"] = self.loss
        if self.communication is not None:
            data["communication"] = self.communication.to_data()
        data["rules"] = [rule.to_data() for rule in self.rules]
        return data

    def to_yaml(self) -> str:
        return yaml_text(self.to_dict())

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan where :meth:`load` finds it again, the file that it extends included."""
        target = Path(path)
        for reference in self.code:
            if not reference.can_be_imported:
                raise PlanError(
                    f"{reference} is no function or class of a module, so a plan file cannot name it: define it at the "
                    f"top of a module, or keep this plan in Python."
                )
        plan = replace(self, extends=self._extends_from(target))
        text = plan.to_json() if target.suffix.lower() == ".json" else plan.to_yaml()
        try:
            write_whole(target, text)
        except (OSError, ValueError) as error:
            raise PlanError(f"{target} cannot be written: {getattr(error, 'strerror', None) or error}.") from None

    def export(
        self,
        to: str,
        model: nn.Module,
        batch: Any,
        loss: Callable[..., Tensor] | None = None,
        *,
        strict: bool = False,
        version: str | None = None,
        weights: str | os.PathLike[str] | None = None,
        step: int | None = None,
        steps: int | None = None,
    ) -> Export:
        """The plan for `model` in another framework's format, see :func:`bitplan.integrations.export.export_plan`."""
        from bitplan.integrations.export import export_plan

        return export_plan(
            self, to, model, batch, loss, strict=strict, version=version, weights=weights, step=step, steps=steps
        )

    def _extends_from(self, target: Path) -> str | None:
        """`extends` as a file in the target's folder has to spell it."""
        if self.extends is None or is_preset_name(self.extends):
            return self.extends
        assert self.base is not None
        base_file, folder = self.base.origin, target.absolute().parent
        if base_file is None or os.path.normpath(base_file) == os.path.normpath(folder / self.extends):
            return self.extends
        return Path(os.path.relpath(base_file, folder)).as_posix()


def check_use(use: Use, names: Names, key: str = "") -> None:
    """Raise for a name that does not exist, and for a rotation where a rule's `key` is no operand of one product."""
    for spec in leaves(use, names):
        if spec is not None and spec.rotate and key in (*ROLES, *OPERANDS):
            raise PlanError(
                f"rotate applies to both operands of one product, and {key} is no operand of one product: give it to "
                f"fprop, dgrad or wgrad, or to single operands such as wgrad.x and wgrad.dy."
            )


def _rotation_of(use: Use, names: Names) -> tuple[Any, ...] | None:
    """How an operand is rotated over time, and whether in evaluation too; None where it never is."""
    while isinstance(use, str) and use != KEEP:
        use = names.quantizers[use]
    if isinstance(use, (Switch, Choosing)):
        cases = tuple(_rotation_of(case, names) for case in use.cases)
        if all(case == cases[0] for case in cases):
            return cases[0]
        moments = use.until if isinstance(use, Switch) else (use.by, *(level for level, _ in use.choose))
        return moments, cases
    if isinstance(use, str) or use.rotate is None:
        return None
    return use.rotate, use.rotate_size, use.eval == "off"


def _without_lonely_shares(choices: dict[str, Choice]) -> dict[str, Choice]:
    """Where a later rule took one slot of a shared operand, nothing is shared any more."""
    shares = [choice.share for choice in choices.values()]
    return {
        place: replace(choice, share=None) if choice.share and shares.count(choice.share) == 1 else choice
        for place, choice in choices.items()
    }
