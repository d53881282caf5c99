"""What the README and the pages beside it show is so: examples run, commands exist, figures were measured."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import bitplan
from bitplan.cli.app import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FORMATS = (ROOT / "docs" / "formats.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


(EXAMPLE,) = blocks(README, "python")
PACKING, NAMES, SCALES = blocks(FORMATS, "python")


# Examples.


def test_the_example_trains_under_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    planned: dict[str, Any] = {}
    exec(EXAMPLE, planned)
    shown = capsys.readouterr().out
    assert "0/linear.0:weight: e3m2" in shown
    assert "GBitOPs" in shown
    plain: dict[str, Any] = {}
    without = EXAMPLE.replace("bp.attach(model, plan, example=batch)", "bp.attach(model, bp.Plan(), example=batch)")
    assert without != EXAMPLE
    exec(without, plain)
    assert len(planned["losses"]) == len(plain["losses"]) == 20
    differences = [abs(one - other) for one, other in zip(planned["losses"], plain["losses"], strict=True)]
    assert all(difference > 1e-6 for difference in differences)
    assert max(differences) < 0.1
    assert planned["losses"][-1] < planned["losses"][0]


def test_packing_example(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    exec(PACKING, {})
    (promised,) = re.findall(r"print\(p\.nbytes\) +# (\d+)", PACKING)
    assert capsys.readouterr().out == f"{promised}\n"


def test_format_example() -> None:
    first, second, third = NAMES.splitlines()
    names: dict[str, Any] = {"bitplan": bitplan}
    exec(first, names)
    shown, promised = second.split("#")
    assert eval(shown, names) == eval(promised.strip())
    assert len(eval(third.split("#")[0], names)) == 255


def test_scale_examples() -> None:
    *statements, size = SCALES.splitlines()
    names: dict[str, Any] = {"bitplan": bitplan, "torch": torch}
    exec("\n".join(statements), names)
    shown, promised = size.split("# ")
    assert eval(shown, names) == int(promised.partition(":")[0])


@pytest.mark.parametrize("mode", ["nearest", "nearest-away", "toward-zero", "stochastic"])
def test_rounding_modes_of_the_table_exist(mode: str) -> None:
    assert f'`"{mode}"`' in FORMATS
    assert bitplan.quantize(torch.ones(3), "e4m3", rounding=mode, seed=0).tolist() == [1.0] * 3


def test_the_example_of_the_start_page_trains() -> None:
    (example,) = blocks((ROOT / "docs" / "index.md").read_text(), "python")
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(example, names)
    assert type(names["model"]) is torch.nn.Sequential
    assert names["run"].cost().gbitops > 0


def test_the_example_of_costs_prices_resnet20(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks((ROOT / "docs" / "cost.md").read_text(), "python")
    exec(example, {})
    figures = re.search(r"GBitOPs +(\S+) +(\S+)", capsys.readouterr().out)
    assert figures is not None
    planned, fp32 = (float(figure.replace(",", "")) for figure in figures.groups())
    assert planned < fp32 / 10


# Commands.

GROUP: Any = typer.main.get_command(app)


def commands_of(group: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command by its words."""
    found: dict[tuple[str, ...], Any] = {}
    for name, command in group.commands.items():
        words = (*path, name)
        found.update(commands_of(command, words) if hasattr(command, "commands") else {words: command})
    return found


COMMANDS = commands_of(GROUP)
SHOWN = [
    (page, line)
    for page in ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
    for block in blocks((ROOT / page).read_text(), "sh")
    for line in block.splitlines()
    if line.startswith("bitplan ")
]


def words_of(arguments: list[str]) -> tuple[str, ...]:
    return next(words for words in COMMANDS if tuple(arguments[: len(words)]) == words)


@pytest.mark.parametrize(("page", "line"), SHOWN)
def test_every_command_shown_exists_and_takes_what_it_is_given(page: str, line: str) -> None:
    arguments = shlex.split(line, comments=True)[1:]
    words = words_of(arguments)
    # Parsed as the command line would, and not run.
    COMMANDS[words].make_context(" ".join(words), arguments[len(words) :])


def test_the_readme_has_every_command() -> None:
    shown = {words_of(shlex.split(line, comments=True)[1:]) for page, line in SHOWN if page == "README.md"}
    assert shown == set(COMMANDS)


# Figures.


def measured(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def row(start: str, after: str = "") -> list[str]:
    """The cells of the README's first table row that starts so, after a text."""
    text = README[README.index(after) :]
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip(" *") for cell in line.strip("|").split("|")[1:]]


@pytest.mark.parametrize(
    ("name", "start", "after", "variant"),
    [
        ("attach-h200.json", "one H200, ResNet-50, batch 256, BF16 autocast", "", "unscaled"),
        ("attach-h200.json", "the same, empty plan", "| one H200", "empty plan"),
        ("attach-cpu.json", "two EPYC cores, ResNet-20, batch 128", "", "unscaled"),
        ("attach-cpu.json", "the same with a scale per tensor", "", "tensor-scaled"),
        ("attach-cpu.json", "the same, empty plan", "| two EPYC", "empty plan"),
    ],
)
def test_the_price_of_attaching_was_measured(name: str, start: str, after: str, variant: str) -> None:
    ratios = {each["mode"]: each["ratio"] for each in measured(name)["rows"] if each["variant"] == variant}
    assert row(start, after)[:2] == [f"{ratios['eager']:.2f}", f"{ratios['compiled']:.2f}"]


MEMORY = {
    "ResNet-50, 256 images of 224x224, SGD: ": "memory-resnet50-h200.json",
    "MobileNet-v2, the same: ": "memory-mobilenet-v2-imagenet-h200.json",
    "GPT, 12 layers of 1024, 32 x 1024 bytes, AdamW: ": "memory-gpt-1024-bytes-h200.json",
}
VARIANTS = {
    "BF16": "bf16",
    "BF16, every block checkpointed": "bf16-checkpointed",
    "BF16, aggressive recomputation": "bf16-aggressive",
    "BF16, torchao's 8-bit AdamW": "bf16-adamw8bit",
    "**packed**, E4M3": "packed",
    "**packed**, E4M3 and BF16": "packed",
    "**packed**, torchao's 8-bit AdamW": "packed-adamw8bit",
}


def table(heading: str) -> list[list[str]]:
    """The rows of the README's table that begins so, cell by cell."""
    lines = README[README.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_memory_was_measured() -> None:
    shown: dict[str, dict[str, list[str]]] = {}
    for name, *cells in table("| | peak, GiB | samples a second | loss, less BF16's |"):
        model = next((each for each in MEMORY if name.startswith(each)), "")
        if model:
            of_model = shown.setdefault(MEMORY[model], {})
        of_model[VARIANTS[name.removeprefix(model)]] = [cell.strip("*") for cell in cells]
    found = {
        document: {
            each["variant"]: [f"{each['peak'] / 2**30:.2f}", f"{each['samples_per_second']:.0f}", gap_of(each)]
            for each in measured(document)["rows"]
        }
        for document in MEMORY.values()
    }
    assert shown == found
    assert all(measured(document)["aim"]["reached_by"] for document in found)  # so it says


def gap_of(figures: dict[str, Any]) -> str:
    if figures["variant"] == "bf16":
        return ""
    gap = round(figures["loss_gap"], 4)
    return f"{gap:+.4f}" if gap else "0.0000"


def test_the_words_about_memory_were_measured() -> None:
    words = " ".join(README.split())
    rows = {each["variant"]: each for each in measured("memory-gpt-1024-bytes-h200.json")["rows"]}
    plain, packed, again = (rows[name] for name in ("bf16", "packed", "bf16-checkpointed"))
    assert f"at {again['samples_per_second'] / plain['samples_per_second']:.2f} times BF16's speed" in words
    assert f"packed is {plain['peak'] / packed['peak']:.2f} times smaller than plain BF16" in words
    assert f"at {packed['samples_per_second'] / plain['samples_per_second']:.2f} times its speed" in words


def test_native_speed_was_measured() -> None:
    variants = {
        "BF16": "bf16",
        "torchao FP8, tensorwise": "torchao fp8 tensorwise",
        "torchao FP8, rowwise": "torchao fp8 rowwise",
        "FP8, scales from past steps": "native-fp8-delayed",
        "FP8, gate and up kept in E4M3": "native-fp8-packed",
    }
    added = {
        "the same, fast sums in forward products (as torchao has them)": ", fast sums",
        "the same, fast sums throughout": ", fast sums throughout",
    }
    variant = ""
    for name, *shown in table("| | 2048, 8 layers"):
        variant = variants.pop(name, "") or variant.partition(",")[0] + added[name]
        for cell, shape in zip(shown, ("llama-2048", "llama-4096"), strict=True):
            rows = {each["variant"]: each for each in measured(f"speed-{shape}-h200.json")["rows"][shape]}
            figures = rows[variant]
            assert cell.replace("*", "") == f"{figures['milliseconds']:.1f}, {figures['peak'] / 2**30:.2f}"
    assert not variants
    for shape in ("llama-2048", "llama-4096"):  # the last row reaches both aims, as it says
        assert variant in measured(f"speed-{shape}-h200.json")["aims"][shape]["reached_by"]


def test_the_words_about_fast_sums_were_measured() -> None:
    loss = measured("speed-llama-2048-h200.json")["losses"]["llama-2048"]["loss"]
    gaps = [
        round(loss[name] - loss["bf16"], 4)
        for name in ("native-fp8-packed, fast sums throughout", "torchao fp8 tensorwise", "native-fp8-packed")
    ]
    words = "loss is {} above BF16's, torchao's tensorwise {} and that of the row without fast sums {}."
    assert words.format(*gaps) in " ".join(README.split())


def test_a_step_of_a_billion_parameters_was_measured() -> None:
    variants = {
        "BF16": "bf16",
        "BF16, torchao's 8-bit AdamW": "torchao AdamW8bit",
        "torchao FP8, tensorwise, and its 8-bit AdamW": "torchao fp8 tensorwise, AdamW8bit",
        "FP8, AdamW's state in E4M3, inputs computed again": "native-fp8-gpt, sparing activations",
        "the same, weights cast again, too": "native-fp8-gpt",
    }
    rows = {each["variant"]: each for each in measured("speed-gpt-1b-h200.json")["rows"]["gpt-1b"]}
    shown = {name: [cell.replace("*", "") for cell in cells] for name, *cells in table("| | ms | GiB |")}
    assert shown == {
        name: [f"{rows[variant]['milliseconds']:.1f}", f"{rows[variant]['peak'] / 2**30:.1f}"]
        for name, variant in variants.items()
    }


def test_the_words_about_native_losses_were_measured() -> None:
    words = " ".join(README.split())
    losses = measured("speed-losses-llama-2048-h200.json")["losses"]["llama-2048"]
    gap = losses["loss"]["native-fp8-packed"] - losses["loss"]["bf16"]
    assert f"is {gap:.4f} above BF16's and {losses['native_less_emulated']:.4f} above its own emulation's" in words
    assert f"moves BF16's by {losses['spread']:.4f}" in words


@pytest.mark.parametrize(
    ("start", "who", "modes"),
    [
        ("**bitplan** eager / compiled", "bitplan", ("eager", "compiled")),
        ("bitplan, format in a tensor, compiled", "bitplan", ("compiled, tensor parameters",)),
        ("torch's cast, eager / compiled", "torch cast", ("eager", "compiled")),
        ("torchao MX", "torchao MX", ("eager",)),
        ("QPyTorch", "QPyTorch", ("eager",)),
        ("ml_dtypes", "ml_dtypes", ("eager",)),
        ("gfloat", "gfloat", ("eager",)),
    ],
)
def test_the_speed_of_rounding_was_measured(start: str, who: str, modes: tuple[str, ...]) -> None:
    times = {
        (each["format"], each["rounding"], each["mode"]): each
        for each in measured("formats-cpu.json")["rows"]
        if each["who"] == who
    }
    kinds = [("e4m3", "nearest"), ("e4m3", "stochastic"), ("bf16", "nearest")]
    for cell, kind in zip(row(start), kinds, strict=True):
        shown = cell.split(" / ") if cell else []
        for figure, mode in zip(shown, modes, strict=bool(shown)):
            found = times[(*kind, mode)]
            if figure == "does not round":
                assert not found["rounded"]
            else:
                # As many digits as are shown.
                digits = len(figure.partition(".")[2])
                assert abs(float(figure) - found["ns_per_element"]) <= 0.51 * 10**-digits


def test_the_speed_of_rounding_on_a_gpu_was_measured() -> None:
    words = " ".join(README.split())
    for rounding, sentence in (
        ("nearest", "rounding runs at {} to {} % of the bandwidth"),
        ("stochastic", "stochastic at {} to {} %"),
    ):
        shares = [
            each["share_of_copy"]
            for each in measured("formats-h200.json")["rows"]
            if each["who"] == "bitplan" and each["mode"].startswith("compiled") and each["rounding"] == rounding
        ]
        assert sentence.format(f"{100 * min(shares):.0f}", f"{100 * max(shares):.0f}") in words


# Experiments.


def studies(name: str) -> list[dict[str, dict[str, Any]]]:
    """Of each study, plan -> its record."""
    document = json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text())
    return [{plan["plan"]: plan for plan in study["plans"]} for study in document["studies"]]


def test_the_words_about_experiments_were_measured() -> None:
    words = " ".join(README.split())
    ten, longer = studies("cifar")
    even = "static at the cost of CR"
    assert f"reached {ten[even]['metric']:.2%} and CR {ten['CR']['metric']:.2%};".replace("%", " %") in words
    saved = 1 - ten["RR"]["relative_to_fp32"] / ten["static 8"]["relative_to_fp32"]
    lost, lost_longer = (100 * (study["static 8"]["metric"] - study["RR"]["metric"]) for study in (ten, longer))
    assert f"RR saves {100 * saved:.0f} % of static 8's bit operations for {lost:.1f} points, which are" in words
    assert f"which are {lost_longer:.1f} after three times" in words
    (ptb,) = studies("ptb")
    figures = {name: (f"{plan['metric']:.2f}", f"{plan['test_perplexity']:.2f}") for name, plan in ptb.items()}
    assert "perplexity of {} in validation and {} in the test".format(*figures["static 8"]) in words
    share = ptb["RR"]["relative_to_fp32"] / ptb["static 8"]["relative_to_fp32"]
    assert "RR ends at {} and {} for {:.0f} %".format(*figures["RR"], 100 * share) in words
    images, _ = studies("deficits")
    base = images["no deficit"]["metric"]
    halves = [plan for name, plan in images.items() if name.startswith("half from") and "only" not in name]
    lost, *_, most = sorted(100 * (base - plan["metric"]) for plan in halves)
    evenly = 100 * (base - images["static at the cost of half"]["metric"])
    told = f"cost ResNet-20 {lost:.0f} to {most:.0f} points, and the same bits spread evenly {evenly:.1f}."
    assert told in words
    (squeezenet,), (gpt,) = studies("assignments-squeezenet"), studies("assignments-gpt")
    ratio, base = squeezenet["r = 0.7"]["ratio"], squeezenet["operator"]["ratio"]
    assert f"ratio of {ratio:.2f}, where the operator baseline has {base:.2f}: more than twice" in words
    assert 0.4 < gpt["operator"]["ratio"] < 0.6
    (resnet18,) = studies("assignments-resnet18-long")
    assert f"ResNet-18 ({resnet18['r = 0.7']['ratio']:.2f} against {resnet18['operator']['ratio']:.2f})" in words


# Links.


def test_every_link_of_the_readme_leads_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README):
        assert (ROOT / link).exists(), link


def test_every_page_is_in_the_documentation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in (ROOT / "docs").glob("*.md"):
        assert f": {path.name}\n" in navigation, path.name
