"""Causal language models of transformers with their loss in chunks of tokens.

With a large vocabulary, the logits of all tokens and their gradient are the largest tensors of a training step. A model
of transformers returns its logits, so they exist as a whole. :class:`CausalLMLoss` calls what lies below the head and
computes the loss from the hidden states, by :func:`bitplan.runtime.head_loss.linear_cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.errors import PlanError
from bitplan.runtime.head_loss import linear_cross_entropy

#: Attributes of a config that say what logits are multiplied by, and divided by.
_SCALES, _DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
#: How many sequences and tokens of the example are compared, and the relative difference that is allowed.
_SEQUENCES, _TOKENS, _TOLERANCE = 2, 16, 0.01


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
        :param model: of transformers, with a head that ``get_output_embeddings()`` returns.
        :param example: arguments of the model, with ``labels``. The loss of a few of these tokens is compared with the
            model's own.
        :param chunk: tokens per chunk; by default as many as have 2^28 logits.
        """
        super().__init__()
        self.model, self.chunk = model, chunk
        name = type(model).__name__
        prefix = getattr(model, "base_model_prefix", "")
        find_head = getattr(model, "get_output_embeddings", None)
        head = find_head() if find_head is not None else None
        if not isinstance(head, nn.Linear) or not isinstance(getattr(model, prefix or " ", None), nn.Module):
            raise PlanError(
                f"{name} is no causal language model of transformers with a linear head: compute its hidden states "
                f"and call bitplan.runtime.head_loss.linear_cross_entropy."
            )
        self.body_name = prefix
        self.head_name = next(path for path, module in model.named_modules() if module is head)
        config: Any = model.config
        self.config = config.get_text_config() if hasattr(config, "get_text_config") else config
        if getattr(self.config, "output_router_logits", False):
            raise PlanError(
                f"{name} adds an auxiliary loss of its routers: set config.output_router_logits = False, or use the "
                f"model's own loss."
            )
        self.logit_scale, self.logit_softcap = _logit_scale(self.config), self._softcap()
        self._compare(dict(example))

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
        loss = linear_cross_entropy(
            self._hidden(*args, **kwargs),
            self.model.get_submodule(self.head_name),
            labels if shift_labels is None else shift_labels,
            shift=shift_labels is None,
            reduction="mean" if num_items_in_batch is None else "sum",
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
            chunk=self.chunk,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    def _hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        """The hidden states below the head."""
        body = self.model.get_submodule(self.body_name)
        hidden: Tensor = body(*args, **{"use_cache": False, **kwargs, "return_dict": True})[0]
        return hidden

    def _softcap(self) -> float | None:
        softcap = getattr(self.config, "final_logit_softcapping", None)
        return None if softcap is None else float(softcap)

    def _compare(self, example: dict[str, Any]) -> None:
        """Raise unless the model's own loss of a few tokens is the same: its forward may do more than is known here."""
        if not isinstance(example.get("labels"), Tensor):
            raise PlanError("CausalLMLoss needs an example with labels: the arguments of one training step.")
        length = example["labels"].shape[-1]
        few = {name: _few_tokens(value, length) for name, value in example.items() if name != "num_items_in_batch"}
        modes = {module: module.training for module in self.modules()}
        self.eval()
        try:
            with torch.no_grad():
                theirs, loss = self.model(**{**few, "return_dict": True}), self(**few)
                inputs = {name: value for name, value in few.items() if name != "labels"}
                head = self.model.get_submodule(self.head_name)
                logits = head(self._hidden(**inputs)).float() * self.logit_scale
                if self.logit_softcap is not None:
                    logits = self.logit_softcap * torch.tanh(logits / self.logit_softcap)
                logit_difference = float((theirs.logits.float() - logits).norm() / logits.norm())
                difference = float((theirs.loss - loss).abs() / loss.abs())
        finally:
            for module, is_training in modes.items():
                module.training = is_training
        if logit_difference > _TOLERANCE or difference > _TOLERANCE:
            raise PlanError(
                f"{type(self.model).__name__}.forward() does more with logits and loss than is known here (logits of a "
                f"few tokens differ by {logit_difference:.1%}, their loss by {difference:.1%}): use its own loss."
            )


def _few_tokens(value: Any, length: int) -> Any:
    """The first tokens of the first sequences of an argument with an axis of tokens."""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != length:
        return value
    return value[:_SEQUENCES, :_TOKENS]


def _logit_scale(config: Any) -> float:
    scale = 1.0
    for name in _SCALES:
        scale *= float(getattr(config, name, None) or 1.0)
    for name in _DIVISORS:
        scale /= float(getattr(config, name, None) or 1.0)
    return scale
