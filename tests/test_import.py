"""What ``import bitplan`` brings in: torch's compiler takes over a second to import, and eager code never uses it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from bitplan.compiler.tracing import constant_when_traced

LOADED = (
    "import sys, torch; before = set(sys.modules); import bitplan; "
    "lab = ('compare', 'record'); "
    "[getattr(bitplan, name) for name in bitplan.__all__ if name not in lab]; "
    "print(*sorted(set(sys.modules) - before))"
)

#: Programs that compile, in a process where nothing but them imports torch's compiler.
QUANTIZED = """
import torch, bitplan
compiled = torch.compile(lambda x: bitplan.quantize(x, "bf16"), backend="aot_eager", fullgraph=True)
x = torch.randn(64)
assert torch.equal(compiled(x), bitplan.quantize(x, "bf16"))
"""
ATTACHED = """
import torch, bitplan
model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
plan = {"version": 1, "rules": [{"match": "*", "x": "e4m3", "activation": "e4m3", "grad_activation": "e5m2"}]}
with bitplan.attach(model, bitplan.Plan.from_dict(plan), example=x, execution=EXECUTION):
    eager = model(x)
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)(x)
    compiled.sum().backward()
    torch.testing.assert_close(compiled, eager)
"""


def output_of(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_bitplan_imports_nothing_slow() -> None:
    loaded = set(output_of(LOADED).split())
    assert "bitplan.runtime.attach" in loaded
    slow = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.fx.experimental.symbolic_shapes")
    assert loaded.isdisjoint((*slow, "sympy", "triton", "torchao", "typer", "plotly"))
    assert not [name for name in loaded if name.startswith("bitplan.lab")]


def test_the_names_of_the_lab_need_no_package_of_its_own() -> None:
    code = "import sys, bitplan; bitplan.record, bitplan.compare; print(*sys.modules)"
    loaded = set(output_of(code).split())
    assert "bitplan.lab.train.record" in loaded
    assert loaded.isdisjoint(("plotly", "jinja2", "safetensors", "typer", "PIL"))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(QUANTIZED, id="quantize"),
        pytest.param(f"EXECUTION, BACKEND = 'emulate', 'aot_eager'{ATTACHED}", id="emulate"),
        pytest.param(f"EXECUTION, BACKEND = 'packed', 'bitplan'{ATTACHED}", id="packed"),
    ],
)
def test_a_program_that_compiles_needs_no_import_of_the_compiler(program: str) -> None:
    output_of(program)


def test_constants_of_tracing_are_marked_as_torch_marks_them() -> None:
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    marked: Any = torch.compiler.assume_constant_result(theirs)  # type: ignore[no-untyped-call]
    assert vars(constant_when_traced(ours)) == vars(marked)


def test_every_reader_of_the_lab_can_be_imported_first() -> None:
    """Tasks import the readers of their data, and readers the classes of their tasks: no order may matter."""
    code = (
        "import importlib, pkgutil, sys\n"
        "import bitplan.lab.sources as sources\n"
        "for module in list(pkgutil.iter_modules(sources.__path__)):\n"
        "    for name in [name for name in sys.modules if name.startswith('bitplan.lab.')]:\n"
        "        del sys.modules[name]\n"
        "    importlib.import_module(f'bitplan.lab.sources.{module.name}')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
