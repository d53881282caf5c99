"""Plans as data: reading, checking, matching and printing them. No model is touched here.

:class:`Plan` is the way in: ``Plan.load("plan.yaml")`` or ``Plan.preset("fp8-linear")``, then
``plan.decide("layer1.0.conv1", "conv2d")``.
"""

from bitplan.numerics.wire_format import ROLES, SLOTS
from bitplan.plans.document import Choice, Decision, Plan
from bitplan.plans.match import (
    KEYS,
    OPERANDS,
    PASSES,
    PLACES,
    GradAt,
    Matcher,
    closest,
    compile_match,
    unmatched_message,
)
from bitplan.plans.presets import preset_names, preset_text
from bitplan.plans.quantizer_use import Choosing, Switch, Use
from bitplan.plans.schema import plan_schema
from bitplan.plans.spec import KEEP, Evaluation, QuantizerSpec, Rule

__all__ = [
    "KEEP",
    "KEYS",
    "OPERANDS",
    "PASSES",
    "PLACES",
    "ROLES",
    "SLOTS",
    "Choice",
    "Choosing",
    "Decision",
    "Evaluation",
    "GradAt",
    "Matcher",
    "Plan",
    "QuantizerSpec",
    "Rule",
    "Switch",
    "Use",
    "closest",
    "compile_match",
    "plan_schema",
    "preset_names",
    "preset_text",
    "unmatched_message",
]
