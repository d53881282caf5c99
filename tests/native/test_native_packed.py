"""Native execution of a plan that also rounds activations: compiled, these are kept as their codes."""

from __future__ import annotations

import functools
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
from bitplan.lab.models.language_models import LlamaBlocks

TOKENS, WIDTH, HIDDEN = 64, 64, 128
F8: dict[str, Any] = {"format": "e4m3", "scale": "tensor"}
G8: dict[str, Any] = {"format": "e5m2", "scale": "tensor"}


def plan_of(activation: Any = None, **more: Any) -> Plan:
    f8, g8 = F8 | more, G8 | more
    rules: list[dict[str, Any]] = [{"match": "*", "op": "linear", "x": f8, "w": f8, "dy": g8}]
    if activation is not None:
        rules.append({"match": ["*.gate", "*.up"], "op": "linear", "activation": activation})
    return Plan.from_dict({"version": 1, "rules": rules})


class Trained:
    """Some steps of blocks: their outputs and gradients, and the bytes that a compiled graph kept."""

    def __init__(self, plan: Plan, execution: str, recompute: Any = None, steps: int = 1) -> None:
        torch.manual_seed(0)
        model = LlamaBlocks(WIDTH, 1, HIDDEN, heads=2)
        x = torch.randn(2, 32, WIDTH).requires_grad_()
        native = bitplan.Native(min_macs=0, recompute=recompute or ())
        self.kept: dict[torch.dtype, int] = {}
        #: What each cast of the last graph waits for.
        self.after: list[Any] = []
        with bitplan.attach(model, plan, example=x, execution=native if execution == "native" else execution) as run:
            called: Any = model
            if recompute is not None:
                run._execution.recast_in_backward = run.execution.recast_operands
                cut = run.partitioner() or min_cut_rematerialization_partition
                compilers = {name: lambda gm, arguments: self._noted(gm) for name in ("fw_compiler", "bw_compiler")}
                backend = aot_autograd(
                    **compilers,
                    partition_fn=cut,
                    decompositions=select_decomp_table(),
                    keep_inference_input_mutations=True,
                )
                called = torch.compile(model, fullgraph=True, backend=backend)
            for number in range(steps):
                model.zero_grad()
                x.grad = None
                y = called(x * (1 + number) if steps > 1 else x)
                y.float().square().mean().backward()
                run.step()
        self.tensors = [y.detach().float(), *(p.grad.float() for p in model.parameters() if p.grad is not None)]

    def _noted(self, gm: torch.fx.GraphModule) -> Any:
        if not self.kept:
            (output,) = (node for node in gm.graph.nodes if node.op == "output")
            for node in output.args[0][1:]:
                value = node.meta.get("val")
                if isinstance(value, Tensor) and node.op != "placeholder":
                    self.kept[value.dtype] = self.kept.get(value.dtype, 0) + value.numel() * value.element_size()
        casts = [node for node in gm.graph.nodes if node.target is torch.ops.bitplan.float8_cast.default]
        self.after = [node.args[8] if len(node.args) > 8 else None for node in casts]
        return make_boxed_func(gm.forward)

    @property
    def bytes(self) -> int:
        return sum(self.kept.values())

    def is_like(self, other: Trained) -> bool:
        return all(
            (mine - its).norm() <= 1e-3 * its.norm() for mine, its in zip(self.tensors, other.tensors, strict=True)
        )


@functools.cache
def train_without_activations(execution: str, recompute: Any = None) -> Trained:
    return Trained(plan_of(), execution, recompute)


@pytest.mark.parametrize(("activation", "recomputes"), [("e4m3", ((), "inputs")), (F8, ("inputs",))])
def test_rounded_activations_are_kept_as_codes(activation: Any, recomputes: tuple[Any, ...]) -> None:
    emulated = Trained(plan_of(activation), "emulate")
    assert not emulated.is_like(train_without_activations("emulate"))
    for recompute in recomputes:
        plain = train_without_activations("native", recompute)
        packed = Trained(plan_of(activation), "native", recompute)
        assert packed.is_like(emulated)
        # The two halves of the gate, a byte an element instead of four.
        assert plain.bytes - packed.bytes == pytest.approx(3 * 2 * TOKENS * HIDDEN, abs=200)
    codes = sum(size for dtype, size in packed.kept.items() if dtype.itemsize == 1)
    assert codes == 2 * TOKENS * HIDDEN  # of operands, nothing is left
    # Of seven layers' gradients and eleven operands cast again: only the first cast of each gradient waits for none.
    waits_for_a_cast = ["getitem" in str(after) for after in packed.after]
    assert len(waits_for_a_cast) == 18
    assert sum(waits_for_a_cast) == 18 - 7


def test_scales_of_the_past_go_on_as_in_emulation() -> None:
    plan = plan_of({**F8, "history": 4}, history=4)
    assert Trained(plan, "native", "inputs", steps=3).is_like(Trained(plan, "emulate", steps=3))


def test_inductor_compiles_it_and_eager_keeps_what_it_kept() -> None:
    model, x = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)), torch.randn(8, 32)
    f8 = {"match": "*", "op": "linear", "x": F8, "w": F8, "dy": G8}
    plan = Plan.from_dict({"version": 1, "rules": [f8, {"match": "0", "activation": "e4m3"}]})
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0, recompute="inputs")) as run:
        eager = model(x)
        called = run.compile()
        torch.testing.assert_close(called(x), eager, rtol=1e-5, atol=1e-5)
        called(x).sum().backward()
    assert model[0].weight.grad is not None


def test_a_format_that_may_change_is_not_kept_as_codes() -> None:
    model, x = nn.Linear(32, 16), torch.randn(6, 32)
    plan = Plan.from_dict(
        {"version": 1, "rules": [{"match": "*", "activation": {"format": "int", "bits": 6, "scale": "tensor"}}]}
    )
    with bitplan.attach(model, plan, example=x, execution=bitplan.Native(min_macs=0)) as run:
        assert run.partitioner() is None
    with bitplan.attach(model, "fp8-all", example=x, execution=bitplan.Native(min_macs=0)) as run:
        assert run.partitioner() is not None
