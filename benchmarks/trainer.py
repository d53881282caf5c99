"""``python benchmarks/trainer.py``: training steps of the Trainer of Transformers, with AdamW, plain and under a plan.

    python benchmarks/trainer.py --plan fp8-train --json benchmarks/results/trainer-h200.json
    python benchmarks/trainer.py --size tiny --steps 4                               # seconds on a CPU

A Llama with the shape of Llama 3.2 1B and random BF16 weights is trained on 4 x 4096 tokens a step. Every contender
has a process of its own; all compile side by side and are timed one at a time. ``bf16``: the Trainer with
``torch_compile=True``. ``torchao``: the same after ``convert_to_float8_training`` with its tensorwise recipe on all
linear layers but the head. ``bitplan``: the Trainer with one :class:`BitplanCallback`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "src")) if path not in sys.path]

import torch  # noqa: E402

from bitplan.lab.sources.texts import library_text  # noqa: E402
from bitplan.lab.tasks.tokens import tokenised  # noqa: E402
from bitplan.machine import describe_machine  # noqa: E402
from bitplan.planners.auto.trials import device_alone  # noqa: E402

CONTENDERS = ("bf16", "torchao", "bitplan")
#: Steps before anything is measured.
WARM_UP = 5
#: The arguments of a configuration, in the order of _NAMES.
_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES: dict[str, dict[str, Any]] = {
    "1b": dict(zip(_NAMES, (128256, 2048, 8192, 16, 32), strict=True), num_key_value_heads=8, head_dim=64),
    "tiny": dict(zip(_NAMES, (256, 64, 128, 2, 4), strict=True), num_key_value_heads=2),
}
BATCHES = {"1b": (4, 4096), "tiny": (2, 64)}


def train(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step, peak memory and losses of one contender. transformers has too few types to be checked."""
    transformers: Any = import_module("transformers")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    samples, tokens = BATCHES[options.size]
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        max_position_embeddings=tokens, use_cache=False, tie_word_embeddings=True, **SIZES[options.size]
    )
    with device:
        model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    if contender == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(model, config=recipe, module_filter_fn=lambda module, name: name != "lm_head")
    steps = WARM_UP + options.steps
    meter = _meter(transformers.TrainerCallback, device)
    callbacks: list[Any] = [meter]
    if contender == "bitplan":
        from bitplan.integrations.transformers import BitplanCallback

        callbacks.append(BitplanCallback(options.plan, compile=True))
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=samples,
            learning_rate=1e-4,
            optim="adamw_torch_fused" if device.type == "cuda" else "adamw_torch",
            torch_compile=contender != "bitplan",
            use_cpu=device.type == "cpu",
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model=model, args=settings, train_dataset=_windows(samples * steps, tokens), callbacks=callbacks
        )
        trainer.train()
    times = meter.times
    quarters = statistics.quantiles(times, n=4)
    return {
        "contender": contender,
        "milliseconds": 1e3 * statistics.median(times),
        "spread": (quarters[2] - quarters[0]) / statistics.median(times),
        "peak": meter.peak,
        "first_seconds": meter.first_seconds,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "machine": describe_machine(device),
        "transformers": transformers.__version__,
    }


def _windows(count: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Windows of the Python standard library's sources, byte by byte."""
    text = tokenised(library_text(), "bytes", 256)[1]
    firsts = torch.randint(len(text) - tokens, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    windows = [text[first : first + tokens] for first in firsts]
    return [{"input_ids": window, "labels": window} for window in windows]


def _meter(base: Any, device: torch.device) -> Any:
    """A callback that times the steps after the warm-up, while no other contender is timed."""

    class Meter(base):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times: list[float] = []
            self.peak, self.first_seconds = 0, 0.0
            self.began, self.alone = time.perf_counter(), ExitStack()
            self.mark = 0.0

        def synchronize(self) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize()

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WARM_UP:
                self.synchronize()
                self.first_seconds = time.perf_counter() - self.began
                self.alone.enter_context(device_alone(device))
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
            self.synchronize()
            self.mark = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.synchronize()
            if state.global_step > WARM_UP:
                self.times.append(time.perf_counter() - self.mark)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            self.alone.close()

    return Meter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    parser.add_argument("--one", choices=CONTENDERS, help="train in this process, and print JSON")
    parser.add_argument("--size", default="1b", choices=list(SIZES))
    parser.add_argument("--plan", default="fp8-train", help="a preset or a file")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path, help="where to write all rows")
    options = parser.parse_args()
    if options.one is not None:
        print("\n" + json.dumps(train(options.one, options)))
        return
    common = ["--size", options.size, "--plan", options.plan, "--steps", str(options.steps)]
    processes = {
        name: subprocess.Popen([sys.executable, __file__, "--one", name, *common], stdout=subprocess.PIPE, text=True)
        for name in options.contenders
    }
    rows = []
    for name, process in processes.items():
        output, _ = process.communicate()
        if process.returncode:
            print(f"{name:8} failed")
            continue
        row = json.loads(output.splitlines()[-1])
        rows.append(row)
        last = statistics.fmean(row["losses"][-4:])
        print(
            f"{name:8} {row['milliseconds']:8.1f} ms  spread {row['spread']:.3f}  {row['peak'] / 2**30:6.2f} GiB  "
            f"first {row['first_seconds']:4.0f} s  loss {last:.4f}",
            flush=True,
        )
    if options.json is not None:
        document = {"benchmark": "trainer", "plan": options.plan, "size": options.size, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
