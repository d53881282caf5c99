"""The ten in three groups by what they save, and which one to take for a saving that is asked for.

The groups follow from the costs. Wolfe & Kyrillidis 2024 call them Large, Medium and Small by the size of the *saving*;
a summary that goes round uses these words the other way, for the cost. So here they are named by what they do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bitplan.errors import ScheduleError
from bitplan.schedules.base import ScheduleSummary
from bitplan.schedules.cyclic import DEFAULT_CYCLES
from bitplan.schedules.named import schedule

Group = Literal["high-saving", "balanced", "low-saving"]

#: Group -> its schedules, those first that fall before they grow.
GROUPS: dict[Group, tuple[str, ...]] = {
    "high-saving": ("RTH", "RR"),
    "balanced": ("CT", "LT", "ETV", "RTV", "CR", "LR"),
    "low-saving": ("ETH", "ER"),
}
#: Group -> the word of Wolfe & Kyrillidis.
PAPERS_WORDS: dict[Group, str] = {"high-saving": "Large", "balanced": "Medium", "low-saving": "Small"}

GROUPS_EXPLAINED = (
    "high-saving, balanced and low-saving are the papers' Large, Medium and Small, which mean the size of the saving "
    "(not of the cost, as some summaries have it)."
)


def group_of(name: str) -> Group | None:
    """The group of one of the ten; None for any other schedule."""
    return next((group for group, names in GROUPS.items() if name in names), None)


@dataclass(frozen=True)
class Recommendation:
    """A schedule for a saving, and why that one."""

    summary: ScheduleSummary
    reason: str

    @property
    def saving(self) -> float:
        return 1 - self.summary.relative_cost


def recommend(saving: float, low: int, high: int, total: int = 64_000, cycles: int = DEFAULT_CYCLES) -> Recommendation:
    """The schedule that keeps the most precision and still saves that share of the bit operations of static `high`.

    Two findings decide: accuracy goes with cost, so no more is saved than was asked for; and low precision early does
    lasting damage, so that of schedules in one group those are taken that begin at the top, and of these the one that
    spends the most steps there.

    >>> recommend(0.35, 3, 8).summary.name, recommend(0.5, 3, 8).summary.name
    ('RTV', 'RTH')
    """
    if not 0 <= saving < 1:
        raise ScheduleError(f"a saving of {saving:g} does not exist: give a share of 0 to 1, such as 0.4.")
    found = {
        name: schedule(name, low=low, high=high, cycles=cycles).summary(total)
        for names in GROUPS.values()
        for name in names
    }
    able = [name for name, summary in found.items() if 1 - summary.relative_cost >= saving]
    if not able:
        best = max(found.values(), key=lambda summary: 1 - summary.relative_cost)
        raise ScheduleError(
            f"no schedule of {low}-{high} bits saves {saving:.0%}: {best.name} saves most, "
            f"{1 - best.relative_cost:.0%}; lower the lowest bits, if a range test allows."
        )
    group = next(group for group in reversed(GROUPS) if any(name in able for name in GROUPS[group]))
    members = [name for name in GROUPS[group] if name in able]
    first = [name for name in members if found[name].first == high] or members
    chosen = max(first, key=lambda name: found[name].share_at_max)
    return Recommendation(found[chosen], _reason(saving, group, found[chosen], found, high))


def _reason(saving: float, group: Group, chosen: ScheduleSummary, found: dict[str, ScheduleSummary], high: int) -> str:
    words = [
        f"{chosen.name} saves {1 - chosen.relative_cost:.0%} of the bit operations of static {high} bits",
        f"of the groups that save {saving:.0%} or more the {group} one saves least, and accuracy goes with cost",
    ]
    if chosen.first == high:
        words.append("it begins at the top, and low precision early does lasting damage")
    sentence = f"{words[0]}: {'; '.join(words[1:])}."
    below = [name for names in GROUPS.values() for name in names if 1 - found[name].relative_cost < saving]
    if below:
        near = max(below, key=lambda name: 1 - found[name].relative_cost)
        sentence += f" Just short of that, {near} saves {1 - found[near].relative_cost:.0%}."
    return sentence
