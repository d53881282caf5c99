"""``bitplan bench speed``: forward and backward on the machine's own low-precision units, against BF16.

All variants are made first and then take turns, so that a machine that grows hot or busy does so for all of them; of
each the best turn counts. The model is in bfloat16 and compiled.
"""

from __future__ import annotations

import copy
import importlib.util
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

from bitplan.attach import Attachment, attach
from bitplan.attachment import SPARING
from bitplan.bench.machine import describe_machine
from bitplan.errors import BitplanError, BitplanWarning, nearest_names
from bitplan.models.llama import LlamaBlocks, random_states
from bitplan.native import crossover
from bitplan.plan import Plan
from bitplan.plan.find import find_plan

#: What is measured -> what makes the model and its input.
SHAPES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear-1024": lambda: (nn.Linear(1024, 1024, bias=False), torch.randn(1024, 1024)),
    "llama-tiny": lambda: (LlamaBlocks(256, 2, 512), random_states(2, 128, 256)),
    "llama-4096": lambda: (LlamaBlocks(4096, 4, 14336), random_states(4, 4096, 4096)),
    "llama-2048": lambda: (LlamaBlocks(2048, 8, 8192), random_states(8, 2048, 2048)),
}
OWN_PLANS = ("native-int8", "native-int8-tensor", "native-fp8", "native-fp8-delayed", "native-fp8-packed")
PLAIN = "bf16"
#: Shape -> milliseconds to reach, and on what.
AIMS = {
    "linear-1024": ("2 CPU cores", 26.0),
    "llama-4096": ("one H200", 104.0),
    "llama-2048": ("one H200", 67.0),
}


@dataclass(frozen=True)
class Row:
    """One variant of one shape."""

    variant: str
    milliseconds: float
    #: Of BF16's.
    ratio: float
    #: The most bytes held on a GPU; None on a CPU.
    peak: int | None
    #: Products, or passes of them, that were emulated.
    fallbacks: int
    #: Seconds of the first step, compilation included.
    first_seconds: float


def own_plan(name: str) -> Plan:
    """One of :data:`OWN_PLANS`, or whatever plan the name stands for."""
    if name not in OWN_PLANS:
        return find_plan(name)
    text = files("bitplan.bench").joinpath("plans", f"{name}.yaml").read_text(encoding="utf-8")
    return Plan.from_yaml(text, f"{name}.yaml")


class Runner:
    """A copy of the model, compiled, with what it is fed and what comes back."""

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        change: Callable[[nn.Module, Tensor], Attachment | None],
        spare_memory: str = "no",
    ) -> None:
        #: What lies on the GPU for other variants' sake.
        self._others = torch.cuda.memory_allocated() if x.is_cuda else 0
        self.model = copy.deepcopy(model)
        self.x = x.detach().clone().requires_grad_()
        self.dy = torch.randn_like(x[..., :1]).expand_as(x).contiguous()
        self.run = change(self.model, self.x)
        self.called = torch.compile(self.model) if self.run is None else self.run.compile(spare_memory=spare_memory)
        self.peak: int | None = None

    def step(self) -> None:
        self.called(self.x).backward(self.dy)
        self.x.grad = None
        self.model.zero_grad(set_to_none=True)
        if self.run is not None:
            self.run.step()

    def seconds(self, steps: int) -> float:
        wait = torch.cuda.synchronize if self.x.is_cuda else _nothing
        wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        wait()
        return (time.perf_counter() - begin) / steps

    def measure_peak(self) -> None:
        if self.x.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated() - self._others


def _nothing() -> None:
    return None


def _planned(plan: Plan, model: nn.Module, x: Tensor) -> Attachment:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BitplanWarning)  # fallbacks are counted in the row
        return attach(model, plan, example=x, execution="native", native_from=0)


def _torchao_int8(model: nn.Module, x: Tensor) -> None:
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
    from torchao.quantization import quantize_

    quantize_(model, Int8MixedPrecisionTrainingConfig(module_swap=True))
    if not any("Int8" in type(module).__name__ for module in model.modules()):
        raise BitplanError("torchao's INT8 training did not apply to this model.")


def _torchao_float8(recipe: str, model: nn.Module, x: Tensor) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def peers(device: torch.device) -> dict[str, Callable[[nn.Module, Tensor], None]]:
    """What others offer on such a device, where they are installed."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    known: dict[str, Callable[[nn.Module, Tensor], None]] = {"torchao int8": _torchao_int8}
    if device.type == "cuda":
        known |= {f"torchao fp8 {recipe}": partial(_torchao_float8, recipe) for recipe in ("tensorwise", "rowwise")}
    return known


def bench_speed(
    shapes: Sequence[str] = ("linear-1024",),
    plans: Sequence[str] = (),
    device: str = "cpu",
    turns: int = 8,
    seed: int = 0,
    sparing: bool = False,
    on_row: Callable[[str, Row], None] = lambda shape, row: None,
) -> dict[str, Any]:
    """Measure everything; a document with machine, versions, the crossover table and one entry a row.

    :param sparing: measure every plan also with each of the ways to spare memory.
    """
    torch.manual_seed(seed)
    where = torch.device(device)
    chosen = plans or (OWN_PLANS[:2] if where.type == "cpu" else OWN_PLANS)
    measured, failed = {}, {}
    for shape in shapes:
        if shape not in SHAPES:
            raise BitplanError(f"there is no shape {shape!r}; {nearest_names(shape, SHAPES)}")
        rows, failures = _shape(shape, chosen, where, turns, sparing, partial(on_row, shape))
        measured[shape], failed[shape] = rows, failures
    return {
        "benchmark": "speed",
        "machine": describe_machine(where),
        "threads": torch.get_num_threads(),
        "device": device,
        "dtype": "bfloat16",
        "seed": seed,
        "plans": {name: own_plan(name).to_dict() for name in chosen},
        "aims": {shape: {"on": AIMS[shape][0], "milliseconds": AIMS[shape][1]} for shape in shapes if shape in AIMS},
        "crossover": [asdict(row) for row in crossover.measured(where, torch.bfloat16)],
        "rows": {shape: [asdict(row) for row in rows] for shape, rows in measured.items()},
        "failed": {shape: failures for shape, failures in failed.items() if failures},
    }


def _shape(
    shape: str,
    plans: Sequence[str],
    device: torch.device,
    turns: int,
    sparing: bool,
    on_row: Callable[[Row], None],
) -> tuple[list[Row], dict[str, str]]:
    model, x = SHAPES[shape]()
    model, x = model.to(device, torch.bfloat16), x.to(device, torch.bfloat16)
    changes: dict[str, Callable[[nn.Module, Tensor], Attachment | None]] = {PLAIN: lambda model, x: None}
    changes |= {name: partial(_planned, own_plan(name)) for name in plans}
    spared = {f"{name}, sparing {what}": (name, what) for name in plans for what in SPARING if sparing and what != "no"}
    changes |= {name: changes[plan] for name, (plan, _) in spared.items()}
    theirs = peers(device)
    changes |= {name: partial(_changed, change) for name, change in theirs.items()}
    runners: dict[str, Runner] = {}
    first: dict[str, float] = {}
    failed: dict[str, str] = {}
    torch.compiler.reset()
    for name, change in changes.items():
        try:
            runners[name] = Runner(model, x, change, spared[name][1] if name in spared else "no")
            first[name] = runners[name].seconds(1)
            runners[name].measure_peak()
        except Exception as error:  # a peer that does not work here is told of; what is ours must work
            if name not in theirs:
                raise
            runners.pop(name, None)
            failed[name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    best = dict.fromkeys(runners, float("inf"))
    for _ in range(turns):
        for name, runner in runners.items():
            best[name] = min(best[name], runner.seconds(2))
    rows = []
    for name, runner in runners.items():
        emulated = 0 if runner.run is None else len(runner.run.fallbacks())
        rows.append(Row(name, best[name] * 1e3, best[name] / best[PLAIN], runner.peak, emulated, first[name]))
        on_row(rows[-1])
    return rows, failed


def _changed(change: Callable[[nn.Module, Tensor], None], model: nn.Module, x: Tensor) -> None:
    change(model, x)
