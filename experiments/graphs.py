"""Cyclic precision on graphs: GCN and GraphSAGE on Cora and Coauthor-CS, neighbour sums quantised or not.

    python experiments/graphs.py FOLDER --device cuda        # the folder with planetoid_cora.npz and coauthor_cs.npz
    python experiments/graphs.py FOLDER --quick              # a rehearsal: a few tiny steps on a CPU

FP32, 8 bits throughout, a static plan that costs what CR costs, and all ten schedules between 3 and 8 bits (the range
of Wolfe & Kyrillidis for OGBN-Arxiv, arXiv 2403.02243), each with three seeds. FP-Agg rounds the linear products only,
Q-Agg also what is summed over neighbours. A graph is one batch, so bits change every epoch. Of each study, a
Jonckheere-Terpstra test of whether groups of schedules that cost more are better, and Pearson's correlation.

The same command resumes an interrupted experiment, and `bitplan report` draws the folders of its runs.
"""

from __future__ import annotations

from typing import Any

from common import CONTROL, Experiment, arguments, cyclic_reading, in_sentences, metric_record

from bitplan.lab.compare.suites import cpt_choices
from bitplan.lab.tasks.registry import find_task
from bitplan.plans.schedules import TEN

RANGE = (3, 8)
GRAPHS = ("cora", "coauthor-cs")
MODELS = ("gcn", "sage")
AGGREGATIONS = ("fp-agg", "q-agg")

#: The least accuracy of FP32; below it, the runs were too short for conclusions.
FLOORS = {("cora", "gcn"): 0.78, ("cora", "sage"): 0.76, ("coauthor-cs", "gcn"): 0.89, ("coauthor-cs", "sage"): 0.87}
RECIPE = ("steps=200", "evaluate_every=100", "features=64")
QUICK = ("steps=3", "evaluate_every=3", "features=8")


def main() -> None:
    parser = arguments(__doc__, seeds=3, data="the folder of the graphs' .npz files")
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=GRAPHS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--aggregations", nargs="+", choices=AGGREGATIONS, default=AGGREGATIONS)
    experiment = Experiment("graphs", parser.parse_args())
    options = experiment.options
    studies: list[dict[str, Any]] = []
    for graph, model in ((graph, model) for graph in options.graphs for model in options.models):
        control: dict[str, Any] | None = None
        for aggregation in options.aggregations:
            if experiment.is_late:
                break
            studies.append(study(experiment, graph, model, aggregation, control))
            control = next((plan for plan in studies[-1]["plans"] if plan["plan"] == CONTROL), None)
            experiment.write(studies)
    experiment.conclude(studies, "accuracy")


def study(
    experiment: Experiment, graph: str, model: str, aggregation: str, control: dict[str, Any] | None
) -> dict[str, Any]:
    """Run the missing part of a study. FP32 is the same for both aggregations, and `control` is that of the first."""
    settings = [f"model={model}", *experiment.settings(RECIPE, QUICK)]
    place = [f"data={experiment.options.data}"]
    names = ("CR", "RR") if experiment.options.quick else tuple(TEN)
    task = find_task(graph, [*place, *settings])
    choices = cpt_choices(task, names, *RANGE, static=(RANGE[1],), quantized_aggregation=aggregation == "q-agg")
    plans = experiment.compared(
        graph,
        [choice for choice in choices if choice.label != CONTROL or control is None],
        folder=f"{graph}-{model}-{aggregation}",
        settings=[*place, *settings],
        metric=task.metric,
    )
    if control is not None:
        plans.insert(0, {**control, "seconds": 0.0})  # counted with the first
    return {
        "study": f"{graph}, {model}, {aggregation}",
        "graph": graph,
        "model": model,
        "aggregation": aggregation,
        "settings": settings,
        "metric": metric_record(task.metric, "test nodes, after the last step"),
        "bits": list(RANGE),
        **cyclic_reading(experiment, plans, names, f"static {RANGE[1]}", FLOORS[graph, model], task.metric),
    }


if __name__ == "__main__":
    in_sentences(main)
