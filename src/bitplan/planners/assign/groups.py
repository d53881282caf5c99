"""The tensors of a training step, counted and cut into groups as Lee, Sharma & Aiken 2023 do (arXiv 2301.13464).

**Tensors.** Each operation's output v and its gradient dv, each parameter theta (biases, norms' too) and its gradient
dtheta; a tensor that several operations read counts once. So the tensors are bitplan's sites of the four roles, with
three additions that make the account the paper's:

* the data x is a tensor, and so is its gradient, though nobody computes that one. A plan rounds x where products read
  it, by their ``x`` slot; data that no product reads (tokens, or what a norm comes before) has no such place and is
  left out.
* a cross-entropy is two operations, log-softmax and negative log-likelihood, where the formats open it up.
* what a tensor is split into (``chunk``, ``split``) counts. In torch these are views: they always have the precision of
  the whole, and belong to its group. Other views, reshapes and permutations are no tensors.

Not counted are norms' statistics, the optimizer's state, master weights and workspaces; a budget in bytes does count
them, see :mod:`bitplan.planners.assign.budget`.

**Groups.** Operations in the order they run; a new group starts with the data, and with every product. v and dv belong
to the group of their operation. theta and dtheta belong to the group of whatever made the operation's first input: a
product's weight lies in the group *before* it, a batch norm's in that of its convolution. A product whose weight has
begun a group before goes on with that one, so all steps of a recurrent layer are one group. Attention, which torch
computes without keeping its scores, is one product.

**Units.** A plan speaks of operations by name, and what has one name has one precision: the calls of a module that is
called several times, a parameter of several operations, all parameters of an operation. Such a unit gets a low
precision only if all its groups do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from bitplan.capture.ops import FUSED, PRODUCTS
from bitplan.capture.recording import Operation, record
from bitplan.errors import PlanError, QuantizeError
from bitplan.numerics.wire_format import parameter_suffix

#: What a unit is rounded as. ``input`` is the data, by the ``x`` of the products that read it.
Kind = Literal["input", "activation", "grad_activation", "weight"]

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
#: Products beside those whose operands bitplan can round one by one.
_OTHER_PRODUCTS = FUSED | {"sparse_matmul"}
#: The group of the data, the first.
DATA = 0


@dataclass(frozen=True)
class CountedTensor:
    """One tensor of the account."""

    #: A site's name; ``input`` for the data.
    name: str
    #: weight, activation, grad_activation or grad_weight.
    role: str
    elements: int
    #: The group whose size it adds to.
    group: int
    #: Its unit's place in :attr:`Account.units`.
    unit: int


@dataclass(frozen=True)
class Unit:
    """Tensors that have one precision."""

    kind: Kind
    #: (module, numbered operation) of the operations that round it; of the data, its readers.
    places: tuple[tuple[str, str], ...]
    #: All groups that have a part in it.
    groups: frozenset[int]


@dataclass(frozen=True)
class Group:
    """A stretch of operations from one product to the next."""

    number: int
    #: What began it: an operation's label, or ``input``.
    start: str
    #: Elements of all its tensors.
    size: int
    tensors: int


@dataclass(frozen=True)
class Account:
    """All tensors of a step, their units and groups."""

    operations: tuple[Operation, ...]
    tensors: tuple[CountedTensor, ...]
    units: tuple[Unit, ...]
    groups: tuple[Group, ...]
    #: The group of each operation.
    group_of: tuple[int, ...]
    #: Values of all parameters of the model.
    parameters: int

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)


def account_of(
    model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None = None, *, opens_loss: bool = True
) -> Account:
    """The account of one training step on fake tensors; `batch` and `loss` as :func:`bitplan.list_sites` takes them.

    :param opens_loss: write a cross-entropy out.
    """
    operations = _recorded(model, batch, loss, opens_loss)
    if not any(map(is_product, operations)):
        raise PlanError("this model has no product (convolution, linear, attention, ...): there is nothing to assign.")
    return _Counting(operations).account(sum(parameter.numel() for parameter in model.parameters()))


def _recorded(
    model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None, opens_loss: bool
) -> tuple[Operation, ...]:
    """Recurrent layers opened up, and the loss; what refuses to be (packed sequences, label smoothing) stays whole."""
    of_loss = ("cross_entropy",) if opens_loss else ()
    for opened in ((*_RECURRENT, *of_loss), _RECURRENT, of_loss):
        try:
            return tuple(record(model, batch, loss, opens=_opening(opened)))
        except QuantizeError:
            continue
    return tuple(record(model, batch, loss))


def _opening(opened: tuple[str, ...]) -> Callable[[str, str], bool]:
    return lambda path, op: op in opened


def is_product(operation: Operation) -> bool:
    """Whether a group begins there."""
    return (operation.op in PRODUCTS and operation.operands is not None) or operation.op in _OTHER_PRODUCTS


def place_of(operation: Operation) -> tuple[str, str]:
    """How a plan finds the operation: its module, and its name with its number."""
    return operation.module, f"{operation.op}.{operation.index}"


class _Counting:
    """The walk through the operations of a step."""

    def __init__(self, operations: tuple[Operation, ...]) -> None:
        self.operations = operations
        self.starts, self.group_of = _groups(operations)
        self.units: list[Unit] = []
        self.tensors: list[CountedTensor] = []

    def account(self, parameters: int) -> Account:
        self._count_data()
        self._count_activations()
        self._count_parameters()
        sizes, counts = [0] * len(self.starts), [0] * len(self.starts)
        for tensor in self.tensors:
            sizes[tensor.group] += tensor.elements
            counts[tensor.group] += 1
        groups = tuple(
            Group(number, start, size, count)
            for number, (start, size, count) in enumerate(zip(self.starts, sizes, counts, strict=True))
        )
        return Account(
            self.operations, tuple(self.tensors), tuple(self.units), groups, tuple(self.group_of), parameters
        )

    def _count(self, name: str, role: str, tensors: Iterable[Tensor], group: int, unit: int) -> None:
        for tensor in tensors:
            self.tensors.append(CountedTensor(name, role, tensor.numel(), group, unit))

    def _unit(self, kind: Kind, places: Iterable[tuple[str, str]], groups: Iterable[int]) -> int:
        self.units.append(Unit(kind, tuple(dict.fromkeys(places)), frozenset(groups)))
        return len(self.units) - 1

    def _count_data(self) -> None:
        tensors: dict[int, Tensor] = {}
        readers: dict[int, list[tuple[str, str]]] = {}
        for operation in self.operations:
            # Steps of an opened recurrent layer begin with a constant state, which is no data.
            x = None if operation.operands is None or operation.inside in _RECURRENT else operation.operands[0]
            if x is None or id(x) in operation.origins or not x.is_floating_point():
                continue
            if any(x is parameter for _, parameter in operation.parameters):
                continue
            tensors[id(x)] = x
            readers.setdefault(id(x), []).append(place_of(operation))
        for key, x in tensors.items():
            unit = self._unit("input", readers[key], [DATA])
            for role in ("activation", "grad_activation"):
                self._count("input", role, [x], DATA, unit)

    def _count_activations(self) -> None:
        calls: dict[str, list[int]] = {}
        for number, operation in enumerate(self.operations):
            calls.setdefault(operation.label, []).append(number)
        for label, numbers in calls.items():
            first = self.operations[numbers[0]]
            groups = [self.group_of[number] for number in numbers]
            has_gradient = any(self.operations[number].needs_grad for number in numbers)
            roles: tuple[Kind, ...] = ("activation", "grad_activation")
            for role in roles[: 1 + has_gradient]:
                unit = self._unit(role, [place_of(first)], groups)
                for number in numbers:
                    operation = self.operations[number]
                    if role == "activation" or operation.needs_grad:
                        made = [*operation.outputs, *operation.parts]
                        self._count(f"{label}:{role}", role, made, self.group_of[number], unit)

    def _count_parameters(self) -> None:
        users: dict[str, list[int]] = {}
        for number, operation in enumerate(self.operations):
            for name, tensor in operation.parameters:
                if tensor.is_floating_point():
                    users.setdefault(name, []).append(number)
        for names in _shared_out(users, self.operations):
            numbers = sorted({number for name in names for number in users[name]})
            sources = {name: self._sources(users[name]) for name in names}
            places = [place_of(self.operations[number]) for number in numbers]
            unit = self._unit("weight", places, (group for groups in sources.values() for group in groups))
            for name in names:
                operation = self.operations[users[name][0]]
                whole = operation.wholes.get(name, dict(operation.parameters)[name])
                short = name.rpartition(".")[2]
                shown = f"weight{parameter_suffix(short)}"
                home = sources[name][0]
                self._count(f"{operation.label}:{shown}", "weight", [whole], home, unit)
                if whole.requires_grad:
                    self._count(f"{operation.label}:grad_{shown}", "grad_weight", [whole], home, unit)

    def _sources(self, numbers: Sequence[int]) -> list[int]:
        """The groups that made the first inputs of the operations that use a parameter."""
        sources = [self._source(self.operations[number]) for number in numbers]
        with_source = [group for group in sources if group is not None]
        # A recurrent layer's first step reads a constant, which is in no group.
        return (
            with_source
            if with_source and self.operations[numbers[0]].inside in _RECURRENT
            else [g or DATA for g in sources]
        )

    def _source(self, operation: Operation) -> int | None:
        if operation.operands is not None:
            first = next(
                (t for t in operation.operands if not any(t is whole for _, whole in operation.parameters)), None
            )
            maker = None if first is None else operation.origins.get(id(first))
        else:
            maker = operation.inputs[0] if operation.inputs else None
        return None if maker is None else self.group_of[maker]


def _groups(operations: Sequence[Operation]) -> tuple[list[str], list[int]]:
    """(what began each group, the group of each operation)."""
    starts, group_of, number_of = ["input"], [], dict[str, int]()
    current = DATA
    for operation in operations:
        if is_product(operation):
            key = _weight_of(operation) or operation.label
            if key not in number_of:
                starts.append(operation.label)
                number_of[key] = len(starts) - 1
            current = number_of[key]
        group_of.append(current)
    return starts, group_of


def _weight_of(operation: Operation) -> str | None:
    """The name of the parameter that a product multiplies by."""
    if operation.operands is None:
        return operation.parameters[0][0] if operation.parameters else None
    return next((name for name, t in operation.parameters if any(t is operand for operand in operation.operands)), None)


def _shared_out(users: dict[str, list[int]], operations: Sequence[Operation]) -> list[list[str]]:
    """Parameters that must have one precision: of one operation, and of all calls that have its name."""
    leader: dict[str, str] = {}

    def find(key: str) -> str:
        while leader.setdefault(key, key) != key:
            key = leader[key]
        return key

    for name, numbers in users.items():
        for number in numbers:
            leader[find(f"op {operations[number].label}")] = find(f"parameter {name}")
    together: dict[str, list[str]] = {}
    for name in users:
        together.setdefault(find(f"parameter {name}"), []).append(name)
    return list(together.values())
