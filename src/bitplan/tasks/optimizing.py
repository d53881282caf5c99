"""Which of torch's implementations of an optimizer the built-in tasks take."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def fused_for(parameters: Iterable[Tensor]) -> bool | None:
    """``fused=`` of an optimizer of these parameters: on a GPU all of them in one launch; elsewhere torch decides.

    >>> import torch
    >>> fused_for([torch.zeros(2)]) is None
    True
    """
    known = list(parameters)
    is_on_gpu = all(each.is_cuda and each.is_floating_point() for each in known)
    return True if known and is_on_gpu else None
