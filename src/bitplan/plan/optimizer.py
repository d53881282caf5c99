"""What a plan says of the optimizer: the bits that its state, Adam's two moments, is kept in between steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from bitplan.errors import PlanError
from bitplan.plan.kinds import Kind, Record, Schema
from bitplan.plan.spec import KEEP
from bitplan.plan.tree import Node

#: What state can be kept in, as torchao's optimizers serve it.
STATE_FORMATS = ("int8", "int4", "e4m3")


@dataclass(frozen=True)
class OptimizerRule:
    """``optimizer: {state: int8}``.

    >>> OptimizerRule("int3")
    Traceback (most recent call last):
    bitplan.errors.PlanError: optimizer state can be kept as int8, int4 or e4m3 (or keep), not as 'int3'.
    """

    #: One of :data:`STATE_FORMATS`; ``keep`` leaves the state alone, whatever an extended plan said.
    state: str
    #: File, line and field.
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.state not in (*STATE_FORMATS, KEEP):
            *others, last = STATE_FORMATS
            raise PlanError(
                f"optimizer state can be kept as {', '.join(others)} or {last} (or {KEEP}), not as {self.state!r}."
            )

    def to_data(self) -> dict[str, str]:
        return {"state": self.state}


@dataclass(frozen=True)
class _State(Kind[str]):
    def read(self, node: Node) -> str:
        if not isinstance(node.value, str):
            raise node.error(f"this must be one of {', '.join((*STATE_FORMATS, KEEP))}, not {node.describe()}.")
        try:
            return OptimizerRule(node.value).state
        except PlanError as error:
            raise node.error(str(error)) from None

    def shape(self) -> Schema:
        return {"enum": [*STATE_FORMATS, KEEP]}


OPTIMIZER = Record(
    "The optimizer's state.",
    {"state": _State("What the moments of Adam and AdamW are kept in between steps; keep: in full.")},
    required=("state",),
)


@dataclass(frozen=True)
class Optimizing(Kind[OptimizerRule]):
    """The mapping under the plan's key ``optimizer``."""

    def read(self, node: Node) -> OptimizerRule:
        return OptimizerRule(OPTIMIZER.read(node)["state"], where=node.where)

    def shape(self) -> Schema:
        return OPTIMIZER.shape()
