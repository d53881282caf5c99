"""The page of ``bitplan schedules --plot``."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.report.page import schedules_page_html
from bitplan.plans.schedules import TEN, schedule

pytest.importorskip("plotly")


def made(*names: str) -> list[Any]:
    return [schedule(name, low=3, high=8) for name in names]


def test_every_schedule_has_a_chart_with_words_and_a_table() -> None:
    page = schedules_page_html(made(*TEN), 64_000)
    result = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert result is not None
    drawings = json.loads(result[1])["drawings"]
    assert len(drawings) == len(TEN)
    assert page.count('role="img"') == page.count("Data as a table") == len(TEN)
    text = html.unescape(page)
    assert "RR costs 39.9% and ETH 82.2% of the bit operations" in text or "ER 82.2%" in text
    for name in TEN:
        assert f'aria-label="Chart: {name} 3-8 x8. From ' in text
    assert "at the top for 1.1% of the steps; relative cost 0.399." in text
    assert text.count("the size of the saving") == 1


def test_one_alone_is_as_wide_as_the_page() -> None:
    page = schedules_page_html(made("CR"), 64_000)
    assert page.count('<figure class="wide">') == 1
    assert "CR 3-8 x8 costs 63.3% of the bit operations of 8 bits throughout, over 64,000 steps." in page
    assert "<td" in page
    many = schedules_page_html([schedule("CR", low=3, high=8, cycles=32)], 64_000)
    assert "changes further" in many


@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_draws_it_in_both_themes(browser: Any, tmp_path: Path, dark: bool) -> None:
    file = tmp_path / "schedules.html"
    file.write_text(schedules_page_html(made("CR", "RTH"), 640))
    browser.open(file, width=390, dark=dark)
    assert browser.complaints == []
    assert browser.run("document.querySelectorAll('.chart .scatterlayer path.js-line').length") == 2
    colour = browser.run("getComputedStyle(document.querySelector('#s0 path.js-line')).stroke")
    assert colour == ("rgb(90, 180, 236)" if dark else "rgb(0, 104, 168)")
    assert browser.run("document.documentElement.scrollWidth") == 390
