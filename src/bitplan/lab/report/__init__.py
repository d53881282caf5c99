"""Pictures and pages that bitplan writes: self-contained files, no network, and only what their data says."""

from bitplan.lab.report.formats_picture import formats_picture
from bitplan.lab.report.summaries import Experiment, PlanSummary, Report

__all__ = ["Experiment", "PlanSummary", "Report", "formats_picture"]
