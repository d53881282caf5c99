"""The cut of native graphs that compute the inputs of their products again."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

import bitplan
from bitplan import Plan
from bitplan.lab.models.resnet import Bottleneck
from bitplan.plans.execution import RECOMPUTE

F8: dict[str, Any] = {"format": "e4m3", "scale": "tensor"}
G8: dict[str, Any] = {"format": "e5m2", "scale": "tensor"}
PLAN = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": ["linear", "conv2d"], "x": F8, "w": F8, "dy": G8}]})
VAR_MEAN = torch.ops.aten.var_mean.correction


class Step:
    """A training step of a compiled model: its tensors, what its graphs do, and the bytes that are kept."""

    def __init__(self, model: nn.Module, x: Tensor, recompute: Any) -> None:
        #: Of the forward and of the backward graph: operation -> how often.
        self.operations: list[Counter[Any]] = []
        self.bytes = 0
        torch.manual_seed(0)
        x = x.detach().requires_grad_()
        with bitplan.attach(model, PLAN, example=x, execution=bitplan.Native(min_macs=0, recompute=recompute)) as run:
            assert run.fallbacks() == []
            run._execution.recast_in_backward = run.execution.recast_operands
            backend = aot_autograd(
                fw_compiler=lambda gm, arguments: self._noted(gm),
                bw_compiler=lambda gm, arguments: self._noted(gm),
                partition_fn=run.partitioner() or min_cut_rematerialization_partition,
                decompositions=select_decomp_table(),
                keep_inference_input_mutations=True,
            )
            y = torch.compile(model, fullgraph=True, backend=backend)(x)
            y.square().mean().backward()
        gradients = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
        self.tensors = [y.detach(), *gradients, *(buffer.float() for buffer in model.buffers())]

    def _noted(self, gm: torch.fx.GraphModule) -> Any:
        if not self.operations:
            (output,) = (node for node in gm.graph.nodes if node.op == "output")
            kept = [arg for arg in output.args[0][1:] if isinstance(arg, torch.fx.Node) and arg.op != "placeholder"]
            values = [item.meta["val"] for item in kept if isinstance(item.meta["val"], Tensor)]
            self.bytes = sum(value.numel() * value.element_size() for value in values)
        self.operations.append(Counter(node.target for node in gm.graph.nodes))
        return make_boxed_func(gm.forward)

    def is_like(self, other: Step) -> bool:
        return all(
            (mine - its).norm() <= 1e-5 * its.norm() for mine, its in zip(self.tensors, other.tensors, strict=True)
        )


def perceptron(batch: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    return model, torch.randn(batch, 32)


@pytest.mark.parametrize("batch", [4, 64])
def test_an_input_behind_a_batch_norm_is_computed_again(batch: int) -> None:
    """Large batches: torch would not run the reduction again. Small ones: its results are not small."""
    plain, spared = (Step(*perceptron(batch), recompute) for recompute in ((), "inputs"))
    assert spared.is_like(plain)
    casts = [operation[torch.ops.bitplan.float8_cast.default] for operation in spared.operations]
    assert casts == [4, 2 + 2 + 2]  # two inputs and two weights; again, with the gradients
    if batch == 64:
        assert [operation[VAR_MEAN] for operation in spared.operations] == [1, 0]
        assert spared.bytes < plain.bytes


def test_a_bottleneck_gives_the_same_whatever_it_spares() -> None:
    steps = {}
    for recompute in ((), *RECOMPUTE):
        torch.manual_seed(0)
        model = Bottleneck(32, 8, 1, "conv").to(memory_format=torch.channels_last)
        x = torch.randn(4, 32, 8, 8).to(memory_format=torch.channels_last)
        steps[recompute] = Step(model, x, recompute)
    for step in steps.values():
        assert step.is_like(steps[()])
        assert [operation[VAR_MEAN] for operation in step.operations] == [3, 0]
    assert steps["inputs"].bytes < steps["weights"].bytes < steps[()].bytes


def test_dropout_keeps_its_mask_rather_than_the_random_numbers_it_was_made_of() -> None:
    kept = {}
    for recompute in ((), "activations"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.3), nn.Linear(128, 16))
        kept[recompute] = Step(model, torch.randn(64, 32), recompute)
    assert kept["activations"].is_like(kept[()])
    codes = 64 * (32 + 128)
    assert kept[()].bytes - kept["activations"].bytes == pytest.approx(codes, abs=100)
