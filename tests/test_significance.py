from __future__ import annotations

import math
import random
from typing import Any, Literal

import numpy as np
import pytest

from bitplan import significance
from bitplan.errors import RunError
from bitplan.significance import (
    LEAST,
    Difference,
    Judgement,
    cost_correlation,
    holm,
    judge,
    judge_all,
    pearson,
    seed_share,
    spearman,
    student_probability,
    student_quantile,
    trend,
)

# --- Student's t


@pytest.mark.parametrize(
    ("share", "freedom", "value"),  # from printed tables
    [
        *((0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.975, 3, 3.1824), (0.975, 4, 2.7764), (0.975, 9, 2.2622)),
        *((0.975, 30, 2.0423), (0.975, 100, 1.9840), (0.95, 4, 2.1318), (0.995, 7, 3.4995)),
    ],
)
def test_quantiles_are_those_of_printed_tables(share: float, freedom: int, value: float) -> None:
    assert student_quantile(share, freedom) == pytest.approx(value, abs=6e-5)
    assert student_probability(value, freedom) == pytest.approx(share, abs=5e-6)


@pytest.mark.parametrize("t", [-3.0, -0.5, 0.0, 0.5, 1.0, 4.0])
def test_probabilities_have_closed_forms_for_few_degrees(t: float) -> None:
    assert student_probability(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi)
    assert student_probability(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert student_probability(t, 3) == pytest.approx(
        0.5 + (t / math.sqrt(3) / (1 + t * t / 3) + math.atan(t / math.sqrt(3))) / math.pi
    )
    assert student_probability(t, 4) == pytest.approx(
        0.5 + 0.375 * (t / math.sqrt(1 + t * t / 4)) * (1 - t * t / (1 + t * t / 4) / 12)
    )
    # Beyond a thousand degrees it is normal.
    assert student_probability(t, 4000) == pytest.approx(0.5 + math.erf(t / math.sqrt(2)) / 2, abs=1e-3)


# --- One plan against another


def test_a_difference_is_paired_by_position() -> None:
    result = Difference.of([10.0, 20.0, 33.0], [9.0, 20.0, 31.0])  # 1, 0 and 2, whatever the seeds themselves do
    assert (result.mean, result.deviation, result.pairs) == (1.0, 1.0, 3)
    assert result.half_width == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)
    assert (result.low, result.high) == (1.0 - result.half_width, 1.0 + result.half_width)
    assert not result.is_sure
    assert Difference.of([10.0, 20.0, 30.2], [9.0, 19.1, 29.0]).is_sure
    with pytest.raises(RunError, match="no seed"):
        Difference.of([], [])


def test_the_p_value_of_a_margin_is_that_of_a_t_test() -> None:
    result = Difference.of([0.1, 0.0, 0.2], [0.0, 0.0, 0.0])  # mean 0.1, standard error 0.1 / sqrt(3)
    t = (0.1 - 0.3) / (0.1 / math.sqrt(3))
    assert result.p_value(0.3) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)))
    assert result.p_value(0.1) == pytest.approx(0.5)
    assert result.p_value(-0.1) == pytest.approx(1 - result.p_value(0.3))
    # The upper end of the interval is where the test of 2.5 % ends.
    assert result.p_value(result.high) == pytest.approx(0.025)
    assert result.p_value(result.low) == pytest.approx(0.975)


def test_one_seed_is_always_undecided() -> None:
    for value in (0.0, 0.5, 0.899, 0.9, 1.0):
        judgement = judge({3: value}, {3: 0.9}, 0.01, "higher")
        assert judgement.verdict == "undecided"
        assert not judgement.is_better
        assert judgement.p_value == 1.0
        # Seeds that only one of the two has are no pairs.
        assert judge({3: value, 4: value}, {3: 0.9, 5: 0.9}, 0.01, "higher").verdict == "undecided"
    assert judge({0: 0.9}, {1: 0.9}, 0.01, "higher").loss is None


def test_verdicts_follow_from_the_interval_and_the_margin() -> None:
    reference = {0: 0.90, 1: 0.92, 2: 0.91}

    def judged(*losses: float, margin: float = 0.01, better: str = "higher") -> tuple[str, bool]:
        sign = -1 if better == "higher" else 1
        values = {seed: reference[seed] + sign * loss for seed, loss in enumerate(losses)}
        result = judge(values, reference, margin, better)  # type: ignore[arg-type]
        assert result.loss is not None
        assert result.loss.mean == pytest.approx(sum(losses) / 3)
        return result.verdict, result.is_better

    assert judged(0.001, 0.002, 0.003) == ("keeps", False)  # 0.002, at most 0.0045
    assert judged(0.001, 0.002, 0.003, margin=0.004) == ("undecided", False)
    assert judged(0.018, 0.020, 0.022) == ("loses", False)  # 0.02, at least 0.015
    assert judged(0.0, 0.02, 0.04) == ("undecided", False)  # at least -0.03
    assert judged(-0.018, -0.020, -0.022) == ("keeps", True)
    assert judged(0.001, 0.002, 0.003, better="lower") == ("keeps", False)
    assert judged(0.018, 0.020, 0.022, better="lower") == ("loses", False)
    assert judged(-0.018, -0.020, -0.022, better="lower") == ("keeps", True)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_few_equal_differences_of_a_coarse_metric_decide_nothing(seeds: int) -> None:
    """One of 360 digits more with every seed, or as many: no spread was seen, and that is chance."""
    reference = {seed: (350 + seed) / 360 for seed in range(seeds)}
    for change in (1 / 360, -20 / 360, 0.0):
        judgement = judge({seed: value + change for seed, value in reference.items()}, reference, 0.01, "higher")
        assert (judgement.verdict, judgement.is_better) == ("undecided", False)
        assert judgement.loss is not None
        assert math.isinf(judgement.loss.half_width)
        assert not judgement.loss.is_sure
        assert judgement.p_value == (1.0 if change < -0.01 else 0.5**seeds)


def test_six_equal_differences_decide_by_a_sign_test() -> None:
    """If the median loss were the margin, six seeds would all stay below it in one of 64 studies."""
    reference = {seed: (350 + seed) / 360 for seed in range(6)}

    def judged(change: float) -> Judgement:
        return judge({seed: value + change for seed, value in reference.items()}, reference, 0.01, "higher")

    assert (judged(0.0).verdict, judged(0.0).is_better, judged(0.0).p_value) == ("keeps", False, 0.5**6)
    assert (judged(1 / 360).verdict, judged(1 / 360).is_better) == ("keeps", True)
    assert judged(-20 / 360).verdict == "loses"
    assert judged(0.0).loss == Difference(0.0, 0.0, 6)
    assert Difference(0.0, 0.0, 6).half_width == 0
    # Of three such plans, none has enough seeds.
    several = judge_all(dict.fromkeys("abc", reference), reference, 0.01, "higher")
    assert {judgement.verdict for judgement in several.values()} == {"undecided"}
    assert {judgement.p_value for judgement in several.values()} == {3 * 0.5**6}


# --- Several plans beside one reference


def test_holm_s_correction_is_that_of_statsmodels() -> None:
    multitest = pytest.importorskip("statsmodels.stats.multitest")
    draws = np.random.default_rng(3)
    for count in (1, 2, 5, 30):
        for scale in (1.0, 0.02):
            p_values = [*(scale * draws.random(count)), scale / 2, scale / 2]  # with ties
            _, expected, _, _ = multitest.multipletests(p_values, method="holm")
            assert holm(p_values) == pytest.approx(expected, abs=1e-15)
    assert holm([]) == []
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


@pytest.mark.parametrize("pairs", [2, 3, 5, 12])
def test_p_values_and_intervals_are_scipy_s(pairs: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    draws = np.random.default_rng(pairs)
    for _ in range(20):
        values, others = draws.normal(1.0, 1.0, (2, pairs))
        result = Difference.of(values.tolist(), others.tolist())
        for margin in (-0.5, 0.0, 1.0):
            below = stats.ttest_1samp(values - others, margin, alternative="less")
            above = stats.ttest_1samp(values - others, margin, alternative="greater")
            assert result.p_value(margin) == pytest.approx(below.pvalue, abs=1e-9)
            assert result.negated().p_value(-margin) == pytest.approx(above.pvalue, abs=1e-9)
        low, high = stats.ttest_rel(values, others).confidence_interval(0.95)
        assert (result.low, result.high) == pytest.approx((low, high), abs=1e-7)


def test_verdicts_follow_from_corrected_p_values() -> None:
    stats, multitest = pytest.importorskip("scipy.stats"), pytest.importorskip("statsmodels.stats.multitest")
    draws, margin, seen = np.random.default_rng(0), 0.5, set[tuple[str, bool]]()
    for _ in range(20):
        reference = draws.normal(0, 1, 5)
        losses = draws.normal(draws.choice([-0.6, 0.0, 0.5, 1.5], 14)[:, None], 0.3, (14, 5))
        plans = {number: dict(enumerate(row)) for number, row in enumerate((reference - losses).tolist())}
        judged = judge_all(plans, dict(enumerate(reference.tolist())), margin, "higher")

        def corrected(bound: float, alternative: str, losses: Any = losses) -> Any:
            p_values = stats.ttest_1samp(losses, bound, axis=1, alternative=alternative).pvalue
            return multitest.multipletests(p_values, method="holm")[1]

        keeps, loses, better = corrected(margin, "less"), corrected(margin, "greater"), corrected(0.0, "less")
        for number, judgement in judged.items():
            verdict = "keeps" if keeps[number] < 0.025 else "loses" if loses[number] < 0.025 else "undecided"
            assert (judgement.verdict, judgement.is_better) == (verdict, better[number] < 0.025)
            assert judgement.p_value == pytest.approx(keeps[number], abs=1e-9)
            assert judgement.compared == 14
            alone = judge(plans[number], dict(enumerate(reference.tolist())), margin, "higher")
            assert judgement.loss == alone.loss
            assert judgement.is_decided_alone == (judgement.verdict == "undecided" != alone.verdict)
            seen.add((judgement.verdict, judgement.is_decided_alone))
    assert seen == {("keeps", False), ("loses", False), ("undecided", False), ("undecided", True)}


def test_some_plan_of_many_is_rarely_found_to_keep_what_all_lose() -> None:
    """Fourteen plans lose exactly the margin, beside a reference whose seeds they share."""
    draws, studies = np.random.default_rng(5), 1000
    found = {"alone": 0, "all": 0}
    for _ in range(studies):
        reference = dict(enumerate(draws.normal(0, 0.3, 5).tolist()))
        plans = {number: dict(enumerate(row)) for number, row in enumerate(draws.normal(1, 0.3, (14, 5)).tolist())}
        found["all"] += any(one.verdict == "keeps" for one in judge_all(plans, reference, 1.0, "lower").values())
        found["alone"] += any(judge(plan, reference, 1.0, "lower").verdict == "keeps" for plan in plans.values())
    assert found["all"] / studies < 0.04
    assert found["alone"] / studies > 0.1


def test_plans_that_cannot_be_decided_cost_the_others_nothing() -> None:
    reference = {0: 0.90, 1: 0.92, 2: 0.91}
    plan = {0: 0.899, 1: 0.917, 2: 0.909}
    judged = judge_all({"a": plan, "one seed": {0: 0.9}, "no seed": {7: 0.9}}, reference, 0.01, "higher")
    assert judged["a"] == judge(plan, reference, 0.01, "higher")
    assert judged["one seed"].p_value == 1.0
    assert judged["no seed"].p_value is None
    assert {judged[name].verdict for name in ("one seed", "no seed")} == {"undecided"}
    assert judge_all({}, reference, 0.01, "higher") == {}


@pytest.mark.parametrize("pairs", [2, 3, 5])
def test_intervals_hold_the_true_difference_in_95_of_100_studies(pairs: int) -> None:
    """And percentile intervals of a bootstrap do not, which is why they are not used for a few seeds."""
    studies, draws = 2000, np.random.default_rng(0)
    values = draws.normal(1.0, 1.0, (studies, pairs))
    found = [Difference.of(row.tolist(), [0.0] * pairs) for row in values]
    share = sum(result.low <= 1.0 <= result.high for result in found) / studies
    assert 0.935 < share < 0.965  # the standard error of the share is 0.005
    again = np.take_along_axis(values[:, None, :], draws.integers(pairs, size=(studies, 400, pairs)), 2).mean(2)
    low, high = np.quantile(again, [0.025, 0.975], axis=1)
    assert ((low <= 1.0) & (high >= 1.0)).mean() < {2: 0.6, 3: 0.82, 5: 0.88}[pairs]


@pytest.mark.parametrize(("loss", "verdict"), [(0.0, "keeps"), (2.0, "loses")])
def test_verdicts_are_rarely_wrong_and_mostly_found(loss: float, verdict: str) -> None:
    """The margin is 1, five seeds: a plan at the margin gets each verdict by chance in one of 40 studies."""
    draws = np.random.default_rng(1)

    def share(true_loss: float) -> float:
        studies = draws.normal(true_loss, 0.4, (2000, 5)).tolist()
        verdicts = [judge(dict(enumerate(row)), dict.fromkeys(range(5), 0.0), 1.0, "lower").verdict for row in studies]
        return verdicts.count(verdict) / len(verdicts)  # type: ignore[arg-type]

    assert 0.015 < share(1.0) < 0.035
    assert share(loss) > 0.95
    assert share(2.0 - loss) == 0.0


# --- Correlations


def test_ranks_alone_matter_and_ties_share_theirs() -> None:
    assert spearman([1, 2, 3], [1, 10, 1000]) == 1.0
    assert spearman([1, 2, 3], [3, 2, -8]) == -1.0
    # By hand: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4.
    assert spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
    assert spearman([1, 1, 1], [1, 2, 3]) == 0.0


def test_a_clear_order_is_sure_and_chance_is_not() -> None:
    draws = random.Random(0)
    costs = [float(number) for number in range(12)]
    clear = cost_correlation(costs, [[cost + draws.gauss(0, 0.3) for _ in range(3)] for cost in costs])
    assert clear.value > 0.95
    assert clear.is_sure
    assert clear.low <= clear.value <= clear.high
    chance = cost_correlation(costs, [[draws.gauss(0, 1) for _ in range(3)] for _ in costs])
    assert not chance.is_sure
    assert chance.low < 0 < chance.high
    assert str(chance).count("to") == 1


def test_the_same_figures_give_the_same_interval() -> None:
    values = [[1.0, 2.0], [2.0, 1.0], [3.0, 3.0], [2.5, 4.0]]
    assert cost_correlation([1, 2, 3, 4], values) == cost_correlation([1, 2, 3, 4], values)


def test_seeds_that_disagree_about_the_order_make_it_unsure() -> None:
    costs = [1.0, 2.0, 3.0, 4.0, 5.0]
    falls = [[cost, -cost, cost] for cost in costs]
    assert cost_correlation(costs, falls).low < 0 < cost_correlation(costs, falls).value


def test_how_much_of_the_differences_seeds_make() -> None:
    draws = random.Random(0)
    alike = [[draws.gauss(0, 1) for _ in range(3)] for _ in range(200)]
    assert seed_share(alike) == pytest.approx(1, abs=0.25)
    assert seed_share([[plan + value / 10 for value in each] for plan, each in enumerate(alike)]) < 0.01
    assert seed_share([[1.0, 2.0], [1.0, 2.0]]) == float("inf")


def test_too_few_plans_are_refused() -> None:
    with pytest.raises(RunError, match=rf"takes at least {LEAST} plans"):
        cost_correlation([1, 2, 3], [[1.0], [2.0], [3.0]])


def test_pearson_sees_distances_where_spearman_sees_ranks() -> None:
    x, y = [1.0, 2.0, 3.0, 10.0], [1.0, 3.0, 2.0, 10.0]
    assert pearson(x, y) == pytest.approx(49 / 50)
    assert spearman(x, y) == pytest.approx(0.8)
    assert pearson(x, [1.0] * 4) == 0.0


# --- Groups in order, and a control


def test_a_trend_counts_pairs_of_different_groups() -> None:
    # By hand: 1 < 3, 1 < 2, 1 < 5, 4 < 5 are in order; 4 > 3, 4 > 2; 3 < 5, 2 < 5.
    result = trend([[1, 4], [3, 2], [5]])
    assert (result.concordant, result.pairs) == (6, 8)
    assert trend([[1], [1]]).concordant == 0.5
    assert not result.is_sure


def test_the_p_value_is_the_share_of_arrangements() -> None:
    # Two groups of two: of six arrangements one has all four pairs in order.
    assert trend([[1, 2], [3, 4]]).p_value == pytest.approx(1 / 6)
    assert trend([[3, 4], [1, 2]]).p_value == 1.0
    # Ten values in groups of 2, 6 and 2: one pair is out of order in two of the 1,260 arrangements.
    values = [[0.1, 0.2], [0.3, 0.4, 0.5, 0.6, 0.7, 0.9], [0.8, 1.0]]
    result = trend(values)
    assert (result.concordant, result.pairs) == (27, 28)
    assert result.p_value == pytest.approx(3 / 1260)
    assert result.is_sure


def test_many_arrangements_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [[1.0, 2.0, 3.0], [2.5, 3.5, 4.0], [5.0, 6.0, 4.5]]
    exact = trend(groups).p_value
    monkeypatch.setattr(significance, "ARRANGEMENTS", 1000)
    assert trend(groups).p_value == pytest.approx(exact, abs=0.005)
    assert trend(groups) == trend(groups)


def test_plans_are_paired_with_their_control_by_seed() -> None:
    control = {"0": 1.0, "1": 5.0, "2": 3.0}
    lower = [{seed: value - 0.1 - 0.01 * plan for seed, value in control.items()} for plan in range(6)]
    result = Difference.of_mean(lower, control)
    assert result.mean == pytest.approx(-0.125)
    assert result.pairs == 3  # seeds: six plans that share a control are no six pairs
    mixed = Difference.of_mean([{"0": 1.1, "1": 4.9, "7": 9.0}, {"0": 1.3, "1": 4.9}], control)
    assert (mixed.mean, mixed.pairs) == (pytest.approx(0.05), 2)  # seed 7 has no control
    assert not mixed.is_sure


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("better", ["higher", "lower"])
def test_values_that_are_no_numbers_decide_nothing(value: float, better: Literal["higher", "lower"]) -> None:
    judgement = judge({0: value, 1: 0.9, 2: 0.9}, {0: 0.9, 1: 0.9, 2: 0.901}, 0.009, better)
    assert judgement.verdict == "undecided"
    assert not judgement.is_better
    assert judgement.p_value == 1.0


def test_nothing_to_compare_is_a_sentence() -> None:
    with pytest.raises(RunError, match="2 values cannot be paired with 1"):
        Difference.of([1.0, 2.0], [1.0])
    with pytest.raises(RunError, match="better is 'max'"):
        judge({0: 1.0}, {0: 1.0}, 0.1, "max")  # type: ignore[arg-type]
    with pytest.raises(RunError, match="no seed was run"):
        Difference.of_mean([{"0": 1.0}], {"1": 1.0})
    with pytest.raises(RunError, match="at least two groups"):
        trend([[1.0, 2.0], []])
