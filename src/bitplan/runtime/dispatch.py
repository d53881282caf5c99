"""Where rounding is decided: which tensors of an intercepted operation are rounded, forward and backward.

Everything here must trace under ``torch.compile(fullgraph=True)`` and give the same graph for equal blocks, so values
that differ between blocks (keys of random bits, the step) are in buffers of the module, not in Python numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.capture.constants import CONSTANT, MASK, SQUARE, STATISTIC, TAG, keep_unrounded, with_unrounded_squares
from bitplan.capture.decompositions import ATTENTION, DECOMPOSITIONS, attention, attention_operations
from bitplan.capture.ops import (
    DROPOUTS,
    PRODUCTS,
    drops_nothing,
    inplace_position,
    out_of_place,
    works_in_place,
)
from bitplan.capture.recording import ProductWatch
from bitplan.capture.scopes import Interceptor, Scope, state_of
from bitplan.compiler import torch_patches
from bitplan.compiler.torch_private import DisableTorchFunction
from bitplan.compiler.tracing import VERSION
from bitplan.errors import PlanError, QuantizeError
from bitplan.gemm.axes import ROTATABLE
from bitplan.gemm.products import has_settings, product_of
from bitplan.numerics.wire_format import op_site
from bitplan.plans import SLOTS
from bitplan.runtime.autograd import (
    log_softmax_of_result,
    rounded,
    rounded_both_ways,
    rounded_gradient,
    rounded_product,
)
from bitplan.runtime.decisions import rounding_of
from bitplan.runtime.execution import AttentionCall, AttentionProducts, Execution
from bitplan.runtime.frozen import FROZEN_PRODUCTS, FROZEN_TAG, FrozenOperand
from bitplan.runtime.frozen_product import frozen_product
from bitplan.runtime.head_loss import HeadLoss, why_not_in_chunks
from bitplan.runtime.op_context import OpContext
from bitplan.runtime.rounded_mark import copy_mark, mark_recomputable, recomputable
from bitplan.runtime.rounding_op import OpRounding, RoundingOp, is_finer
from bitplan.runtime.sharding import (
    follow_fsdp,
    is_freed_after_forward,
    is_sharded,
    keep_buffers_local,
    ranks_of_shards,
)
from bitplan.runtime.traced_dispatch import GENERAL, PLAIN, inplace_argument, traced_operation, way_of
from bitplan.runtime.weights import (
    WEIGHT_TAG,
    WeightView,
    context_of_parameter,
    frozen_weight_key,
    largest,
    map_tensors,
    replaces_parameter,
    tag_views,
    taggable,
    weight_key,
)

#: The attribute of a tensor that says how its consumers' gradients are rounded.
_GRAD_TAG = "_bitplan_grad"
#: The attribute of a rounded scalar that holds its value before it was rounded.
_VALUE_TAG = "_bitplan_value"


def value_before_rounding(loss: Tensor) -> Tensor:
    """The value of a loss before a plan rounded it, for reports; the loss itself if it was not rounded eagerly."""
    value: Tensor = getattr(loss, _VALUE_TAG, loss)
    return value


class Rounder(Interceptor):
    """The interceptor that rounds."""

    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.wraps_calls = execution.packs_saved_tensors
        self._finds_shards = True
        #: Set when some plan rounds gradients where they leave a consumer.
        self.tags_gradients = False
        #: Set when some plan rounds weights, so that views of them must be known.
        self.tags_weights = False
        #: Set when weights are stored in few bits (:mod:`bitplan.runtime.frozen`).
        self.has_frozen = False
        #: Called when ``fully_shard`` has sharded a module.
        self.on_sharding: Callable[[], None] | None = None
        #: Called eagerly when a module is entered; None to stop.
        self.on_first_call: Callable[[nn.Module, Any, dict[str, Any]], None] | None = None
        #: Called eagerly for every operation with its tensors; None to stop.
        self.on_site: Callable[[Scope, str, int, str, Any], None] | None = None
        #: Called eagerly for every other operation whose rules round operands, with the products of aten in it.
        self.on_product: Callable[[Scope, str, Sequence[str]], None] | None = None
        #: Called eagerly the first time that a rounded operation runs at a site.
        self.on_new_site: Callable[[nn.Module, OpRounding, OpContext], None] | None = None

    def on_operation(
        self, scope: Scope, op: str, index: int, kind: str, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        module = scope.module
        if isinstance(func, HeadLoss):
            return self._head_loss(scope, op, index, kind, func, args)
        if op in DROPOUTS and drops_nothing(args, kwargs):
            return args[0]  # torch.compile would take it for another tensor
        frozen = frozen_operand(op, args, kwargs) if self.has_frozen else None
        if frozen is not None:
            return self._frozen_product(scope, op, index, kind, func, args, kwargs, frozen)
        if torch.compiler.is_compiling() and not self.tags_gradients and kind not in (SQUARE, STATISTIC):
            way = way_of(module.__dict__[VERSION], op, index, scope.inside, kind, module.training, len(args))
            if way == PLAIN:
                return func(*args, **kwargs)
            writes = (kwargs or inplace_argument(func) != -1) and _works_in_place(func, args, kwargs)
            if way != GENERAL and not writes:
                return traced_operation(way, scope, op, index, kind, func, args, kwargs)
        action = self.rounding_of(module, op, index, scope.inside)
        if kind == STATISTIC:
            args = with_unrounded_squares(args)
        if action is not None and kind == CONSTANT and not action.rounds_constants:
            return func(*args, **kwargs)
        # Tracing must not read the hooks: compiled code would be guarded by them, and they change after the first step.
        if not torch.compiler.is_compiling() and self.on_site is not None:
            self.on_site(scope, op, index, kind, (args, tuple(kwargs.values())))
        if action is None and not self.tags_gradients:
            return func(*args, **kwargs)
        context = OpContext(op_site(op, index), module, action)
        context.is_mask = kind == MASK
        rounds_output = action is not None and kind != STATISTIC and action.rounds_output(context.training)
        is_product = op in PRODUCTS and (op != "einsum" or len(args) == 3)
        has_slots = is_product and action is not None and action.has_slots
        target = None
        if has_slots or self.tags_gradients or rounds_output:
            target, func, args, kwargs = _returning(func, args, kwargs)
        overwritten = _overwritten_arguments(op, target, args)
        if self.tags_gradients:
            args = map_tensors(lambda tensor: self._from_consumer(tensor, context), args)
            kwargs = {
                key: map_tensors(lambda t: self._from_consumer(t, context), value) for key, value in kwargs.items()
            }
        if overwritten:
            args = _with_copies(args, overwritten)
        if action is None:
            return _written(target, func(*args, **kwargs))
        if not torch.compiler.is_compiling() and self.on_new_site is not None and context.site not in action.met:
            self.on_new_site(module, action, context)
        if self.wraps_calls and not torch.compiler.is_compiling():
            func = self.execution.eager_function(op, func)
        if is_product:
            _require_room_under_autocast(action, args)
        if has_slots:
            return _written(target, self._product(module, op, action, context, func, args, kwargs))
        if op == "relu" and rounds_output and not action.at_consumer:
            x = args[0] if args else kwargs["input"]
            return _written(target, self.execution.relu(x, *self._ways(action, context, x), context))
        if op == "log_softmax" and rounds_output and (softmax := _differentiated_softmax(action, args, kwargs)):
            return _written(target, self._log_softmax(*softmax, action, context, func, args, kwargs))
        args, kwargs = self._rounded_weights(module, action, context, args, kwargs)
        if action.has_slots and not torch.compiler.is_compiling() and self.on_product is not None:
            with ProductWatch() as watch:
                result = func(*args, **kwargs)
            self.on_product(scope, op, watch.seen)
        else:
            result = func(*args, **kwargs)
        if rounds_output:
            main, unrounded = largest(result, Tensor), result
            other = context.unrecorded(follows=action.promotes_together)
            result = map_tensors(
                lambda t: self._rounded_output(action, context if t is main else other, t, args), result
            )
            if kind == SQUARE and target is None and result is not unrounded:
                keep_unrounded(result, unrounded)
            if isinstance(unrounded, Tensor) and not unrounded.dim() and not torch.compiler.is_compiling():
                setattr(result, _VALUE_TAG, unrounded.detach())
        return _written(target, result)

    def around_call(self) -> AbstractContextManager[None]:
        return self.execution.around_call()

    def check_compilation(self) -> None:
        if self.split_over is not None:
            raise PlanError(
                "torch.compile does not know which tensors of a plan tensor parallelism splits: run the model eagerly."
            )
        self.execution.check_compilation()

    def on_call(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and self.on_first_call is not None:
            self.on_first_call(module, args, kwargs)

    def on_view(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            return result
        if self.tags_gradients:
            gradient = getattr(first, _GRAD_TAG, None)
            if gradient is not None:
                result = taggable(result)
                for view in result if isinstance(result, (tuple, list)) else [result]:
                    if isinstance(view, Tensor):
                        setattr(view, _GRAD_TAG, gradient)
        if self.tags_weights and (isinstance(first, nn.Parameter) or getattr(first, WEIGHT_TAG, None) is not None):
            result = taggable(result)
            tag_views(result, func, args, kwargs)
        return result

    def on_outermost_call(self, module: nn.Module) -> None:
        if self._finds_shards:
            self.find_shards(module)

    def find_shards(self, model: nn.Module) -> None:
        """Find out whether tensors of the model are split; its layout is final when it is first called."""
        self._finds_shards = False
        self.split_over = ranks_of_shards(model)
        if self.split_over is not None:
            keep_buffers_local(model)
            self.wraps_calls = True  # for check_compilation()

    def on_new_class(self, module: nn.Module) -> None:
        if is_sharded(module):
            self.follow_sharding()
            if self.on_sharding is not None:
                self.on_sharding()

    def follow_sharding(self) -> None:
        """The model is sharded: rounded copies of weights that are gathered for a while must not stay either."""
        self.wraps_calls = True
        torch_patches.apply(follow_fsdp)

    def on_weight(self, path: str, weight: Any) -> Any:
        if isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter):
            setattr(weight, WEIGHT_TAG, True)
        return weight

    def tags_of(self, given: Any) -> dict[int, Any]:
        known: dict[int, Any] = {}
        for position, tensor in enumerate(given):
            tags = {tag: getattr(tensor, tag) for tag in (_GRAD_TAG, WEIGHT_TAG, TAG) if hasattr(tensor, tag)}
            if isinstance(tensor, nn.Parameter) or tags:
                known[position] = tensor if isinstance(tensor, nn.Parameter) else tags
        return known

    def with_tags(self, args: Any, known: dict[int, Any]) -> Any:
        with_tags = list(args)
        for position, what in known.items():
            if isinstance(what, nn.Parameter):
                with_tags[position] = what  # its gradient goes straight to it
                continue
            for tag, value in what.items():
                setattr(with_tags[position], tag, value)
        return with_tags

    @staticmethod
    def rounding_of(module: nn.Module, op: str, index: int, inside: str | None = None) -> OpRounding | None:
        """What happens to the operation of that number, which may lie inside an opened one."""
        return rounding_of(state_of(module).actions, op, index, inside)

    def decomposition_of(self, scope: Scope, op: str) -> Callable[..., Any] | None:
        if op not in DECOMPOSITIONS or not state_of(scope.module).actions[f"open {op}"]:
            return None
        if op != ATTENTION or not self.execution.has_attention:
            return DECOMPOSITIONS[op]
        return lambda *args, **kwargs: self._attention(scope, *args, **kwargs)

    # --- attention ---

    def _attention(self, scope: Scope, *args: Any, **kwargs: Any) -> Tensor:
        """Attention whose products are rounded: in one kernel, or written out."""
        with DisableTorchFunction():
            call = AttentionCall(*args, **kwargs)
            products = self._attention_products(scope, call)
            runs = products is not None and self.execution.runs_attention(call, products, scope.module.training)
        if products is None or not runs:
            result: Tensor = attention(*args, **kwargs)
            return result
        numbers = scope.next_index("matmul"), scope.next_index("matmul") + 1
        if torch.compiler.is_compiling() or not self._is_new(scope, numbers, products):
            scope.count(attention_operations(call.is_causal, call.enable_gqa))
        else:  # for those who want to know of the operations inside, and for the records of delayed scales
            query, key, value = (tensor[..., :1, :] for tensor in call[:3])
            attention(query, key, value, *call[3:6], scale=call.scale, enable_gqa=call.enable_gqa)
        with DisableTorchFunction():
            contexts = tuple(
                OpContext(op_site("matmul", number), scope.module, rounding)
                for number, rounding in zip(numbers, products, strict=True)
            )
            return self.execution.attention(call, products, (contexts[0], contexts[1]))

    def _attention_products(self, scope: Scope, call: AttentionCall) -> AttentionProducts | None:
        """What happens to the operands of both products; None where that is nothing, or where more is rounded."""
        if self.tags_gradients or self.split_over is not None:
            return None
        found: list[OpRounding] = []
        indices: dict[str, int] = {}
        for op in attention_operations(call.is_causal, call.enable_gqa):
            index = indices[op] = indices[op] + 1 if op in indices else scope.next_index(op)
            rounding = self.rounding_of(scope.module, op, index, ATTENTION)
            if (rounding is None) == (op == "matmul"):
                return None
            if rounding is not None:
                found.append(rounding)
        return found[0], found[1]

    def _is_new(self, scope: Scope, numbers: tuple[int, int], products: AttentionProducts) -> bool:
        """Whether somebody wants to know of operations that run, or of these products that run for the first time."""
        if self.on_site is not None:
            return True
        sites = [op_site("matmul", number) for number in numbers]
        is_met = all(site in rounding.met for site, rounding in zip(sites, products, strict=True))
        return self.on_new_site is not None and not is_met

    # --- outputs ---

    def _rounded_output(self, action: OpRounding, context: OpContext, tensor: Tensor, inputs: Any) -> Tensor:
        if not tensor.is_floating_point() or any(tensor is given for given in inputs):
            return tensor  # dropout in evaluation, say, returns what it was given
        value, gradient = self._ways(action, context, tensor)
        if action.at_consumer and "grad_activation" in action.places:
            tensor = rounded_both_ways(tensor, value, None, context)
            # Also without a gradient: a checkpointed region runs so at first, and its result has one later.
            setattr(tensor, _GRAD_TAG, (action.places["grad_activation"], context))
            return tensor
        return rounded_both_ways(tensor, value, gradient, context)

    def _log_softmax(
        self,
        x: Tensor,
        dim: int,
        action: OpRounding,
        context: OpContext,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """A log-softmax whose backward pass reads the rounded result, as in Lee, Sharma & Aiken's code."""
        with torch.no_grad():
            y = self._rounded_output(action, context, func(*args, **kwargs), args)
        result = log_softmax_of_result(x, y, dim)
        setattr(result, _GRAD_TAG, getattr(y, _GRAD_TAG, None))
        return result

    @staticmethod
    def _ways(action: OpRounding, context: OpContext, tensor: Tensor) -> tuple[RoundingOp | None, RoundingOp | None]:
        """What rounds an output, and its gradient."""
        is_rounded = action.applies("activation", context.training) and not context.is_mask
        value = action.places["activation"] if is_rounded else None
        gradient = action.places.get("grad_activation") if torch.is_grad_enabled() and tensor.requires_grad else None
        return value, gradient

    def _from_consumer(self, tensor: Tensor, context: OpContext) -> Tensor:
        tag = getattr(tensor, _GRAD_TAG, None)
        if tag is None or not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        gradient, producer = tag  # whose tables hold what rounding needs
        return rounded_gradient(tensor, gradient, producer.towards(context))

    # --- weights ---

    def _rounded_weights(
        self, module: nn.Module, action: OpRounding, context: OpContext, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if not action.rounds_weights:
            return args, kwargs
        main = largest((args, tuple(kwargs.values())), nn.Parameter)

        def rounded(tensor: Tensor) -> Tensor:
            if action.tells_weights_apart:
                return self._rounded_weight(module, action, context_of_parameter(context, module, tensor), tensor)
            recorded = main is None or tensor is main or not isinstance(tensor, nn.Parameter)
            return self._rounded_weight(module, action, context if recorded else context.unrecorded(), tensor)

        return map_tensors(rounded, args), {key: map_tensors(rounded, value) for key, value in kwargs.items()}

    def _rounded_weight(self, module: nn.Module, action: OpRounding, context: OpContext, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            tag = getattr(tensor, WEIGHT_TAG, None)
            if isinstance(tag, WeightView):
                return tag.of(self._rounded_weight(module, action, context, tag.parent))
            if tag is None and not replaces_parameter(module, tensor):
                return tensor
        gradient = action.places.get("grad_weight") if torch.is_grad_enabled() and tensor.requires_grad else None
        value = action.places["weight"] if action.applies("weight", context.training) else None
        key = weight_key(module, tensor) if action.needs_key else None
        rounded = rounded_both_ways(tensor, value, gradient, context, key)
        return rounded if value is None else _saved_with_source(rounded, tensor, value, context, key)

    # --- products ---

    def _product(
        self,
        module: nn.Module,
        op: str,
        action: OpRounding,
        context: OpContext,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        (x_at, x_name), (w_at, w_name) = PRODUCTS[op]
        w = args[w_at] if len(args) > w_at else kwargs[w_name]
        if action.rotates:
            _require_rotatable(op, args[x_at] if len(args) > x_at else kwargs[x_name], w, context)
        key = weight_key(module, w) if action.needs_key and isinstance(w, nn.Parameter) else None
        args, kwargs = self._rounded_weights(module, action, context, args, kwargs)
        x = args[x_at] if len(args) > x_at else kwargs[x_name]
        w = args[w_at] if len(args) > w_at else kwargs[w_name]
        result = None
        if action.is_prepared:
            result = self.execution.product(op, args, kwargs, x, w, action, context, key)
        if result is None and (action.slots_apart or _rounds_weight_again(op, action, args, kwargs, x, w)):
            product, bias = product_of(op, args, kwargs)
            result = rounded_product(x, w, bias, product, action, context, key)
        elif result is None:
            places, shared, training = action.places, action.shared, context.training
            is_direct = not (action.promotes or torch.compiler.is_compiling())
            if "x" in shared and action.applies("fprop.x", training):
                x_op = places["fprop.x"]
                x = x_op.round(x, context) if is_direct else rounded(x, x_op, context)
            if "w" in shared and action.applies("fprop.w", training):
                w_op, unrounded = places["fprop.w"], w
                w = w_op.round(w, context, key) if is_direct else rounded(w, w_op, context, key)
                w = _saved_with_source(w, unrounded, w_op, context, key)
            args, kwargs = _replaced(args, kwargs, x_at, x_name, x)
            args, kwargs = _replaced(args, kwargs, w_at, w_name, w)
            result = func(*args, **kwargs)
            if "dy" in shared and torch.is_grad_enabled() and result.requires_grad:
                result = rounded_gradient(result, places["dgrad.dy"], context)
        return self._rounded_output(action, context, result, ()) if action.rounds_output(context.training) else result

    def _frozen_product(
        self,
        scope: Scope,
        op: str,
        index: int,
        kind: str,
        func: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        frozen: FrozenOperand,
    ) -> Any:
        """The product of an input with a weight that is stored in few bits."""
        module = scope.module
        action = self.rounding_of(module, op, index, scope.inside)
        if not torch.compiler.is_compiling() and self.on_site is not None:
            self.on_site(scope, op, index, kind, (args, tuple(kwargs.values())))
        context = OpContext(op_site(op, index), module, action)
        if self.tags_gradients:
            args = map_tensors(lambda tensor: self._from_consumer(tensor, context), args)
            kwargs = {
                key: map_tensors(lambda t: self._from_consumer(t, context), value) for key, value in kwargs.items()
            }
        if action is not None:
            if not torch.compiler.is_compiling() and self.on_new_site is not None and context.site not in action.met:
                self.on_new_site(module, action, context)
            _require_room_under_autocast(action, args)
        x = args[0] if args else kwargs["input"]
        w = args[1] if len(args) > 1 else kwargs["weight"]
        if action is not None and action.rotates:
            _require_rotatable(op, x, w, context)
        key = frozen_weight_key(module) if action is not None and action.needs_key else None
        product, bias = product_of(op, args, kwargs)
        result = None
        if action is not None and action.rounds_weights:
            # Rounded as any weight, and saved so: rules for the class `weight` are about what all readers see.
            args, kwargs = self._rounded_weights(module, action, context, args, kwargs)
            (x, w) = (args[0] if args else kwargs["input"]), (args[1] if len(args) > 1 else kwargs["weight"])
            product, bias = product_of(op, args, kwargs)
            result = rounded_product(x, w, bias, product, action, context, key)
        elif action is not None and action.prepared is not None:
            result = self.execution.frozen_product(product, x, bias, w, frozen, action, context, key)
        if result is None:
            result = frozen_product(x, bias, w, frozen, product, action, context, key)
        if action is not None and action.rounds_output(context.training):
            return self._rounded_output(action, context, result, ())
        return result

    def _head_loss(self, scope: Scope, op: str, index: int, kind: str, loss: HeadLoss, args: Any) -> Tensor:
        """The product of a head whose loss is computed in chunks of tokens."""
        module = scope.module
        action = self.rounding_of(module, op, index, scope.inside)
        if self.on_site is not None and not torch.compiler.is_compiling():
            self.on_site(scope, op, index, kind, (args, ()))
        context = OpContext(op_site(op, index), module, action)
        if self.tags_gradients:
            args = map_tensors(lambda tensor: self._from_consumer(tensor, context), args)
        if action is None:
            return loss(*args)
        reason = why_not_in_chunks(action, context.training)
        if reason is not None:
            raise PlanError(
                f"the plan's rules for {state_of(module).path}/{context.site} do not allow its loss to be computed in "
                f"chunks of tokens: {reason}; change these rules, or compute logits and loss separately."
            )
        if not torch.compiler.is_compiling() and self.on_new_site is not None and context.site not in action.met:
            self.on_new_site(module, action, context)
        _require_room_under_autocast(action, args)
        weight = args[1]
        key = weight_key(module, weight) if action.needs_key and isinstance(weight, nn.Parameter) else None
        (x, w, bias), _ = self._rounded_weights(module, action, context, args, {})
        if not action.has_slots:
            return loss(x, w, bias)
        return self.execution.head_loss(x, w, bias, loss, action, context, key)


def _require_rotatable(op: str, x: Any, w: Any, context: OpContext) -> None:
    """Raise where the operands of a product cannot be rotated along one axis."""
    if op not in ROTATABLE or (op != "linear" and min(x.dim(), w.dim()) < 2):
        raise PlanError(
            f"rotate applies to operands of linear layers and matrix products, and not those of {context.site}: "
            f"restrict the rule, as in op: [linear, addmm]."
        )


def _rounds_weight_again(op: str, action: OpRounding, args: Any, kwargs: dict[str, Any], x: Tensor, w: Any) -> bool:
    """Whether the backward pass rounds a frozen weight once more, so that its rounded copy is not saved.

    Eagerly; in a compiled graph the partitioner decides.
    """
    if torch.compiler.is_compiling() or not isinstance(w, nn.Parameter) or w.requires_grad or not x.requires_grad:
        return False
    if "w" not in action.shared or op not in FROZEN_PRODUCTS or not has_settings(op, args, kwargs):
        return False
    # What is observed must be observed once.
    return not action.promotes and not any(rounding.observes for rounding in action.places.values())


def _saved_with_source(
    rounded: Tensor, weight: Tensor, op: RoundingOp, context: OpContext, key: Tensor | None
) -> Tensor:
    """`rounded`, which the backward pass makes again of `weight` where FSDP2 frees that after the forward pass."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return rounded
    source, present = recomputable(weight), op.after_promotion(context)
    if present is not None and (source is not None or is_freed_after_forward(weight)):
        make = weight.detach if source is None else source.make
        mark_recomputable(rounded, weight, lambda: present.round(make(), context, key))
    return rounded


def frozen_operand(op: str, args: Any, kwargs: dict[str, Any]) -> FrozenOperand | None:
    """The codes of the weight of a linear layer or convolution, where it is stored in few bits."""
    if op not in FROZEN_PRODUCTS or not has_settings(op, args, kwargs):
        return None
    w = args[1] if len(args) > 1 else kwargs.get("weight")
    return getattr(w, FROZEN_TAG, None)


#: In-place functions that fill a tensor with random numbers, and have no twin that returns a new one.
_FILLERS = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")


def _works_in_place(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes into one of its arguments."""
    if kwargs and (kwargs.get("out") is not None or kwargs.get("inplace")):
        return True
    position = inplace_argument(func)
    return position != -1 and (position == -2 or (position < len(args) and bool(args[position])))


def _returning(
    func: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Callable[..., Any], Any, dict[str, Any]]:
    """What `func` would write into (None where nothing), and a call that returns the same values instead."""
    if kwargs.get("out") is not None:
        return kwargs["out"], func, args, {key: value for key, value in kwargs.items() if key != "out"}
    if kwargs.get("inplace"):
        return args[0], func, args, {**kwargs, "inplace": False}
    position = inplace_position(func)
    if 0 <= position < len(args):  # torch.compile shows a call as it is written
        target = args[0] if args[position] else None
        return target, func, (*args[:position], False, *args[position + 1 :]), kwargs
    if not works_in_place(func):
        return None, func, args, kwargs
    if getattr(func, "__name__", "") in _FILLERS:
        return args[0], lambda tensor, *rest, **named: func(tensor.clone(), *rest, **named), args, kwargs
    return args[0], out_of_place(func), args, kwargs


#: Operations whose backward pass does not read their input.
_SAVES_NO_INPUT = frozenset({"add", "dropout", "neg", "relu", "sub"})


def _overwritten_arguments(op: str, target: Any, args: Any) -> tuple[int, ...]:
    """The positions of arguments that an in-place operation overwrites and that its backward pass may read."""
    if target is None or op in _SAVES_NO_INPUT or not torch.is_grad_enabled():
        return ()
    return tuple(position for position, value in enumerate(args) if value is target)


def _with_copies(args: Any, positions: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments with a copy of the tensor in these positions."""
    original = args[positions[0]]
    copy = original.clone()
    if not torch.compiler.is_compiling():
        copy_mark(copy, original)
    return tuple(copy if position in positions else value for position, value in enumerate(args))


def _written(target: Any, result: Any) -> Any:
    """`result` itself, or where it was to be written into a tensor, that tensor."""
    if target is None:
        return result
    if isinstance(target, (tuple, list)):
        return type(result)([_written(*pair) for pair in zip(target, result, strict=True)])
    if target.shape != result.shape:
        target.resize_(result.shape)
    target.copy_(result)
    if not torch.compiler.is_compiling():
        copy_mark(target, result)
    tag = getattr(result, _GRAD_TAG, None)
    if tag is not None or hasattr(target, _GRAD_TAG):
        setattr(target, _GRAD_TAG, tag)
    return target


def _differentiated_softmax(action: OpRounding, args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, int] | None:
    """Input and axis of a log-softmax whose gradient is computed from its rounded result; None for any other.

    With ``grad_at: consumer``, gradients are what the authors of these formats compute. Elsewhere torch's own function
    keeps the unrounded result.
    """
    x = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    is_differentiated = isinstance(x, Tensor) and torch.is_grad_enabled() and x.requires_grad
    return (x, dim) if action.at_consumer and is_differentiated and isinstance(dim, int) else None


def _replaced(
    args: Any, kwargs: dict[str, Any], position: int, name: str, tensor: Tensor
) -> tuple[Any, dict[str, Any]]:
    """The arguments with another tensor in one of them."""
    if len(args) > position:
        return (*args[:position], tensor, *args[position + 1 :]), kwargs
    return args, {**kwargs, name: tensor}


def _require_room_under_autocast(action: OpRounding, args: Any) -> None:
    """Autocast would round a finer operand again, to its own type: that is an error, not a surprise."""
    kind = "cpu"
    for value in args:
        if isinstance(value, Tensor):
            kind = value.device.type
            break
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # torch raises for the meta device
        return
    dtype = torch.get_autocast_dtype(kind)
    for place in ("weight", *SLOTS):
        if place in action.places:
            target = action.places[place].spec.target
            if is_finer(target, dtype):
                raise QuantizeError(
                    f"autocast computes {action.op} in {dtype}, which is coarser than {target.name} in {place}: "
                    f"choose a coarser format, or leave autocast."
                )
