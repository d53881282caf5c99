"""AdamW for bfloat16 weights that loses no small update, with moments in E4M3.

bfloat16 has 8 significant bits: an update of less than 1/512 of a weight is rounded away, and most updates of AdamW are
smaller. Two ways out cost no float32 copy of the model:

* ``weights="float32"``: the 16 bits that a float32 has more are in the optimizer's state. Together with the bfloat16
  weight they are that float32 exactly, so training is that of float32 weights, and the model computes with their
  nearest bfloat16 values. 2 bytes per weight more.
* ``weights="stochastic"``: the updated weight is rounded up or down by chance, so that its mean is exact. No state.

Moments are one byte per weight with a float32 scale for 256 of them. The second moment is stored as its square root,
which has half of its exponents: stored itself, small values would become zero in a block with a large one, and their
update a division by zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer

from bitplan.errors import PlanError

WeightPrecision = Literal["float32", "stochastic"]

#: Values that share a scale; fewer where a parameter does not have a multiple of them.
BLOCK = 256
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
#: The smallest positive number of E4M3.
_SMALLEST = 2.0**-9
#: The bits of a float32 NaN to which others may be added: those of a GPU, 0x7FFFFFFF, would become -0.
_NAN = 0x7FC00000
#: Values that are updated at once. Without compilation each takes about 50 bytes for a moment.
CHUNK = 1 << 24


class BF16AdamW(Optimizer):
    """AdamW of bfloat16 parameters, by :class:`torch.optim.AdamW`'s formula, computed in float32.

    >>> weight = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    >>> optimizer = BF16AdamW([weight], lr=1e-3)
    >>> weight.square().sum().backward()
    >>> optimizer.step()
    >>> {name: value.dtype for name, value in optimizer.state[weight].items() if name != "step"}
    {'exp_avg': torch.float8_e4m3fn, 'exp_avg_scale': torch.float32, \
'exp_avg_sq_root': torch.float8_e4m3fn, 'exp_avg_sq_root_scale': torch.float32, 'low_bits': torch.int16}
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        weights: WeightPrecision = "float32",
        compiled: bool | None = None,
    ) -> None:
        """
        :param weights: how updates that bfloat16 cannot hold are kept: see the module.
        :param compiled: compile the step, once for all shapes; by default on a GPU.
        """
        if weights not in get_args(WeightPrecision):
            raise PlanError(f"weights is 'float32' or 'stochastic', not {weights!r}.")
        self.weights, self.compiled = weights, compiled
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype != torch.bfloat16 or not parameter.is_contiguous():
                raise PlanError(
                    f"BF16AdamW updates contiguous bfloat16 parameters, and one has {parameter.dtype} and strides "
                    f"{tuple(parameter.stride())}: use torch.optim.AdamW for it."
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where a state was taken."""
        super().load_state_dict(state_dict)
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, state in state_dict["state"].items():  # torch has cast codes to the dtype of the parameter
            parameter = parameters[number]
            self.state[parameter] = {
                name: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                for name, value in state.items()
            }

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        if parameter.numel() == 0:
            return
        block = math.gcd(parameter.numel(), BLOCK)
        state = self.state[parameter]
        if not state:
            self._make_state(parameter, block)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        corrections = 1 - beta1 ** state["step"], math.sqrt(1 - beta2 ** state["step"])
        # Numbers that change are tensors, and stay on the CPU: compiled code takes them as arguments of its kernels.
        numbers = [torch.tensor(float(number)) for number in (group["lr"], *corrections)]
        compiled = parameter.is_cuda if self.compiled is None else self.compiled
        update = _update_for(block, beta1, beta2, group["eps"], group["weight_decay"], self.weights, compiled)
        assert parameter.grad is not None
        values = [parameter, parameter.grad.contiguous(), state["exp_avg"], state["exp_avg_sq_root"]]
        scales = [state["exp_avg_scale"], state["exp_avg_sq_root_scale"]]
        low_bits = state.get("low_bits")
        for start in range(0, parameter.numel(), CHUNK):
            end = start + CHUNK
            parts = [_part(value, start, end) for value in values]
            parts += [_part(scale, start // block, end // block) for scale in scales]
            update(*parts, None if low_bits is None else _part(low_bits, start, end), *numbers)
        torch.autograd.graph.increment_version(parameter)

    def _make_state(self, parameter: Tensor, block: int) -> None:
        state = self.state[parameter]
        state["step"] = 0
        for name in ("exp_avg", "exp_avg_sq_root"):
            state[name] = torch.zeros_like(parameter, dtype=torch.float8_e4m3fn)
            state[f"{name}_scale"] = parameter.new_zeros(parameter.numel() // block, dtype=torch.float32)
        if self.weights == "float32":
            state["low_bits"] = torch.zeros_like(parameter, dtype=torch.int16)


def float32_weights(optimizer: BF16AdamW, parameter: Tensor) -> Tensor:
    """The float32 values of a parameter that is updated with ``weights="float32"``."""
    low_bits = optimizer.state[parameter].get("low_bits")
    values = parameter.detach()
    return values.float() if low_bits is None else _joined(values, low_bits)


def _part(tensor: Tensor, start: int, end: int) -> Tensor:
    """Some values of a tensor; as ``data``, not as a view: compiled code has guards for the shape of a view's base."""
    return tensor.view(-1)[start:end].data


def _joined(weight: Tensor, low_bits: Tensor) -> Tensor:
    """The float32 of which a bfloat16 has the upper bits; the lower ones are a signed difference."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + low_bits.to(torch.int32)).view(torch.float32)


def _upper_bits(bits: Tensor) -> Tensor:
    """The bfloat16 in the upper 16 bits of float32 numbers, and these bits as a number."""
    return (bits >> 16).to(torch.int16)


def _encoded(values: Tensor, least: float) -> tuple[Tensor, Tensor]:
    """Blocks of numbers in E4M3, and their scales; no number of a block that is not zero has less than `least`."""
    scale = values.abs().amax(1, keepdim=True) / _LARGEST
    codes = values / torch.where(scale > 0, scale, 1.0)
    if least:
        codes = torch.where(scale > 0, codes.clamp(min=least), 0.0)
    return codes.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scale


@cache
def _update_for(
    block: int, beta1: float, beta2: float, eps: float, decay: float, weights: str, compiled: bool
) -> Callable[..., None]:
    """The update of flat tensors, in place, with these constants."""

    def update(
        weight: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq_root: Tensor,
        exp_avg_scale: Tensor,
        exp_avg_sq_root_scale: Tensor,
        low_bits: Tensor | None,
        lr: Tensor,
        correction: Tensor,
        root_correction: Tensor,
    ) -> None:
        g = grad.float().view(-1, block)
        m = exp_avg.float().view(-1, block) * exp_avg_scale.view(-1, 1)
        root = exp_avg_sq_root.float().view(-1, block) * exp_avg_sq_root_scale.view(-1, 1)
        m = m * beta1 + g * (1 - beta1)
        root = torch.sqrt(root * root * beta2 + g * g * (1 - beta2))
        value = weight.float() if low_bits is None else _joined(weight, low_bits)
        value = value.view(-1, block)
        value = value * (1 - lr * decay) - lr * (m / correction) / (root / root_correction + eps)
        bits = torch.where(value.isnan(), _NAN, value.view(torch.int32)).view(-1)
        if low_bits is None:
            bits = bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
            weight.copy_(_upper_bits(bits).view(torch.bfloat16))
        else:
            upper = _upper_bits(bits + (1 << 15))
            low_bits.copy_((bits - (upper.to(torch.int32) << 16)).to(torch.int16))
            weight.copy_(upper.view(torch.bfloat16))
        codes, scale = _encoded(m, 0.0)
        exp_avg.copy_(codes.view(-1))
        exp_avg_scale.copy_(scale.view(-1))
        codes, scale = _encoded(root, _SMALLEST)
        exp_avg_sq_root.copy_(codes.view(-1))
        exp_avg_sq_root_scale.copy_(scale.view(-1))

    return torch.compile(update, fullgraph=True, dynamic=True) if compiled else update
