"""A plan at work on a model: what :func:`bitplan.attach` puts into it, and what that does in every step.

From a plan to :mod:`~bitplan.runtime.decisions` and :mod:`~bitplan.runtime.rounding_op`;
:mod:`~bitplan.runtime.installation` puts these into the modules, :mod:`~bitplan.runtime.dispatch` carries them out, and
:mod:`~bitplan.runtime.attachment` is the run that a user holds.
"""
