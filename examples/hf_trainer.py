"""A Llama in the Trainer of Transformers, with its linear layers in FP8 and saved tensors packed.

    python examples/hf_trainer.py

Two lines differ from the plain script: the import and the callback. The data are the bytes of Python's own argparse
module, so nothing is downloaded. It needs the package transformers with accelerate.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from bitplan.integrations.transformers import BitplanCallback

LENGTH = 64


def samples() -> list[dict[str, torch.Tensor]]:
    """Windows of the text, as bytes."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": window, "labels": window} for window in windows]


def main() -> None:
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    data = samples()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            LlamaForCausalLM(config),
            TrainingArguments(
                folder,
                max_steps=60,
                per_device_train_batch_size=16,
                learning_rate=3e-3,
                logging_steps=20,
                eval_strategy="steps",
                eval_steps=60,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
            ),
            train_dataset=data[:-64],
            eval_dataset=data[-64:],
            callbacks=[BitplanCallback("fp8-linear", execution="packed")],
        )
        trainer.train()
    (loss,) = (line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line)
    print(f"evaluation loss {loss:.4f}")


if __name__ == "__main__":
    main()
