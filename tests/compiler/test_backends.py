"""What each backend of ``run.compile()`` gives to Inductor; tests that leave Inductor out rely on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bitplan as bp
from bitplan.compiler import torch_private

pytestmark = pytest.mark.filterwarnings("ignore::bitplan.errors.BitplanWarning")


@pytest.mark.parametrize(
    ("execution", "partitions"),
    [
        ("packed", True),
        (bp.Packed("aggressive"), True),
        (bp.Native(min_macs=0), True),  # of saved codes
        (bp.Native(min_macs=0, recompute="inputs"), True),
        (bp.Native(min_macs=0, recompute="products"), True),
        ("native", False),
    ],
    ids=["packed", "aggressive", "native codes", "native inputs", "native products", "native"],
)
def test_inductor_is_given_the_partitioner_of_the_run(
    execution: Any, partitions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.compiler.reset()
    partitioners: list[Any] = []

    def compile_fx(gm: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any]) -> Any:
        partitioners.append(config_patches.get("custom_partitioner_fn"))
        return gm.forward

    monkeypatch.setattr(torch_private, "compile_fx", compile_fx)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(4, 8)
    plan = "fp8-all" if partitions else "fp8-linear"
    with bp.attach(model, plan, example=x, execution=execution) as run:
        run.compile()(x)
        own = run.partitioner()
    (given,) = partitioners
    assert (given is not None) == (own is not None) == partitions
    if given is not None and own is not None:
        assert (type(given), given.uuid()) == (type(own), own.uuid())
