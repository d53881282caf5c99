"""Levels and sets of formats."""

from __future__ import annotations

import pytest

from bitplan.errors import BitplanError
from bitplan.planners.assign.levels import FORMATS, PAPER, parse_level, resolve_formats


def test_the_paper_s_formats() -> None:
    high, low = PAPER.levels
    assert [str(low.activation), str(low.grad_activation)] == [
        "e4m3b4 nearest-away saturate",
        "e5m2b0 nearest-away special",
    ]
    assert low.weight is not None
    assert low.weight.eval == "off"  # evaluation uses the master weights
    assert low.grad_weight == high.grad_weight
    assert [high.bits("weight"), low.bits("weight"), low.bits("grad_weight")] == [16, 8, 16]
    assert (PAPER.grad_at, PAPER.decompose_loss, PAPER.needs_loss_scale) == ("consumer", True, True)


def test_formats_that_hardware_has_bring_their_scales() -> None:
    low = FORMATS["bf16/e4m3+e5m2"].levels[1]
    assert [str(low.activation), str(low.grad_activation), str(low.grad_weight)] == [
        *("e4m3 tensor", "e5m2 tensor", "bf16")
    ]
    assert not FORMATS["bf16/e4m3+e5m2"].needs_loss_scale
    assert FORMATS["bf16/mxfp8"].levels[1].bits("activation") == 8.25


@pytest.mark.parametrize(
    ("requests", "names", "wants"),
    [
        ({"formats": "bf16/8/4"}, ["bf16", "8", "4"], False),
        ({"low": "e4m3b4+e5m2b0", "high": "bf16"}, ["bf16", "e4m3b4+e5m2b0"], True),
        ({"low": "mxfp4"}, ["FP(6,9,0)", "mxfp4"], False),
        ({"levels": ["fp32", "16"]}, ["fp32", "16"], False),
    ],
)
def test_levels_of_one_s_own(requests: dict[str, str], names: list[str], wants: bool) -> None:
    result = resolve_formats(**requests)  # type: ignore[arg-type]
    assert [level.name for level in result.levels] == names
    assert result.needs_loss_scale is wants


def test_what_is_no_level_is_told() -> None:
    with pytest.raises(BitplanError, match="mantissa bits, not 4 and 9000"):
        parse_level("e4m9000")
    with pytest.raises(BitplanError, match="give formats, or levels"):
        resolve_formats("paper", low="8")
