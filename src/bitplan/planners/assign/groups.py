"""The tensors of a training step, counted and grouped as in Lee, Sharma & Aiken 2023 (arXiv 2301.13464).

**Tensors.** Each operation's output v and its gradient dv, each parameter theta (biases and norm parameters included)
and its gradient dtheta. A tensor that several operations read counts once. These are bitplan's sites of the four roles,
with three additions from the paper:

* The data x is a tensor, and so is its gradient, though it is never computed. A plan rounds x as the ``x`` operand of
  the products that read it. Data that no product reads directly (token ids, the input of a norm) is not counted.
* A cross-entropy is two operations, log-softmax and negative log-likelihood, where the formats decompose it.
* The results of ``chunk`` and ``split`` count and belong to the group of the tensor that was split. Each has a
  precision of its own where the products that read it can round it as their operand: a part may be lower than the
  whole. Elsewhere, as inside fused attention, parts have the precision of the whole. Other views, reshapes and
  permutations are not counted.

Norm statistics, optimizer state, master weights and workspaces are not counted. A budget in bytes does count them, see
:mod:`bitplan.planners.assign.budget`.

**Groups.** In execution order, a group starts with the data and with every product. v and dv belong to the group of
their operation. theta and dtheta belong to the group that produced the operation's first input: a product's weight is
in the group *before* it, a batch norm's in that of its convolution. A product whose weight already started a group
continues that group, so all steps of a recurrent layer are one group. Attention, which torch computes without storing
its scores, is one product.

**Units.** Rules match operations by name, so tensors of the same name have the same precision: the calls of a module
that is called several times, a parameter of several operations, all parameters of an operation. Such a unit is low only
if all its groups are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from bitplan.capture.ops import FUSED, PRODUCTS
from bitplan.capture.recording import Operation, Read, record
from bitplan.errors import PlanError, QuantizeError
from bitplan.gemm.macs import RECURRENT
from bitplan.numerics.wire_format import parameter_suffix

#: How a unit is rounded. ``input`` is the data, rounded as the ``x`` operand of the products that read it. ``part`` is
#: a part of a split tensor, rounded as an operand of the products that read it; ``grad_part`` is its gradient.
Kind = Literal["input", "activation", "grad_activation", "weight", "part", "grad_part"]

#: Products whose operands bitplan cannot round separately.
_OTHER_PRODUCTS = FUSED | {"sparse_matmul"}
#: The group of the data is the first.
DATA = 0
#: (module path, operation name with its number), as rules match it.
OperationKey = tuple[str, str]


@dataclass(frozen=True)
class CountedTensor:
    """A tensor of the training step."""

    #: A site's name; ``input`` for the data.
    name: str
    #: weight, activation, grad_activation or grad_weight.
    role: str
    elements: int
    #: The group whose size it adds to.
    group: int
    #: Index into :attr:`StepTensors.units`.
    unit: int


@dataclass(frozen=True)
class Unit:
    """Tensors that must have the same precision."""

    kind: Kind
    #: The operations that round it; for the data and for parts of a split, the products that read it.
    operations: tuple[OperationKey, ...]
    #: The groups of its tensors.
    groups: frozenset[int]
    #: For the part of a split: the index of the whole tensor's unit.
    whole: int | None = None
    #: For the part of a split: the operand, ``x`` or ``w``, that it is in each of `operations`.
    operands: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """The operations from one product to the next."""

    number: int
    #: The label of its first operation, or ``input``.
    start: str
    #: Elements of its tensors.
    size: int
    tensors: int


@dataclass(frozen=True)
class StepTensors:
    """All tensors of a training step, their units and groups."""

    operations: tuple[Operation, ...]
    tensors: tuple[CountedTensor, ...]
    units: tuple[Unit, ...]
    groups: tuple[Group, ...]
    #: The group of each operation.
    group_of: tuple[int, ...]
    #: Elements of all parameters of the model.
    parameters: int

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)


def count_tensors(
    model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None = None, *, decompose_loss: bool = True
) -> StepTensors:
    """Count the tensors of a training step on fake tensors; `batch` and `loss` are as in :func:`bitplan.list_sites`.

    :param decompose_loss: count a cross-entropy as two operations.
    """
    operations = _record(model, batch, loss, decompose_loss)
    if not any(map(is_product, operations)):
        raise PlanError("this model has no product (convolution, linear, attention, ...): there is nothing to assign.")
    return _TensorCounter(operations).count(sum(parameter.numel() for parameter in model.parameters()))


def _record(
    model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None, decompose_loss: bool
) -> tuple[Operation, ...]:
    """Record with recurrent layers and the loss decomposed, except packed sequences and label smoothing."""
    loss_ops = ("cross_entropy",) if decompose_loss else ()
    for decomposed in ((*RECURRENT, *loss_ops), RECURRENT, loss_ops):
        try:
            return tuple(record(model, batch, loss, opens=_is_op_among(decomposed)))
        except QuantizeError:
            continue
    return tuple(record(model, batch, loss))


def _is_op_among(names: tuple[str, ...]) -> Callable[[str, str], bool]:
    return lambda path, op: op in names


def is_product(operation: Operation) -> bool:
    """Whether the operation starts a group."""
    return (operation.op in PRODUCTS and operation.operands is not None) or operation.op in _OTHER_PRODUCTS


def operation_key(operation: Operation) -> OperationKey:
    """The module and numbered name by which rules match the operation."""
    return operation.module, f"{operation.op}.{operation.index}"


class _TensorCounter:
    """Counts the tensors of a step's operations and assigns them to units and groups."""

    def __init__(self, operations: tuple[Operation, ...]) -> None:
        self.operations = operations
        self.starts, self.group_of = _split_groups(operations)
        self.part_readers = _find_part_readers(operations)
        self.units: list[Unit] = []
        self.tensors: list[CountedTensor] = []

    def count(self, parameters: int) -> StepTensors:
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
        return StepTensors(
            self.operations, tuple(self.tensors), tuple(self.units), groups, tuple(self.group_of), parameters
        )

    def _add_tensors(self, name: str, role: str, tensors: Iterable[Tensor], group: int, unit: int) -> None:
        for tensor in tensors:
            self.tensors.append(CountedTensor(name, role, tensor.numel(), group, unit))

    def _add_unit(self, kind: Kind, operations: Iterable[OperationKey], groups: Iterable[int]) -> int:
        self.units.append(Unit(kind, tuple(dict.fromkeys(operations)), frozenset(groups)))
        return len(self.units) - 1

    def _add_part_unit(self, kind: Kind, readers: Iterable[_PartReader], groups: Iterable[int], whole: int) -> int:
        keys = dict.fromkeys(
            (operation_key(self.operations[reader.operation]), reader.operand)
            for reader in readers
            if reader.operand is not None
        )
        operations, operands = tuple(key for key, _ in keys), tuple(operand for _, operand in keys)
        self.units.append(Unit(kind, operations, frozenset(groups), whole, operands))
        return len(self.units) - 1

    def _count_data(self) -> None:
        tensors: dict[int, Tensor] = {}
        readers: dict[int, list[OperationKey]] = {}
        for operation in self.operations:
            # The first step of a decomposed recurrent layer reads a constant state, which is not data.
            x = None if operation.operands is None or operation.inside in RECURRENT else operation.operands[0]
            if x is None or id(x) in operation.origins or not x.is_floating_point():
                continue
            if any(x is parameter for _, parameter in operation.parameters):
                continue
            tensors[id(x)] = x
            readers.setdefault(id(x), []).append(operation_key(operation))
        for key, x in tensors.items():
            unit = self._add_unit("input", readers[key], [DATA])
            for role in ("activation", "grad_activation"):
                self._add_tensors("input", role, [x], DATA, unit)

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
                unit = self._add_unit(role, [operation_key(first)], groups)
                part_units = self._part_units(role, numbers, groups, unit)
                for number in numbers:
                    operation = self.operations[number]
                    if role == "activation" or operation.needs_grad:
                        name, group = f"{label}:{role}", self.group_of[number]
                        self._add_tensors(name, role, operation.outputs, group, unit)
                        for position, part in enumerate(operation.parts):
                            self._add_tensors(name, role, [part], group, part_units.get(position, unit))

    def _part_units(self, role: Kind, numbers: Sequence[int], groups: Sequence[int], whole: int) -> dict[int, int]:
        """Position of a part of the split results of these calls -> its unit; none if parts cannot be rounded."""
        readers_by_part: dict[int, list[_PartReader]] = {}
        for number in numbers:
            for position in range(len(self.operations[number].parts)):
                readers = self.part_readers.get((number, position), [])
                if any(reader.operand is None for reader in readers):
                    return {}
                readers_by_part.setdefault(position, []).extend(readers)
        kind: Kind = "part" if role == "activation" else "grad_part"
        return {
            position: self._add_part_unit(kind, readers, groups, whole) for position, readers in readers_by_part.items()
        }

    def _count_parameters(self) -> None:
        users: dict[str, list[int]] = {}
        for number, operation in enumerate(self.operations):
            for name, tensor in operation.parameters:
                if tensor.is_floating_point():
                    users.setdefault(name, []).append(number)
        for names in _tie_parameters(users, self.operations):
            numbers = sorted({number for name in names for number in users[name]})
            sources = {name: self._source_groups(users[name]) for name in names}
            keys = [operation_key(self.operations[number]) for number in numbers]
            unit = self._add_unit("weight", keys, (group for groups in sources.values() for group in groups))
            for name in names:
                operation = self.operations[users[name][0]]
                parameter = operation.wholes.get(name, dict(operation.parameters)[name])
                site = f"weight{parameter_suffix(name.rpartition('.')[2])}"
                group = sources[name][0]
                self._add_tensors(f"{operation.label}:{site}", "weight", [parameter], group, unit)
                if parameter.requires_grad:
                    self._add_tensors(f"{operation.label}:grad_{site}", "grad_weight", [parameter], group, unit)

    def _source_groups(self, numbers: Sequence[int]) -> list[int]:
        """The groups that produced the first inputs of the operations that use a parameter."""
        sources = [self._source_group(self.operations[number]) for number in numbers]
        with_source = [group for group in sources if group is not None]
        # The first step of a recurrent layer reads a constant, which is in no group.
        if with_source and self.operations[numbers[0]].inside in RECURRENT:
            return with_source
        return [group or DATA for group in sources]

    def _source_group(self, operation: Operation) -> int | None:
        if operation.operands is not None:
            parameters = [parameter for _, parameter in operation.parameters]
            first = next((x for x in operation.operands if not any(x is parameter for parameter in parameters)), None)
            producer = None if first is None else operation.origins.get(id(first))
        else:
            producer = operation.inputs[0] if operation.inputs else None
        return None if producer is None else self.group_of[producer]


class _PartReader(NamedTuple):
    """A product that reads a part of a split tensor."""

    #: The number of the product.
    operation: int
    #: The operand, ``x`` or ``w``; None where the product cannot round it.
    operand: str | None


def part_of(read: Read, operations: Sequence[Operation]) -> int | None:
    """The position among the parts of a split tensor that is read; None if the whole tensor is."""
    if read.source < 0:
        return None
    containing = [
        (len(part.part), position)
        for position, part in enumerate(operations[read.source].part_reads)
        if part.part and read.part[: len(part.part)] == part.part
    ]
    return max(containing)[1] if containing else None


def _find_part_readers(operations: Sequence[Operation]) -> dict[tuple[int, int], list[_PartReader]]:
    """(operation whose result was split, position of the part) -> the products that read the part."""
    readers: dict[tuple[int, int], list[_PartReader]] = {}
    for number, operation in enumerate(operations):
        if not is_product(operation):
            continue
        for read in dict.fromkeys(operation.reads):
            position = part_of(read, operations)
            if position is not None:
                operands = [key for key, own in zip("xw", operation.operand_reads, strict=True) if own == read]
                part_readers = [_PartReader(number, operand) for operand in operands] or [_PartReader(number, None)]
                readers.setdefault((read.source, position), []).extend(part_readers)
    return readers


def _split_groups(operations: Sequence[Operation]) -> tuple[list[str], list[int]]:
    """(first operation of each group, group of each operation)."""
    starts, group_of, number_of = ["input"], [], dict[str, int]()
    current = DATA
    for operation in operations:
        if is_product(operation):
            key = _weight_name(operation) or operation.label
            if key not in number_of:
                starts.append(operation.label)
                number_of[key] = len(starts) - 1
            current = number_of[key]
        group_of.append(current)
    return starts, group_of


def _weight_name(operation: Operation) -> str | None:
    """The name of the parameter that is an operand of the product."""
    if operation.operands is None:
        return operation.parameters[0][0] if operation.parameters else None
    return next((name for name, t in operation.parameters if any(t is operand for operand in operation.operands)), None)


def _tie_parameters(users: dict[str, list[int]], operations: Sequence[Operation]) -> list[list[str]]:
    """Sets of parameters that must have the same precision, because operations of the same label use them."""
    parent: dict[str, str] = {}

    def find(key: str) -> str:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    for name, numbers in users.items():
        for number in numbers:
            parent[find(f"op {operations[number].label}")] = find(f"parameter {name}")
    tied: dict[str, list[str]] = {}
    for name in users:
        tied.setdefault(find(f"parameter {name}"), []).append(name)
    return list(tied.values())
