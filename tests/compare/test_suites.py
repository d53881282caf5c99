from __future__ import annotations

import pytest

from bitplan.errors import RunError
from bitplan.lab.compare import SUITES, find_suite
from bitplan.lab.compare.compare import slug
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan


@pytest.mark.parametrize("name", list(SUITES))
def test_every_plan_of_a_suite_exists_under_a_name_of_its_own(name: str) -> None:
    suite = find_suite(name)
    assert suite.description
    labels = [choice.label for choice in suite.choices]
    assert len({slug(label) for label in labels}) == len(labels)
    assert all(choice.plan is None or isinstance(find_plan(choice.plan), Plan) for choice in suite.choices)


def test_the_static_suite_goes_from_fp32_to_a_failing_two_bits() -> None:
    labels = [choice.label for choice in find_suite("static").choices]
    assert labels == ["FP32", "BF16", "8 bits", "6 bits", "4 bits", "2 bits"]


def test_a_suite_that_does_not_exist() -> None:
    with pytest.raises(RunError, match=r"there is no suite 'statik'; did you mean static\?"):
        find_suite("statik")
