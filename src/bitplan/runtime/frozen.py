"""Weights that are not trained, stored in few bits while a plan with ``frozen:`` is attached.

A module with such a weight has no parameter in its place, but buffers with codes and scales. Its class has a property
of the weight's name that decodes it, so that everything that reads ``module.weight`` sees a tensor in the module's
dtype. A product recognises it by a tag (:class:`FrozenOperand`) and saves the codes instead of it. ``state_dict()`` has
plain tensors; what is loaded is encoded again. A weight that somebody writes to is an ordinary parameter from then on.

In execution ``emulate`` the weight stays a parameter, whose values are rounded once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bitplan.capture.ops import works_in_place
from bitplan.capture.planned_classes import original_class, register_planned_class, without_wrappers
from bitplan.capture.scopes import state_of
from bitplan.compiler.torch_private import DisableTorchFunction, FakeTensor
from bitplan.compiler.tracing import is_traced_below_dynamo, needs_shapes_only, opaque_in_graph
from bitplan.errors import BitplanWarning, PlanError, QuantizeError
from bitplan.numerics.frozen_codec import FrozenCodec, FrozenCodes, codec_of_text, codes_from_tensors
from bitplan.plans import OPERANDS, Decision, Plan
from bitplan.plans.frozen import FrozenSpec
from bitplan.plans.spec import QuantizerSpec
from bitplan.runtime.module_state import FROZEN

#: Attribute of a tensor that was decoded from codes: its :class:`FrozenOperand`.
FROZEN_TAG = "_bitplan_frozen_operand"

#: Modules whose ``weight`` can be stored in few bits -> the operation that reads it.
_OPERATIONS: dict[type[nn.Module], str] = {
    nn.Linear: "linear",
    nn.Embedding: "embedding",
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
}


#: Operations that read the codes themselves; embeddings read the decoded weight, which they do not save.
FROZEN_PRODUCTS = frozenset(_OPERATIONS.values()) - {"embedding"}


class FrozenOperand(NamedTuple):
    """A decoded weight's codes, as a product needs them."""

    #: Stands for codec and dtype in compiled graphs.
    text: str
    tensors: tuple[Tensor, ...]

    def decode(self, after: Tensor | None = None) -> Tensor:
        """The weight; in a graph, :meth:`FrozenCodec.decode` says what `after` is for."""
        codec, dtype = codec_and_dtype(self.text)
        return codec.decode(codes_from_tensors(self.tensors, codec), dtype, after)

    @property
    def codec(self) -> FrozenCodec:
        return codec_and_dtype(self.text)[0]

    @property
    def codes(self) -> FrozenCodes:
        return codes_from_tensors(self.tensors, self.codec)


def codec_and_dtype(text: str) -> tuple[FrozenCodec, torch.dtype]:
    dtype, codec = text.split(" ", 1)
    return codec_of_text(codec), getattr(torch, dtype)


@dataclass(frozen=True)
class FrozenWeight:
    """What is known of one stored weight of a module, beside its buffers."""

    codec: FrozenCodec
    #: That of the parameter, and of the decoded weight.
    dtype: torch.dtype
    #: The parameter that the codes replace, without its data; None where the weight stays a parameter.
    parameter: nn.Parameter | None
    text: str
    buffers: tuple[str, ...] = ()

    @classmethod
    def of(cls, codec: FrozenCodec, dtype: torch.dtype, parameter: nn.Parameter | None, name: str) -> FrozenWeight:
        count = len(codec_tensors(codec))
        buffers = tuple(f"{FROZEN}_{name}_{number}" for number in range(count)) if parameter is not None else ()
        return cls(codec, dtype, parameter, _text(codec, dtype), buffers)

    def in_dtype(self, dtype: torch.dtype) -> FrozenWeight:
        return replace(self, dtype=dtype, text=_text(self.codec, dtype))


def _text(codec: FrozenCodec, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {codec.text}"


def codec_tensors(codec: FrozenCodec) -> tuple[str, ...]:
    """What the stored tensors are, in order."""
    scales = ("scales", "offsets", "steps") if codec.has_double_scales else ("scales",)
    has_table = codec.code_dtype is None and codec.element.kind != "int"
    return ("codes", *scales, "table") if has_table else ("codes", *scales)


# --- Reading a stored weight


def weight_property(name: str) -> property:
    """The property of a class whose instances may have a stored weight of that name."""

    def get(self: Any) -> Any:
        own = self._parameters[name]
        return own if own is not None else _decoded(self, name)

    return property(get)


def _decoded(module: nn.Module, name: str) -> Tensor:
    weight: FrozenWeight = module.__dict__[FROZEN][name]
    buffers: dict[str, Any] = module._buffers
    tensors = tuple([buffers[key] for key in weight.buffers])
    operand = FrozenOperand(weight.text, tensors)
    if torch.compiler.is_compiling():
        with DisableTorchFunction():
            traced = decoded_in_graph(weight.text, *tensors)
        setattr(traced, FROZEN_TAG, operand)
        return traced
    with DisableTorchFunction(), torch.no_grad():
        values: Any = operand.decode()
        if not isinstance(values, FakeTensor):  # which has a class of its own, and no values to be written to
            values = values.as_subclass(DecodedWeight)
            values.weight_owner, values.weight_name = weakref.ref(module), name
    setattr(values, FROZEN_TAG, operand)
    state = state_of(module)
    return state.interceptor.on_weight(f"{state.path}.{name}", values)  # type: ignore[no-any-return]


@opaque_in_graph
def decoded_in_graph(text: str, *tensors: Tensor) -> Tensor:
    codec, dtype = codec_and_dtype(text)
    if is_traced_below_dynamo() and needs_shapes_only(tensors[0]):
        return tensors[0].new_empty(codec.shape, dtype=dtype)
    return codec.decode(codes_from_tensors(tensors, codec), dtype)


class DecodedWeight(Tensor):
    """The values of a stored weight. What is written to it is stored, as a parameter in full precision."""

    weight_owner: Callable[[], nn.Module | None]
    weight_name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        first = args[0] if args and isinstance(args[0], DecodedWeight) else None
        name = getattr(func, "__name__", "")
        if first is not None and name == "requires_grad_":
            if named.get("requires_grad", args[1] if len(args) > 1 else True):
                raise PlanError(f"{_label(first)} is stored in few bits and cannot be trained: detach the plan first.")
            return first
        with DisableTorchFunction():
            result = func(*args, **named)
        if first is not None:
            if func == Tensor.data.__set__ or works_in_place(func):  # type: ignore[attr-defined]
                _store_values(first)
            elif func == Tensor.data.__get__ or name == "detach":  # type: ignore[attr-defined]
                alias = result.as_subclass(DecodedWeight)
                alias.weight_owner, alias.weight_name = first.weight_owner, first.weight_name
                return alias
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).clone()


def _plain(values: Tensor) -> Tensor:
    return values.as_subclass(Tensor) if isinstance(values, DecodedWeight) else values


def _label(values: DecodedWeight) -> str:
    module = values.weight_owner()
    return values.weight_name if module is None else f"{state_of(module).path}.{values.weight_name}"


def _store_values(values: DecodedWeight) -> None:
    """Make a weight that was written to an ordinary parameter: PEFT's merged weights stay exact this way."""
    module = values.weight_owner()
    if module is None or FROZEN not in module.__dict__:
        return
    with DisableTorchFunction(), torch.no_grad():
        dense = values.as_subclass(Tensor).detach()
    weight: FrozenWeight = module.__dict__[FROZEN][values.weight_name]
    reported = state_of(module).interceptor.reported_gaps
    if weight.parameter is not None and reported is not None and "frozen" not in reported:
        reported.add("frozen")
        warnings.warn(
            f"{_label(values)} was written to, so it is kept in full precision from now on instead of as "
            f"{weight.codec.format.name}: attach the plan again to store it in few bits.",
            BitplanWarning,
            stacklevel=4,
        )
    _put_parameter(module, values.weight_name, dense)


def _put_parameter(module: nn.Module, name: str, values: Tensor) -> None:
    """Replace the codes of a weight by its parameter with these values."""
    weight: FrozenWeight = module.__dict__[FROZEN][name]
    if weight.parameter is not None:
        parameter = weight.parameter
        parameter.data = values.detach()
        module._parameters[name] = parameter
        for key in weight.buffers:
            module._buffers.pop(key, None)
            module._non_persistent_buffers_set.discard(key)
        module.__dict__[FROZEN] = {
            key: replace(value, parameter=None, buffers=()) if key == name else value
            for key, value in module.__dict__[FROZEN].items()
        }
    else:
        own = module._parameters[name]
        assert own is not None
        own.data = values.detach()


def _put_codes(module: nn.Module, name: str, weight: FrozenWeight, codes: FrozenCodes) -> None:
    for key, tensor in zip(weight.buffers, codes.tensors, strict=True):
        module.register_buffer(key, tensor, persistent=False)
    module._parameters[name] = None


# --- The class of a module with stored weights


class _HasFrozenWeights:
    """Mixed into a planned class in front of it."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        own: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        stored = [name for name in self.__dict__[FROZEN] if own[name] is None]
        for name in stored:
            with torch.no_grad():
                own[name] = _plain(getattr(self, name))
        try:
            super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        finally:
            for name in stored:
                own[name] = None

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """What is loaded is rounded or encoded as the weight was at first."""
        own: dict[str, Any] = self._parameters  # type: ignore[attr-defined]
        weights: dict[str, FrozenWeight] = self.__dict__[FROZEN]
        stored = [name for name, weight in weights.items() if weight.parameter is not None and own[name] is None]
        for name in stored:
            weight = weights[name]
            device = self._buffers[weight.buffers[0]].device  # type: ignore[attr-defined]
            own[name] = nn.Parameter(torch.empty(weight.codec.shape, dtype=weight.dtype, device=device), False)
        before = {name: (own[name], own[name]._version) for name in weights}
        try:
            super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]
            for name, weight in weights.items():
                if own[name] is before[name][0] and own[name]._version == before[name][1]:
                    continue  # not loaded: the key is missing, or its tensor does not fit
                if name in stored:
                    _put_codes(self, name, weight, weight.codec.encode(own[name]))  # type: ignore[arg-type]
                else:
                    _round_in_place(weight.codec, own[name])
        finally:
            for name in stored:
                own[name] = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Buffers keep their dtype; the dtype of decoded weights follows the module's."""
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        weights: dict[str, FrozenWeight] = self.__dict__[FROZEN]
        changed = dict(weights)
        for name, weight in weights.items():
            if weight.buffers:
                device = self._buffers[weight.buffers[0]].device  # type: ignore[attr-defined]
                dtype = fn(torch.empty(0, dtype=weight.dtype, device=device)).dtype
                changed[name] = weight if dtype == weight.dtype else weight.in_dtype(dtype)
        if changed != weights:
            self.__dict__[FROZEN] = changed
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle holds the plain model, with the decoded weights."""
        reduced: tuple[Any, ...] = super().__reduce_ex__(protocol)  # type: ignore[assignment]
        function, arguments, state = reduced
        state = {key: value for key, value in state.items() if key != FROZEN}
        state["_parameters"] = dict(state["_parameters"])
        for name, weight in self.__dict__[FROZEN].items():
            if weight.buffers:
                state["_parameters"][name] = nn.Parameter(_plain(getattr(self, name)), False)
        return function, arguments, state

    def _before_uninstall(self) -> None:
        restore_parameters(self)  # type: ignore[arg-type]


_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[nn.Module]] = {}


def _class_with(planned: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """One for each class and names, so that equal blocks share compiled code."""
    if (planned, names) not in _CLASSES:
        own: dict[str, Any] = {name: weight_property(name) for name in names}
        own["__module__"] = planned.__module__
        derived = type(planned.__name__, (_HasFrozenWeights, planned), own)
        register_planned_class(derived, original_class(planned))
        _CLASSES[planned, names] = derived
    return _CLASSES[planned, names]


# --- Attaching and detaching


class FrozenSite(NamedTuple):
    """A weight that a plan stores in few bits."""

    path: str
    module: nn.Module
    name: str
    spec: FrozenSpec
    #: The index of the rule that says so.
    rule: int

    @property
    def label(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")

    @property
    def parameter(self) -> nn.Parameter:
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter

    @property
    def codec(self) -> FrozenCodec:
        return self.spec.codec(tuple(self.parameter.shape))


def operation_of(module: nn.Module) -> str | None:
    """The operation that reads the module's weight, where it can be stored in few bits."""
    return next((op for kind, op in _OPERATIONS.items() if isinstance(module, kind)), None)


def is_frozen_weight(op: str, name: str | None, parameters: Iterable[tuple[str, Tensor]]) -> bool:
    """Whether a recorded operation reads a parameter of that name that can be stored in few bits."""
    if op not in _OPERATIONS.values() or name is None or name.rpartition(".")[2] != "weight":
        return False
    return any(own == name and not tensor.requires_grad and tensor.dim() > 1 for own, tensor in parameters)


def frozen_spec(plan: Plan, path: str, module: nn.Module, op: str) -> FrozenSpec | None:
    """What the weight is stored in that `op` in that module reads; None where it is not frozen, or stays as it is."""
    if not plan.has_frozen or operation_of(module) != op:
        return None
    weight = module._parameters.get("weight")
    is_stored = "weight" in module.__dict__.get(FROZEN, {})
    if not is_stored and (weight is None or weight.requires_grad):
        return None
    return plan.frozen_at(path, op)[0]


def with_stored_weight(decision: Decision, spec: FrozenSpec) -> Decision:
    """The decision with the format of a stored weight for its operand, where the plan gives it none.

    For the choice of GEMM backends: the weight is on that grid already.
    """
    slots = OPERANDS["w"]
    if any(decision[slot].quantizer is not None for slot in slots) or spec.scale not in ("tensor", "channel"):
        return decision
    quantizer = QuantizerSpec(spec.format, scale=spec.scale, axis=0 if spec.scale == "channel" else None)
    stored = {slot: replace(decision[slot], quantizer=quantizer, share="stored weight") for slot in slots}
    return replace(decision, choices={**decision.choices, **stored})


def find_frozen_weights(plan: Plan, modules: Iterable[tuple[str, nn.Module]], model: nn.Module) -> list[FrozenSite]:
    """The weights that the plan's rules about frozen weights apply to. Raise where such a rule has no effect.

    Raise also for a weight that several modules share: one of them would have codes and the other not.
    """
    if not plan.has_frozen:
        return []
    candidates: list[FrozenSite] = []
    is_trained: set[int] = set()
    for path, module in modules:
        op = operation_of(module)
        weight = module._parameters.get("weight")
        if op is None or weight is None or not weight.is_floating_point() or weight.dim() < 2:
            continue
        spec, rule = plan.frozen_at(path, op)
        if spec is None or rule is None:
            continue
        if weight.requires_grad:
            is_trained.add(rule)
        else:
            candidates.append(FrozenSite(path, module, "weight", spec, rule))
    _require_effect(plan, candidates, is_trained)
    _require_unshared(candidates, model)
    return candidates


def _require_effect(plan: Plan, sites: Sequence[FrozenSite], is_trained: set[int]) -> None:
    effective = {site.rule for site in sites}
    for index, rule in enumerate(plan.all_rules):
        if not isinstance(rule.frozen, FrozenSpec) or index in effective:
            continue
        why = (
            "all weights that it matches are trained: set requires_grad to False before attach(), or drop frozen"
            if index in is_trained
            else "it matches no weight of a linear layer, a convolution or an embedding that later rules leave to it"
        )
        message = f"{rule.where or f'rules[{index}]'}.frozen has no effect, because {why}."
        if rule.strict:
            raise PlanError(message)
        warnings.warn(message, BitplanWarning, stacklevel=5)


def _require_unshared(sites: Sequence[FrozenSite], model: nn.Module) -> None:
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(without_wrappers(f"{path}.{name}".lstrip(".")))
    for site in sites:
        others = [name for name in names[id(site.parameter)] if name != site.label]
        if others:
            raise PlanError(
                f"{site.label} is also {others[0]}, and shared weights cannot be stored in few bits: add "
                f"{{match: {site.path!r}, frozen: keep}} as the last rule."
            )


def store_frozen_weights(sites: Sequence[FrozenSite], in_few_bits: bool) -> None:
    """Round the weights; `in_few_bits`: replace their parameters by codes, one after the other.

    Nothing is changed where one of them cannot be stored.
    """
    for site in sites:
        values = site.parameter.detach()
        if values.is_meta:
            raise PlanError(f"{site.label} is on the meta device and has no values to store: load the model first.")
        if not isinstance(values, FakeTensor) and not bool(values.isfinite().all()):
            raise QuantizeError(f"{site.label} holds NaN or infinities, which cannot be stored in few bits.")
    for site in sites:
        _store(site, in_few_bits)


def _store(site: FrozenSite, in_few_bits: bool) -> None:
    module, name, parameter, codec = site.module, site.name, site.parameter, site.codec
    weight = FrozenWeight.of(codec, parameter.dtype, parameter if in_few_bits else None, name)
    if in_few_bits:
        codes = codec.encode(parameter)
        _put_codes(module, name, weight, codes)
        # Optimizers and trainers may hold the parameter: its memory is freed all the same.
        parameter.data = parameter.data.new_empty(0)
    else:
        _round_in_place(codec, parameter)
    module.__dict__[FROZEN] = {**module.__dict__.get(FROZEN, {}), name: weight}
    module.__class__ = _class_with(_planned_base(type(module)), tuple(module.__dict__[FROZEN]))


def _planned_base(kind: type[nn.Module]) -> type[nn.Module]:
    """The planned class without stored weights."""
    return next((planned for (planned, _), derived in _CLASSES.items() if derived is kind), kind)


def _round_in_place(codec: FrozenCodec, parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.data.copy_(codec.decode(codec.encode(parameter), parameter.dtype))


def restore_parameters(module: nn.Module) -> None:
    """Give a module its parameters back, with the decoded values."""
    weights: dict[str, FrozenWeight] = module.__dict__.get(FROZEN, {})
    for name, weight in weights.items():
        if weight.buffers and module._parameters[name] is None:
            with torch.no_grad():
                codes = tuple(module._buffers[key] for key in weight.buffers)
                values = FrozenOperand(weight.text, codes).decode()  # type: ignore[arg-type]
            _put_parameter(module, name, values)
    module.__dict__.pop(FROZEN, None)


def frozen_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's weights that are stored as codes now."""
    weights: dict[str, FrozenWeight] = module.__dict__.get(FROZEN, {})
    return tuple(name for name, weight in weights.items() if weight.buffers)


def frozen_buffers(module: nn.Module) -> list[Tensor]:
    """The tensors of a module's stored weights."""
    weights: dict[str, FrozenWeight] = module.__dict__.get(FROZEN, {})
    keys = [key for weight in weights.values() for key in weight.buffers]
    return [tensor for key in keys if (tensor := module._buffers.get(key)) is not None]
