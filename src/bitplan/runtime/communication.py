"""Weights and gradients on the wire in the formats of a plan's ``communication:``.

FSDP2 takes objects that gather and reduce in place of its own collectives, and DistributedDataParallel a function for
its buckets. What is sent are codes of one byte, with scales behind them in float32. Gradients are exchanged by an
all-to-all and added up in float32, in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bitplan.errors import PlanError
from bitplan.numerics.dtypes import TORCH_FLOAT8
from bitplan.numerics.noise import bits_of_key, key_of
from bitplan.numerics.quantizer import Encoded, Quantizer, make_quantizer
from bitplan.numerics.wire_format import reduction_site, text_hash
from bitplan.plans.communication import Communication, Gather, Reduce
from bitplan.runtime.sharding import param_groups

#: Seed and step of a run.
Position = Callable[[], tuple[int, int]]


class _Codes:
    """Encodes tensors as bytes: codes, then scales."""

    def __init__(self, quantizer: Quantizer) -> None:
        self.quantizer = quantizer
        self.dtype = TORCH_FLOAT8[quantizer.format]  # type: ignore[index]

    def encode(self, x: Tensor, bits: Tensor | None = None, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Codes in the shape of `x`, and its scales; `amax` replaces that of `x` for a single scale."""
        encoded = self.quantizer.encode(x.float(), bits, span=amax)
        return encoded.elements.to(self.dtype).view(torch.uint8), encoded.scales[0]

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        elements = codes.view(self.dtype).float()
        return self.quantizer.decode(Encoded(elements, (scales,)), elements)


class QuantizedAllGather:
    """Gathers the weight matrices of one group of FSDP2's parameters in few bits, and all others as they are."""

    def __init__(self, group: Any, spec: Gather, position: Position) -> None:
        self.group, self.spec, self.position = group, spec, position
        axis = 0 if spec.scale == "channel" else None
        self.codes = _Codes(make_quantizer(spec.format, scale=spec.scale, axis=axis))
        #: For one scale per matrix: the amax of the whole matrices at the previous step, and at this one.
        self._amax: dict[int, Tensor] | None = None
        self._next_amax: dict[int, Tensor] = {}
        self._step = -1

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        shards = self._shards(input_tensor)
        amax = self._amax_of_step(shards, group) if self.spec.scale == "tensor" else [None] * len(shards)
        parts: list[Tensor] = []
        for shard, largest in zip(shards, amax, strict=True):
            if shard.dim() == 1:
                parts.append(shard.view(torch.uint8))
            else:
                codes, scales = self.codes.encode(shard, amax=largest)
                tail = scales if largest is None else _amax_of(shard)
                parts.append(torch.cat((codes.flatten(), _bytes_of(tail))))
        payload = torch.cat(parts)
        world = group.size()
        gathered = torch.empty(world * payload.numel(), dtype=torch.uint8, device=payload.device)
        _all_gather(gathered, payload, group)
        received = torch.split(gathered.view(world, -1), [len(part) for part in parts], 1)
        outputs = torch.split(output_tensor.view(world, -1), [shard.numel() for shard in shards], 1)
        for number, (shard, largest) in enumerate(zip(shards, amax, strict=True)):
            for sent, output in zip(received[number], outputs[number], strict=True):
                output.copy_(self._decode(sent, shard, largest))
            if largest is not None and shard.dim() == 2:
                tails = received[number][:, shard.numel() :].contiguous().view(torch.float32)
                self._next_amax[number] = tails.amax()

    def _decode(self, sent: Tensor, shard: Tensor, amax: Tensor | None) -> Tensor:
        """The values that another process has sent of the parameter of which `shard` is ours."""
        if shard.dim() == 1:
            return sent.clone().view(shard.dtype)
        codes, tail = sent[: shard.numel()].view(shard.shape), sent[shard.numel() :].clone().view(torch.float32)
        if amax is not None:  # the same computation as in every other process
            tail = self.codes.encode(torch.zeros(1, 1, device=sent.device), amax=amax)[1]
        return self.codes.decode(codes, tail.view(-1, 1)).flatten()

    def _amax_of_step(self, shards: list[Tensor], group: dist.ProcessGroup) -> list[Tensor | None]:
        """The amax of whole matrices at the previous step: weights are gathered alike in all passes of a step."""
        step = self.position()[1]
        if self._amax is None:  # the first time there is no previous step
            largest = torch.cat([_amax_of(shard) for shard in shards])
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            self._amax = dict(enumerate(largest))
        elif step != self._step:
            self._amax = {**self._amax, **self._next_amax}
        self._step = step
        return [self._amax[number] for number in range(len(shards))]

    def _shards(self, flat: Tensor) -> list[Tensor]:
        """What this process holds of each parameter, padded: matrices as (rows, columns), others flat."""
        shards = []
        sizes = [parameter._sharded_param_data.numel() for parameter in self.group.fsdp_params]
        if sum(sizes) != flat.numel() or not flat.is_floating_point():
            raise PlanError(
                "communication.gather cannot gather tensor subclasses, nor after reshard_after_forward=N with another "
                "number of processes: give reshard_after_forward=True or False, or drop gather."
            )
        for part, parameter in zip(torch.split(flat, sizes), self.group.fsdp_params, strict=True):
            shape = parameter.sharded_param.shape
            is_matrix = len(shape) > 1 and parameter.fsdp_placement.dim == 0
            shards.append(part.view(-1, shape[1:].numel()) if is_matrix else part)
        return shards


class QuantizedReduce:
    """Adds up gradients of several processes that are sent in few bits."""

    def __init__(self, spec: Reduce, site: str, position: Position) -> None:
        self.spec, self.site, self.position = spec, site, position
        self.codes = _Codes(make_quantizer(spec.format, spec.rounding, "block", axis=-1, block=spec.block))
        #: What rounding has lost, by call within a step.
        self._residuals: dict[int, Tensor] = {}
        self._step, self._calls = -1, 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise PlanError("communication.reduce adds or averages gradients: drop set_gradient_divide_factor().")
        total = self.reduce_scatter(input_tensor, group)
        output_tensor.copy_(total / group.size() if op == dist.ReduceOp.AVG else total)

    def reduce_scatter(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The sum, over all processes, of this process's part of `values`; in float32."""
        seed, step = self.position()
        self._calls = self._calls + 1 if step == self._step else 0
        self._step = step
        world, rank = group.size(), group.rank()
        rows = values.view(world, -1).float()
        if self.spec.error_feedback and self._calls in self._residuals:
            rows = rows + self._residuals[self._calls]
        codes, scales = self._encode(rows, seed, step, rank)
        if self.spec.error_feedback:
            self._residuals[self._calls] = rows - self._decode(codes, scales, rows.shape[1])
        sent = torch.cat((codes.view(world, -1), _bytes_of(scales).view(world, -1)), 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        codes = received[:, : codes[0].numel()].reshape(codes.shape)
        scales = received[:, codes[0].numel() :].contiguous().view(torch.float32).view(scales.shape)
        return self._decode(codes, scales, rows.shape[1]).sum(0)

    def all_reduce(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The mean over all processes, which is sent in few bits, too."""
        world = group.size()
        padded = torch.nn.functional.pad(values, (0, -values.numel() % world))
        mean = self.reduce_scatter(padded, group) / world
        seed, step = self.position()
        codes, scales = self._encode(mean[None], seed, step, world + group.rank())
        sent = torch.cat((codes.flatten(), _bytes_of(scales)))
        received = torch.empty(world * sent.numel(), dtype=torch.uint8, device=sent.device)
        _all_gather(received, sent, group)
        received = received.view(world, -1)
        codes = received[:, : codes.numel()].reshape(world, *codes.shape[1:])
        scales = received[:, codes[0].numel() :].contiguous().view(torch.float32).view(world, *scales.shape[1:])
        return self._decode(codes, scales, mean.numel()).flatten()[: values.numel()].to(values.dtype)

    def _encode(self, rows: Tensor, seed: int, step: int, sender: int) -> tuple[Tensor, Tensor]:
        bits = None
        if self.spec.rounding == "stochastic":
            bits = bits_of_key(rows, *key_of(seed, step, text_hash(reduction_site(self.site, sender, self._calls))))
        return self.codes.encode(rows, bits)

    def _decode(self, codes: Tensor, scales: Tensor, length: int) -> Tensor:
        values = codes.view(self.codes.dtype).float() * scales
        return values.flatten(1)[:, :length]


def _all_gather(received: Tensor, sent: Tensor, group: dist.ProcessGroup) -> None:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renamed it
    gather(received, sent, group=group)


def _amax_of(x: Tensor) -> Tensor:
    return x.detach().abs().amax().float().reshape(1) if x.numel() else x.new_zeros(1, dtype=torch.float32)


def _bytes_of(scales: Tensor) -> Tensor:
    return scales.float().contiguous().flatten().view(torch.uint8)


class PlannedCommunication:
    """The collectives of a sharded or replicated model, exchanged for those of a plan."""

    def __init__(self, spec: Communication, position: Position) -> None:
        self.spec, self.position = spec, position
        self.is_installed = False
        self._before: list[tuple[Any, Any, Any]] = []
        self._is_detached = False

    def install(self, model: nn.Module) -> None:
        """Exchange the collectives of all modules that ``fully_shard`` has sharded, or of DistributedDataParallel."""
        if isinstance(model, nn.parallel.DistributedDataParallel):
            self._install_in_ddp(model)
            return
        if not dist.is_available() or not dist.is_initialized():
            return
        done = {id(group) for group, _, _ in self._before}
        for path, module in model.named_modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                for number, group in enumerate(param_groups(module)):
                    if id(group) not in done:
                        self._exchange(group, f"{path}[{number}]")

    def _exchange(self, group: Any, site: str) -> None:
        self._before.append((group, group._all_gather_comm, group._reduce_scatter_comm))
        if self.spec.gather is not None:
            group._all_gather_comm = QuantizedAllGather(group, self.spec.gather, self.position)
        if self.spec.reduce is not None:
            group._reduce_scatter_comm = QuantizedReduce(self.spec.reduce, site, self.position)
        self.is_installed = True

    def _install_in_ddp(self, model: nn.parallel.DistributedDataParallel) -> None:
        if self.spec.gather is not None:
            raise PlanError(
                "communication.gather is about weights that FSDP2 gathers, and DistributedDataParallel gathers none: "
                "drop gather, or use fully_shard."
            )
        group, reducers = model.process_group, {}
        spec = self.spec.reduce

        def reduce_bucket(bucket: Any) -> torch.futures.Future[Tensor]:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            if spec is None or self._is_detached:
                values = bucket.buffer()
                dist.all_reduce(values, group=group)
                future.set_result(values.div_(group.size()))
                return future
            number = bucket.index()
            if number not in reducers:
                reducers[number] = QuantizedReduce(spec, f"bucket {number}", self.position)
            future.set_result(reducers[number].all_reduce(bucket.buffer(), group))
            return future

        # torch compares annotations with types, and ours are texts.
        model.register_comm_hook(None, lambda state, bucket: reduce_bucket(bucket))
        self.is_installed = True

    def require_installed(self) -> None:
        """Raise where several processes train the model and nothing of theirs was exchanged."""
        if not self.is_installed and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise PlanError(
                "the plan's communication has no effect, because no collective of the model is known: attach the plan "
                "to the model that fully_shard has sharded, or to the DistributedDataParallel wrapper."
            )

    def remove(self) -> None:
        """Give FSDP2 its own collectives back; DistributedDataParallel reduces in the gradients' dtype again."""
        self._is_detached = True
        for group, gather, reduce in self._before:
            group._all_gather_comm, group._reduce_scatter_comm = gather, reduce
        self._before = []
