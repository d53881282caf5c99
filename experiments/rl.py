"""Low precision in reinforcement learning: PPO on CartPole and Acrobot, which the papers left open.

    python experiments/rl.py --jobs 2            # five seeds: 280 runs, half a minute of one core each
    python experiments/rl.py --quick             # a rehearsal: a few tiny steps

1. Schedules: FP32, static 8 and 6, a static plan that costs what CR costs, and all ten schedules between 3 and 8 bits.
2. Mismatch: static 8, 6, 4 and 3 where the plan holds in rollouts and updates, in rollouts only, and in updates only.

The return is that of 100 episodes with the most probable actions after the last update, each with five seeds. FP32
must reach 475 on CartPole (its authors call it solved there; CleanRL's PPO has 490) and -95 on Acrobot (CleanRL: -86).

A CPU is enough. The same command resumes an interrupted experiment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from common import CONTROL, Experiment, against, arguments, cyclic_study, in_sentences, metric_record

from bitplan.lab.compare.suites import cpt_choices
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.tasks.rl import ROUNDED
from bitplan.plans.schedules import TEN

RANGE = (3, 8)
STATIC = (8, 6, 4, 3)
#: Environment -> the least return of FP32; below it, the runs were too short for conclusions.
FLOORS = {"CartPole-v1": 475.0, "Acrobot-v1": -95.0}
OF = "100 evaluation episodes, after the last update"
QUICK = ("environments=2", "rollout=8", "batch=8", "epochs=2", "features=8", "steps=4", "evaluate_every=4")


def main() -> None:
    parser = arguments(__doc__, seeds=5)
    parser.add_argument("--environments", nargs="+", choices=tuple(FLOORS), default=tuple(FLOORS))
    parser.add_argument("--rounded", nargs="*", choices=ROUNDED, default=ROUNDED, help="of the study of the mismatch")
    parser.add_argument("--mismatch-seeds", type=int, default=5, metavar="N", help="at most, of that study")
    experiment = Experiment("rl", parser.parse_args())
    mismatch = replace(experiment, most_seeds=experiment.options.mismatch_seeds)
    options = experiment.options
    studies: list[dict[str, Any]] = []
    for environment in options.environments:
        settings = experiment.settings((f"environment={environment}",), QUICK)
        control: dict[str, Any] | None = None
        for rounded in ("", *options.rounded):
            if experiment.is_late:
                break
            studies.append(
                mismatch_study(mismatch, environment, rounded, settings, control)
                if rounded
                else cyclic_study(
                    *(experiment, environment, "rl", [], settings),
                    names=("CR", "RR") if options.quick else tuple(TEN),
                    bits=RANGE,
                    floor=FLOORS[environment],
                    of=OF,
                    static=(8, 6),
                    equal_to=("RR", "CR") if options.quick else ("RR", "CR", "ER"),
                )
            )
            control = next((plan for plan in studies[-1]["plans"] if plan["plan"] == CONTROL), None)
            experiment.write(studies)
    experiment.conclude(studies, "return")


def mismatch_study(
    experiment: Experiment,
    environment: str,
    rounded: str,
    settings: list[str],
    control: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Static plans where the plan holds in rollouts, in updates, or in both.

    :param control: FP32 of the first study, the same in all of them.
    """
    settings = [*settings, f"rounded={rounded}"]
    task = find_task("rl", settings)
    choices = [
        choice
        for choice in cpt_choices(task, ("CR",), *RANGE, static=STATIC[:2] if experiment.options.quick else STATIC)
        if (choice.label == CONTROL and control is None) or choice.label in {f"static {bits}" for bits in STATIC}
    ]
    name = f"{environment}, {rounded}"
    plans = experiment.compared("rl", choices, folder=name.replace(", ", "-"), settings=settings, metric=task.metric)
    if control is not None:
        plans.insert(0, {**control, "seconds": 0.0})  # counted with the first
    short = experiment.why_short(plans, FLOORS[environment], task.metric)
    names = [choice.label for choice in choices if choice.label not in (CONTROL, "static 8")]
    return {
        "study": name,
        "settings": settings,
        "metric": metric_record(task.metric, OF),
        "floor": FLOORS[environment],
        "short_run": short is not None,
        "reading": short or against(plans, names, "static 8", task.metric),
        "plans": plans,
    }


if __name__ == "__main__":
    in_sentences(main)
