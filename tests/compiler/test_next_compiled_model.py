"""A model that is compiled after a planned one, in the same process, is compiled as in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bitplan as bp

PROGRAM = """
import re, sys
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code

# The code that Inductor writes is compared; compiling the C++ in it takes seconds for each kernel.
assert AsyncCompile.cpp_pybinding
AsyncCompile.cpp_pybinding = lambda self, types, code: lambda *arguments: None

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(self.second(torch.relu(self.first(x)))).tanh()

CONFIGS = dynamo_config, functorch_config, inductor_config

def text(value):
    return repr(sorted(value) if isinstance(value, (set, frozenset)) else value)

def settings():
    return [{name: text(value) for name, value in config.get_config_copy().items()} for config in CONFIGS]

torch.set_num_threads(1)
before = settings()
if sys.argv[1] == "after":
    import bitplan as bp

    runs = []
    int8 = {"format": "int8", "scale": "tensor"}
    packed, native = {"match": "first", "activation": "e4m3"}, {"match": "first", "x": int8, "w": int8}
    # Rules for one layer: of fp8-all, Inductor writes C++ for half a minute.
    for rule, execution in ((packed, "packed"), (native, bp.Native(min_macs=0))):
        model, x = Net(), torch.randn(4, 16)
        runs.append(bp.attach(model, {"version": 1, "rules": [rule]}, example=x, execution=execution))
        runs[-1].compile()(x).sum().backward()
model, x = Net(), torch.randn(8, 16)
compiled = torch.compile(model)
saved = []

def step():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        y = compiled(x)
    y.sum().backward()

_, codes = run_and_get_code(step)
if sys.argv[1] == "after":
    for run in runs:
        run.detach()
    for own, changed in zip(before, settings()):
        assert own == changed, {name: (own[name], changed[name]) for name in own if own[name] != changed[name]}
assert len(codes) == 2
assert saved
print("bytes saved:", sorted(saved))
print(re.sub(r"/\\S+|[0-9a-z]{30,}|AOT ID.*", "", "".join(codes)))
"""


def code_of_plain_model(when: str) -> str:
    no_graph_cache = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    environment = {**os.environ, **no_graph_cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, when], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_model_compiles_after_planned_ones_as_in_a_fresh_process() -> None:
    fresh = code_of_plain_model("fresh")
    assert "bytes saved: [" in fresh
    assert "extern_kernels.addmm" in fresh
    assert "cpp_fused" in fresh
    assert code_of_plain_model("after") == fresh


class Outer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


class OfAnotherClass(Outer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def input_sizes(model: nn.Module, x: Tensor) -> list[Any]:
    """The sizes of the batch in each graph that Dynamo makes of the model."""
    sizes: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        examples = (node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder")
        shapes = [tuple(value.shape) for value in examples if isinstance(value, Tensor) and not value.requires_grad]
        sizes.append(shapes[-1])
        return graph

    torch.compile(model, backend=backend)(x)
    return sizes


@pytest.mark.parametrize("plan", [None, "fp8-linear"])
def test_sizes_stay_numbers_after_a_model_of_another_class(plan: str | None) -> None:
    """Dynamo makes sizes symbolic that differ from those that code of the same file, line and name had before."""
    torch.compiler.reset()
    runs = []
    for model, x in ((Outer(8), torch.randn(4, 8)), (OfAnotherClass(16), torch.randn(6, 16))):
        if plan is not None:
            runs.append(bp.attach(model, plan, example=x))
        (shape,) = input_sizes(model, x)
        assert all(isinstance(size, int) for size in shape), shape
        assert shape == tuple(x.shape)
    torch.compiler.reset()
