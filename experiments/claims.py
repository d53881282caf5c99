"""The tables of claims, readings and plans in docs/results, from the stored results alone.

    python experiments/claims.py            # prints them
    python experiments/claims.py --write    # puts them into the pages

A test compares the pages with these tables.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import metrics
import rl
from assignments import SAME
from common import CONTROL, EQUAL_COST, RESULTS, is_equal_cost, judgements, word
from reread import metric_of, plans_of

from bitplan.files import write_whole
from bitplan.lab.report.summaries import MARGIN
from bitplan.lab.tasks.task import Metric
from bitplan.plans.schedules.named import GROUPS
from bitplan.significance import LEVEL, SURE, Difference, Judgement, holm, judge

#: Results whose readings are on the page; the others have pages of their own.
READINGS = ("cifar", "ptb", "sst2", "detection", "forecast", "forecast-demand", "forecast-lstm", "rl", "rl-acrobot")
HEADINGS = ("what the paper says", "what was run", "gain (95 %)", "verdict", "command")
BALANCED = GROUPS["balanced"]
#: The plans of the study of the mismatch.
STATIC = tuple(f"static {bits}" for bits in rl.STATIC)


class Claim(NamedTuple):
    """A row of the table."""

    paper: str
    run: str
    effect: str
    verdict: str
    command: str
    #: Of a claim that one is better than the other: by how much it is worse. :func:`decided` has the verdict.
    loss: Difference | None = None


class Study(NamedTuple):
    """A stored study, as claims need it."""

    file: str
    command: str
    title: str
    metric: Metric
    plans: dict[str, dict[str, Any]]
    record: Mapping[str, Any]

    @property
    def is_share(self) -> bool:
        return self.metric.name == "accuracy"

    def seeds(self, *names: str) -> str:
        counts = [len(self.plans[name]["values"]) for name in names if name in self.plans]
        return "1 seed" if min(counts) == 1 else f"{min(counts)} seeds"

    def gain(self, loss: Difference) -> str:
        """A gain with its interval: points for accuracies, else the metric's unit."""
        unit = "points" if self.is_share else self.metric.name
        digits = 2 if self.is_share or abs(self.plans[CONTROL]["metric"]) > 1 else 4
        return f"{unit} {gain_text(loss, digits, 100 if self.is_share else 1)}"

    def judged(self, base: str = "static 8", margin: float = MARGIN) -> dict[str, Judgement]:
        """The verdicts on all its plans beside one of them, corrected for their number."""
        return judgements(self.plans.values(), self.plans[base], self.metric, margin)

    def cost(self, name: str, of: str) -> str:
        return f"{self.plans[name]['relative_to_fp32'] / self.plans[of]['relative_to_fp32']:.0%}".replace("%", " %")


def gain_text(loss: Difference, digits: int, scale: float = 1) -> str:
    """A loss the other way round, so that positive is better, whatever the metric."""
    mean, low, high = (
        f"{round(-scale * value, digits) + 0.0:+.{digits}f}" for value in (loss.mean, loss.high, loss.low)
    )
    if loss.pairs > 1 and loss.is_constant:
        return f"{mean} (every seed)"
    return mean if loss.pairs < 2 else f"{mean} ({low} to {high})"


@cache
def stored(file: str) -> tuple[Study, ...]:
    result = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))
    return tuple(
        Study(
            file,
            result["command"],
            study.get("study", file),
            metric_of(result, study),
            {plan["plan"]: plan for plan in plans_of(study) if plan["metric"] is not None},
            study,
        )
        for study in result["studies"]
        if "metric" in study or "metric" in result
    )


# --- Claims


def keeps(study: Study, title: str, plan: str, base: str = "static 8") -> Claim:
    """Whether a schedule keeps the metric of a static plan that costs more."""
    judgement = study.judged(base)[plan]
    assert judgement.loss is not None
    return Claim(
        "Schedules keep the quality of 8 bits at a lower cost (CPT)",
        f"{title}: {plan}, {study.cost(plan, base)} of the bit operations of {base}, {study.seeds(plan, base)}",
        study.gain(judgement.loss),
        word(judgement),
        study.command,
    )


def ordered(titles: Sequence[tuple[Study, str]]) -> list[Claim]:
    """Whether dearer schedules are better, in these studies and in those of graphs; p-values are corrected for all."""
    paper = "Accuracy grows with the cost of a schedule (Wolfe & Kyrillidis)"
    graphs = [study.record["order"] for study in stored("graphs")]
    orders = [*(study.record["order"] for study, _ in titles), *graphs]
    corrected = holm([order["trend"]["p_value"] for order in orders])
    sure = [order["is_sure"] and p < 1 - SURE for order, p in zip(orders, corrected, strict=True)]
    rows = []
    for (study, title), order, is_sure in zip(titles, orders, sure, strict=False):
        trend, (low, high) = order["trend"], order["pearson"]["interval"]
        rows.append(
            Claim(
                paper,
                f"{title}: ten schedules, {study.seeds(*BALANCED)}",
                f"{trend['concordant']:g} of {trend['pairs']} pairs in that order, p = {trend['p_value']:.2g}; Pearson "
                f"{order['pearson']['value']:+.2f} ({low:+.2f} to {high:+.2f})",
                "holds" if is_sure else "undecided",
                study.command,
            )
        )
    p_values = sorted(order["trend"]["p_value"] for order in graphs)
    means = sorted(order["pearson"]["value"] for order in graphs)
    of_graphs = Claim(
        paper,
        f"Cora and Coauthor-CS, GCN and GraphSAGE: {len(graphs)} studies of ten schedules, 3 seeds",
        f"p from {p_values[0]:.2f} to {p_values[-1]:.2f}; Pearson {means[0]:+.2f} to {means[-1]:+.2f}",
        f"holds in {sum(sure[-len(graphs) :])} of {len(graphs)}" if any(sure[-len(graphs) :]) else "undecided in all",
        stored("graphs")[0].command,
    )
    return [*rows, of_graphs]


def decided(rows: Sequence[Claim], better: str, worse: str) -> list[Claim]:
    """The rows of one claim with their verdicts, whose p-values are corrected for the number of rows."""
    losses = [row.loss for row in rows if row.loss is not None]
    is_better = holm([loss.p_value(0.0) for loss in losses])
    is_worse = holm([loss.negated().p_value(0.0) for loss in losses])
    words = [
        better if first < LEVEL else worse if second < LEVEL else "undecided"
        for first, second in zip(is_better, is_worse, strict=True)
    ]
    return [row._replace(verdict=verdict) for row, verdict in zip(rows, words, strict=True)]


def has_equal_cost(study: Study, name: str, names: Sequence[str]) -> bool:
    """Whether the static plan made for the cost of `name` has it: a model of few products allows few costs only."""
    return all(is_equal_cost(study.plans[each], study.plans[f"{EQUAL_COST} {name}"]) for each in names)


def changing(study: Study, title: str, static: str = f"{EQUAL_COST} CR", names: Sequence[str] = BALANCED) -> Claim:
    """Whether schedules are better than a static plan of their cost."""
    values = [study.plans[name]["values"] for name in names]
    sign = -1 if study.metric.better == "higher" else 1
    difference = Difference.of_mean(values, study.plans[static]["values"])
    loss = Difference(sign * difference.mean, difference.deviation, difference.pairs)
    return Claim(
        "Changing the precision helps at equal cost (CPT)",
        f"{title}: {' and '.join(names) if len(names) < 3 else f'{len(names)} schedules'} less a static plan "
        f"of equal cost, {study.seeds(static, *names)}",
        study.gain(loss),
        "",
        study.command,
        loss,
    )


def graphs_keep() -> Claim:
    words = []
    for study in stored("graphs"):
        judged = study.judged()
        words += [word(judged[name]) for names in GROUPS.values() for name in names]
    counts = {word: words.count(word) for word in ("keeps", "better", "undecided", "loses")}
    return Claim(
        "Schedules keep the quality of 8 bits at a lower cost (CPT)",
        "Cora and Coauthor-CS, GCN and GraphSAGE: ten schedules in eight studies, 39 to 82 % of the bit "
        "operations of static 8, 3 seeds",
        ", ".join(f"{count} {word}" for word, count in counts.items()),
        f"keeps in {counts['keeps'] + counts['better']} of {len(words)}",
        stored("graphs")[0].command,
    )


def published() -> Claim:
    (ptb,) = stored("ptb")
    static = ptb.plans["static 8"]
    return Claim(
        "PTB, 8 bits: perplexity 89.65 in validation, 85.59 in the test (CPT)",
        f"the published recipe, {ptb.seeds('static 8')}",
        f"{static['metric']:.2f} and {static['test_perplexity']:.2f}",
        "undecided: one seed",
        ptb.command,
    )


def deficit(name: str, base: str, paper: str, run: str) -> Claim:
    study = stored("deficits")[0]
    judgement = study.judged(base)[name]
    assert judgement.loss is not None
    return Claim(
        paper, f"{run}, {study.seeds(name, base)}", study.gain(judgement.loss), judgement.verdict, study.command
    )


def assigned(file: str, title: str, name: str) -> Claim:
    (study,) = stored(f"assignments-{file}")
    plan, operator = study.plans[name], study.plans["operator"]
    judgement = study.judged(CONTROL, SAME)[name]
    assert judgement.loss is not None
    times = plan["ratio"] / operator["ratio"]
    most = 1 / operator["ratio"]
    return Claim(
        "More than twice the operator baseline's saving at FP32's accuracy (Lee, Sharma & Aiken)",
        f"{title}, {name}: ratio {plan['ratio']:.2f}, {times:.1f} times the baseline's {operator['ratio']:.2f}; "
        f"{study.seeds(name, CONTROL)}, margin {SAME:.1%}".replace("%", " %"),
        study.gain(judgement.loss),
        judgement.verdict if most > 2 else "cannot hold: the baseline saves over half",
        study.command,
    )


def ranks(number: int, title: str) -> Claim:
    result = json.loads((RESULTS / "metrics.json").read_text(encoding="utf-8"))
    correlation = result["studies"][number]["spearman"]["all"]
    low, high = correlation["interval"]
    return Claim(
        "A format's measured error ranks what trains",
        f"{title}: {correlation['plans']} ways to round, 500 steps, 2 seeds",
        f"Spearman {correlation['value']:+.2f} ({low:+.2f} to {high:+.2f})",
        "holds" if low > 0 else "undecided",
        result["command"],
    )


def rounds(number: int, title: str, name: str, paper: str) -> Claim:
    """A way to round against BF16, by the held-out loss of each seed."""
    result = json.loads((RESULTS / "metrics.json").read_text(encoding="utf-8"))
    judgement = metrics.against_baseline(result["studies"][number]["plans"])[name]
    loss = judgement.loss
    assert loss is not None
    return Claim(
        paper,
        f"{title}, {name}: held-out loss against BF16, {loss.pairs} seeds",
        f"loss {gain_text(loss, 2)}",
        word(judgement),
        result["command"],
    )


def claims() -> list[Claim]:
    """All rows, those of one claim after each other."""
    cifar, longer = stored("cifar")
    (ptb,), (sst2,), (detection,) = stored("ptb"), stored("sst2"), stored("detection")
    titles: list[tuple[Study, str]] = [(cifar, "CIFAR-10, ResNet-20, 8,000 iterations"), *new_domains()]
    graphs = {study.title: study for study in stored("graphs")}
    changes = [
        *(changing(study, title) for study, title in titles if has_equal_cost(study, "CR", BALANCED)),
        *(
            changing(study, title, f"{EQUAL_COST} {names[-1]}", names)
            for study, title in new_domains()
            for names in (GROUPS["high-saving"], GROUPS["low-saving"])
            if has_equal_cost(study, names[-1], names)
        ),
        changing(graphs["cora, sage, fp-agg"], "Cora, GraphSAGE"),
        changing(graphs["coauthor-cs, sage, fp-agg"], "Coauthor-CS, GraphSAGE"),
    ]
    return [
        *ordered(titles),
        *decided(changes, "holds", "does not hold"),
        *(keeps(study, title, "CR") for study, title in titles),
        keeps(cifar, titles[0][1], "RR"),
        *(keeps(study, title, "RR") for study, title in new_domains()),
        keeps(longer, "CIFAR-10, ResNet-20, 24,000 iterations", "RR"),
        graphs_keep(),
        keeps(ptb, "Penn Treebank, LSTM, the full recipe", "RR"),
        keeps(sst2, "SST-2, fine-tune of MiniLM", "CR"),
        keeps(detection, "BCCD, RetinaNet", "CR"),
        published(),
        deficit(
            "half from 0%",
            "half from 50%",
            "Low precision early harms more than late (Wolfe & Kyrillidis)",
            "CIFAR-10, ResNet-20: 3 bits in the first half of a budget, against 3 bits in the last half",
        ),
        deficit(
            "half from 0%",
            "static at the cost of half",
            "Low precision early harms for good (Wolfe & Kyrillidis)",
            "the same against the same bits spread evenly",
        ),
        assigned("squeezenet", "CIFAR-10, SqueezeNet", "r = 0.7"),
        assigned("resnet18-long", "CIFAR-10, ResNet-18, 20,000 iterations", "r = 0.7"),
        assigned("gpt", "a GPT on characters", "r = 0.9"),
        ranks(0, "BERT-mini"),
        ranks(1, "ResNet-20"),
        rounds(0, "BERT-mini", "weights int8", "INT8 weights are lossless"),
        rounds(1, "ResNet-20", "weights int8", "INT8 weights are lossless"),
        rounds(0, "BERT-mini", "gradients int8", "Gradients need more than INT8 to nearest"),
        rounds(1, "ResNet-20", "gradients int8", "Gradients need more than INT8 to nearest"),
        *mismatches(),
    ]


def new_domains() -> list[tuple[Study, str]]:
    """Forecasting and reinforcement learning, which the papers left open."""
    return [
        (stored("forecast")[0], "ETTh1, DLinear, 500 steps"),
        (stored("forecast-demand")[0], "electricity demand, DLinear, 1,000 steps"),
        (stored("forecast-lstm")[0], "ETTh1, LSTM, 200 steps"),
        (stored("rl")[0], "CartPole, PPO, 800 updates"),
        (stored("rl-acrobot")[0], "Acrobot, PPO, 1,000 updates"),
    ]


def mismatches() -> list[Claim]:
    """Rounding only rollouts, or only updates, against rounding both."""
    _, both, *others = stored("rl")
    rows = []
    for study in others:
        where = study.title.rpartition(", ")[2]
        for name in STATIC:
            loss = judge(study.plans[name]["values"], both.plans[name]["values"], 0.0, both.metric.better).loss
            assert loss is not None
            rows.append(
                Claim(
                    "One rounded policy is better than a rounded and an unrounded one (our own question)",
                    f"CartPole, PPO: {name} in {where}s only, against both, {loss.pairs} seeds",
                    both.gain(loss),
                    "",
                    study.command,
                    loss,
                )
            )
    return decided(rows, "does not hold", "holds")


# --- The page


def claims_table() -> str:
    rows: list[Sequence[str]] = [HEADINGS, ["---"] * len(HEADINGS)]
    before = ""
    for claim in claims():
        script = claim.command.removeprefix("python experiments/").split()[0]
        link = f"`{script}`"
        rows.append(("" if claim.paper == before else claim.paper, claim.run, claim.effect, claim.verdict, link))
        before = claim.paper
    return _markdown(rows)


def readings() -> str:
    rows = [("study", "reading"), ("---", "---")]
    for file in READINGS:
        for study in stored(file):
            text = study.record["reading"].replace("%", " %").replace("|", "/")
            rows.append((f"[{file}]({file}.json), {study.title}", text))
    return _markdown(rows)


def plans_table(study: Study) -> str:
    """All plans of a study, and how each compares with static 8."""
    judged, scale = study.judged(), 2 if abs(study.plans[CONTROL]["metric"]) > 1 else 4
    rows = [("plan", "cost, of static 8", study.metric.name, "gain over static 8 (95 %)", "verdict"), ("---",) * 5]
    for name, plan in study.plans.items():
        judgement = judged.get(name)
        compared = (
            ("", "")
            if judgement is None or judgement.loss is None
            else (
                gain_text(judgement.loss, scale),
                word(judgement),
            )
        )
        mean = f"{plan['metric']:.{scale}f} ± {plan['deviation']:.{scale}f}"
        rows.append((name, study.cost(name, "static 8"), mean, *compared))
    return _markdown(rows)


def mismatch_table() -> str:
    """Static plans that hold in rollouts and updates, or in one of them: returns and differences of the policies."""
    studies = stored("rl")[1:]
    where = ["both", *(f"{study.title.rpartition(', ')[2]}s only" for study in studies[1:])]
    rows = [("plan", *(f"{name}: return (mismatch)" for name in where)), ("---",) * (1 + len(where))]
    for name in STATIC:
        cells = []
        for study in studies:
            plan = study.plans[name]
            mismatch = sum(metrics["mismatch"] for metrics in plan["metrics"].values()) / len(plan["metrics"])
            cells.append(f"{plan['metric']:.0f} ± {plan['deviation']:.0f} ({mismatch:.3f})")
        rows.append((name, *cells))
    return _markdown(rows)


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


#: Page -> the tables on it.
PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"claims": claims_table, "readings": readings},
    "new-domains.md": {
        "forecast": lambda: plans_table(stored("forecast")[0]),
        "demand": lambda: plans_table(stored("forecast-demand")[0]),
        "lstm": lambda: plans_table(stored("forecast-lstm")[0]),
        "rl": lambda: plans_table(stored("rl")[0]),
        "acrobot": lambda: plans_table(stored("rl-acrobot")[0]),
        "mismatch": mismatch_table,
    },
}


def with_tables(name: str, page: str) -> str:
    """The page with the tables of today's results, each between two comments."""
    for title, table in PAGES[name].items():
        before, begin, rest = page.partition(f"<!-- {title}: experiments/claims.py --write -->")
        _, end, after = rest.partition(f"<!-- end of {title} -->")
        page = f"{before}{begin}\n\n{table()}\n{end}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/results/README.md")
    is_writing = parser.parse_args().write
    for name, tables in PAGES.items():
        if is_writing:
            write_whole(RESULTS / name, with_tables(name, (RESULTS / name).read_text(encoding="utf-8")))
        else:
            print(*(table() for table in tables.values()), sep="\n")


if __name__ == "__main__":
    main()
