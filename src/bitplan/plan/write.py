"""Plain values to YAML that people like to read and that :mod:`bitplan.plan.tree` reads back unchanged."""

from __future__ import annotations

from typing import Any

import yaml

from bitplan.plan.tree import NUMBER


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 (other tools) or our reading of it (``1e-2``) would not take for a text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # Outside double quotes PyYAML folds some line breaks (U+0085 among them) into spaces.
    style = '"' if text and text.splitlines() != [text] else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))


def yaml_text(data: dict[str, Any]) -> str:
    """One YAML document; the innermost mappings and lists stand on one line, as in ``{match: fc, keep: true}``."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=110)
    return text
