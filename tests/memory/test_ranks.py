"""Memory and traffic of one process of a sharded step: by hand, and measured in two processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F

from bitplan.analysis.memory import estimate_memory
from bitplan.analysis.memory.ranks import RankEstimate, estimate_rank, measure_rank, parse_bandwidths
from bitplan.analysis.sharding import Sharding, sharded_blocks
from bitplan.errors import BitplanError, MemoryEstimateError, TargetError

FEATURES, BLOCKS, ROWS = 64, 4, 2
#: Bytes of a block's weight.
BLOCK = 4 * FEATURES * FEATURES


class Blocks(nn.Module):
    """Linear layers without bias, in a list; weights are most of its memory."""

    def __init__(self, count: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(count))
        self.tp_plan = {"blocks.0": "colwise", "blocks.1": "rowwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rank_of(text: str, model: nn.Module | None = None, **options: Any) -> RankEstimate:
    torch.manual_seed(0)
    x = torch.randn(ROWS, FEATURES)
    dtypes = {name: options.pop(name) for name in ("param_dtype", "reduce_dtype") if name in options}
    sharding = Sharding.parse(text, **dtypes)
    return estimate_rank(model or Blocks(), x, None, "adamw", sharding=sharding, **options)


def sent(estimate: RankEstimate) -> dict[tuple[str, str], tuple[int, int]]:
    return {(part.axis, part.collective): (part.calls, part.bytes) for part in estimate.traffic}


def test_fsdp_splits_weights_gradients_and_optimizer_state() -> None:
    memory = rank_of("fsdp=4").memory
    assert memory.weights == memory.gradients == BLOCKS * BLOCK // 4
    assert 2 * memory.weights <= memory.optimizer < 2 * memory.weights + 64 * BLOCKS


def test_fsdp_gathers_every_block_twice_and_reduces_it_once() -> None:
    moved = BLOCKS * BLOCK * 3 // 4  # by the ring algorithm: three of four parts
    traffic = sent(rank_of("fsdp=4"))
    calls, received = traffic["fsdp", "all-gather"]
    assert (calls, received) == (2 * BLOCKS, 2 * moved)
    assert traffic["fsdp", "reduce-scatter"] == (BLOCKS, moved)


def test_gathered_weights_take_the_dtype_of_the_policy() -> None:
    plain, mixed = rank_of("fsdp=4"), rank_of("fsdp=4", param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert mixed.memory.weights == plain.memory.weights
    assert 2 * sent(mixed)["fsdp", "all-gather"][1] == sent(plain)["fsdp", "all-gather"][1]
    assert sent(mixed)["fsdp", "reduce-scatter"] == sent(plain)["fsdp", "reduce-scatter"]
    # A block and the buffer of the next, at least; never the whole model's.
    assert 2 * BLOCK <= plain.memory.gathered < BLOCKS * BLOCK
    assert mixed.memory.gathered < plain.memory.gathered


def test_the_whole_model_is_never_gathered_however_many_processes() -> None:
    few, many = (rank_of("fsdp=64", Blocks(count)).memory for count in (4, 12))
    assert (few.weights, many.weights) == (4 * BLOCK // 64, 12 * BLOCK // 64)
    assert many.gathered == few.gathered
    assert many.peak < 12 * BLOCK


def test_tensor_parallel_splits_the_layers_of_the_models_plan() -> None:
    estimate = rank_of("tp=2")
    assert estimate.memory.weights == BLOCKS * BLOCK - BLOCK  # two layers of four are halved
    # The output of the second layer, and the gradient of the input of the first does not exist.
    assert sent(estimate) == {("tp", "all-reduce"): (1, ROWS * FEATURES * 4)}


def test_both_axes_split_what_both_apply_to() -> None:
    estimate = rank_of("fsdp=2,tp=2")
    assert estimate.memory.weights == (BLOCKS * BLOCK - BLOCK) // 2
    assert {axis for axis, _ in sent(estimate)} == {"fsdp", "tp"}


def test_ddp_adds_its_buckets_and_reduces_all_gradients() -> None:
    model = Blocks()
    plain = estimate_memory(model, torch.randn(ROWS, FEATURES), None, "adamw")
    estimate = rank_of("ddp=4", model)
    assert estimate.memory.peak == plain.peak + BLOCKS * BLOCK
    assert sent(estimate) == {("ddp", "all-reduce"): (1, 2 * BLOCKS * BLOCK * 3 // 4)}


def test_a_replicated_axis_reduces_shards() -> None:
    traffic = sent(rank_of("ddp=2,fsdp=2"))
    assert traffic["ddp", "all-reduce"] == (BLOCKS, 2 * (BLOCKS * BLOCK // 2) // 2)
    assert traffic["fsdp", "reduce-scatter"] == (BLOCKS, BLOCKS * BLOCK // 2)


def test_one_process_is_the_plain_step() -> None:
    model = Blocks()
    plain = estimate_memory(model, torch.randn(ROWS, FEATURES), None, "adamw")
    estimate = rank_of("fsdp=1", model)
    assert (estimate.memory.to_dict(), estimate.traffic) == (plain.to_dict(), ())


def test_a_model_on_the_meta_device_takes_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(2**16, 2**16, bias=False) for _ in range(3)))  # 48 GiB
        x = torch.empty(1, 2**16)
    memory = estimate_rank(model, x, None, "sgd", sharding=Sharding(fsdp=64)).memory
    assert memory.weights == 3 * 2**34 // 64


def test_a_plan_shrinks_the_saved_tensors_of_a_rank() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)))
    x = torch.randn(4096, 64)
    options: dict[str, Any] = {"sharding": Sharding(fsdp=2)}
    plain = estimate_rank(model, x, None, "sgd", **options).memory
    packed = estimate_rank(model, x, None, "sgd", "fp8-all", "packed", **options).memory
    assert packed.activations < 0.4 * plain.activations
    assert packed.weights == plain.weights


def test_blocks_are_the_entries_of_the_outermost_containers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    assert sharded_blocks(model) == [model[0], model[2]]


def test_blocks_of_transformers_are_those_that_it_does_not_split() -> None:
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **size))
    assert sharded_blocks(model) == [*model.model.layers]


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ("fsdp=0", "fsdp=0"),
        ("fsdp", "'fsdp'"),
        ("pp=2", "'pp'"),
        ("fsdp=2,fsdp=2", "twice"),
        ("ddp=2,tp=2", "DDP"),
    ],
)
def test_a_sharding_that_cannot_be_is_one_sentence(text: str, token: str) -> None:
    with pytest.raises(TargetError, match=token):
        Sharding.parse(text)


@pytest.mark.parametrize(
    ("plan", "token"),
    [
        (None, "tp_plan"),
        ({"blocks.0": "slantwise"}, "'slantwise'"),
        ({"absent": "colwise"}, "matches"),
        ({"blocks": "colwise"}, "ModuleList"),
    ],
)
def test_a_tensor_parallel_plan_that_does_not_fit_is_one_sentence(plan: dict[str, str] | None, token: str) -> None:
    model = Blocks()
    model.tp_plan = plan or {}
    with pytest.raises(TargetError, match=token):
        rank_of("tp=2", model)


def test_a_layer_that_cannot_be_split_evenly_is_named() -> None:
    with pytest.raises(TargetError, match=r"blocks\.0 .*tp=3"):
        rank_of("tp=3")


def test_bandwidths_are_given_by_axis_or_for_all() -> None:
    assert parse_bandwidths("fsdp=50GB, tp=450GB") == {"fsdp": 50 * 10**9, "tp": 450 * 10**9}
    assert set(parse_bandwidths("1GB").values()) == {10**9}
    with pytest.raises(BitplanError, match="'pp'"):
        parse_bandwidths("pp=1GB")


@pytest.fixture
def own_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_process_of_a_group_is_refused(own_group: None) -> None:
    with pytest.raises(MemoryEstimateError, match="process group"):
        rank_of("fsdp=2")


# --- measured, by gloo on a CPU


def measured_model(name: str) -> tuple[nn.Module, Any, Callable[..., torch.Tensor] | None]:
    torch.manual_seed(0)
    if name == "blocks":
        return Blocks(), torch.randn(ROWS, FEATURES), None
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128)) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(128, 10)), (torch.randn(64, 128), torch.randint(10, (64,))), F.cross_entropy


#: (layout, model, plan).
MEASURED = (
    ("fsdp=2", "perceptron", None),
    ("fsdp=2", "perceptron", "fp8-linear"),
    ("ddp=2", "perceptron", None),
    ("tp=2", "blocks", None),
)


def _measure(rank: int) -> list[int]:
    peaks = []
    for layout, name, plan in MEASURED:
        step = (*measured_model(name), "adamw", plan, None if plan is None else "packed")
        peaks.append(measure_rank(*step, sharding=Sharding.parse(layout)).peak)
    return peaks


def test_the_peak_of_two_processes_is_predicted(tmp_path: Path) -> None:
    peaks = on_ranks(2, _measure, tmp_path)
    for (layout, name, plan), *measured in zip(MEASURED, *peaks, strict=True):
        step = (*measured_model(name), "adamw", plan, None if plan is None else "packed")
        predicted = estimate_rank(*step, sharding=Sharding.parse(layout), backend="gloo").memory.peak
        assert predicted == pytest.approx(max(measured), rel=0.1), (layout, name, plan)


def test_the_peak_of_one_process_is_predicted(own_group: None) -> None:
    model, batch, loss = measured_model("perceptron")
    measured = measure_rank(model, batch, loss, "adamw", sharding=Sharding()).peak
    dist.destroy_process_group()
    predicted = estimate_rank(model, batch, loss, "adamw", sharding=Sharding()).memory.peak
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for the fixture
    assert predicted == pytest.approx(measured, rel=0.1)
