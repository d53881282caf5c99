"""Colours, signs and lines that tell plans apart: for colour-blind readers too, on light and on dark ground.

The hues are those of Okabe & Ito, made darker for a light ground and lighter for a dark one; a plan also has a sign
and a kind of line of its own. Figures are drawn in the light colours, and the page exchanges them for their dark
partners.
"""

from __future__ import annotations

from dataclasses import dataclass

#: (light, dark), for what is the reference.
NEUTRAL = ("#3f4756", "#d5dae3")
#: (light, dark), in the order plans get them.
HUES = (
    ("#0068a8", "#5ab4ec"),
    ("#007f5c", "#2fc79a"),
    ("#b06a00", "#f0b040"),
    ("#c2410c", "#ff8a5c"),
    ("#9b3f78", "#e293c3"),
    ("#5b4bb5", "#a99cf5"),
    ("#6b6f00", "#cfd24a"),
)
#: (light, dark), for classes of tensors: apart from those of plans, and told apart by lightness alone.
CLASSES = (
    ("#274b7a", "#7fb0ee"),
    ("#4f8fc4", "#4a7fc0"),
    ("#8fc1d9", "#b9d3ee"),
    ("#c7a76c", "#d9bd86"),
    ("#8a8f99", "#8a94a3"),
    ("#5e6b4e", "#a9b894"),
)
SIGNS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "hexagon", "star")
LINES = ("solid", "dash", "dot", "dashdot", "longdash")

#: The same for a legend that is no chart: SVG paths in a box of 12, and SVG dashes.
_SIGN_PATHS = {
    "circle": "M6 1a5 5 0 1 1 0 10a5 5 0 1 1 0-10z",
    "square": "M1.5 1.5h9v9h-9z",
    "diamond": "M6 .3L11.7 6L6 11.7L.3 6z",
    "triangle-up": "M6 .8L11.6 10.5H.4z",
    "triangle-down": "M6 11.2L.4 1.5H11.6z",
    "pentagon": "M6 .6L11.4 4.5L9.3 10.9H2.7L.6 4.5z",
    "hexagon": "M6 .4L10.9 3.2V8.8L6 11.6L1.1 8.8V3.2z",
    "star": "M6 .4L7.5 4.2L11.6 4.5L8.4 7.1L9.5 11.1L6 8.9L2.5 11.1L3.6 7.1L.4 4.5L4.5 4.2z",
}
_DASHES = {"solid": "none", "dash": "5 3", "dot": "1.6 2.4", "dashdot": "5 2 1.6 2", "longdash": "8 3"}


@dataclass(frozen=True)
class Style:
    """How one plan is drawn everywhere."""

    colour: str
    sign: str
    line: str


def plan_styles(references: list[bool]) -> list[Style]:
    """A style for each plan, in order; what is the reference gets the neutral colour."""
    styles, number = [], 0
    for is_reference in references:
        if is_reference:
            styles.append(Style(NEUTRAL[0], SIGNS[0], "solid"))
            continue
        # 7 hues and 5 lines make 35 plans that differ in what lines show, and 56 with 8 signs.
        line = LINES[number % len(LINES)]
        styles.append(Style(HUES[number % len(HUES)][0], SIGNS[(number + 1) % len(SIGNS)], line))
        number += 1
    return styles


def sign_svg(style: Style) -> str:
    """A plan's line and sign as a small picture in the page's current colour."""
    return (
        '<svg class="sample" width="34" height="12" viewBox="0 0 34 12" aria-hidden="true">'
        f'<path d="M0 6H34" stroke="currentColor" stroke-width="2" stroke-dasharray="{_DASHES[style.line]}"/>'
        f'<path d="{_SIGN_PATHS[style.sign]}" transform="translate(11 0)" fill="currentColor"/></svg>'
    )


def class_colour(number: int) -> str:
    return CLASSES[number % len(CLASSES)][0]


def dark_partners() -> dict[str, str]:
    """Light colour -> its partner on dark ground."""
    return dict((NEUTRAL, *HUES, *CLASSES))
