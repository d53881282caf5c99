"""Memory of one process of a sharded training step: predicted without running it, and measured in every process.

Llamas of transformers with random weights are trained by AdamW on the CPU in 1, 2 and 4 processes (gloo), each with one
thread. Prints the predicted and the largest measured peak of a process.

    python benchmarks/sharded_memory.py [--processes 1 2 4] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

#: Processes -> layouts.
LAYOUTS = {
    1: ("fsdp=1",),
    2: ("ddp=2", "fsdp=2", "tp=2"),
    4: ("fsdp=4", "fsdp=2,tp=2", "ddp=2,fsdp=2"),
}
#: Name -> (plan, gradient checkpointing, dtype of gathered weights).
VARIANTS: dict[str, tuple[str | None, bool, torch.dtype | None]] = {
    "float32": (None, False, None),
    "checkpointing": (None, True, None),
    "param_dtype bf16": (None, False, torch.bfloat16),
    "fp8-linear, packed": ("fp8-linear", False, None),
}


def make_llama(checkpointing: bool) -> tuple[nn.Module, dict[str, Tensor], Callable[[Any], Tensor]]:
    """A Llama of 3.8 million parameters, a batch of 2 x 64 tokens, and its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config).train()  # type: ignore[no-untyped-call]
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = torch.randint(1024, (2, 64))
    return model, {"input_ids": tokens, "labels": tokens}, lambda output: output.loss


def cases(processes: int) -> list[tuple[str, str]]:
    """(layout, variant) of the comparisons with that many processes."""
    return [
        (layout, variant)
        for layout in LAYOUTS[processes]
        for variant, (plan, _, dtype) in VARIANTS.items()
        # FSDP's dtypes need fsdp; plans are measured where a layout supports them.
        if (dtype is None or "fsdp=2" in layout or "fsdp=4" in layout) and (plan is None or "tp" not in layout)
    ]


def arguments_of(layout: str, variant: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of estimate_rank and measure_rank for a comparison."""
    from bitplan.analysis.sharding import Sharding

    plan, checkpointing, dtype = VARIANTS[variant]
    model, batch, loss = make_llama(checkpointing)
    execution = None if plan is None else "packed"
    return (model, batch, loss, "adamw", plan, execution), {"sharding": Sharding.parse(layout, param_dtype=dtype)}


def measure_in_process(rank: int, processes: int, folder: Path, chosen: Sequence[tuple[str, str]]) -> None:
    """One process: measures every comparison and writes its peaks."""
    import torch.distributed as dist

    from bitplan.analysis.memory.ranks import measure_rank

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    try:
        peaks = []
        for layout, variant in chosen:
            args, options = arguments_of(layout, variant)
            peaks.append(measure_rank(*args, **options).peak)
        (folder / f"{rank}.json").write_text(json.dumps(peaks))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def compare(processes: int, chosen: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Predicted and measured peaks of the comparisons."""
    from bitplan.analysis.memory.ranks import estimate_rank

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        multiprocessing.spawn(measure_in_process, (processes, place, chosen), nprocs=processes)  # type: ignore[attr-defined, no-untyped-call]
        measured = [json.loads((place / f"{rank}.json").read_text()) for rank in range(processes)]
    rows = []
    for number, (layout, variant) in enumerate(chosen):
        args, options = arguments_of(layout, variant)
        predicted = estimate_rank(*args, **options, backend="gloo").memory.peak
        peak = max(peaks[number] for peaks in measured)
        rows.append({"layout": layout, "variant": variant, "predicted": predicted, "measured": peak})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", choices=LAYOUTS, default=[*LAYOUTS])
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = [row for processes in options.processes for row in compare(processes, cases(processes))]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'layout':<14}{'variant':<22}{'predicted':>11}{'measured':>11}{'error':>8}")
    for row in rows:
        predicted, measured = (row[name] / 2**20 for name in ("predicted", "measured"))
        error = predicted / measured - 1
        print(f"{row['layout']:<14}{row['variant']:<22}{predicted:>7.2f} MiB{measured:>7.2f} MiB{error:>+8.1%}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
