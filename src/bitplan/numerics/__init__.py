"""Formats, rounding, scales, and tensors packed into codes; independent of models and plans.

:mod:`~bitplan.numerics.formats` defines formats and their names, :mod:`~bitplan.numerics.reference` every rounding, and
:mod:`~bitplan.numerics.rounding` its fast implementation. :mod:`~bitplan.numerics.scaling` computes scales,
:mod:`~bitplan.numerics.quantizer` combines all three, and :mod:`~bitplan.numerics.packing` stores codes.
"""
