"""How an attached plan is computed: :class:`Packed`, :class:`Native`, or by default :class:`Emulate`.

The three are options only, validated when they are made. ``attach(..., execution=)`` takes one of them or its name, and
a plan may carry one under ``execution:``. They are defined with the plans because plan documents are read and written
below everything that runs a model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from bitplan.errors import PlanError, nearest_names
from bitplan.plans.fields import Choice, Flag, Kind, OneOrMore, Record, Schema, Whole
from bitplan.plans.match import PASSES
from bitplan.plans.tree import Node

#: What compiled packed execution may recompute: everything that is not a product, random or a copy.
AGGRESSIVE = "aggressive"


@dataclass(frozen=True)
class Emulate:
    """Round values and compute in the model's own precision: the numerics of low precision, none of its savings."""

    kind: ClassVar[str] = "emulate"
    summary: ClassVar[str] = "values are rounded, but no memory or time is saved."

    def to_data(self) -> str:
        return self.kind


@dataclass(frozen=True)
class Packed:
    """Compute the same numbers as emulation and save tensors for the backward pass in the format's own bits.

    :param recompute: ``"aggressive"``: the graphs of :meth:`~bitplan.Attachment.compile` recompute in the backward pass
        whatever pointwise operations and reductions can restore (torch's ``aggressive_recomputation``). A plan without
        rules then trains in the model's own precision with less memory and more time.

    >>> Packed("aggressive").to_data()
    {'kind': 'packed', 'recompute': 'aggressive'}
    """

    kind: ClassVar[str] = "packed"
    summary: ClassVar[str] = "values are rounded, and tensors saved for the backward pass are packed."

    recompute: str | Iterable[str] | None = None

    def __post_init__(self) -> None:
        recompute = self.recompute
        if isinstance(recompute, (tuple, list)) and len(recompute) <= 1:  # as a plan names it
            recompute = recompute[0] if recompute else None
            object.__setattr__(self, "recompute", recompute)
        if recompute not in (None, AGGRESSIVE):
            raise PlanError(f"recompute of packed execution is {AGGRESSIVE!r} or None, not {recompute!r}.")

    def to_data(self) -> str | dict[str, str]:
        return self.kind if self.recompute is None else {"kind": self.kind, "recompute": AGGRESSIVE}


#: What compiled native execution may recompute in the backward pass, and what each choice stands for.
RECOMPUTE: dict[str, frozenset[str]] = {
    "weights": frozenset({"weights"}),
    "activations": frozenset({"activations"}),
    "inputs": frozenset({"weights", "activations"}),
    "products": frozenset({"weights", "activations", "products"}),
}


@dataclass(frozen=True)
class Native:
    """Multiply on the hardware's low-precision units where a GEMM has a path to them; the rest is emulated.

    :param min_macs: GEMMs of at least this many multiply-accumulates (tokens x inputs x outputs) use the units. None:
        from where on that pays on this machine, which is measured once and cached.
    :param strict: raise where a GEMM that the plan gives formats would be emulated; needs ``attach(..., example=)``.
    :param fast_accumulation: passes (``fprop``, ``dgrad``, ``wgrad``) whose FP8 GEMMs accumulate in reduced precision,
        the tensor cores' fastest mode; True: all three. torchao's FP8 training does so in ``fprop``.
    :param recompute: what :meth:`~bitplan.Attachment.compile` recomputes in the backward pass instead of saving it.
        ``weights``: the FP8 or INT8 copy of a linear layer's weight. ``activations``: that of its input, where it can
        be recomputed from saved tensors. ``inputs``: both. ``products``: also a GEMM whose result only pointwise
        operations read, where another GEMM has the same input (half of a gate). Each takes more time. Activations that
        the plan rounds are saved as codes in any case.

    >>> Native(min_macs=0, fast_accumulation="fprop", recompute=("weights", "activations"))
    Native(min_macs=0, strict=False, fast_accumulation=('fprop',), recompute=('inputs',))
    """

    kind: ClassVar[str] = "native"
    summary: ClassVar[str] = "GEMMs run on low-precision units where these have a path; the rest is emulated."

    min_macs: int | None = None
    strict: bool = False
    fast_accumulation: bool | str | Iterable[str] = ()
    recompute: str | Iterable[str] = ()

    def __post_init__(self) -> None:
        if self.min_macs is not None and (
            isinstance(self.min_macs, bool) or not isinstance(self.min_macs, int) or self.min_macs < 0
        ):
            raise PlanError(f"min_macs must be a whole number of at least 0, or None, not {self.min_macs!r}.")
        if not isinstance(self.strict, bool):
            raise PlanError(f"strict must be True or False, not {self.strict!r}.")
        passes = self.fast_accumulation
        if isinstance(passes, bool):
            passes = tuple(PASSES) if passes else ()
        chosen = _names("fast_accumulation", passes, PASSES)
        object.__setattr__(self, "fast_accumulation", tuple(name for name in PASSES if name in chosen))
        # Two spellings of one choice are one value: weights and activations together are inputs.
        parts = frozenset().union(*(RECOMPUTE[name] for name in _names("recompute", self.recompute, RECOMPUTE)))
        canonical = tuple(name for name, stands_for in RECOMPUTE.items() if stands_for == parts)
        object.__setattr__(self, "recompute", canonical)

    @property
    def fast_passes(self) -> tuple[str, ...]:
        """The passes with fast accumulation, in the order fprop, dgrad, wgrad."""
        return tuple(self.fast_accumulation)  # type: ignore[arg-type]  # normalized when made

    @property
    def recomputed(self) -> frozenset[str]:
        """What is recomputed: a subset of weights, activations and products."""
        return frozenset().union(*(RECOMPUTE[name] for name in self.recompute))

    @property
    def recast_operands(self) -> tuple[str, ...]:
        """The operands of linear layers that compiled code casts again in the backward pass: x, w, both or none."""
        names = {"x": "activations", "w": "weights"}
        return tuple(operand for operand, name in names.items() if name in self.recomputed)

    def to_data(self) -> str | dict[str, Any]:
        """As a plan says it, without defaults."""
        data: dict[str, Any] = {"kind": self.kind}
        if self.min_macs is not None:
            data["min_macs"] = self.min_macs
        if self.strict:
            data["strict"] = True
        if self.fast_passes:
            data["fast_accumulation"] = list(self.fast_passes)
        if self.recompute:
            (data["recompute"],) = self.recompute
        return data if len(data) > 1 else self.kind


ExecutionOptions = Emulate | Packed | Native

#: Name -> class, in the order in which they are listed.
EXECUTIONS: dict[str, type[Emulate] | type[Packed] | type[Native]] = {
    options.kind: options for options in (Emulate, Packed, Native)
}


def execution_options(execution: object) -> ExecutionOptions:
    """The options object for a name, or the object itself.

    >>> execution_options("packed")
    Packed(recompute=None)
    """
    if isinstance(execution, (Emulate, Packed, Native)):
        return execution
    if isinstance(execution, str):
        if execution not in EXECUTIONS:
            raise PlanError(f"there is no execution {execution!r}; {nearest_names(execution, EXECUTIONS)}")
        return EXECUTIONS[execution]()
    if isinstance(execution, type) and execution in EXECUTIONS.values():
        raise PlanError(f"execution is an object such as bitplan.{execution.__name__}(), not the class: add ().")
    raise PlanError(
        f"execution is {', '.join(map(repr, EXECUTIONS))}, bitplan.Packed() or bitplan.Native(...), not {execution!r}."
    )


def _names(option: str, names: object, known: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, Iterable):
        raise PlanError(f"{option} takes names among {', '.join(known)}, not {names!r}.")
    names = tuple(names)
    for name in names:
        if name not in known:
            raise PlanError(f"there is no {option} {name!r}; {nearest_names(str(name), known)}")
    return names


# --- The plan key `execution:`

_KIND = Choice("How the plan is computed.", tuple(EXECUTIONS))


@dataclass(frozen=True)
class _Passes(Kind[bool | tuple[str, ...]]):
    """Names of passes, or true for all of them."""

    def read(self, node: Node) -> bool | tuple[str, ...]:
        return node.value if isinstance(node.value, bool) else _PASS_NAMES.read(node)

    def shape(self) -> Schema:
        return {"anyOf": [{"type": "boolean"}, *_PASS_NAMES.shape()["anyOf"]]}


_PASS_NAMES = OneOrMore("", Choice("", tuple(PASSES)))

EXECUTION = Record(
    "How the plan is computed, with the options of native execution.",
    {
        "kind": _KIND,
        "min_macs": Whole("GEMMs of at least this many multiply-accumulates run natively.", 0, 2**63 - 1),
        "strict": Flag("Raise where a GEMM that the plan gives formats would be emulated."),
        "fast_accumulation": _Passes("Passes whose FP8 GEMMs accumulate in reduced precision; true: all three."),
        "recompute": OneOrMore(
            "What the backward pass recomputes instead of saving it; packed: aggressive.",
            Choice("", (*RECOMPUTE, AGGRESSIVE)),
        ),
    },
    required=("kind",),
)


@dataclass(frozen=True)
class Executing(Kind[ExecutionOptions]):
    """The name of an execution, or a mapping with its options."""

    def read(self, node: Node) -> ExecutionOptions:
        if not isinstance(node.value, dict):
            return EXECUTIONS[_KIND.read(node)]()
        values = EXECUTION.read(node)
        kind = values.pop("kind")
        try:
            if kind == Native.kind:
                return Native(**values)
            if kind == Packed.kind and set(values) == {"recompute"}:
                return Packed(**values)
        except PlanError as error:
            raise node.value["recompute"].error(str(error)) from None
        for option in values:
            raise node.value[option].error(
                f"{option} is an option of native execution: drop it, or write kind: native."
            )
        return EXECUTIONS[kind]()

    def shape(self) -> Schema:
        native = EXECUTION.shape()
        native["properties"]["kind"] = {"const": Native.kind}
        native["properties"]["recompute"] = OneOrMore("", Choice("", tuple(RECOMPUTE))).shape()
        emulate, packed = (Choice("", (options.kind,)) for options in (Emulate, Packed))
        recompute = OneOrMore("", Choice("", (AGGRESSIVE,)))
        others = (
            Record("", {"kind": emulate}, ("kind",)),
            Record("", {"kind": packed, "recompute": recompute}, ("kind",)),
        )
        return {"anyOf": [_KIND.shape(), native, *(record.shape() for record in others)]}
