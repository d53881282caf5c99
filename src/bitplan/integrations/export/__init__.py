"""Plans in the formats of other frameworks: :func:`export_plan`, or ``plan.export()`` and ``bitplan plan export``."""

from bitplan.integrations.export.export import EXPORT_FORMATS, Export, ExportFormat, export_plan
from bitplan.integrations.export.layers import Omission

__all__ = ["EXPORT_FORMATS", "Export", "ExportFormat", "Omission", "export_plan"]
