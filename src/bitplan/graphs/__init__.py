"""Compiled graphs: what they have to check of a plan, what they keep for the backward pass, and what is fused in them.

:mod:`~bitplan.graphs.guarding` and :mod:`~bitplan.graphs.allowances` are about torch.compile itself,
:mod:`~bitplan.graphs.packed_backend` and :mod:`~bitplan.graphs.partitioning` about packed execution, and the rest about
kernels of ours that a graph calls.
"""
