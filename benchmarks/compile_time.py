"""Compile time of planned models, relative to the same model without a plan.

For every contender (model, compiler, plan, execution), each in a process of its own: CPU seconds of the first call,
forward and backward, less those of a later one, the median of several compilations; imports and one-time set-up of the
compiler are done before. CPU seconds count child processes (the C++ compiler) and do not count other users of the
machine. Beside them what explains the time and is the same on every machine: nodes of the graph that Dynamo makes,
nodes of the forward and backward graphs that AOTAutograd makes, kernels of Inductor, and guards.

    python benchmarks/compile_time.py -o benchmarks/results/compile-time-cpu.json
    python benchmarks/compile_time.py --model llama --compiler aot_eager --plan fp8-all
    python benchmarks/compile_time.py --regional --model llama-8 -o benchmarks/results/compile-time-regional-cpu.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PLAIN = "no plan"
PLANS = ("fp8-linear", "fp8-all", "int8-all")
COMPILERS = ("aot_eager", "inductor")


@dataclass(frozen=True)
class Contender:
    """A model compiled in one way."""

    model: str
    compiler: str
    plan: str = PLAIN
    execution: str = "emulate"
    #: Equal blocks are compiled once, and the rest of the model not at all.
    regional: bool = False

    def __str__(self) -> str:
        execution = f" {self.execution}" if self.plan != PLAIN else ""
        return f"{self.model} {self.compiler} {self.plan}{execution}{' regional' * self.regional}"


@dataclass(frozen=True)
class Row:
    """What was measured of a contender."""

    contender: Contender
    #: CPU seconds of the first call less those of a later one.
    seconds: float
    #: Relative to the same model and compiler without a plan.
    ratio: float
    dynamo_nodes: int
    aot_nodes: int
    #: C++ kernels that Inductor generated.
    kernels: int
    guards: int


# --- Models: the loss of one batch, as a function without arguments


def _llama(layers: int = 4) -> tuple[Any, dict[str, Any]]:
    transformers: Any = importlib.import_module("transformers")

    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config), _tokens()


def _gpt2() -> tuple[Any, dict[str, Any]]:
    transformers: Any = importlib.import_module("transformers")

    config = transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=4, n_head=4, n_positions=64, use_cache=False)
    return transformers.GPT2LMHeadModel(config), _tokens()


def _bert() -> tuple[Any, dict[str, Any]]:
    transformers: Any = importlib.import_module("transformers")

    config = transformers.BertConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128
    )
    return transformers.BertForMaskedLM(config), _tokens()


def _tokens() -> dict[str, Any]:
    import torch

    return {"input_ids": torch.randint(3, 128, (2, 16))}


def _resnet() -> tuple[Any, dict[str, Any]]:
    import timm
    import torch

    return timm.create_model("resnet18", num_classes=10), {"x": torch.randn(2, 3, 64, 64)}


def _vit() -> tuple[Any, dict[str, Any]]:
    import timm
    import torch

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, embed_dim=64, num_heads=4, num_classes=10)
    return model, {"x": torch.randn(2, 3, 64, 64)}


def _encoder() -> tuple[Any, dict[str, Any]]:
    import torch
    from torch import nn

    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), {"src": torch.randn(2, 16, 64)}


#: Small ones, since compiling does not depend on the sizes of tensors.
MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "llama": _llama,
    "llama-8": lambda: _llama(8),
    "gpt2": _gpt2,
    "bert": _bert,
    "resnet18": _resnet,
    "vit": _vit,
    "encoder": _encoder,
}


# --- One contender


def measure(contender: Contender, repeats: int) -> dict[str, Any]:
    """The seconds of each compilation, and the counts."""
    import torch
    from torch._inductor import metrics

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "zoo"))
    importlib.import_module("zoo_models").import_torchvision()  # transformers and timm import it, broken or not
    model, batch = MODELS[contender.model]()
    run = None if contender.plan == PLAIN else _attach(model, contender, batch)
    warm_up = Contender("", contender.compiler)
    _compile(torch.nn.Linear(2, 2), None, warm_up)(torch.ones(1, 2)).sum().backward()  # imports, set-up

    def step(compiled: Any) -> float:
        begin = _cpu_seconds()
        output = compiled(**batch)
        (output if isinstance(output, torch.Tensor) else output[0]).square().mean().backward()
        return _cpu_seconds() - begin

    seconds = []
    for _ in range(repeats):
        torch.compiler.reset()
        metrics.reset()
        compiled = _compile(model, run, contender)
        first = step(compiled)
        step(compiled)
        seconds.append(first - step(compiled))
    kernels = metrics.generated_kernel_count
    return {"seconds": seconds, "kernels": kernels, **_count(model, run, contender, step)}


def _attach(model: Any, contender: Contender, batch: dict[str, Any]) -> Any:
    import bitplan as bp

    execution = bp.Native(min_macs=0) if contender.execution == "native" else contender.execution
    return bp.attach(model, contender.plan, example=batch, execution=execution)


def _compile(model: Any, run: Any, contender: Contender, **options: Any) -> Any:
    import torch

    from bitplan.runtime.regions import equal_blocks

    if contender.compiler == "inductor" and run is not None and not options:
        return run.compile(regional=contender.regional)
    arguments = {"fullgraph": True, "backend": contender.compiler, **options}
    if not contender.regional:
        return torch.compile(model, **arguments)
    for block in equal_blocks(model):
        block.compile(**arguments)
    return model


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _count(model: Any, run: Any, contender: Contender, step: Callable[[Any], float]) -> dict[str, int]:
    """Nodes and guards, from one more compilation."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    from bitplan.compiler.tracing import keep_guards

    counts = {"dynamo_nodes": 0, "aot_nodes": 0, "guards": 0}
    if contender.execution != "emulate":
        return counts  # partitioned by backends of their own
    torch.compiler.reset()

    def count_aot_nodes(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        counts["aot_nodes"] += len(gm.graph.nodes)
        return gm.forward

    lower = aot_autograd(
        fw_compiler=count_aot_nodes, bw_compiler=count_aot_nodes, partition_fn=min_cut_rematerialization_partition
    )

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        counts["dynamo_nodes"] += len(gm.graph.nodes)
        return lower(gm, inputs)

    def count_guards(guards: Sequence[Any]) -> Sequence[bool]:
        is_kept = [True] * len(guards) if run is None else keep_guards(guards)
        counts["guards"] += sum(is_kept)
        return is_kept

    step(_compile(model, run, contender, backend=backend, options={"guard_filter_fn": count_guards}))
    return counts


# --- All contenders


def contenders(models: Sequence[str], compilers: Sequence[str], plans: Sequence[str]) -> list[Contender]:
    chosen = []
    for model in models:
        for compiler in compilers:
            chosen.append(Contender(model, compiler))
            chosen.extend(Contender(model, compiler, plan) for plan in plans)
            if compiler == "inductor":
                chosen.extend(Contender(model, compiler, plan, "packed") for plan in plans if plan == "fp8-all")
                chosen.append(Contender(model, compiler, "int8-linear", "native"))
    return chosen


def regional_contenders(models: Sequence[str], compilers: Sequence[str], plans: Sequence[str]) -> list[Contender]:
    """The whole model and its equal blocks, without a plan and with each."""
    return [
        Contender(model, compiler, plan, regional=regional)
        for model in models
        for compiler in compilers
        for plan in (PLAIN, *plans)
        for regional in (False, True)
    ]


def run_contender(contender: Contender, repeats: int) -> dict[str, Any]:
    """Measure in a process of its own, with an empty cache and without worker processes."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, "--repeats", str(repeats), "--contender", json.dumps(asdict(contender))]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **settings})
    if done.returncode:
        raise RuntimeError(f"{contender}: {done.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def run_all(chosen: Sequence[Contender], repeats: int, on_row: Callable[[Row], None]) -> list[Row]:
    rows: list[Row] = []
    for contender in chosen:
        measured = run_contender(contender, repeats)
        seconds = statistics.median(measured.pop("seconds"))
        if contender.plan == PLAIN and not contender.regional:
            plain = seconds
        rows.append(Row(contender, seconds, seconds / plain, **measured))
        on_row(rows[-1])
    return rows


def medians(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The median ratio over all models, by compiler, plan and execution."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row.contender.plan != PLAIN and not row.contender.regional:
            key = row.contender.compiler, row.contender.plan, row.contender.execution
            ratios.setdefault(key, []).append(row.ratio)
    return [
        {"compiler": compiler, "plan": plan, "execution": execution, "ratio": statistics.median(values)}
        for (compiler, plan, execution), values in ratios.items()
    ]


def print_row(row: Row) -> None:
    counts = f"{row.dynamo_nodes:6} {row.aot_nodes:6} {row.kernels:5} {row.guards:6}"
    print(f"{row.contender!s:44} {row.seconds:7.2f} s {row.ratio:6.2f} {counts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="repeatable; all by default")
    parser.add_argument("--compiler", action="append", choices=COMPILERS)
    parser.add_argument("--plan", action="append", choices=PLANS)
    parser.add_argument("--regional", action="store_true", help="whole models next to their equal blocks compiled once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="rows of other contenders in the file stay")
    parser.add_argument("--contender", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(measure(Contender(**json.loads(options.contender)), options.repeats)))
        return
    import torch

    from bitplan.machine import describe_machine

    choose = regional_contenders if options.regional else contenders
    models = options.model or [name for name in MODELS if name != "llama-8"]
    chosen = choose(models, options.compiler or COMPILERS, options.plan or PLANS)
    print(f"{'':44} {'CPU':>9} {'ratio':>6} {'dynamo':>6} {'aot':>6} {'kern.':>5} {'guards':>6}")
    rows = run_all(chosen, options.repeats, print_row)
    for median in medians(rows):
        print(f"median {median['compiler']:9} {median['plan']:11} {median['execution']:8} {median['ratio']:6.2f}")
    if options.output:
        rows = [*stored_rows(options.output, chosen), *rows]
        document = {
            "benchmark": "compile-time",
            "machine": describe_machine(torch.device("cpu")),
            "threads": 1,
            "repeats": options.repeats,
            "medians": medians(rows),
            "rows": [asdict(row) for row in rows],
        }
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def stored_rows(path: Path, without: Sequence[Contender]) -> list[Row]:
    """The rows of an earlier run, without those that were measured again."""
    if not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    stored = [Row(**{**row, "contender": Contender(**row["contender"])}) for row in rows]
    return [row for row in stored if row.contender not in without]


if __name__ == "__main__":
    main()
