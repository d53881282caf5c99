"""``bitplan demo``: the product's main job on built-in data. For now: the formats, as a table and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bitplan.cli.formats import format_record, print_table
from bitplan.cli.output import JsonOption, command_output, make_folder, write_file
from bitplan.names import NAMED
from bitplan.names import format as format_named
from bitplan.report.formats_picture import drawable_formats, formats_svg


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    folder: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the picture.")] = Path(
        "bitplan-demo"
    ),
    as_json: JsonOption = False,
) -> None:
    """Show what bitplan does, on built-in data: the formats as a table and a picture."""
    with command_output(as_json) as output:
        named = [format_named(name) for name in NAMED]
        picture = folder / "formats.svg"
        make_folder(folder)
        write_file(picture, formats_svg(drawable_formats(named)))
        output.document({"formats": [format_record(each) for each in named], "picture": picture})
        if not as_json:
            print_table(named, output.console)
            output.console.print(f"Every value of the small formats, drawn: {picture}", soft_wrap=True)
