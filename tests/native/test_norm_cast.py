"""An RMS norm's result, cast where it is computed: what the operations give, and where graphs get them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from bitplan import Plan
from bitplan.compiler import norm_fusion as norm_fusing
from bitplan.compiler.gated_fusion import fuse_gates
from bitplan.compiler.launching import KernelInliningPass, inline_kernels
from bitplan.compiler.norm_fusion import fuse_norms
from bitplan.compiler.partitioning import RecomputePartitioner, RecomputePolicy
from bitplan.executions.native.float8_cast import cast_float8, tile_count
from bitplan.executions.native.norm_cast import rms_norm_reference
from bitplan.lab.models.language_models import LlamaBlocks

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
OURS: Any = torch.ops.bitplan
EPS = 2.0**-16


def given(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Input, means of squares, weight."""
    torch.manual_seed(0)
    x = (torch.randn(20, 48) * torch.logspace(-2, 2, 20)[:, None]).to(dtype)
    return x, x.float().square().mean(1), (torch.randn(48) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_numbers_are_those_of_torch(dtype: torch.dtype) -> None:
    x, mean, weight = given(dtype)
    expected = F.rms_norm(x, (48,), weight, EPS).bfloat16()
    assert torch.equal(rms_norm_reference(x, mean, weight, EPS), expected)
    assert torch.equal(rms_norm_reference(x, torch.rsqrt(mean + EPS), weight, None), expected)


@pytest.mark.parametrize("history_amax", [0.0, 2.0])
@pytest.mark.parametrize("eps", [EPS, None])
def test_the_operations_cast_these_numbers(history_amax: float, eps: float | None) -> None:
    x, mean, weight = given()
    history, read = torch.tensor(history_amax), (x, mean if eps else torch.rsqrt(mean + EPS), weight, eps)
    expected = cast_float8(
        F.rms_norm(x, (48,), weight, EPS), E4M3, power_of_two=True, history_amax=history, returns_amax=True
    )
    parts = OURS.norm_amax(*read, history)
    actual = OURS.norm_cast(*read, E4M3, parts, history, True, True, True, x)
    for ours, other in zip(actual, expected, strict=True):
        assert torch.equal(ours.float(), other.float())


def test_torch_finds_the_operations_well_defined() -> None:
    x, mean, weight = given()
    history_amax = torch.tensor(2.0)
    torch.library.opcheck(OURS.norm_amax, (x, mean, weight, EPS, history_amax))
    parts = OURS.norm_amax(x, mean, weight, None, history_amax)
    for layouts in ((True, False), (False, True), (True, True)):
        torch.library.opcheck(OURS.norm_cast, (x, mean, weight, EPS, E5M2, parts, history_amax, *layouts, layouts[0]))


# --- graphs -------------------------------------------------------------------------------------------------


def names_of(graph: fx.Graph) -> list[str]:
    names = (str(node.target) for node in graph.nodes)
    return [name.split(".")[1] for name in names if name.startswith("bitplan.")]


F8: dict[str, Any] = {"format": "e4m3", "scale": "tensor", "power_of_two": True, "history": 4}


def gradients(rewritten: Any, recompute: Any, layers: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = LlamaBlocks(64, layers, 128, heads=2).bfloat16()
    for norm in (module for module in model.modules() if isinstance(module, nn.RMSNorm)):
        nn.init.normal_(norm.weight)
    x = torch.randn(2, 32, 64).bfloat16().requires_grad_()
    rule = {"match": "*", "op": "linear", **dict.fromkeys(("x", "w", "dy"), F8)}
    result: list[Tensor] = rewritten.gradients(model, x, Plan.from_dict({"version": 1, "rules": [rule]}), recompute)
    return result


@pytest.mark.parametrize(
    ("recompute", "sums", "layers"), [((), False, 1), ("activations", False, 1), ("inputs", True, 2)]
)
def test_graphs_cast_norms_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, rewriting: Any, recompute: Any, sums: bool, layers: int
) -> None:
    recast_in_backward = recompute != ()
    partitioner = RecomputePartitioner(RecomputePolicy()) if recast_in_backward else min_cut_rematerialization_partition
    monkeypatch.setattr(norm_fusing, "FUSES_SUMS", sums)
    fused_count = 2 * layers - 1  # of the first sum its terms are kept: the model's input, and a product
    rewritten = rewriting(partitioner, fuse_gates, fuse_norms, switch=(norm_fusing, "FUSES"))
    assert all(gradient.isfinite().all() for gradient in gradients(rewritten, recompute, layers))
    for fuses, (forward, backward) in ((True, rewritten.seen), (False, rewritten.seen_without)):
        joined = (fused_count if sums else 1) if fuses else 0
        assert (forward.get("norm_amax", 0), forward.get("norm_cast", 0)) == (joined, joined)
        assert "norm_amax" not in backward
        assert backward.get("norm_cast", 0) == (fused_count if fuses and recast_in_backward else 0)
        assert backward["gated_grads_cast"] == layers


class Logits(nn.Module):
    """A Llama of transformers; returns logits."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=32,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            use_cache=False,
        )
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(ids).logits
        return logits


def test_norms_of_a_llama_of_transformers_are_fused(rewriting: Any) -> None:
    layers = 2
    rule = {"match": "*layers*", "op": "linear", **dict.fromkeys(("x", "w", "dy"), F8)}
    plan = Plan.from_dict({"version": 1, "rules": [rule]})
    fused_count = 2 * layers - 1  # of the first sum its terms are kept: the embedding, and a product
    torch.manual_seed(0)
    model = Logits(layers).bfloat16()
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight)
    partitioner = RecomputePartitioner(RecomputePolicy())
    rewritten = rewriting(partitioner, fuse_gates, fuse_norms, switch=(norm_fusing, "FUSES"))
    rewritten.gradients(model, torch.randint(32, (2, 16)), plan, "inputs")
    for joined, (forward, backward) in ((fused_count, rewritten.seen), (0, rewritten.seen_without)):
        assert [graph.get("norm_cast", 0) for graph in (forward, backward)] == [joined, joined]
        assert (forward.get("norm_amax", 0), backward.get("norm_amax", 0)) == (joined, 0)
        # One cast serves query, key and value, another gate and up; the attention's result is cast by itself.
        assert forward["float8_cast"] + joined == 3 * layers + 7 * layers


def traced(function: Any, *given: Tensor) -> fx.GraphModule:
    return make_fx(torch.func.functionalize(function), decomposition_table=select_decomp_table(), tracing_mode="fake")(
        *given
    )


def cast(x: Tensor, **settings: Any) -> Tensor:
    given: dict[str, Any] = {"power_of_two": True, "history_amax": torch.ones(()), **settings}
    return cast_float8(x.flatten(0, -2), E4M3, **given).rows


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return cast(F.rms_norm(x, x.shape[-1:], weight, EPS))


def of_inverse(x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    return cast((x.float() * inverse * weight).bfloat16())


def of_mean(x: Tensor, mean: Tensor, weight: Tensor) -> Tensor:
    return of_inverse(x, torch.rsqrt(mean + EPS), weight)


def of_sum(x: Tensor, total: Tensor, weight: Tensor) -> Tensor:
    return of_inverse(x, torch.rsqrt(total), weight)


def turned(x: Tensor, mean: Tensor, weight: Tensor) -> Tensor:
    return cast((weight * (torch.rsqrt(EPS + mean) * x)).bfloat16())


@pytest.mark.parametrize("function", [normed, of_mean, of_sum, of_inverse, turned])
@pytest.mark.parametrize("dims", [2, 3])
def test_rows_are_read_as_the_graph_has_them(function: Any, dims: int) -> None:
    x, mean, weight = given()
    x, mean = (x, mean[:, None]) if dims == 2 else (x.view(4, 5, 48), mean.view(4, 5, 1))
    read = {normed: (x, weight), of_mean: (x, mean, weight), turned: (x.float(), mean, weight.float())}
    inputs = read.get(function, (x, torch.rsqrt(mean + EPS), weight))
    module = traced(function, *inputs)
    expected = module(*inputs)
    assert fuse_norms(module.graph) == 0  # no GPU
    assert fuse_norms(module.graph, "cpu") == 1
    module.graph.lint()
    module.recompile()
    assert names_of(module.graph) == ["norm_amax", "norm_cast"]
    (joined,) = module.graph.find_nodes(op="call_function", target=OURS.norm_cast.default)
    assert joined.args[3] == {of_mean: EPS, turned: EPS, of_sum: 0.0}.get(function)
    assert torch.equal(module(*inputs).float(), expected.float())


def norm_of(kind: str) -> Any:
    """A norm of transformers as a function of input and weight."""
    family = kind.partition("RMS")[0].partition("Layer")[0].lower()
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    norm = getattr(module, kind)(48, eps=EPS).bfloat16()
    return lambda x, weight: torch.func.functional_call(norm, {"weight": weight}, (x,))


@pytest.mark.parametrize(
    ("kind", "rounds_twice"),
    [(f"{name}RMSNorm", True) for name in ("Llama", "Mistral", "Qwen2", "Qwen3")]
    + [("T5LayerNorm", True), ("GemmaRMSNorm", False), ("Olmo2RMSNorm", False)],
)
def test_norms_of_transformers_keep_the_bits_of_eager_code(kind: str, rounds_twice: bool) -> None:
    norm = norm_of(kind)
    x, _, weight = given()

    def step(x: Tensor, weight: Tensor) -> Tensor:
        return cast(norm(x, weight))

    def step_of_sum(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + 1
        return step(total, weight), total

    for function, fused in ((step, True), (step_of_sum, rounds_twice)):
        module = traced(function, x, weight)
        assert fuse_norms(module.graph, "cpu") == fused
        module.graph.lint()
        module.recompile()
        joined = module.graph.find_nodes(op="call_function", target=OURS.norm_cast.default)
        assert [node.args[-1] for node in joined] == [rounds_twice] * fused
        results = zip(*map(flat, (module(x, weight), function(x, weight))), strict=True)
        assert all(torch.equal(first.float(), second.float()) for first, second in results)
    # The two kinds of norms are not the same.
    _, mean, _ = given()
    first, second = (rms_norm_reference(x, mean, weight, EPS, rounds) for rounds in (False, True))
    assert 0 < (first != second).sum() < first.numel()
    assert torch.equal(norm(x, weight), second if rounds_twice else rms_norm_reference_of(kind, x, mean, weight))


def rms_norm_reference_of(kind: str, x: Tensor, mean: Tensor, weight: Tensor) -> Tensor:
    """The norm's result with one rounding; Gemma's weight is a difference from 1."""
    return rms_norm_reference(x, mean, 1 + weight.float() if kind == "GemmaRMSNorm" else weight, EPS)


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def test_only_what_fits_exactly_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    x, mean, weight = given()

    def read(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        result = F.rms_norm(x, (48,), weight)
        return cast(result), result

    def weightless(x: Tensor, weight: Tensor) -> Tensor:
        return cast(F.rms_norm(x, (48,)))

    def centred(x: Tensor, weight: Tensor) -> Tensor:
        return cast(F.layer_norm(x, (48,), weight))

    def shifted(x: Tensor, weight: Tensor) -> Tensor:
        return normed(x, weight + 1)

    def scattered(x: Tensor, weight: Tensor) -> Tensor:
        return cast(F.rms_norm(x, (48,), weight).t().contiguous())

    def of_heads(x: Tensor, weight: Tensor) -> Tensor:
        return cast(F.rms_norm(x.view(20, 4, 12), (12,), weight[:12]).flatten(1))

    def of_both(x: Tensor, weight: Tensor) -> Tensor:
        return cast(F.rms_norm(x, (20, 48), weight.expand(20, 48).contiguous()))

    def of_sums(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + 1
        return normed(total, weight), total

    def otherwise(**settings: Any) -> Any:
        return lambda x, weight: cast(F.rms_norm(x, (48,), weight), **settings)

    of_the_present, of_any_size = otherwise(history_amax=None), otherwise(power_of_two=False)
    for function in (
        of_the_present,
        of_any_size,
        read,
        weightless,
        centred,
        shifted,
        scattered,
        of_heads,
        of_both,
        of_sums,
    ):
        assert fuse_norms(traced(function, x, weight).graph, "cpu") == 0, function
    assert fuse_norms(traced(normed, x.t().contiguous().t(), weight).graph, "cpu") == 0
    assert fuse_norms(traced(normed, x.half(), weight.half()).graph, "cpu") == 0
    assert fuse_norms(traced(of_mean, x, mean[:, None].bfloat16(), weight).graph, "cpu") == 0
    graphs = [traced(item, x, weight).graph for item in (normed, normed, of_sums)]
    norm_fusing._patterns.cache_clear()
    with torch.inference_mode():
        assert fuse_norms(graphs[0], "cpu") == 1
    monkeypatch.setattr(norm_fusing, "FUSES_SUMS", True)
    assert fuse_norms(graphs[2], "cpu") == 1
    monkeypatch.setattr(norm_fusing, "FUSES", False)
    assert fuse_norms(graphs[1], "cpu") == 0


@pytest.mark.parametrize("switch", ["FUSES", "FUSES_SUMS"])
def test_what_is_stored_compiled_knows_the_switches(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    before = KernelInliningPass().uuid()
    monkeypatch.setattr(norm_fusing, switch, not getattr(norm_fusing, switch))
    assert KernelInliningPass().uuid() != before


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, whose kernels are traced")
@pytest.mark.usefixtures("gpu_in_name")
def test_kernels_become_launches_that_write_nothing_but_their_results() -> None:
    def step(x: Tensor, row_stats: Tensor, weight: Tensor, history_amax: Tensor) -> tuple[Tensor, ...]:
        parts = OURS.norm_amax(x, row_stats, weight, EPS, history_amax)
        return OURS.norm_cast(x, row_stats, weight, None, E4M3, parts, history_amax, True, False, True)  # type: ignore[no-any-return]

    with FakeTensorMode():
        x, weight = (torch.empty(size, dtype=torch.bfloat16) for size in ((300, 130), (130,)))
        module = make_fx(step)(x, torch.empty(300), weight, torch.empty(()))
    assert inline_kernels(module.graph, "cpu") == 2
    module.graph.lint()
    result: dict[str, tuple[Any, set[str]]] = {}
    for node in module.graph.find_nodes(op="call_function", target=triton_kernel_wrapper_functional):
        kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
        result[kernel.fn.__name__] = (node.kwargs["grid"], set(node.kwargs["tensors_to_clone"]))
    assert result == {
        "_norm_amax": ([(512, 1, 1)], {"out"}),
        "_cast_norm_tile": ([(tile_count(300, 130), 1, 1)], {"as_rows", "scale_out", "tile_amax"}),
    }
