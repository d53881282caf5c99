"""``sites.json``: what every tensor of a run got, and what rounding did to it."""

from __future__ import annotations

from typing import Any

import torch

from bitplan.attach import Attachment
from bitplan.plan import ROLES
from bitplan.train.session import Session


def planned_sites(run: Attachment) -> list[dict[str, Any]]:
    """Every tensor, and the operands that a rule speaks of."""
    return [
        {
            "site": each.site.name,
            "role": each.site.role,
            "format": each.words,
            "rule": each.where or f"rules[{each.rule}]" if each.rule is not None else None,
            "elements": each.site.elements,
        }
        for each in run.table()
        if each.site.role in ROLES or each.rule is not None
    ]


def measured_sites(session: Session) -> list[dict[str, Any]]:
    """The same at the end of a run, with what rounding did to the last batch: one more pass, without a step."""
    sites = planned_sites(session.run)
    if not session.run.plan.all_rules:
        return sites
    session.observe()
    session.step -= 1
    try:
        session.forward_backward()
        session.run.step()
        seen = session.run.stats()
    except torch.OutOfMemoryError:  # uncompiled it may take more than the run did, and what is here is not needed
        return sites
    finally:
        session.step += 1
    for site in sites:
        # Of several weights or results of one operation the record is the largest's, which is listed first.
        label, _, shown = site["site"].rpartition(":")
        found = seen.pop(f"{label}:{site['role']}", None) if "(" not in shown else None
        if found is not None and site["format"] is not None:
            site |= {"overflow": found.overflow, "underflow": found.underflow, "error": found.error}
    return sites
