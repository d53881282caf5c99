"""A small causal language model and its Trainer. As a script it trains until it is killed:

    python hf_training.py OUTPUT PAUSE_AFTER

writes ``paused`` into OUTPUT after so many steps, and waits there for the signal.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from trainer_plans import HISTORY
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from bitplan.integrations.transformers import BitplanCallback

STEPS = 6
TOKENS = torch.randint(64, (48, 12), generator=torch.Generator().manual_seed(1))
#: With a column that the model does not take, as datasets have them.
DATA = [{"input_ids": row, "labels": row, "name": number} for number, row in enumerate(TOKENS)]


def make_model(layers: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_dropout=0.1,
        )
    )


def make_trainer(
    output: Path, callbacks: list[TrainerCallback], model: Any = None, kind: Any = Trainer, **settings: Any
) -> Trainer:
    settings = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": 2, **settings}
    arguments = TrainingArguments(
        str(output),
        use_cpu=True,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        disable_tqdm=True,
        report_to=[],
        logging_steps=1,
        **settings,
    )
    return kind(
        make_model() if model is None else model,
        arguments,
        train_dataset=DATA,
        eval_dataset=DATA[:8],
        callbacks=callbacks,
    )


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


class Pause(TrainerCallback):
    """Waits for ever after so many steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            (Path(args.output_dir) / "paused").touch()
            time.sleep(600)


if __name__ == "__main__":
    make_trainer(Path(sys.argv[1]), [BitplanCallback(HISTORY), Pause(int(sys.argv[2]))]).train()
