"""Changes of formats in the middle of a run of a compiled native model."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch._dynamo.utils import counters

from benchmarks.own_plans import own_plan
from benchmarks.speed_variants import OWN_PLANS
from bitplan.errors import BitplanWarning
from bitplan.lab.models.language_models import LlamaBlocks, random_states
from bitplan.plans import Plan
from bitplan.plans.execution import Native
from bitplan.runtime.attach import attach

#: Steps per format; the first may compile.
_STEPS = 3
#: Bits of the schedule: low, wide, low, wide.
_TURNS = (8, 16, 8, 16)


def switching_plan(plan: Plan) -> Plan:
    """The plan's own formats and none, alternating: each of its named quantizers is active in the first and the third
    quarter of a run.

    >>> switching_plan(own_plan("native-int8")).quantizers["i8"].choose[1]
    (16, 'keep')
    """
    document = plan.to_dict()
    shares = [f"{100 * turn // len(_TURNS)}%" for turn in range(1, len(_TURNS))]
    quantizers = {
        name: {"by": "turns", "choose": {str(_TURNS[0]): spec, str(_TURNS[1]): "keep"}}
        for name, spec in document["quantizers"].items()
    }
    turns = {"name": "steps", "bits": list(_TURNS), "at": shares}
    return Plan.from_dict({**document, "schedules": {"turns": turns}, "quantizers": quantizers})


def measure_switches(device: torch.device, plan: str | None = None) -> dict[str, Any]:
    """Switch a block to its low-precision formats, to BF16, and again.

    Counts the graphs that torch.compile makes; the first two formats need one each. Returns ``switches`` and
    ``switching`` of the document.
    """
    name = plan or (OWN_PLANS[1] if device.type == "cpu" else "native-fp8-delayed")
    model = LlamaBlocks(256, 1, 512).to(device, torch.bfloat16)
    x = random_states(2, 128, 256).to(device, torch.bfloat16).requires_grad_()
    total = _STEPS * len(_TURNS)
    torch.compiler.reset()
    switches: list[dict[str, Any]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BitplanWarning)
        run = attach(model, switching_plan(own_plan(name)), steps=total, example=x, execution=Native(min_macs=0))
    with run:
        called = run.compile()
        for number in range(total):
            before, begin = _graphs(), time.perf_counter()
            called(x).sum().backward()
            model.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
            if number % _STEPS == 0:
                to = name if _TURNS[number // _STEPS] == _TURNS[0] else "bf16"
                switches.append({"to": to, "recompiles": 0, "milliseconds": seconds * 1e3, "later_milliseconds": 0.0})
            switches[-1]["recompiles"] += _graphs() - before
            switches[-1]["later_milliseconds"] = seconds * 1e3
            run.step()
    later = [switch["recompiles"] for switch in switches[2:]]
    return {
        "switches": switches,
        "switching": {"plan": name, "recompiles_after_the_first": sum(later), "reached": not any(later)},
    }


def _graphs() -> int:
    return int(counters["stats"]["unique_graphs"])
