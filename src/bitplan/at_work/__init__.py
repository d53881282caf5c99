"""A plan at work on a model: what :func:`bitplan.attach` puts into it, and what that does in every step.

From a plan to :mod:`~bitplan.at_work.decisions` and :mod:`~bitplan.at_work.actions`;
:mod:`~bitplan.at_work.installation` puts these into the modules, :mod:`~bitplan.at_work.rounder` carries them out, and
:mod:`~bitplan.at_work.attachment` is the run that a user holds.
"""
