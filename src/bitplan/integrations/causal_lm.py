"""Causal language models of transformers with their loss in chunks of tokens.

With a large vocabulary, the logits of all tokens and their gradient are the largest tensors of a training step. A model
of transformers returns its logits, so they exist as a whole. Here the part below the head is called, and the loss is
computed from its hidden states, by :func:`bitplan.runtime.head_loss.linear_cross_entropy`: by a module around the model
(:class:`CausalLMLoss`), or by the model itself while it trains (:func:`compute_loss_in_chunks`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.capture.scopes import is_planned
from bitplan.errors import BitplanError, PlanError
from bitplan.runtime.head_loss import is_plain_linear, linear_cross_entropy

#: Attributes of a config that say what logits are multiplied by, and divided by.
_SCALES, _DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
#: How many sequences and tokens of the example are compared, and the relative difference that is allowed.
_SEQUENCES, _TOKENS, _TOLERANCE = 2, 16, 0.01
#: The attribute of a model whose class was exchanged by :func:`compute_loss_in_chunks`.
_LAYOUT = "_bitplan_causal_lm"


class CausalLMLoss(nn.Module):
    """The loss of a causal language model, without the logits of all tokens.

    ``CausalLMLoss(model, batch)(**batch)`` equals ``model(**batch).loss``. A plan that is attached to `model` holds
    here, too: its rules for the head round the operands of the head's product. Compile it as a whole::

        run = bitplan.attach(model, "fp8-linear", example=batch)
        step = run.compile(CausalLMLoss(model, batch))
        step(**batch).backward()

    The model is a submodule, so parameters are named ``model.*`` here; save and load the model itself.
    """

    def __init__(self, model: nn.Module, example: Mapping[str, Any], *, chunk: int | None = None) -> None:
        """
        :param model: of transformers, with a linear head that ``get_output_embeddings()`` returns.
        :param example: arguments of the model, with ``labels``. The loss of a few of these tokens is compared with the
            model's own.
        :param chunk: tokens per chunk; by default as many as have 2^28 logits.
        """
        super().__init__()
        self.model = model
        self.layout = _checked_layout(model, example, chunk)

    def forward(
        self,
        *args: Any,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss.

        :param num_items_in_batch: divides the sum of all losses, as in gradient accumulation by transformers' Trainer.
        :param shift_labels: labels that are shifted already.
        """
        hidden = self.layout.hidden(self.model, args, kwargs)
        return self.layout.loss(self.model, hidden, labels, num_items_in_batch, shift_labels)


def compute_loss_in_chunks(
    model: nn.Module, example: Mapping[str, Any], *, chunk: int | None = None
) -> Callable[[], None]:
    """Let a model of transformers compute its loss in chunks of tokens: for trainers that call the model themselves.

    While it trains and is given ``labels``, ``model(**batch)`` returns an output with a loss and without logits. In
    evaluation, and without labels, it is unchanged. Call it before a plan is attached.

    :param example: arguments of the model, with ``labels``, to compare a few losses with the model's own.
    :param chunk: tokens per chunk; by default as many as have 2^28 logits.
    :return: a function that undoes it.
    """
    if is_planned(model) or isinstance(model, _LossInChunks):
        raise PlanError(
            "compute_loss_in_chunks() is called once, before a plan is attached: call run.detach() first, or compile "
            "CausalLMLoss(model, example)."
        )
    layout, plain = _checked_layout(model, example, chunk), type(model)
    # A class, not a function on the instance: a copy of the model then runs on its own weights.
    own = {"__module__": plain.__module__, "forward": _forward_of(plain)}
    model.__dict__[_LAYOUT] = layout
    model.__class__ = type(plain.__name__, (_LossInChunks, plain), own)

    def undo() -> None:
        if is_planned(model):
            raise PlanError("the model has a plan: call run.detach() before its loss is computed as a whole again.")
        model.__class__ = plain
        model.__dict__.pop(_LAYOUT, None)

    return undo


class _LossInChunks:
    """Mixed into a model's class in front of it."""


def _forward_of(plain: Any) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = kwargs.get("labels")
        if labels is None or not self.training:
            return plain.forward(self, *args, **kwargs)
        layout: CausalLMLayout = self.__dict__[_LAYOUT]
        names = ("labels", "num_items_in_batch", "shift_labels")
        arguments = {name: value for name, value in kwargs.items() if name not in names}
        hidden = layout.hidden(self, args, arguments)
        loss = layout.loss(self, hidden, *(kwargs.get(name) for name in names))
        if kwargs.get("return_dict") is False:
            return (loss,)
        return import_module("transformers.modeling_outputs").CausalLMOutput(loss=loss)

    forward.__signature__ = inspect.signature(plain.forward)  # type: ignore[attr-defined]  # trainers read it
    return forward


@dataclass(frozen=True)
class CausalLMLayout:
    """Where a model has its body and its head, and what it does with logits."""

    body_path: str
    head_path: str
    logit_scale: float
    logit_softcap: float | None
    chunk: int | None

    def hidden(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The hidden states below the head."""
        arguments = {"use_cache": False, **kwargs, "return_dict": True}
        hidden: Tensor = model.get_submodule(self.body_path)(*args, **arguments)[0]
        return hidden

    def loss(
        self,
        model: nn.Module,
        hidden: Tensor,
        labels: Any,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        loss = linear_cross_entropy(
            hidden,
            model.get_submodule(self.head_path),
            labels if shift_labels is None else shift_labels,
            shift=shift_labels is None,
            reduction="mean" if num_items_in_batch is None else "sum",
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
            chunk=self.chunk,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def _checked_layout(model: nn.Module, example: Mapping[str, Any], chunk: int | None) -> CausalLMLayout:
    """The layout of a model, after a few of its losses were compared."""
    name = type(model).__name__
    body_path = getattr(model, "base_model_prefix", "")
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if find_head is not None else None
    if not is_plain_linear(head) or not isinstance(getattr(model, body_path or " ", None), nn.Module):
        raise PlanError(
            f"{name} is no causal language model of transformers with a linear head: compute its hidden states and "
            f"call bitplan.runtime.head_loss.linear_cross_entropy."
        )
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "output_router_logits", False):
        raise PlanError(
            f"{name} adds an auxiliary loss of its routers: set config.output_router_logits = False, or use the "
            f"model's own loss."
        )
    if not isinstance(example.get("labels"), Tensor):
        raise PlanError("the example is the arguments of one training step of the model, and has labels.")
    softcap = getattr(config, "final_logit_softcapping", None)
    head_path = next(path for path, module in model.named_modules() if module is head)
    layout = CausalLMLayout(
        body_path, head_path, _logit_scale(config), None if softcap is None else float(softcap), chunk
    )
    _compare(model, layout, dict(example))
    return layout


def _compare(model: nn.Module, layout: CausalLMLayout, example: dict[str, Any]) -> None:
    """Raise unless logits and loss of a few tokens are the model's own: its forward may do more than is known here."""
    length = example["labels"].shape[-1]
    few = {name: _few_tokens(value, length) for name, value in example.items() if name != "num_items_in_batch"}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            own = model(**{**few, "return_dict": True})
            labels = few.pop("labels")
            hidden = layout.hidden(model, (), few)
            loss = layout.loss(model, hidden, labels, None, few.get("shift_labels"))
            logits = model.get_submodule(layout.head_path)(hidden).float() * layout.logit_scale
    except (torch.OutOfMemoryError, BitplanError):
        raise
    except Exception as error:  # of the model's own code, such as a decoder that is given the encoder's arguments
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PlanError(
            f"{type(model).__name__} is no causal language model whose body runs by itself ({reason}): use its own "
            f"loss."
        ) from error
    finally:
        for module, is_training in modes:
            module.training = is_training
    if layout.logit_softcap is not None:
        logits = layout.logit_softcap * torch.tanh(logits / layout.logit_softcap)
    logit_difference = float((own.logits.float() - logits).norm() / logits.norm())
    difference = float((own.loss - loss).abs() / loss.abs())
    if logit_difference > _TOLERANCE or difference > _TOLERANCE:
        raise PlanError(
            f"{type(model).__name__}.forward() does more with logits and loss than is known here (logits of a few "
            f"tokens differ by {logit_difference:.1%}, their loss by {difference:.1%}): use its own loss."
        )


def _few_tokens(value: Any, length: int) -> Any:
    """The first tokens of the first sequences of an argument with an axis of tokens."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != length:
        return value
    return value[:_SEQUENCES, :_TOKENS].contiguous()  # models view their labels


def _logit_scale(config: Any) -> float:
    scale = 1.0
    for name in _SCALES:
        scale *= float(getattr(config, name, None) or 1.0)
    for name in _DIVISORS:
        scale /= float(getattr(config, name, None) or 1.0)
    return scale
