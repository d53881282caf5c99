"""Compiled graphs: what they have to check of a plan, what they keep for the backward pass, and what is fused in them.

:mod:`~bitplan.compiler.tracing` and :mod:`~bitplan.compiler.tracing` are about torch.compile itself,
:mod:`~bitplan.compiler.packed_backend` and :mod:`~bitplan.compiler.partitioning` about packed execution, and the rest
about
kernels of ours that a graph calls.
"""
