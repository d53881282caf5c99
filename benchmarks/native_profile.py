"""GPU time of a planned, compiled training step by kind of kernel, for models of transformers, timm and torchvision.

    python benchmarks/native_profile.py --models llama_2048 llama_4096 --json profile.json
    python benchmarks/native_profile.py --models llama_1b --loss chunked --code generated
    python benchmarks/native_profile.py --models llama_2048 --plan none            # BF16, by torch.compile
    python benchmarks/native_profile.py --models llama_2048 --plan empty           # BF16, by run.compile
    python benchmarks/native_profile.py --models examples/hf_llama.py:make         # seconds on a CPU

Every model runs in a process of its own. A step is the forward and backward pass. Step time and peak memory are
measured first, without the profiler, as ``bitplan auto`` measures them. ``--code`` writes the code that Inductor
generated, from which the operations of a kernel can be read. On a CPU the time is that of operations, and says little.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "src")) if path not in sys.path]

from torch.autograd import DeviceType  # type: ignore[attr-defined] # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from benchmarks.foreign_models import MODELS  # noqa: E402
from bitplan.compiler import attention_masks  # noqa: E402
from bitplan.compiler.tracing import raise_recompile_limit  # noqa: E402
from bitplan.files import strict  # noqa: E402
from bitplan.lab.targets import load_target  # noqa: E402
from bitplan.machine import describe_machine  # noqa: E402
from bitplan.planners.auto import Problem  # noqa: E402
from bitplan.planners.auto.trials import CandidateStep, device_alone  # noqa: E402
from bitplan.plans import Plan  # noqa: E402
from bitplan.plans.loading import find_plan  # noqa: E402

#: Category -> pattern of kernel names; the first that matches counts.
CATEGORIES = {
    "attention": r"flash|fmha|_sdpa_|cudnn::fusion",
    "our amax": r"_partial_amax|_gated_amax|_gated_grads_amax|_norm_amax",
    "our gate casts": r"_cast_gated_tile|_cast_grads_tile",
    "our norm casts": r"_cast_norm_tile",
    "our casts": r"_cast_tile",
    "our head loss": r"head_loss|linear_cross_entropy",
    "gemm fp8": r"nvjet_sm\d+_q|e4m3|e5m2|f8f8|float8|fp8|scaled_mm",
    "gemm bf16": r"nvjet|gemm|cutlass|cublas|xmma|triton_mm|triton_tem",
    "copies": r"memcpy|memset|copy_device|direct_copy|CatArray",
    "inductor reductions": r"triton_(red|per|spl)_",
    "inductor pointwise": r"triton_(poi|for)_",
    "aten reductions": r"reduce_kernel|softmax|index_add|embedding",
    "aten pointwise": r"elementwise",
}
OTHER = "other"
#: Steps under the profiler.
STEPS = 5


@dataclass(frozen=True)
class Kernel:
    """A kernel of a step."""

    name: str
    category: str
    #: Launches, and milliseconds, per step.
    launches: float
    milliseconds: float


def category_of(name: str) -> str:
    """The category of a kernel name."""
    return next((category for category, pattern in CATEGORIES.items() if re.search(pattern, name, re.I)), OTHER)


def profile_kernels(step: CandidateStep, steps: int = STEPS) -> list[Kernel]:
    """The kernels of a training step, the longest first."""
    is_gpu = step.problem.device.type == "cuda"
    device = DeviceType.CUDA if is_gpu else DeviceType.CPU
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    with device_alone(step.problem.device), profile(activities=activities) as profiler:
        for _ in range(steps):
            step.step(lambda phase: None)
        step.release_cache()
    kernels = []
    for event in profiler.key_averages():
        microseconds = event.self_device_time_total if is_gpu else event.self_cpu_time_total
        if event.device_type != device or event.is_user_annotation or not microseconds:
            continue
        if re.match(r"##|Torch-Compiled Region|ProfilerStep", event.key):
            continue
        milliseconds = microseconds / 1e3 / steps
        kernels.append(Kernel(event.key, category_of(event.key), event.count / steps, milliseconds))
    return sorted(kernels, key=lambda kernel: -kernel.milliseconds)


def plan_of(options: argparse.Namespace) -> Plan | None:
    """The plan to attach; None for the model as it is."""
    if options.plan == "none":
        return None
    if options.plan == "empty":
        return Plan.from_dict({"version": 1, "execution": {"kind": "native", "min_macs": 0}, "rules": []})
    document = find_plan(options.plan).flattened().to_dict()
    if options.loss is not None:
        document["loss"] = options.loss
    if options.min_macs is not None:
        document["execution"] = {**document.get("execution", {"kind": "native"}), "min_macs": options.min_macs}
    return Plan.from_dict(document)


def profile_model(model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Step time, peak memory and kernels of a model."""
    target = MODELS[model]() if model in MODELS else load_target(model)
    problem = Problem(target, compile=True)
    attention_masks.FOLDS = not options.keep_masks

    def prepare() -> CandidateStep:
        with raise_recompile_limit():
            return CandidateStep(problem, plan_of(options), copies=False)

    if options.code is None:
        step = prepare()
    else:
        from torch._inductor.utils import run_and_get_code

        step, sources = run_and_get_code(prepare)
        options.code.mkdir(parents=True, exist_ok=True)
        for number, source in enumerate(sources):
            path: Path = options.code / f"{Path(model).stem}-{number}.py"
            path.write_text(source, encoding="utf-8")
    trial = step.measure()
    kernels = profile_kernels(step)
    categories: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        categories[kernel.category] += kernel.milliseconds
    return {
        "model": model,
        "plan": options.plan,
        "loss": options.loss,
        "min_macs": options.min_macs,
        "keep_masks": options.keep_masks,
        "machine": describe_machine(problem.device),
        "milliseconds": trial.milliseconds,
        "spread": trial.spread,
        "peak": trial.peak,
        "saved": trial.saved,
        "first_seconds": trial.first_seconds,
        "kernel_milliseconds": sum(categories.values()),
        "categories": dict(sorted(categories.items(), key=lambda item: -item[1])),
        "kernels": [asdict(kernel) for kernel in kernels],
    }


def show(document: dict[str, Any], most: int) -> None:
    """Print a model's categories and its longest kernels."""
    gib = 2**30
    print(
        f"== {document['model']}, plan {document['plan']}: {document['milliseconds']:.1f} ms a step "
        f"(kernels {document['kernel_milliseconds']:.1f}), peak {document['peak'] / gib:.2f} GiB, "
        f"saved {document['saved'] / gib:.2f} GiB, first steps {document['first_seconds']:.0f} s"
    )
    for category, milliseconds in document["categories"].items():
        launches = sum(kernel["launches"] for kernel in document["kernels"] if kernel["category"] == category)
        print(f"   {category:22}{milliseconds:9.3f} ms {launches:7.0f} launches")
    for kernel in document["kernels"][:most]:
        print(f"   {kernel['milliseconds']:9.3f} ms {kernel['launches']:6.0f} x  {kernel['name'][:110]}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["llama_2048", "llama_4096"], help="names, or file.py:make")
    parser.add_argument("--plan", default="fp8-train", help="a preset, a plan file, none, or empty")
    parser.add_argument(
        "--loss", choices=["chunked", "whole"], help="how the loss is computed, if not as the plan says"
    )
    parser.add_argument("--min-macs", type=int, help="from which size on products run natively, if not as measured")
    parser.add_argument("--keep-masks", action="store_true", help="do not drop constant masks of attention")
    parser.add_argument("--top", type=int, default=25, help="kernels to print")
    parser.add_argument("--code", type=Path, help="a folder for the code that Inductor generates")
    parser.add_argument("--json", type=Path, help="where to write all documents together")
    parser.add_argument("--one", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(strict(profile_model(options.one, options))))
        return
    documents = []
    for model in options.models:
        command = [sys.executable, __file__, "--one", model, "--plan", options.plan]
        command += [] if options.loss is None else ["--loss", options.loss]
        command += [] if options.min_macs is None else ["--min-macs", str(options.min_macs)]
        command += ["--keep-masks"] if options.keep_masks else []
        command += [] if options.code is None else ["--code", str(options.code)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"== {model} failed: {done.stderr[-3000:]}", flush=True)
            continue
        documents.append(json.loads(done.stdout.splitlines()[-1]))
        show(documents[-1], options.top)
        if options.json is not None:
            text = json.dumps({"benchmark": "native-profile", "models": documents}, indent=1)
            options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
