"""The page in a headless Chromium: it draws, sorts, fits a telephone, follows the theme, and says nothing wrong."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
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
    assert len(drawn) == 8
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


def test_the_axis_shows_plans_that_work_and_on_request_all(browser: Any, page: Path) -> None:
    browser.open(page)
    low = "document.getElementById('e0-0').layout.yaxis.range[0]"
    assert browser.run(low) > 80
    browser.run("document.querySelector('.zoom[data-for=e0-0]').click()")
    browser.wait_for(f"{low} < 20")
    browser.run("document.querySelector('.zoom[data-for=e0-0]').click()")
    browser.wait_for(f"{low} > 80")
    assert browser.complaints == []


def test_a_filter_leaves_the_plans_that_fit(browser: Any, page: Path) -> None:
    browser.open(page)
    rows = "[...document.querySelector('table[data-sorts]').tBodies[0].rows].filter(r => !r.hidden).length"
    everything = browser.run(rows)
    browser.run(
        "(() => { const f = document.querySelector('.filter'); f.value = 'FP3'; "
        "f.dispatchEvent(new Event('input')) })()"
    )
    assert (everything, browser.run(rows)) == (5, 1)
    assert browser.run("[...document.querySelectorAll('.entry')].filter(e => e.offsetParent).length") == 1
    browser.wait_for("document.querySelectorAll('#e0-2 .scatterlayer .trace').length === 3")  # two seeds and their mean
    browser.run(
        "(() => { const f = document.querySelector('.filter'); f.value = ''; f.dispatchEvent(new Event('input')) })()"
    )
    assert browser.run(rows) == everything
    assert browser.complaints == []


#: The contrast of every text on the page with what stands behind it, as WCAG computes it: those below 4.5.
PALE = """(() => {
  const channels = (text) => text.match(/[\\d.]+/g).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const luminance = (c) => c.slice(0, 3).map((v) => linear(v / 255))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = channels(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const pale = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest('.heatmap-label, script, style, .unseen')) continue;
    const style = getComputedStyle(e);
    const ink = channels(e instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(ink), luminance(behind(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) pale.push([e.textContent.slice(0, 40), ratio]);
  }
  return pale;
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_is_legible(browser: Any, page: Path, dark: bool) -> None:
    browser.open(page, dark=dark)
    assert browser.run(PALE) == []
    browser.run("document.querySelector('.entry').click()")
    assert browser.run(PALE) == []
    browser.run("document.querySelector('.entry').style.color = '#777c80'")
    assert len(browser.run(PALE)) == 1  # the test can fail


def test_a_live_page_loads_itself_again_and_keeps_what_was_chosen(
    browser: Any, write_run: WriteRun, tmp_path: Path
) -> None:
    for plan in (None, "int8"):
        write_run(tmp_path / str(plan), plan=plan, status="unfinished")
    file = tmp_path / "live.html"
    file.write_text(page_html(Report.of([tmp_path]), refresh=0.5))
    browser.open(file)
    browser.run("document.querySelector('.filter').value = 'int'")
    deadline = time.monotonic() + 30
    loaded_again = "performance.getEntriesByType('navigation')[0].type === 'reload'"
    is_there = False
    while not is_there and time.monotonic() < deadline:
        with suppress(AssertionError):  # the page of a moment ago is gone
            is_there = browser.run(f"{loaded_again} && document.documentElement.dataset.drawn === 'true'")
    assert is_there
    assert browser.run("document.querySelector('.filter').value") == "int"
    assert browser.run("[...document.querySelectorAll('.entry')].filter(e => e.offsetParent).length") == 1
    assert browser.complaints == []


#: Boxes of the names beside points, and of the points.
NAMES = """[...document.querySelectorAll('#e0-0 .textpoint text')].filter((t) => t.textContent).map((t) => {
  const { left, right, top, bottom } = t.getBoundingClientRect();
  return { name: t.textContent, left, right, top: top + 3, bottom: bottom - 3 };
})"""
POINTS = """[...document.querySelectorAll('#e0-0 .scatterlayer path.point')].map((p) => p.getBoundingClientRect())
  .filter((box) => box.width > 9).map(({ left, right, top, bottom }) => ({ left, right, top, bottom }))"""


def overlap(a: dict[str, float], b: dict[str, float]) -> bool:
    return a["left"] < b["right"] and b["left"] < a["right"] and a["top"] < b["bottom"] and b["top"] < a["bottom"]


@pytest.mark.parametrize("width", [390, 1280])
def test_names_beside_points_overlap_neither_each_other_nor_points(
    browser: Any, write_run: WriteRun, tmp_path: Path, width: int
) -> None:
    write_run(tmp_path / "fp32", value=0.97)
    for number in range(14):
        plan = f"a plan with a long name, {number}"
        write_run(tmp_path / str(number), plan=plan, cost=0.04 + 0.01 * (number % 3), value=0.9 + 0.005 * number)
    file = tmp_path / "page.html"
    file.write_text(page_html(Report.of([tmp_path])))
    browser.open(file, width=width)
    names, points = browser.run(NAMES), browser.run(POINTS)
    assert len(points) == 15
    assert 3 <= len(names) < 15  # there is no room for all
    assert "fp32" in {name["name"] for name in names}
    assert not any(overlap(first, second) for number, first in enumerate(names) for second in names[:number])
    assert not any(overlap(name, point) for name in names for point in points)
    assert browser.complaints == []


def test_rows_of_heat_maps_differ_on_a_telephone(browser: Any, page: Path) -> None:
    browser.open(page, width=390)
    rows = browser.run("document.getElementById('e0-sites').layout.yaxis.ticktext")
    assert len(set(rows)) == len(rows) == 12
    assert max(map(len, rows)) <= 21
