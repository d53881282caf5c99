"""The head and its cross-entropy: milliseconds and peak memory of forward and backward, whole and in chunks of tokens.

    python benchmarks/head_loss.py --tokens 256 --vocabulary 4096 --features 64          # seconds on a CPU
    python benchmarks/head_loss.py --device cuda --json                                  # 16384 tokens x 128256
    python benchmarks/head_loss.py --device cuda --variants chunks chunks-fp8 --chunk 4096
    python benchmarks/head_loss.py --device cuda --llama --json                          # a model, 4 x 4096 tokens

Every variant runs in a process of its own, in bfloat16. With ``--llama`` it is a Llama of transformers with the sizes
of Llama-3.2-1B; ``--plan`` attaches a plan to all of it. Peak memory is that of a training step without an optimizer,
weights and gradients included. ``--json`` writes benchmarks/results/head-loss-DEVICE.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "src")) if path not in sys.path]

import bitplan  # noqa: E402
from benchmarks.timing import seconds_per_call  # noqa: E402
from bitplan.files import write_whole  # noqa: E402
from bitplan.integrations.causal_lm import CausalLMLoss  # noqa: E402
from bitplan.machine import describe_machine  # noqa: E402
from bitplan.plans.loading import find_plan  # noqa: E402
from bitplan.runtime.head_loss import linear_cross_entropy  # noqa: E402

#: Variant -> what it is.
VARIANTS = {
    "whole": "F.linear, float(), F.cross_entropy, compiled",
    "chunks": "linear_cross_entropy, compiled",
    "chunks-eager": "linear_cross_entropy, eager",
    "chunks-fp8": "linear_cross_entropy, FP8 with scales of the current tensor, native, compiled",
    "chunks-fp8-delayed": "the same with delayed scales",
}


def head_rule(delayed: bool) -> dict[str, Any]:
    """The rule of a head in FP8."""
    scaled = {"scale": "tensor", **({"history": 16} if delayed else {})}
    operands = {"x": "e4m3", "w": "e4m3", "dy": "e5m2"}
    return {"match": "*head", **{operand: {"format": name, **scaled} for operand, name in operands.items()}}


class Head(nn.Module):
    """A linear head with its loss."""

    def __init__(self, features: int, vocabulary: int, chunk: int | None, is_whole: bool) -> None:
        super().__init__()
        self.head = nn.Linear(features, vocabulary, bias=False)
        self.chunk, self.is_whole = chunk, is_whole

    def forward(self, hidden: Tensor, classes: Tensor) -> Tensor:
        if self.is_whole:
            return nn.functional.cross_entropy(self.head(hidden).float(), classes)
        return linear_cross_entropy(hidden, self.head, classes, chunk=self.chunk)


def head_step(variant: str, arguments: argparse.Namespace) -> tuple[Callable[[], Tensor], nn.Module]:
    """One forward and backward pass of a head, and the module."""
    device, dtype = torch.device(arguments.device), torch.bfloat16
    module: Any = Head(arguments.features, arguments.vocabulary, arguments.chunk, variant == "whole")
    module = module.to(device, dtype)
    hidden = torch.randn(arguments.tokens, arguments.features, device=device, dtype=dtype, requires_grad=True)
    classes = torch.randint(0, arguments.vocabulary, (arguments.tokens,), device=device)
    called: Any = module
    if "fp8" in variant:
        plan = {"version": 1, "rules": [head_rule("delayed" in variant)]}
        run = bitplan.attach(module, plan, example=(hidden, classes), execution=bitplan.Native(min_macs=0))
        called = run.compile()
    elif "eager" not in variant:
        called = torch.compile(module, fullgraph=True)

    def step() -> Tensor:
        hidden.grad = module.head.weight.grad = None
        loss: Tensor = called(hidden, classes)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step, module


def llama_step(variant: str, arguments: argparse.Namespace) -> tuple[Callable[[], Tensor], nn.Module]:
    """One forward and backward pass of a Llama, and the model."""
    transformers: Any = import_module("transformers")
    device = torch.device(arguments.device)
    config = transformers.LlamaConfig(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.features,
        intermediate_size=4 * arguments.features,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.features // 64,
        num_key_value_heads=max(arguments.features // 256, 1),
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
    )
    with device:
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    ids = torch.randint(0, arguments.vocabulary, (arguments.sequences, arguments.tokens // arguments.sequences))
    batch = {"input_ids": ids.to(device), "labels": ids.to(device), "use_cache": False}
    plan: dict[str, Any] = find_plan(arguments.plan).to_dict() if arguments.plan else {"version": 1, "rules": []}
    if "fp8" in variant:
        plan["rules"] = [*plan["rules"], head_rule("delayed" in variant)]
    module = model
    if variant != "whole":
        module = CausalLMLoss(model, batch, chunk=arguments.chunk)
    if plan["rules"]:
        execution = None if "execution" in plan else bitplan.Native(min_macs=0)
        called: Any = bitplan.attach(model, plan, example=batch, execution=execution).compile(module)
    else:
        called = torch.compile(module, fullgraph=True)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        result = called(**batch)
        loss: Tensor = result.loss if variant == "whole" else result
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return step, model


def measure(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds, peak memory and loss of a variant."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    device = torch.device(arguments.device)
    step, _ = (llama_step if arguments.llama else head_step)(variant, arguments)
    loss = float(step())
    result: dict[str, Any] = {"variant": variant, "loss": loss, "peak_gib": None}
    if device.type == "cuda":
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    result["ms"] = seconds_per_call(step, device, samples=arguments.samples) * 1e3
    return result


def main() -> int:
    """Measure all variants, each in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--chunk", type=int, help="tokens per chunk (default: bitplan's choice)")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--llama", action="store_true", help="a Llama-3.2-1B of transformers instead of a head alone")
    parser.add_argument("--plan", help="with --llama: a plan for the whole model")
    parser.add_argument("--layers", type=int, default=16, help="of the Llama")
    parser.add_argument("--sequences", type=int, default=4, help="of the Llama, that share the tokens")
    parser.add_argument("--json", action="store_true", help="write a file into benchmarks/results")
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments)))
        return 0
    rows = []
    for variant in arguments.variants:
        command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--one", variant]
        process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if process.returncode:
            print(f"{variant:20} failed", flush=True)
            continue
        rows.append(json.loads(process.stdout.splitlines()[-1]))
        peak = "" if rows[-1]["peak_gib"] is None else f"{rows[-1]['peak_gib']:8.2f} GiB"
        print(f"{variant:20} {rows[-1]['ms']:9.2f} ms {peak}   loss {rows[-1]['loss']:.5f}", flush=True)
    if arguments.json:
        name = f"head-loss-{'llama-' if arguments.llama else ''}{arguments.device}.json"
        result = {
            "machine": describe_machine(torch.device(arguments.device)),
            "arguments": vars(arguments),
            "rows": rows,
        }
        write_whole(ROOT / "benchmarks" / "results" / name, json.dumps(result, indent=1) + "\n")
    return 0 if len(rows) == len(arguments.variants) else 1


if __name__ == "__main__":
    raise SystemExit(main())
