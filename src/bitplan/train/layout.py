"""How images and the weights of convolutions lie in a device's memory.

cuDNN's fast convolutions read an image pixel by pixel, all channels of each (*channels-last*). Given the channels one
after another, as torch has them by itself, it converts every tensor there and back, or takes slower ways: a third of a
small network's step. Only the layout changes: shapes, indices and checkpoints are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def layout_for(model: nn.Module, device: str, execution: str = "emulate") -> torch.memory_format:
    """The layout of a model's four-dimensional tensors on that kind of device; native execution wants channels last.

    >>> layout_for(nn.Conv2d(3, 8, 3), "cuda"), layout_for(nn.Conv2d(3, 8, 3), "cpu"), layout_for(nn.GELU(), "cuda")
    (torch.channels_last, torch.contiguous_format, torch.contiguous_format)
    """
    dimensions = {tensor.dim() for tensor in (*model.parameters(), *model.buffers())}
    # Where there are five, torch asks for a layout of its own.
    has_images = any(parameter.dim() == 4 for parameter in model.parameters()) and 5 not in dimensions
    wants_them = device == "cuda" or execution == "native"
    return torch.channels_last if wants_them and has_images else torch.contiguous_format


def lay_out(model: nn.Module, layout: torch.memory_format) -> nn.Module:
    """Let the parameters and buffers of a model lie in that layout; as they are where it is torch's own."""
    if layout == torch.contiguous_format:
        return model
    return model.to(memory_format=layout)  # type: ignore[call-overload, no-any-return]


def laid_out(tensor: Tensor, layout: torch.memory_format) -> Tensor:
    """A tensor of a batch in that layout, if it is made of images."""
    is_images = tensor.dim() == 4 and tensor.layout == torch.strided and tensor.is_floating_point()
    return tensor.contiguous(memory_format=layout) if is_images and layout != torch.contiguous_format else tensor
