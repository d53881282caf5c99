"""Convolutions of a ResNet-50 in native execution: milliseconds of forward and backward, each layer compiled by itself.

    python benchmarks/convolutions.py                       # float32, 8 images: minutes on a CPU
    python benchmarks/convolutions.py --dtype bfloat16
    python benchmarks/convolutions.py --device cuda --dtype bfloat16 --plan fp8 --images 64

Writes benchmarks/results/convolutions-DEVICE-DTYPE.json. The columns: torch's convolution and emulation in channels
last; native in channels last; torch's and native in the contiguous layout, the latter by copies of input, output and
gradients to channels last and back (which bitplan does not do: it falls back to emulation, and reports it).
On a GPU the time is device time: steps are replayed as CUDA graphs.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import bitplan
from bitplan import Plan
from bitplan.executions.native import convolution, crossover
from bitplan.files import write_whole
from bitplan.machine import describe_machine

#: (input channels, height and width, output channels, kernel, stride)
SHAPES = [
    (64, 56, 256, 1, 1),
    (256, 56, 64, 1, 1),
    (512, 28, 128, 1, 1),
    (1024, 14, 256, 1, 1),
    (2048, 7, 512, 1, 1),
    (512, 28, 1024, 1, 2),
    (64, 56, 64, 3, 1),
    (128, 28, 128, 3, 1),
    (256, 14, 256, 3, 1),
    (512, 7, 512, 3, 1),
    (256, 28, 256, 3, 2),
]
FORMATS = {"int8": ("int8", "int8", "int8"), "fp8": ("e4m3", "e4m3", "e5m2")}
#: Column -> (execution, channels last).
COLUMNS = {
    "torch": (None, True),
    "emulate": ("emulate", True),
    "native": ("native", True),
    "torch, torch's layout": (None, False),
    "native, by copies": ("native", False),
}
TURNS = 4


def step_of(shape: tuple[int, ...], column: str, plan: Plan, arguments: argparse.Namespace) -> Any:
    """A function that makes one step."""
    inputs, side, outputs, kernel, stride = shape
    execution, is_last = COLUMNS[column]
    layout = torch.channels_last if is_last else torch.contiguous_format
    dtype = getattr(torch, arguments.dtype)
    torch.manual_seed(0)
    model = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False).to(arguments.device, dtype)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    x = (
        torch.randn(arguments.images, inputs, side, side)
        .to(arguments.device, dtype)
        .to(memory_format=layout)
        .requires_grad_()
    )
    if execution is None:
        called: Any = torch.compile(model)
    else:
        options = bitplan.Native(min_macs=0) if execution == "native" else execution
        called = bitplan.attach(model, plan, example=x, execution=options).compile()
    dy: Tensor = torch.randn_like(called(x))

    def step() -> tuple[Tensor, ...]:
        return torch.autograd.grad(called(x), (x, model.weight), dy)

    step()
    return step


def believed(x: Tensor) -> bool:
    """Report every image as channels last to the checks of native paths, while tensors keep their layout."""
    return True


def made(plan: Plan, options: argparse.Namespace) -> dict[tuple[int, ...], dict[str, Any]]:
    """Shape -> column -> a compiled step."""
    with (
        mock.patch.object(convolution, "is_channels_last", believed),
        warnings.catch_warnings(),
        torch._dynamo.config.patch(recompile_limit=8 * len(SHAPES) * len(COLUMNS)),
    ):
        warnings.simplefilter("ignore")
        return {shape: {column: step_of(shape, column, plan, options) for column in COLUMNS} for shape in SHAPES}


def timed(steps: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Column -> milliseconds, the best of several turns, in which the columns alternate."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(TURNS):
        for column, step in steps.items():
            best[column] = min(best[column], crossover.milliseconds(step, device))
    return {column: round(value, 3) for column, value in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--plan", choices=FORMATS, default="int8")
    parser.add_argument("--images", type=int, default=8)
    options = parser.parse_args()
    operands = zip(("x", "w", "dy"), FORMATS[options.plan], strict=True)
    rule = {operand: {"format": name, "scale": "tensor"} for operand, name in operands}
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", **rule}]})
    rows = []
    print("channels, side -> channels, kernel, stride", *COLUMNS, sep="  ")
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    for shape, steps in made(plan, options).items():
        row = timed(steps, device)
        rows.append({"shape": shape, "milliseconds": row})
        print(shape, *(f"{value:.2f}" for value in row.values()), sep="  ", flush=True)
    document = {
        "benchmark": "convolutions",
        "command": "python benchmarks/convolutions.py "
        + " ".join(f"--{name} {value}" for name, value in vars(options).items()),
        "machine": describe_machine(device),
        "threads": torch.get_num_threads(),
        "seed": 0,
        "rows": rows,
        "crossover 3x3": [vars(row) for row in crossover.measure_im2col_crossover(device, dtype).fastest],
    }
    file = Path(__file__).parent / "results" / f"convolutions-{options.device}-{options.dtype}.json"
    write_whole(file, json.dumps(document, indent=2) + "\n")
    print(f"written to {file.name}")


if __name__ == "__main__":
    main()
