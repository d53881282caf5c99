"""LoRA on a frozen Llama in few bits: tokens per second, peak memory, and the loss of the adapters.

    python benchmarks/lora.py --size tiny --json                         # seconds on a CPU
    python benchmarks/lora.py --device cuda --json                       # Llama-3-8B, 4 x 2048 tokens
    python benchmarks/lora.py --device cuda --checkpointing --json       # every block is recomputed in backward
    python benchmarks/lora.py --device cuda --chunked-loss --rows bf16 bitplan-nf4
    python benchmarks/lora.py --device cuda --losses --json              # 500 steps on text, three seeds
    python benchmarks/lora.py --size tiny --losses --steps 20            # seconds on a CPU

A Llama of transformers with random weights in bfloat16, adapters of rank 16 at all linear layers but the head, and
AdamW for the adapters. Blocks are compiled, all to one graph, and so are head and loss; with ``--compile whole``, the
model is one graph. Every row has a process of its own; ``--parallel`` of them compile at the same time, and they take
turns at measuring. ``--json`` writes benchmarks/results/lora-MACHINE.json, with the options in its name.

With ``--losses``, a smaller Llama is trained on text first, in full; then adapters are trained on other text, on the
frozen weights as each row stores them.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parents[1]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "src")) if path not in sys.path]

import bitplan  # noqa: E402
from benchmarks.timing import seconds_per_step, wait_for  # noqa: E402
from bitplan.executions.native.crossover import cache_file  # noqa: E402
from bitplan.files import write_whole  # noqa: E402
from bitplan.integrations.causal_lm import CausalLMLoss  # noqa: E402
from bitplan.lab.sources.texts import library_text  # noqa: E402
from bitplan.machine import describe_machine  # noqa: E402
from bitplan.plans.loading import find_plan  # noqa: E402
from bitplan.runtime.head_loss import linear_cross_entropy  # noqa: E402

RANK, SCALING = 16, 2.0
#: Arguments that say nothing of what is measured.
_INTERNAL = ("one", "seed", "lock", "json")


@dataclass(frozen=True)
class Size:
    """The sizes of a Llama and of its batch."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    sequences: int
    length: int


SIZES = {
    "8b": Size(4096, 14336, 32, 32, 8, 128256, 4, 2048),
    "1b": Size(2048, 8192, 16, 32, 8, 128256, 4, 2048),
    "small": Size(512, 1536, 8, 8, 8, 256, 16, 256),
    "tiny": Size(64, 128, 2, 4, 2, 256, 2, 32),
}

#: Row -> what it is.
ROWS = {
    "bf16": "frozen weights in BF16",
    "qlora": "NF4 with double quantisation, decoded to BF16 per layer by plain compiled torch, without bitplan",
    "bitplan-nf4": "the preset lora-4bit, with torch's own partitioner (native)",
    "bitplan-nf4-packed": "the preset lora-4bit, packed",
    "bitplan-fp8": "the preset lora-fp8",
    "bitplan-nf4-fp8": "weights in NF4, decoded and multiplied in FP8",
    "bitplan-nf4-small": "the preset lora-4bit-small with native execution, and the loss in chunks",
    "bitplan-nf4-small-packed": "the preset lora-4bit-small as it is, and the loss in chunks",
    "bitplan-nf4-fp8-small": "as bitplan-nf4-small, with weights multiplied in FP8",
}
DEFAULT_ROWS = ("bf16", "qlora", "bitplan-nf4", "bitplan-fp8")
LOSS_ROWS = ("bf16", "bitplan-nf4", "bitplan-fp8", "bitplan-nf4-small")


def plan_of(row: str) -> tuple[Any, Any] | None:
    """The plan of a row and its execution; None for rows without bitplan."""
    if row == "bitplan-nf4":
        return find_plan("lora-4bit"), bitplan.Native(min_macs=0)
    if row == "bitplan-nf4-packed":
        return find_plan("lora-4bit"), bitplan.Packed()
    if row == "bitplan-fp8":
        return find_plan("lora-fp8"), bitplan.Native(min_macs=0, fast_accumulation=True)
    if row == "bitplan-nf4-small":
        return find_plan("lora-4bit-small"), bitplan.Native(min_macs=0, recompute="inputs")
    if row == "bitplan-nf4-small-packed":
        return find_plan("lora-4bit-small"), None
    if row in ("bitplan-nf4-fp8", "bitplan-nf4-fp8-small"):
        document = find_plan("lora-fp8").to_dict()
        document["rules"][0] |= {"frozen": "nf4", "w": {"format": "e4m3", "scale": "tensor"}}
        if row == "bitplan-nf4-fp8":
            return document, bitplan.Native(min_macs=0, fast_accumulation=True)
        document["rules"] += [rule for rule in find_plan("lora-4bit-small").to_dict()["rules"] if "select" in rule]
        return document, bitplan.Native(min_macs=0, fast_accumulation=True, recompute="products")
    return None


# --- The model


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter; the names are those of PEFT."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        options: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.lora_A = nn.Linear(base.in_features, RANK, **options)
        self.lora_B = nn.Linear(RANK, base.out_features, **options)
        nn.init.normal_(self.lora_A.weight, std=base.in_features**-0.5)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x)) * SCALING
        return y


def make_llama(size: Size, device: torch.device, layers: int | None = None) -> Any:
    """A Llama with random weights in bfloat16, made on the device."""
    transformers: Any = import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=layers or size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=max(size.length, 2048),
        tie_word_embeddings=False,
        use_cache=False,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    return model.train()


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Parameters in another dtype; buffers, such as the frequencies of positions, stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def add_adapters(model: nn.Module) -> None:
    """Freeze the model and put an adapter beside every linear layer but the head."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(parent, name, LoraLinear(child))


# --- NF4 without bitplan, as QLoRA stores and decodes it


#: The published values.
_BOOK = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_BLOCK, _GROUP = 64, 256


class QloraLinear(nn.Module):
    """A linear layer in NF4: absmax of 64 weights in 8 bits, less their mean, in groups of 256 with a float32 each."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        weight = base.weight.detach().float().view(-1, _BLOCK)
        book = torch.tensor(_BOOK, device=weight.device)
        absmax = weight.abs().amax(1)
        codes = torch.bucketize(weight / absmax.clamp_min(1e-12).unsqueeze(1), (book[1:] + book[:-1]) / 2)
        pairs = codes.to(torch.uint8).view(-1, 2)
        mean = absmax.mean()
        groups = F.pad(absmax - mean, (0, -len(absmax) % _GROUP)).view(-1, _GROUP)
        step = groups.abs().amax(1).clamp_min(1e-12) / 127
        self.register_buffer("codes", pairs[:, 0] << 4 | pairs[:, 1])
        self.register_buffer("scales", (groups / step.unsqueeze(1)).round().to(torch.int8))
        self.register_buffer("steps", step)
        self.register_buffer("mean", mean)
        self.register_buffer("book", book)

    def forward(self, x: Tensor) -> Tensor:
        shape = (self.out_features, self.in_features)
        stored: tuple[Any, ...] = (self.codes, self.scales, self.steps, self.mean, self.book)
        y: Tensor = _QloraProduct.apply(x, shape, *stored)  # type: ignore[no-untyped-call]
        return y


def _decoded(
    shape: tuple[int, int], dtype: torch.dtype, codes: Tensor, scales: Tensor, steps: Tensor, mean: Tensor, book: Tensor
) -> Tensor:
    blocks = shape[0] * shape[1] // _BLOCK
    absmax = (scales.float() * steps.unsqueeze(1) + mean).view(-1)[:blocks]
    numbers = torch.stack((codes >> 4, codes & 15), -1).view(blocks, _BLOCK).int()
    return (book[numbers] * absmax.unsqueeze(1)).to(dtype).view(shape)


class _QloraProduct(torch.autograd.Function):
    """The weight is decoded in the forward pass, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], codes: Tensor, *rest: Tensor) -> Tensor:
        ctx.save_for_backward(codes, *rest)
        ctx.shape = shape
        return F.linear(x, _decoded(shape, x.dtype, codes, *rest))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        codes, *rest = ctx.saved_tensors
        dy = grads[0]
        # Without this, torch.compile finds that the weight was decoded before, and keeps it.
        zero = (dy.flatten()[:1].view(torch.int16) & 0).to(torch.uint8)
        return dy @ _decoded(ctx.shape, dy.dtype, codes | zero, *rest), None, None, None, None, None, None


def store_as_qlora(model: nn.Module) -> None:
    """Replace the frozen layers one after the other, so that both copies of one layer are in memory at most."""
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.base_layer = QloraLinear(module.base_layer)  # type: ignore[assignment]


# --- Speed and memory


class WholeLoss(nn.Module):
    """The model's own loss, of all logits at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


class BlockwiseLoss(nn.Module):
    """The loss of a model whose blocks are compiled one by one; `head_loss` has hidden states, head and labels."""

    def __init__(self, model: Any, head_loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.head_loss = model, head_loss

    def forward(self, labels: Tensor, **batch: Any) -> Tensor:
        hidden = self.model.model(**batch).last_hidden_state
        return self.head_loss(hidden[:, :-1].flatten(0, 1), self.model.lm_head, labels[:, 1:].flatten())


class Checkpointed(nn.Module):
    """A block that saves its inputs only, and is run again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def whole_head_loss(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head.weight).float(), labels)


def compiled(model: Any, run: Any, batch: dict[str, Any], arguments: argparse.Namespace) -> Callable[..., Tensor]:
    """The model with its loss, compiled as the arguments say."""
    chunked_loss = arguments.chunked_loss or "small" in arguments.one
    if arguments.compile == "blocks":
        layers = model.model.layers
        for number, layer in enumerate(list(layers)):
            block: Any = torch.compile(layer, fullgraph=True) if run is None else run.compile(layer)
            layers[number] = Checkpointed(block) if arguments.checkpointing else block
        head_loss = linear_cross_entropy if chunked_loss else torch.compile(whole_head_loss, fullgraph=True)
        return BlockwiseLoss(model, head_loss)
    module = CausalLMLoss(model, batch) if chunked_loss else WholeLoss(model)
    if arguments.compile == "not":
        return module
    whole: Callable[..., Tensor] = torch.compile(module, fullgraph=True) if run is None else run.compile(module)
    return whole


def measure(row: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second and peak memory of a row."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    device, size = torch.device(arguments.device), SIZES[arguments.size]
    begin = time.perf_counter()
    model = make_llama(size, device, arguments.layers)
    add_adapters(model)
    ids = torch.randint(size.vocabulary, (size.sequences, size.length), device=device)
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    if arguments.checkpointing and arguments.compile != "blocks":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    run = None
    if row == "qlora":
        store_as_qlora(model)
    elif (planned := plan_of(row)) is not None:
        run = bitplan.attach(model, planned[0], execution=planned[1], example=batch)
    called = compiled(model, run, batch, arguments)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True if device.type == "cuda" else None)

    def step() -> Tensor:
        loss = called(**batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if run is not None:
            run.step()
        return loss.detach()

    gc.collect()
    stored = sum(t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers()))
    print(f"{row}: made after {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    if arguments.compile == "blocks":
        # All blocks share one graph: it is compiled with one block, which takes little memory beside other processes.
        model.config.num_hidden_layers, layers = 1, model.config.num_hidden_layers
        step()
        model.config.num_hidden_layers = layers
        if device.type == "cuda":
            torch.cuda.empty_cache()
    first = time.perf_counter() - begin
    print(f"{row}: compiled after {first:.0f} s", file=sys.stderr, flush=True)
    result: dict[str, Any] = {
        "row": row,
        "about": ROWS[row],
        "weights_gib": stored / 2**30,
        "peak_gib": None,
        "compiled_after_s": first,
        "fallbacks": len(run.fallbacks()) if run is not None and run.execution.kind == "native" else None,
    }
    with turn(arguments.lock):
        result["first_loss"] = float(step())
        step()
        if device.type == "cuda":
            wait_for(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            step()
            wait_for(device)
            result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        seconds = min(seconds_per_step(step, arguments.samples, device) for _ in range(arguments.turns))
        result |= {"ms": seconds * 1e3, "tokens_per_s": ids.numel() / seconds, "last_loss": float(step())}
    result["graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return result


@contextmanager
def turn(lock: str | None) -> Iterator[None]:
    """Alone on the machine among the processes with this lock file."""
    if lock is None:
        yield
        return
    with open(lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- Losses


def windows(text: Tensor, size: Size, seed: int, step: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - size.length, (size.sequences,), generator=generator)
    ids = torch.stack([text[start : start + size.length] for start in starts]).to(device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def train(model: nn.Module, text: Tensor, size: Size, steps: int, rate: float, seed: int, run: Any = None) -> None:
    """AdamW with clipped gradients, and a rate that grows for a tenth of the steps and then falls linearly."""
    device = next(model.parameters()).device
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(10 * (step + 1) / steps, 1 - step / steps))
    for step in range(steps):
        # A context for each step: autocast keeps its copies of weights until it is left.
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(**windows(text, size, seed, step, device)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if run is not None:
            run.step()


def loss_on(model: nn.Module, text: Tensor, size: Size) -> float:
    """The mean loss of 16 batches of held-out text."""
    device = next(model.parameters()).device
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        batches = [windows(text, size, 99, number, device) for number in range(16)]
        return statistics.fmean(float(model(**batch).loss) for batch in batches)


def losses_of_seed(arguments: argparse.Namespace) -> dict[str, float]:
    """The loss of adapters after some steps, on frozen weights as each row stores them, by row."""
    warnings.simplefilter("ignore")
    device, size, seed = torch.device(arguments.device), SIZES[arguments.size], arguments.seed
    size = replace(size, sequences=max(size.sequences, 16))
    text = library_text()
    training, held_out = (
        torch.frombuffer(bytearray(part.encode()), dtype=torch.uint8).long() for part in (text.training, text.held_out)
    )
    first, second = training[: len(training) // 2], training[len(training) // 2 :]
    torch.manual_seed(seed)
    model = cast_parameters(make_llama(size, device, arguments.layers), torch.float32)
    train(model, first, size, arguments.pretraining, 1e-3, seed)
    cast_parameters(model, torch.bfloat16)
    losses = {"frozen": loss_on(model, held_out, size)}
    for row in arguments.rows:
        torch.manual_seed(seed)
        replica = copy.deepcopy(model)
        add_adapters(replica)
        for module in replica.modules():
            if isinstance(module, LoraLinear):  # 8 bits of precision would lose small updates
                module.lora_A.float()
                module.lora_B.float()
        run = None
        if (planned := plan_of(row)) is not None:
            example = windows(first, size, 0, 0, device)
            run = bitplan.attach(replica, planned[0], execution=planned[1], example=example)
        train(replica, second, size, arguments.steps, 1e-3, seed, run)
        losses[row] = loss_on(replica, held_out, size)
        print(f"seed {seed}, {row}: {losses[row]:.4f}", file=sys.stderr, flush=True)
    return losses


def measure_losses(arguments: argparse.Namespace) -> dict[str, Any]:
    """The losses of all seeds, each in a process of its own, and on a GPU at the same time."""
    command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--seed"]
    documents: list[str] = []
    seeds, together = list(range(arguments.seeds)), arguments.seeds if arguments.device == "cuda" else 1
    for start in range(0, len(seeds), together):
        batch = seeds[start : start + together]
        running = [subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, text=True) for seed in batch]
        documents += [process.communicate()[0].splitlines()[-1] for process in running]
    by_seed = [json.loads(document) for document in documents]
    losses = {row: [one[row] for one in by_seed] for row in by_seed[0]}
    reference = losses["bf16"]
    spread = max(reference) - min(reference)
    gaps = {row: statistics.fmean(losses[row]) - statistics.fmean(reference) for row in arguments.rows}
    for row, gap in gaps.items():
        print(f"{row:20} mean {statistics.fmean(losses[row]):.4f}, less BF16 {gap:+.4f} (spread of seeds {spread:.4f})")
    return {"losses": losses, "gaps": gaps, "spread_of_seeds": spread}


# --- All rows


def started(row: str, lock: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(Path(__file__)), *sys.argv[1:], "--one", row, "--lock", lock]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def measure_rows(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every row in a process of its own."""
    results: list[dict[str, Any]] = []
    failed: list[str] = []

    def note(row: str, process: subprocess.Popen[str]) -> None:
        output = process.communicate()[0]
        if process.returncode:
            failed.append(row)
            print(f"{row:20} failed", flush=True)
            return
        result = json.loads(output.splitlines()[-1])
        results.append(result)
        peak = "" if result["peak_gib"] is None else f"{result['peak_gib']:8.2f} GiB"
        print(f"{row:20} {result['tokens_per_s']:10.0f} tokens/s {peak} {result['weights_gib']:8.2f} GiB of weights")

    with tempfile.NamedTemporaryFile() as own_lock:
        # On a GPU the lock of bitplan's trials, so that benchmarks that run at the same time take turns, too.
        lock = cache_file().with_name("gpu0.lock") if arguments.device == "cuda" else Path(own_lock.name)
        lock.parent.mkdir(parents=True, exist_ok=True)
        waiting: list[str] = list(arguments.rows)
        running: dict[str, subprocess.Popen[str]] = {}
        while waiting or running:
            while waiting and len(running) < arguments.parallel:
                row = waiting.pop(0)
                running[row] = started(row, str(lock))
            # Its output is a few lines, so that no process waits for a reader.
            ended = [row for row, process in running.items() if process.poll() is not None]
            for row in ended:
                note(row, running.pop(row))
            time.sleep(0.2)
    plain = next((result for result in results if result["row"] == "bf16"), None)
    for result in results if plain is not None else ():
        assert plain is not None
        result["speed"] = result["tokens_per_s"] / plain["tokens_per_s"]
        result["memory"] = None if result["peak_gib"] is None else result["peak_gib"] / plain["peak_gib"]
        memory = "" if result["memory"] is None else f", {result['memory']:.3f} x its peak"
        print(f"{result['row']:20} {result['speed']:.3f} x the speed of BF16{memory}")
    return {"rows": results, "failed": failed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, help="default: 8b, and small with --losses")
    parser.add_argument("--layers", type=int, help="fewer than the size has")
    parser.add_argument("--rows", nargs="+", choices=ROWS)
    parser.add_argument("--checkpointing", action="store_true", help="recompute every block in the backward pass")
    parser.add_argument("--chunked-loss", action="store_true", help="compute the loss of all rows in chunks of tokens")
    parser.add_argument("--compile", choices=("blocks", "whole", "not"), default="blocks")
    parser.add_argument("--parallel", type=int, default=4, help="processes at a time; one, with --compile whole")
    parser.add_argument("--samples", type=int, default=5, help="steps per turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--losses", action="store_true", help="train adapters on text")
    parser.add_argument("--steps", type=int, default=500, help="of the adapters")
    parser.add_argument("--pretraining", type=int, help="steps of the whole model before (default: as many as --steps)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="write a file into benchmarks/results")
    parser.add_argument("--one", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lock", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.size = arguments.size or ("small" if arguments.losses else "8b")
    arguments.rows = arguments.rows or list(LOSS_ROWS if arguments.losses else DEFAULT_ROWS)
    arguments.parallel = 1 if arguments.compile == "whole" else arguments.parallel
    arguments.pretraining = arguments.steps if arguments.pretraining is None else arguments.pretraining
    if arguments.one:
        try:
            print(json.dumps(measure(arguments.one, arguments)))
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    if arguments.seed is not None:
        print(json.dumps(losses_of_seed(arguments)))
        return 0
    results = (measure_losses if arguments.losses else measure_rows)(arguments)
    if arguments.json:
        options = [name for name in ("losses", "checkpointing", "chunked_loss") if getattr(arguments, name)]
        machine = "h200" if arguments.device == "cuda" else arguments.device
        name = "-".join(["lora", *options, *([arguments.size] if arguments.size == "tiny" else []), machine])
        document = {
            "benchmark": "lora",
            "machine": describe_machine(torch.device(arguments.device)),
            "arguments": {
                key: value for key, value in vars(arguments).items() if key not in ("one", "seed", "lock", "json")
            },
            "size": vars(SIZES[arguments.size]),
            "rank": RANK,
            **results,
        }
        write_whole(ROOT / "benchmarks" / "results" / f"{name}.json", json.dumps(document, indent=1) + "\n")
    return 1 if results.get("failed") else 0


if __name__ == "__main__":
    raise SystemExit(main())
