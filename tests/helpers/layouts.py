"""Training of a small Llama on several processes, in every layout; the processes import this module."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import bitplan

E4 = {"format": "e4m3", "scale": "tensor"}
G8 = {"format": "e5m2", "scale": "tensor"}
NOISY = {"format": "e4m3", "scale": "tensor", "rounding": "stochastic"}


def plan_of(**rule: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": "model.layers.*", **rule}]}


DELAYED = {"version": 1, "rules": [{"match": "*", "op": "linear"}]}
DELAYED["rules"][0].update({"x": {**E4, "history": 4}, "w": {**E4, "history": 4}, "dy": {**G8, "history": 4}})  # type: ignore[index]
PLANS: dict[str, Any] = {
    "fp8-all": "fp8-all",
    "fp8-linear": "fp8-linear",
    "int8-linear": "int8-linear",
    "int8-minmax": "int8-minmax",
    "delayed": DELAYED,
    "stochastic weights": {"version": 1, "rules": [{"match": "*", "weight": NOISY}]},
    "promotion": plan_of(activation={"format": "e2m1", "promote": {"to": "bf16", "underflow": 0.01}}),
    "consumer": plan_of(weight="bf16", activation="e4m3", grad_activation=NOISY, grad_at="consumer"),
}
COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Case:
    """A training: its layout, plan and execution."""

    #: ddp, fsdp, hsdp, tp, sp (tensor parallel with sequence parallel), fsdp x tp, fsdp x sp.
    layout: str
    plan: str
    execution: str = "emulate"
    #: Whether the plan is attached before the model is sharded.
    before: bool = False
    reshard: bool = True
    dtype: str = "float32"
    policy: str = ""
    communication: Any = field(default=None, hash=False)

    @property
    def name(self) -> str:
        parts = (self.layout, self.plan, self.execution, "before" if self.before else "", self.policy)
        return ", ".join(filter(None, (*parts, "" if self.reshard else "whole after forward", self.dtype)))


@dataclass
class Outcome:
    losses: list[float]
    weights: list[Tensor]
    #: Records of statistics, by site.
    stats: dict[str, Any]
    promotions: list[str]
    #: Whether all classes are as they were, after detach().
    is_plain: bool = True
    bytes_sent: dict[str, float] = field(default_factory=dict)


def model_of(dtype: str = "float32", seed: int = 0, hidden: int = 32) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).to(getattr(torch, dtype))
    return model


def batches_of(parts: int, steps: int = 3) -> Tensor:
    """Steps x micro-batches x sentences x tokens."""
    return torch.randint(0, 64, (steps, parts, 2, 16), generator=torch.Generator().manual_seed(1))


def attach(model: nn.Module, case: Case, **options: Any) -> bitplan.Attachment:
    plan = PLANS[case.plan]
    if case.communication is not None:
        plan = {**plan, "communication": case.communication}
    execution: Any = bitplan.Native(min_macs=0) if case.execution == "native" else case.execution
    return bitplan.attach(model, plan, execution=execution, stats=case.dtype == "float32", **options)


def train(model: nn.Module, run: bitplan.Attachment, batches: Tensor, lr: float = 0.05) -> list[float]:
    """Losses of the steps; gradients of micro-batches are averaged, as those of several processes are."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for step in batches:
        optimizer.zero_grad()
        total = 0.0
        for batch in step:
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            total += loss.item() / len(step)
        if len(step) > 1:
            for parameter in model.parameters():
                parameter.grad.div_(len(step))  # type: ignore[union-attr]
        optimizer.step()
        run.step()
        losses.append(total)
    return losses


def evaluated(model: nn.Module, batch: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        loss: float = model(input_ids=batch, labels=batch).loss.item()
    model.train()
    return loss


def outcome(model: nn.Module, run: bitplan.Attachment, losses: list[float]) -> Outcome:
    stats = {site: (s.amax, s.error, s.underflow) for site, s in run.stats().items()} if run._watched else {}
    promotions = [f"{promoted.site} {promoted.step}" for promoted in run.promotions()]
    return Outcome(losses, [_whole(p).detach().clone() for p in model.parameters()], stats, promotions)


def _whole(parameter: Any) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter  # type: ignore[no-any-return]


def reference(case: Case, parts: int) -> Outcome:
    """The same training by one process, which goes through the micro-batches one after the other."""
    model = model_of(case.dtype)
    run = attach(model, case)
    losses = train(model, run, batches_of(parts))
    return outcome(model, run, [*losses, evaluated(model, batches_of(parts)[0, 0])])


# --- layouts


def shard(model: nn.Module, case: Case, world: int) -> nn.Module:
    options: dict[str, Any] = {}
    if "mixed" in case.policy:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if "offload" in case.policy:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    first, _, second = case.layout.partition(" x ")
    if first == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh: Any = dist.init_device_mesh("cpu", (world,))
    if first in ("tp", "sp"):
        return _tensor_parallel(model, mesh, first == "sp")
    if first == "hsdp":
        mesh = dist.init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards"))
    if "alone" in case.policy:  # every process by itself, for a reference
        mesh = dist.init_device_mesh("cpu", (world, 1), mesh_dim_names=("others", "own"))["own"]
    if second:
        both = dist.init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        _tensor_parallel(model, both["tensor"], second == "sp")
        mesh = both["data"]
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, reshard_after_forward=case.reshard, **options)
    fully_shard(model, mesh=mesh, reshard_after_forward=case.reshard, **options)
    return model


def _tensor_parallel(model: nn.Module, mesh: Any, splits_sequence: bool) -> nn.Module:
    styles: dict[str, Any] = {}
    in_sequence: dict[str, Any] = {"output_layouts": Shard(1), "use_local_output": False} if splits_sequence else {}
    layer = "model.layers.0."
    styles.update({layer + name: ColwiseParallel() for name in COLUMNS})
    styles.update({layer + name: RowwiseParallel(**in_sequence) for name in ROWS})
    if splits_sequence:
        hidden: Any = {"hidden_states": Shard(1)}
        styles |= {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), **in_sequence),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
            layer + "input_layernorm": SequenceParallel(),
            layer + "post_attention_layernorm": SequenceParallel(),
            layer + "self_attn": PrepareModuleInput(
                input_kwarg_layouts=hidden, desired_input_kwarg_layouts={"hidden_states": Replicate()}
            ),
            layer + "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    return parallelize_module(model, mesh, styles)


def run_case(case: Case, rank: int, world: int) -> Outcome:
    tensor_ranks = 2 if " x " in case.layout else world if case.layout in ("tp", "sp") else 1
    parts = world // tensor_ranks
    batches = batches_of(parts)
    if tensor_ranks < world and "alone" not in case.policy:
        index = rank // tensor_ranks
        batches = batches[:, index : index + 1]
    model = model_of(case.dtype)
    classes = [type(module) for module in model.modules()]
    run = attach(model, case) if case.before else None
    sharded = shard(model, case, world)
    if run is None:
        classes = [type(module) for module in model.modules()]
        run = attach(sharded, case)
    losses = torch.tensor(train(sharded, run, batches), dtype=torch.float64)
    dist.all_reduce(losses)
    ending = evaluated(sharded, batches_of(parts)[0, 0])
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]
    result = outcome(model, run, [*(losses / world).tolist(), ending])
    run.detach()
    plain = [type(m).__name__.removeprefix("FSDP") for m in model.modules()]
    result.is_plain = plain == [kind.__name__.removeprefix("FSDP") for kind in classes]
    sharded(input_ids=batches[0, 0], labels=batches[0, 0]).loss.backward()
    return result


# --- processes that run one function on each of several cases


def run_on_ranks(world: int, function: Callable[..., Any], cases: list[Any], folder: Path) -> list[Any]:
    """What `function(case, rank, world)` returns on rank 0 for each case; the text of an error in its place."""
    own = folder / f"{world}-{function.__name__}"
    own.mkdir()
    return on_ranks(world, _run_all, own, world, function, cases)[0]  # type: ignore[no-any-return]


def _run_all(rank: int, world: int, function: Callable[..., Any], cases: list[Any]) -> list[Any]:
    results: list[Any] = []
    for case in cases:
        try:
            results.append(function(case, rank, world))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            results.append(text if isinstance(error, bitplan.BitplanError) else text + traceback.format_exc())
        dist.barrier()
    return results


# --- checkpoints


CHECKPOINTED = Case("fsdp", "delayed")


def save_in_the_middle(folder: str, rank: int, world: int) -> list[float]:
    """Train, save, and train on; the losses after the checkpoint."""
    model, run, batches = _resumable(rank, world)
    train(model, run, batches[:2])
    dcp.save({"model": model.state_dict(), "bitplan": run}, checkpoint_id=folder)
    return _losses(model, run, batches[2:])


def go_on(folder: str, rank: int, world: int) -> list[float]:
    """Load a checkpoint of any number of processes, and train on."""
    model, run, batches = _resumable(rank, world)
    state = {"model": model.state_dict(), "bitplan": run}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])  # type: ignore[arg-type]
    return _losses(model, run, batches[2:])


def go_on_alone(folder: str, rank: int, world: int) -> tuple[list[float], str]:
    """The losses, and the error of an attachment that has no room for the records."""
    losses = go_on(folder, rank, world)
    model = shard(model_of(), CHECKPOINTED, world)
    try:
        dcp.load({"bitplan": attach(model, CHECKPOINTED)}, checkpoint_id=folder)
    except Exception as error:
        return losses, str(error)
    return losses, ""


def _losses(model: nn.Module, run: bitplan.Attachment, batches: Tensor) -> list[float]:
    losses = torch.tensor(train(model, run, batches), dtype=torch.float64)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()  # type: ignore[no-any-return]


def _resumable(rank: int, world: int) -> tuple[nn.Module, bitplan.Attachment, Tensor]:
    whole = batches_of(4, steps=4)
    own = whole[:, rank * 4 // world : (rank + 1) * 4 // world]
    model = shard(model_of(), CHECKPOINTED, world)
    return model, attach(model, CHECKPOINTED, example={"input_ids": whole[0, 0], "labels": whole[0, 0]}), own


# --- bytes on the wire


def communicate(case: Case, rank: int, world: int) -> Outcome:
    """Bytes that collectives are given, per parameter and call of FSDP2, in the second step of a wider model."""
    model = model_of(hidden=512)
    run = attach(model, case) if case.before else None
    sharded = shard(model, case, world)
    run = attach(sharded, case) if run is None else run
    batches = batches_of(world)[:, rank : rank + 1]
    losses = train(sharded, run, batches[:1])
    with counted_bytes() as sent:
        losses += train(sharded, run, batches[1:2])
    count = sum(p.numel() for p in model.parameters())
    whole = {name: total * (world if "gather" in name else 1) / count for name, total in sent.items()}
    run.detach()
    return Outcome(losses, [], {}, [], bytes_sent=whole)


#: Collective -> the position of its input.
_INPUTS = {
    "all_gather_into_tensor": 1, "all_gather_single": 1, "reduce_scatter_tensor": 1, "reduce_scatter_single": 1,
    "all_to_all_single": 1, "all_reduce": 0,
}  # fmt: skip


@contextmanager
def counted_bytes() -> Iterator[dict[str, int]]:
    sent: dict[str, int] = {}
    originals = {name: getattr(dist, name) for name in _INPUTS if hasattr(dist, name)}

    def counting(name: str) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            position = _INPUTS[name]
            tensor = args[position] if len(args) > position else kwargs.get("input", kwargs.get("input_tensor"))
            sent[name] = sent.get(name, 0) + tensor.numel() * tensor.element_size()
            return originals[name](*args, **kwargs)

        return collective

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
