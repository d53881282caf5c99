"""Plans as data: reading, checking, matching and printing them. No model is touched here.

:class:`Plan` is the way in: ``Plan.load("plan.yaml")`` or ``Plan.preset("fp8-linear")``, then
``plan.decide("layer1.0.conv1", "conv2d")``.
"""

from bitplan.plan.document import Choice, Decision, Plan
from bitplan.plan.match import Matcher, closest, compile_match, unmatched_message
from bitplan.plan.places import KEYS, OPERANDS, PASSES, PLACES, ROLES, SLOTS, GradAt
from bitplan.plan.presets import preset_names, preset_text
from bitplan.plan.schema import plan_schema
from bitplan.plan.spec import KEEP, Evaluation, QuantizerSpec, Rule
from bitplan.plan.uses import Choosing, Switch, Use

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
