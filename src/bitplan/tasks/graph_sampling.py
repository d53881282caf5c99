"""Samples of a graph: some nodes, some of their neighbours, some of theirs, in shapes that never change."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from bitplan.models.neighbours import both_ways


class Sampler:
    """Draws neighbours of nodes, so many in each layer.

    Every neighbour is as likely at each draw, so that the mean of the drawn is on average that of all; a node may be
    drawn more than once. In this way every sample has the same shapes, and one compiled graph serves them all.
    """

    def __init__(self, edges: Tensor, nodes: int, fanouts: Sequence[int]) -> None:
        targets, self.sources = both_ways(edges, nodes)
        self.degrees = torch.bincount(targets, minlength=nodes)
        self.firsts = self.degrees.cumsum(0) - self.degrees
        self.fanouts = tuple(fanouts)

    def sample(self, nodes: Tensor, draws: torch.Generator) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The nodes whose features are wanted, and the tensors of each layer, first to last, as GraphSAGE takes them.

        The nodes asked for come first, then the drawn neighbours of each, then those of all these.
        """
        layers: list[tuple[Tensor, Tensor, Tensor]] = []
        for fanout in reversed(self.fanouts):
            count = len(nodes)
            degrees = self.degrees[nodes]
            chance = torch.rand(count, fanout, generator=draws, dtype=torch.float64)
            places = self.firsts[nodes, None] + (chance * degrees[:, None]).long()
            # A node without neighbours draws anyone, and the scale says that it counts for nothing.
            drawn = self.sources[places.clamp(max=len(self.sources) - 1)]
            scale = (degrees > 0).float().unsqueeze(1) / fanout
            layers.append((count + torch.arange(count * fanout), torch.arange(count).repeat_interleave(fanout), scale))
            nodes = torch.cat([nodes, drawn.flatten()])
        return nodes, tuple(part for layer in reversed(layers) for part in layer)

    @staticmethod
    def sizes(batch: int, fanouts: Sequence[int]) -> list[int]:
        """Nodes before the first layer, before the second, ..., and behind the last.

        >>> Sampler.sizes(2, (10, 5))
        [132, 12, 2]
        """
        return [*reversed([*accumulate(reversed(fanouts), lambda count, fanout: count * (1 + fanout), initial=batch)])]
