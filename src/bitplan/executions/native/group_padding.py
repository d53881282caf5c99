"""Groups of rows, padded for products that sum over the rows of each group.

FP8 kernels read both operands of such a product with the rows innermost in memory, and every group must begin at a
multiple of 16 bytes there, which groups made by a router do not. So the columns of the transposed codes are padded with
zeros, which add nothing to a sum. The sizes of the groups are on the device and are not read: the padded matrix has
room for the most padding that there can be.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

#: Each padded group has a multiple of so many rows, and at least as many: kernels accept no empty sums.
MULTIPLE = 16


class GroupPadding(NamedTuple):
    """Where the rows of a matrix are in its padded transpose."""

    #: For each padded column the row that it holds, or -1 for zeros. Every row occurs once; rows that are in no group
    #: follow the last.
    sources: Tensor
    #: The padded column at which each group ends.
    ends: Tensor


def pad_groups(ends: Tensor, rows: int) -> GroupPadding:
    """The padding of groups that end at these rows, of a matrix with `rows` rows.

    >>> padding = pad_groups(torch.tensor([2, 2, 19]), 20)
    >>> padding.ends.tolist(), padding.sources.tolist()[:3], padding.sources[32:50].tolist()
    ([16, 32, 64], [0, 1, -1], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, -1])
    """
    ends = ends.to(torch.int32)
    starts = F.pad(ends, (1, 0))  # of the groups, and of the rest
    sizes = starts.diff()
    padded_sizes = ((sizes + MULTIPLE - 1) // MULTIPLE).clamp_min(1) * MULTIPLE
    padded_ends = padded_sizes.cumsum(0, dtype=torch.int32)
    shifts = F.pad(padded_ends, (1, 0)) - starts
    columns = torch.arange(padded_count(rows, len(ends)), dtype=torch.int32, device=ends.device)
    group = torch.bucketize(columns, padded_ends, right=True)
    source = columns - shifts[group]
    stops = F.pad(ends, (0, 1), value=rows)
    return GroupPadding(torch.where(source < stops[group], source, -1), padded_ends)


def padded_count(rows: int, groups: int) -> int:
    """The columns of a padded transpose: enough for any sizes of the groups.

    >>> padded_count(20, 3)
    80
    """
    return -(-rows // MULTIPLE) * MULTIPLE + MULTIPLE * groups
