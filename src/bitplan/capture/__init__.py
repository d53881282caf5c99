"""Seeing a model: every operation of it, in which module it happens, and what is multiplied there.

:mod:`~bitplan.capture.scopes` shows operations while they happen, :mod:`~bitplan.capture.recording` lists those of one
forward pass on fake tensors, and :mod:`~bitplan.capture.decompositions` writes fused ones out.
"""
