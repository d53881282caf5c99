"""A model that is compiled after a planned one, in the same process, is compiled as in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import re, sys
import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code

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
    for plan, execution in (("fp8-all", "packed"), ("int8-linear", bp.Native(min_macs=0))):
        model, x = Net(), torch.randn(4, 16)
        runs.append(bp.attach(model, plan, example=x, execution=execution))
        runs[-1].compile()(x).sum().backward()
model, x = Net(), torch.randn(8, 16)
compiled = torch.compile(model)
_, codes = run_and_get_code(lambda: compiled(x).sum().backward())
if sys.argv[1] == "after":
    for run in runs:
        run.detach()
    for own, changed in zip(before, settings()):
        assert own == changed, {name: (own[name], changed[name]) for name in own if own[name] != changed[name]}
assert len(codes) == 2
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
    assert "extern_kernels.addmm" in fresh
    assert "cpp_fused" in fresh
    assert code_of_plain_model("after") == fresh
