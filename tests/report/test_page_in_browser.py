"""The page in a headless Chromium: it draws, sorts, fits a telephone, follows the theme, and says nothing wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bitplan.lab.report.page import page_html
from bitplan.lab.report.summaries import Report

WriteRun = Callable[..., Path]
EVIL = "<script>window.evil=1</script></script><img src=x onerror='window.evil=1'>"
CHARTS = ".experiment .chart"
SITES = [
    {"site": f"layer{number}.a.long.module.path/conv2d.0:{role}", "role": role, "format": "int8 tensor", "rule": "r"}
    | {"error": 0.01 * (number + 1)}
    for number in range(12)
    for role in ("weight", "activation", "grad_activation", "grad_weight", "fprop.x", "fprop.w", "dgrad.dy")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture
def page(write_run: WriteRun, folder: Path) -> Path:
    """A page with all that a page can have; written once."""
    file = folder / "report.html"
    if file.exists():
        return file
    for seed in range(2):
        write_run(folder / f"fp32-{seed}", seed=seed, value=0.97 + 0.01 * seed)
        write_run(folder / f"a-{seed}", plan="a", seed=seed, value=0.96, cost=0.1, bits=8.0, memory=1e6, sites=SITES)
        odd = {"plan": "lost", "value": None, "status": "diverged", "cost": 0.01, "losses": (2.3, float("nan"))}
        write_run(folder / f"lost-{seed}", seed=seed, **odd)
    write_run(folder / "evil", plan=EVIL, settings={EVIL: EVIL, "steps": 30}, status="stopped", sites=SITES[:3])
    write_run(folder / "w", plan="W" * 60, value=0.3, cost=0.5, command="bitplan train " + "x" * 300)
    file.write_text(page_html(Report.of([folder])))
    return file


def test_charts_are_drawn_and_the_console_is_silent(browser: Any, page: Path) -> None:
    browser.open(page)
    assert browser.complaints == []
    drawn = browser.run(
        f"[...document.querySelectorAll('{CHARTS}')].map(c => c.querySelectorAll('svg.main-svg').length)"
    )
    assert len(drawn) == 7
    assert min(drawn) >= 1
    points = browser.run("document.querySelectorAll('#e0-0 .scatterlayer .point').length")
    assert points >= 5
    assert browser.run("document.querySelectorAll('#e0-5 .bars path, #e0-5 .barlayer path').length") > 5
    assert browser.run("document.querySelectorAll('#e0-sites .hm image').length") == 1
    assert browser.run("document.querySelectorAll('#e0-0 .errorbar').length") >= 1


def test_nothing_is_fetched_and_no_name_is_run(browser: Any, page: Path) -> None:
    browser.open(page)
    assert {request.partition(":")[0] for request in browser.requests} <= {"file", "data"}
    assert [request for request in browser.requests if request.startswith("file")] == [page.resolve().as_uri()]
    assert browser.run("typeof window.evil") == "undefined"
    assert EVIL in browser.run("document.querySelector('.legend').textContent")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows(browser: Any, page: Path, width: int, dark: bool) -> None:
    browser.open(page, width=width, dark=dark)
    assert browser.complaints == []
    assert browser.run("document.documentElement.scrollWidth") == width
    outside = browser.run(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('.frame, .scroll, svg') && "
        f"e.getBoundingClientRect().right > {width} + 0.5).map(e => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    charts = browser.run(f"[...document.querySelectorAll('{CHARTS}')].map(c => c.scrollWidth - c.clientWidth)")
    assert max(charts) <= 0


def test_the_theme_follows_the_system_and_the_button(browser: Any, page: Path) -> None:
    def ground() -> str:
        return str(browser.run("getComputedStyle(document.body).backgroundColor"))

    def marker() -> str:
        return str(browser.run("document.querySelector('#e0-5 .barlayer path').style.fill"))

    browser.open(page)
    light = ground(), marker()
    browser.prefer(dark=True)
    browser.wait_for("document.documentElement.dataset.theme === 'dark'")
    dark = ground(), marker()
    assert all(first != second for first, second in zip(light, dark, strict=True))
    ink = browser.run("getComputedStyle(document.querySelector('#e0-0 .xtick text')).fill")
    browser.run("document.getElementById('theme').click()")
    assert (ground(), marker()) == light
    assert browser.run("getComputedStyle(document.querySelector('#e0-0 .xtick text')).fill") != ink
    assert browser.complaints == []


def test_tables_sort_by_press_and_by_key(browser: Any, page: Path) -> None:
    browser.open(page)
    heads = browser.run("[...document.querySelector('table[data-sorts]').tHead.rows[0].cells].map(c => c.textContent)")
    column = heads.index("bit operations")
    cells = (
        f"[...document.querySelector('table[data-sorts]').tBodies[0].rows].map(r => r.cells[{column}].dataset.order)"
    )
    head = f"document.querySelector('table[data-sorts]').tHead.rows[0].cells[{column}]"
    browser.run(f"{head}.querySelector('button').click()")
    rising = [float(value) for value in browser.run(cells) if value]
    assert rising == sorted(rising)
    assert browser.run(f"{head}.getAttribute('aria-sort')") == "ascending"
    browser.run(f"{head}.querySelector('button').focus()")
    browser.press("Enter")
    assert [float(value) for value in browser.run(cells) if value] == rising[::-1]
    assert browser.run(f"{head}.getAttribute('aria-sort')") == "descending"
    assert browser.run("document.querySelectorAll('table[data-sorts] [aria-sort=descending]').length") == 1
    by_metric = "[...document.querySelector('table[data-sorts]').tBodies[0].rows].map(r => r.cells[1].dataset.order)"
    for _ in range(2):  # what has no value is last, up and down
        browser.run(
            "document.querySelector('table[data-sorts]').tHead.rows[0].cells[1].querySelector('button').click()"
        )
        assert browser.run(by_metric)[-1] == ""


def test_names_sort_as_texts(browser: Any, page: Path) -> None:
    browser.open(page)
    browser.run("document.querySelector('table[data-sorts]').tHead.rows[0].cells[0].querySelector('button').click()")
    names = browser.run(
        "[...document.querySelector('table[data-sorts]').tBodies[0].rows].map(r => r.cells[0].textContent)"
    )
    assert names.index("a") < names.index("fp32") < names.index("lost")


def test_the_legend_hides_a_plan_in_every_chart(browser: Any, page: Path) -> None:
    browser.open(page)
    count = "document.querySelectorAll('#e0-2 .scatterlayer .trace').length"
    before = browser.run(count)
    browser.run("document.querySelector('.entry').click()")
    browser.wait_for(f"{count} < {before}")
    assert browser.run("document.querySelector('.entry').getAttribute('aria-pressed')") == "false"
    browser.run("document.querySelector('.entry').click()")
    browser.wait_for(f"{count} === {before}")
    assert browser.complaints == []


def test_the_heat_map_shows_the_chosen_plan_and_measure(browser: Any, page: Path) -> None:
    browser.open(page)
    texts = "[...document.querySelectorAll('#e0-sites .heatmap-label text')].map(t => t.textContent)"
    assert set(browser.run(texts)) == {"int8"}
    change = (
        "const s = document.getElementById('e0-sites-measure'); s.value = 'error'; s.dispatchEvent(new Event('change'))"
    )
    browser.run(f"(() => {{ {change} }})()")
    browser.wait_for(f"{texts}.includes('12.0%')")
    assert browser.complaints == []


def test_one_run_makes_a_page_too(browser: Any, write_run: WriteRun, tmp_path: Path) -> None:
    file = tmp_path / "one.html"
    file.write_text(page_html(Report.of([write_run(tmp_path / "a")])))
    browser.open(file, width=390)
    assert browser.complaints == []
    assert browser.run(f"document.querySelectorAll('{CHARTS} svg.main-svg').length") >= 6


def test_a_hundred_plans_fit(browser: Any, write_run: WriteRun, tmp_path: Path) -> None:
    for number in range(100):
        write_run(tmp_path / f"{number:03}", plan=f"plan-{number}", cost=1 / (number + 1), value=0.5 + number / 300)
    (tmp_path / "report.html").write_text(page_html(Report.of([tmp_path])))
    browser.open(tmp_path / "report.html", width=390)
    assert browser.complaints == []
    assert browser.run("document.documentElement.scrollWidth") == 390
