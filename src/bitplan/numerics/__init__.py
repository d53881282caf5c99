"""Numbers: formats, rounding onto them, scales, and tensors packed into their codes.

The way through the room: :mod:`~bitplan.numerics.formats` and their :mod:`~bitplan.numerics.formats`;
:mod:`~bitplan.numerics.reference`, the definition of every rounding, and :mod:`~bitplan.numerics.rounding`, its fast
twin; :mod:`~bitplan.numerics.scaling`; :mod:`~bitplan.numerics.quantizer`, which is all three together; and
:mod:`~bitplan.numerics.packing`. Nothing here knows of a model or a plan.
"""
