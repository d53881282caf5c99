"""Imports go downwards only: a package imports packages below it, and nothing outside the lab imports the lab.

Imports inside functions are exempt: that is how `Attachment.memory()` reaches the analysis that is built on top of it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "bitplan"
#: Lowest first. Packages in one tuple may import each other.
LAYERS = (
    ("_version", "cluster", "errors", "extensions", "files", "machine", "progress", "significance", "tables"),
    ("numerics",),
    ("plans",),
    ("capture",),
    ("gemm",),
    ("runtime",),
    ("executions", "compiler"),
    ("analysis",),
    ("planners",),
    ("integrations",),
    ("lab", "cli"),
)
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}
#: Leaf modules that every layer may use: they import nothing of bitplan but errors.
LEAVES = {"compiler.tracing", "compiler.torch_private", "compiler.torch_patches"}
#: Violations that are still to be removed; a test fails if one of them is gone and still listed.
KNOWN: set[tuple[str, str]] = set()


def imported_modules(file: Path) -> Iterator[str]:
    """The modules of bitplan that `file` imports when it is imported itself, without the leading ``bitplan.``."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (name.name.removeprefix("bitplan.") for name in node.names if name.name.startswith("bitplan."))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "bitplan":
            module = str(node.module).removeprefix("bitplan").removeprefix(".")
            for name in node.names:
                submodule = f"{module}.{name.name}".removeprefix(".")
                yield submodule if (SOURCE / (submodule.replace(".", "/") + ".py")).exists() else module


def upward_imports() -> set[tuple[str, str]]:
    violations = set()
    for file in SOURCE.rglob("*.py"):
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        package = module.split(".")[0]
        if package in ("__init__", "__main__") or module in LEAVES:
            continue
        for target in imported_modules(file):
            if target and target not in LEAVES and LEVEL[target.split(".")[0]] > LEVEL[package]:
                violations.add((module, target))
    return violations


def test_every_package_has_a_layer() -> None:
    packages = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert packages - {"__init__", "__main__"} <= set(LEVEL)


def test_imports_go_downwards() -> None:
    assert upward_imports() <= KNOWN


def test_nothing_but_the_command_line_imports_the_lab() -> None:
    """Not even inside a function: the library works where the lab's own requirements are missing.

    The package itself names what the lab exports, for type checkers alone: tests/test_import.py holds that.
    """
    importers = set()
    for file in SOURCE.rglob("*.py"):
        module = file.relative_to(SOURCE)
        if module == Path("__init__.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if module.parts[0] not in ("lab", "cli") and any(f"{name}.".startswith("bitplan.lab.") for name in names):
                importers.add(str(module))
    assert importers == set()


def test_no_violation_is_listed_that_is_gone() -> None:
    assert upward_imports() >= KNOWN


@pytest.mark.parametrize("leaf", sorted(LEAVES))
def test_leaves_import_no_layer(leaf: str) -> None:
    file = SOURCE / (leaf.replace(".", "/") + ".py")
    if file.exists():
        assert {target.split(".")[0] for target in imported_modules(file)} <= {"errors"} | {"compiler"}
