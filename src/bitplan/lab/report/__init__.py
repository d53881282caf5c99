"""Pictures and pages that bitplan writes: self-contained files, no network, and only what their data says."""

from bitplan.lab.report.summaries import Experiment, PlanSummary, Report

__all__ = ["Experiment", "PlanSummary", "Report"]
