"""``bitplan env``: what a bug report needs."""

from __future__ import annotations

from typing import Any

import typer

from bitplan.cli.output import JsonOption, Output, command_output
from bitplan.files import byte_text
from bitplan.lab.train.config import environment


def register(app: typer.Typer) -> None:
    app.command("env")(env)


def env(as_json: JsonOption = False) -> None:
    """Print versions, processor, GPUs and installed packages, for a bug report."""
    with command_output(as_json) as output:
        facts = environment()
        output.document(facts)
        if not as_json:
            _print(facts, output)


def _print(facts: dict[str, Any], output: Output) -> None:
    cpu = facts["cpu"]
    gpus = [f"{gpu['name']} ({byte_text(gpu['memory'])}, capability {gpu['capability']})" for gpu in facts["gpus"]]
    packages = facts["packages"]
    lines = {
        "bitplan": facts["bitplan"],
        "python": f"{facts['python']} on {facts['system']}",
        "cpu": f"{cpu['name']}, {cpu['cores']} cores, {cpu['threads']} threads, torch uses {cpu['capability']}",
        "cpu flags": " ".join(cpu["flags"]) or "unknown",
        "gpu": ", ".join(gpus) or "none",
        "cuda": facts["cuda"] or "none (torch without CUDA)",
        "variables": " ".join(f"{name}={value}" for name, value in facts["variables"].items()) or "none set",
        "packages": ", ".join(f"{name} {version}" for name, version in packages.items() if version),
        "not installed": ", ".join(name for name, version in packages.items() if not version) or "-",
    }
    for name, text in lines.items():
        output.console.print(f"{name + ':':<15}{text}")
