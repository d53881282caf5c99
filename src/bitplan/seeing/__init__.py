"""Seeing a model: every operation of it, in which module it happens, and what is multiplied there.

:mod:`~bitplan.seeing.intercept` shows operations while they happen, :mod:`~bitplan.seeing.recording` lists those of one
forward pass on fake tensors, and :mod:`~bitplan.seeing.opened` writes fused ones out.
"""
