"""Planners of the user's own: ``bp.auto(planners=...)``, ``bitplan auto --planner``, ``bitplan compare --suite``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from bitplan.errors import PlanError
from bitplan.extensions import PLANNERS, Registry
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan

#: Called with model, batch and loss; returns a plan, or several by their labels. A plan may also be a mapping, a
#: preset's name or a file.
Planner = Callable[[nn.Module, Any, Callable[..., Tensor] | None], Any]

registry: Registry[Planner] = Registry(PLANNERS, "planner")


def register_planner(name: str, planner: Planner) -> Planner:
    """Make `planner` known by a name.

    :param planner: a function of model, batch and loss (None where there is none) that returns a plan, or a mapping
        from labels to plans. It must not change the model, which may be on the meta device.
    """
    return registry.register(name, planner)


def planned_by(
    planner: str | Planner, model: nn.Module, batch: Any, loss: Callable[..., Tensor] | None
) -> dict[str, Plan]:
    """The plans that a planner, or the one of that name, makes for a model, by their labels."""
    function = registry.find(planner) if isinstance(planner, str) else planner
    name = planner if isinstance(planner, str) else getattr(planner, "__name__", "planner")
    made = function(model, batch, loss)
    several = made if isinstance(made, Mapping) and "version" not in made else {name: made}
    if not several:
        raise PlanError(f"the planner {name} returned no plan.")
    try:
        return {str(label): find_plan(plan) for label, plan in several.items()}
    except PlanError as error:
        raise PlanError(f"the planner {name} returned no plan: {error}") from error
