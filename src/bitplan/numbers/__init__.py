"""Numbers: formats, rounding onto them, scales, and tensors packed into their codes.

The way through the room: :mod:`~bitplan.numbers.formats` and their :mod:`~bitplan.numbers.names`;
:mod:`~bitplan.numbers.reference`, the definition of every rounding, and :mod:`~bitplan.numbers.rounding`, its fast
twin; :mod:`~bitplan.numbers.scaling`; :mod:`~bitplan.numbers.quantizer`, which is all three together; and
:mod:`~bitplan.numbers.packing`. Nothing here knows of a model or a plan.
"""
