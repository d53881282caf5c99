"""Texts, files and mappings become plans; every mistake is one sentence with its file, line and field.

What a plan may say is in :mod:`bitplan.plans.grammar`; here are the ways to it: presets, files, and plans that extend
others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from bitplan.errors import FormatError, PlanError, nearest_names
from bitplan.numerics.formats import register_format
from bitplan.plans.code import is_code_allowed
from bitplan.plans.document import VERSION, Plan, check_use
from bitplan.plans.fields import entries_of, items_of
from bitplan.plans.grammar import PLAN
from bitplan.plans.presets import is_preset_name, preset_names, preset_text
from bitplan.plans.quantizer_use import Names, Use
from bitplan.plans.schedules import Schedule
from bitplan.plans.spec import Rule
from bitplan.plans.tree import MAX_CHARACTERS, Node, tree_from_data, tree_from_json, tree_from_yaml

Syntax = Literal["yaml", "json"]

#: Files that extend files that extend files ...: more than this is a mistake.
_MAX_EXTENDS = 16


def plan_from_tree(tree: Node, origin: Path | None = None, chain: tuple[str, ...] = ()) -> Plan:
    """The plan of a tree. `origin` is the file it came from, `chain` the files and presets being extended by now."""
    if tree.value is None:
        raise tree.error(f"the plan is empty: write at least version: {VERSION}.")
    if isinstance(tree.value, str) and tree.value.endswith((".yaml", ".yml", ".json")):
        raise tree.error(f"{tree.value!r} is a file's name, not the text of a plan: give Plan.load() the name.")
    _register_formats(tree)
    values = PLAN.read(tree)
    values.pop("formats", None)
    base = None
    if "extends" in values:
        base = _base(entries_of(tree)["extends"], values["extends"], origin, chain)
    quantizers = {name: placed.use for name, placed in values.pop("quantizers", {}).items()}
    rules: tuple[Rule, ...] = values.pop("rules", ())
    _check_uses(tree, quantizers, rules, values.get("schedules", {}), base)
    try:
        plan = Plan(rules, quantizers, base=base, origin=origin, **values)
    except PlanError as error:
        raise tree.error(str(error)) from None
    return plan.with_code() if is_code_allowed() else plan


def _register_formats(tree: Node) -> None:
    """Make the plan's own code books known, before quantizers name them."""
    formats = entries_of(tree).get("formats")
    if formats is None:
        return
    for name, values in PLAN.fields["formats"].read(formats).items():
        try:
            register_format(name, values)
        except FormatError as error:
            raise entries_of(formats)[name].error(str(error)) from None


def _check_uses(
    tree: Node,
    quantizers: dict[str, Use],
    rules: tuple[Rule, ...],
    schedules: dict[str, Schedule],
    base: Plan | None,
) -> None:
    """Check every use of a quantizer. The plan checks this too, but only here are the lines known."""
    names = Names(
        {**(base.all_quantizers if base else {}), **quantizers}, {**(base.all_schedules if base else {}), **schedules}
    )
    nodes = entries_of(tree)
    uses = [(entries_of(nodes["quantizers"])[name], use, "") for name, use in quantizers.items()]
    for rule, node in zip(rules, items_of(nodes["rules"]) if rules else [], strict=True):
        uses += [(entries_of(node)[key], use, key) for key, use in rule.quantizers]
    for node, use, key in uses:
        try:
            check_use(use, names, key)
        except PlanError as error:
            raise node.error(str(error)) from None


def _base(node: Node, name: str, origin: Path | None, chain: tuple[str, ...]) -> Plan:
    """The plan that `node` extends."""
    is_preset = is_preset_name(name)
    path = (origin.parent if origin else Path()) / name
    try:
        identity = name if is_preset else str(path.resolve())
    except (OSError, ValueError, RuntimeError) as error:
        raise node.error(f"{name!r} cannot be read: {error}.") from None
    if identity in chain:
        raise node.error(f"{name!r} extends, in the end, itself: break the circle.")
    if len(chain) > _MAX_EXTENDS:
        raise node.error(f"more than {_MAX_EXTENDS} plans extend one another.")
    try:
        return load_preset(name, chain) if is_preset else load_file(path, chain)
    except _Unreadable as error:
        raise node.error(str(error)) from None


class _Unreadable(PlanError):
    """No text could be had: the place to name is the one that asked for it."""


def load_preset(name: str, chain: tuple[str, ...] = ()) -> Plan:
    """A plan that comes with bitplan."""
    try:
        text = preset_text(name)
    except PlanError as error:
        raise _Unreadable(str(error)) from None
    return plan_from_tree(tree_from_yaml(text, f"preset {name}"), None, (*chain, name))


def load_file(path: Path, chain: tuple[str, ...] = ()) -> Plan:
    """The plan in a file: JSON if its name ends in .json, YAML otherwise."""
    text = _read_text(path)
    origin = path.absolute()
    return load_text(text, str(path), syntax_of(path), origin, (*chain, str(path.resolve())))


def load_text(
    text: str, source: str, syntax: Syntax = "yaml", origin: Path | None = None, chain: tuple[str, ...] = ()
) -> Plan:
    """The plan in a text; `source` is what messages call it."""
    tree = tree_from_json(text, source) if syntax == "json" else tree_from_yaml(text, source)
    return plan_from_tree(tree, origin, chain)


def load_data(data: object, source: str, origin: Path | None = None) -> Plan:
    """The plan that a mapping says."""
    return plan_from_tree(tree_from_data(data, source), origin)


def syntax_of(path: Path) -> Syntax:
    return "json" if path.suffix.lower() == ".json" else "yaml"


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # a folder, or a device that never ends
            raise _Unreadable(f"{path} is not a file.")
        with path.open("rb") as file:
            # Four bytes hold any character of UTF-8, so a text that is cut here is too long in any case.
            raw = file.read(4 * MAX_CHARACTERS + 1)
    except FileNotFoundError:
        is_preset = str(path) in preset_names()
        advice = f"Plan.preset({str(path)!r}) is the preset" if is_preset else "name a plan's file, or a preset"
        raise _Unreadable(f"there is no file {path}: {advice}.") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _Unreadable(f"{path} cannot be read: {reason}.") from None
    if len(raw) > 4 * MAX_CHARACTERS:
        raise _Unreadable(f"{path}: a plan has at most {MAX_CHARACTERS:,} characters.")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise _Unreadable(f"{path}:{line}: this is not UTF-8 text: save the file as UTF-8.") from None


# --- A plan by whatever names it: itself, a preset, a file


#: What names a plan: itself, a preset's name, a file or a mapping.
PlanSource = Plan | str | os.PathLike[str] | Mapping[str, Any]


def find_plan(plan: PlanSource) -> Plan:
    """The plan itself, that of a mapping, the preset of that name, or the plan in that file.

    >>> find_plan("bf16-all").all_rules[0].match
    ('*',)
    """
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Mapping):
        return Plan.from_dict(plan)
    if isinstance(plan, os.PathLike):
        return Plan.load(plan)
    if not isinstance(plan, str):
        raise _not_a_plan(plan)
    presets = preset_names()
    if plan in presets:
        return Plan.preset(plan)
    if "\n" in plan or plan.lstrip().startswith("{"):
        raise PlanError("this is the text of a plan, not a name: give Plan.from_yaml(text).")
    if is_preset_name(plan) and not Path(plan).exists():
        raise PlanError(f"there is no preset and no file {plan!r}; {nearest_names(plan, presets)}")
    return Plan.load(plan)


def _not_a_plan(plan: object) -> PlanError:
    advice = ""
    if isinstance(plan, list):
        advice = " A list of rules is {'version': 1, 'rules': [...]}."
    elif type(plan).__module__.startswith("torch"):
        advice = " The plan comes before the batch."
    elif plan is None:
        advice = " Without a plan, leave the model as it is."
    return PlanError(f"a plan is a Plan, a mapping, a preset's name or a file, not {type(plan).__name__}.{advice}")
