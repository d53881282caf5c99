"""What the files around the package promise about it."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.resources import files
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
import yaml

from bitplan._version import __version__

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirement_names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=!~ \[]", requirement)[0].lower() for requirement in requirements}


def pinned_names() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    return requirement_names(pins)


def test_every_requirement_of_the_base_lab_dev_and_docs_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    expected = requirement_names(PROJECT["dependencies"] + extras["lab"] + extras["dev"] + extras["docs"])
    assert expected - pinned_names() == set()


def test_the_citation_has_the_version_of_the_package_and_its_three_papers() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    papers = {identifier["value"] for paper in citation["references"] for identifier in paper["identifiers"]}
    assert papers == {"arXiv:2403.02243", "arXiv:2301.13464", "arXiv:2408.02897"}


def test_a_source_distribution_is_complete(tmp_path: Path) -> None:
    """It holds every tracked file but those of the repository itself."""
    pytest.importorskip("setuptools", "77", reason="the build backend")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git repository")
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    for name in tracked:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree" / name)
    program = "import setuptools.build_meta as backend, sys; backend.build_sdist(sys.argv[1])"
    made = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=tmp_path / "tree",
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr[-2000:]
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    missing = [name for name in tracked if name not in packed and not name.startswith((".github/", ".gitignore"))]
    assert missing == []


def release_script() -> Any:
    loader = SourceFileLoader("release", str(ROOT / ".ci" / "release"))
    module = module_from_spec(spec_from_loader("release", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    return module


def test_the_long_description_of_a_release_has_absolute_links_that_lead_to_files() -> None:
    script, address = release_script(), "https://example.org/owner/bitplan"
    text = script.with_absolute_links((ROOT / "README.md").read_text(), address, __version__)
    targets = [target for _, _, target in script.LINK.findall(text)]
    assert len(targets) > 30
    assert all(target.startswith("https://") for target in targets)
    beginning = f"{address}/blob/v{__version__}/"
    own = [target.removeprefix(beginning).partition("#")[0] for target in targets if target.startswith(beginning)]
    assert len(own) > 30
    assert all((ROOT / path).exists() for path in own)
    picture = script.with_absolute_links("![a](docs/images/report.png) [b](https://a.b/c) [c](#d)", address, "1")
    assert picture == f"![a]({address}/raw/v1/docs/images/report.png) [b](https://a.b/c) [c](#d)"


def test_a_release_names_its_project() -> None:
    text = (ROOT / "pyproject.toml").read_text() + release_script().project_urls("https://example.org/b", __version__)
    urls = tomllib.loads(text)["project"]["urls"]
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues"}
    for url in urls.values():
        path = url.partition(f"/blob/v{__version__}/")[2]
        assert not path or (ROOT / path).is_file()


def test_the_package_says_that_it_is_typed() -> None:
    assert (files("bitplan") / "py.typed").is_file()


@pytest.mark.parametrize("target", ["demo", "test", "wheel-check", "release", "bench", "docs", "clean"])
def test_make_knows_its_targets_and_pins_what_it_installs(target: str) -> None:
    planned = subprocess.run(
        ["make", "--dry-run", "VENV=no-such-venv", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    installs = [line for line in planned.splitlines() if "pip install" in line]
    assert bool(installs) == (target != "clean")
    assert all("-c constraints.txt" in line for line in installs)
