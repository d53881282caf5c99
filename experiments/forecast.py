"""Cyclic precision in forecasting: DLinear, PatchTST and an LSTM on time series, which the papers left open.

    python experiments/forecast.py --data ETTh1.csv --jobs 2     # the benchmark's series, horizon 96
    python experiments/forecast.py --jobs 2                      # the electricity demand that statsmodels has
    python experiments/forecast.py --quick                       # a rehearsal: a few tiny steps

FP32, static 8 and 6, a static plan that costs what CR costs, and all ten schedules between 3 and 8 bits, each with five
seeds. The look-back is 336 rows; on ETTh1, FP32 must reach the published errors within 3 % (DLinear 0.375, PatchTST
0.370), and the LSTM, for which none are published, 0.413.

A CPU is enough: a run of DLinear takes 8 s of one core in FP32. The same command resumes an interrupted experiment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import Experiment, arguments, cyclic_study, in_sentences

from bitplan.plans.schedules import TEN

RANGE = (3, 8)
#: Model -> its recipe, and the largest error of FP32 on ETTh1 and on the demand.
MODELS = {
    "dlinear": (("steps=1000",), 0.386, 0.14),
    "patchtst": (("steps=500",), 0.381, 0.24),
    "lstm": (("steps=1000", "layers=1", "features=64", "lr=3e-3"), 0.413, 0.33),
}
QUICK = ("length=48", "horizon=8", "batch=4", "features=8", "layers=1", "steps=3", "evaluate_every=3")


def main() -> None:
    parser = arguments(__doc__, seeds=5)
    parser.add_argument("--data", metavar="FILE", default="", help="ETTh1.csv or .csv.gz (default: demand)")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    experiment = Experiment("forecast", parser.parse_args())
    options = experiment.options
    # In the name of a study and of its folder, so that runs on one series are never taken for those on another.
    place = [f"data={options.data}"] if options.data else []
    series = Path(options.data).name.split(".")[0] if options.data else "demand"
    studies: list[dict[str, Any]] = []
    for model in options.models:
        if experiment.is_late:
            break
        recipe, *floors = MODELS[model]
        settings = experiment.settings((f"model={model}", "evaluate_every=500", *recipe), QUICK)
        study = cyclic_study(
            *(experiment, f"{model} on {series}", "forecast", place, settings),
            names=("CR", "RR") if options.quick else tuple(TEN),
            bits=RANGE,
            floor=floors[0 if options.data else 1],
            of="the test rows, after the last step",
            static=(8, 6),
            equal_to=("RR", "CR") if options.quick else ("RR", "CR", "ER"),
        )
        studies.append(study)
        experiment.write(studies)
    experiment.conclude(studies, "mse")


if __name__ == "__main__":
    in_sentences(main)
