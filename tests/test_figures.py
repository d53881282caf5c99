"""The figures of the README, of docs/benchmarks.md and of docs/results are those of the stored JSON files."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from bitplan.analysis.measure import DEFAULT_CANDIDATES
from bitplan.analysis.memory.fit import LADDER
from bitplan.lab.compare import SUITES
from bitplan.lab.tasks.registry import task_class, task_names
from bitplan.lab.train import RunFolder
from bitplan.planners.range_test import THRESHOLD, WINDOW
from bitplan.plans.schedules import SCHEDULE_NAMES, TEN, schedule

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()


def page(name: str) -> str:
    return (ROOT / "docs" / "how-to" / f"{name}.md").read_text()


def cells(line: str) -> list[str]:
    return [cell.strip(" *") for cell in line.strip("|").split("|")]


# Compile time.


def test_compile_times_of_equal_blocks_are_those_of_the_stored_file() -> None:
    rows = measured("compile-time-regional-cpu.json")["rows"]
    expected: dict[str, list[str]] = {}
    for row in rows:
        plan = row["contender"]["plan"]
        name = f"`{row['contender']['compiler']}`, {plan if plan == 'no plan' else f'`{plan}`'}"
        expected.setdefault(name, []).append(f"{row['seconds']:.1f} s, {row['ratio']:.2f}")
    listed = {
        cells(line)[0]: cells(line)[1:] for line in BENCHMARKS.splitlines() if re.match(r"\| `\w+`, .* s, ", line)
    }
    assert listed == expected


# The README.

#: Row -> file of results, and its variants: BF16, torchao, bitplan.
SUMMARY = {
    "ResNet-50, 256 images, SGD": ("memory-resnet50-h200", "bf16", "", "packed"),
    "MobileNet-v2, 256 images, SGD": ("memory-mobilenet-v2-imagenet-h200", "bf16", "", "packed"),
    "GPT, 12 layers of 1024, AdamW": ("memory-gpt-1024-bytes-h200", "bf16", "bf16-adamw8bit", "packed"),
    "Llama blocks, width 2048, forward and backward": (
        *("speed-blocks-h200:llama-2048", "bf16", "torchao fp8 tensorwise", "fp8-train"),
    ),
    "GPT, 1.03e9 parameters, AdamW": (
        "speed-gpt-1b-h200",
        "bf16",
        "torchao fp8 tensorwise, AdamW8bit",
        "native-fp8-gpt, sparing activations",
    ),
}


def rows_of(document: str) -> dict[str, Any]:
    """The rows by variant; a shape may stand behind a colon."""
    name, _, shape = document.partition(":")
    rows = measured(f"{name}.json")["rows"]
    if isinstance(rows, dict):
        rows = rows[shape] if shape else next(iter(rows.values()))
    return {row["variant"]: row for row in rows}


@pytest.mark.parametrize("name", SUMMARY)
def test_the_table_of_the_readme_was_measured(name: str) -> None:
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {name} |"))
    document, *variants = SUMMARY[name]
    bf16, torchao, ours = (rows_of(document).get(variant) for variant in variants)
    assert bf16 is not None
    assert ours is not None
    gap = ours.get("loss_gap")
    assert cells(line)[1:] == [
        f"{bf16['peak'] / 2**30:.2f}",
        f"{torchao['peak'] / 2**30:.2f}" if torchao else "",
        f"{ours['peak'] / 2**30:.2f}",
        f"{bf16['milliseconds'] / torchao['milliseconds']:.2f}" if torchao else "",
        f"{bf16['milliseconds'] / ours['milliseconds']:.2f}",
        "not measured" if gap is None else gap_of(ours),
    ]


def test_the_table_of_the_readme_has_no_other_rows() -> None:
    table_lines = README[README.index("| training step") :].split("\n\n")[0].splitlines()[2:]
    assert [cells(line)[0] for line in table_lines] == list(SUMMARY)


# Benchmarks.


def measured(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def row(start: str, after: str = "") -> list[str]:
    """The cells of the BENCHMARKS's first table row that starts so, after a text."""
    text = BENCHMARKS[BENCHMARKS.index(after) :]
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip(" *") for cell in line.strip("|").split("|")[1:]]


@pytest.mark.parametrize(
    ("name", "start", "after", "variant"),
    [
        ("attach-h200.json", "one H200, ResNet-50, batch 256, BF16 autocast", "", "unscaled"),
        ("attach-h200.json", "the same, empty plan", "| one H200", "empty plan"),
        ("attach-cpu.json", "two EPYC cores, ResNet-20, batch 128", "", "unscaled"),
        ("attach-cpu.json", "the same with per-tensor scales", "", "tensor-scaled"),
        ("attach-cpu.json", "the same, empty plan", "| two EPYC", "empty plan"),
    ],
)
def test_the_price_of_attaching_was_measured(name: str, start: str, after: str, variant: str) -> None:
    ratios = {result["mode"]: result["ratio"] for result in measured(name)["rows"] if result["variant"] == variant}
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
    """The rows of the BENCHMARKS's table that begins so, cell by cell."""
    lines = BENCHMARKS[BENCHMARKS.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_memory_was_measured() -> None:
    shown: dict[str, dict[str, list[str]]] = {}
    for name, *cells in table("| | peak, GiB | samples/s | loss - BF16's |"):
        model = next((heading for heading in MEMORY if name.startswith(heading)), "")
        if model:
            of_model = shown.setdefault(MEMORY[model], {})
        of_model[VARIANTS[name.removeprefix(model)]] = [cell.strip("*") for cell in cells]
    expected = {
        document: {
            result["variant"]: [f"{result['peak'] / 2**30:.2f}", f"{result['samples_per_second']:.0f}", gap_of(result)]
            for result in measured(document)["rows"]
        }
        for document in MEMORY.values()
    }
    assert shown == expected
    assert all(measured(document)["aim"]["reached_by"] for document in expected)  # as the page says


def gap_of(figures: dict[str, Any]) -> str:
    if figures["variant"] == "bf16":
        return ""
    gap = round(figures["loss_gap"], 4)
    return f"{gap:+.4f}" if gap else "0.0000"


def test_the_sentences_about_memory_were_measured() -> None:
    text = " ".join(BENCHMARKS.split())
    rows = {result["variant"]: result for result in measured("memory-gpt-1024-bytes-h200.json")["rows"]}
    plain, packed, again = (rows[name] for name in ("bf16", "packed", "bf16-checkpointed"))
    assert f"at {again['samples_per_second'] / plain['samples_per_second']:.2f} times BF16's speed" in text
    assert f"packed needs {plain['peak'] / packed['peak']:.2f} times less memory than plain BF16" in text
    assert f"at {packed['samples_per_second'] / plain['samples_per_second']:.2f} times its speed" in text


def test_native_speed_was_measured() -> None:
    variants = {
        "BF16": "bf16",
        "torchao FP8, tensorwise": "torchao fp8 tensorwise",
        "torchao FP8, rowwise": "torchao fp8 rowwise",
        "FP8, delayed scaling": "native-fp8-delayed",
        "FP8, gate and up saved in E4M3": "native-fp8-packed",
    }
    added = {
        "the same, fast accumulation in fprop (as torchao)": ", fast sums",
        "the same, fast accumulation in all passes": ", fast sums throughout",
    }
    variant = ""
    for name, *shown in table("| | 2048, 8 layers"):
        variant = variants.pop(name, "") or variant.partition(",")[0] + added[name]
        for cell, shape in zip(shown, ("llama-2048", "llama-4096"), strict=True):
            rows = {result["variant"]: result for result in measured(f"speed-{shape}-h200.json")["rows"][shape]}
            figures = rows[variant]
            memory = "" if variant.startswith("torchao") else f", {figures['peak'] / 2**30:.2f}"
            assert cell.replace("*", "") == f"{figures['milliseconds']:.1f}{memory}"
    assert not variants
    alone = rows_of("speed-llama-2048-torchao-h200")
    plain, peer = alone["bf16"], alone["torchao fp8 tensorwise"]
    text = " ".join(BENCHMARKS.split())
    assert f"{peer['milliseconds']:.1f} ms and {peer['peak'] / 2**30:.2f} GiB at width 2048" in text
    assert f"{peer['milliseconds'] / plain['milliseconds']:.2f} times BF16's time where the table has 0.81" in text
    for shape in ("llama-2048", "llama-4096"):  # the last row reaches both aims, as it says
        assert variant in measured(f"speed-{shape}-h200.json")["aims"][shape]["reached_by"]


#: Heading of a table -> its file and shapes, and each row's variant.
OWN_PROCESSES: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "| blocks |": (
        *("speed-blocks-h200", ("llama-2048", "llama-4096")),
        {
            "BF16": "bf16",
            "torchao FP8, tensorwise": "torchao fp8 tensorwise",
            "preset `fp8-train`": "fp8-train",
            "preset `fp8-train-small`": "fp8-train-small",
            "whatever is kept in E4M3, as searches choose (`native-fp8-kept`)": "native-fp8-kept",
        },
    ),
    "| scales for blocks |": (
        *("speed-block-scales-h200", ("llama-2048", "llama-4096")),
        {
            "BF16": "bf16",
            "torchao FP8, blockwise (prototype)": "torchao fp8 blockwise (prototype)",
            "preset `deepseek-v3`": "deepseek-v3",
        },
    ),
    "| experts, 8 of 2048 x 7168, 16,384 tokens |": (
        *("speed-blocks-h200", ("experts",)),
        {
            "BF16, `torch._grouped_mm`": "bf16",
            "torchao FP8, rowwise, grouped (prototype)": "torchao fp8 rowwise, grouped (prototype)",
            "FP8, a delayed scale for each tensor (`native-fp8-experts`)": "native-fp8-experts",
            "FP8, a scale for each row (`native-fp8-experts-rowwise`)": "native-fp8-experts-rowwise",
        },
    ),
    "| attention, 4 x 4096 tokens, 32 heads of 128, causal, one layer |": (
        *("speed-blocks-h200", ("attention",)),
        {"BF16 (cuDNN)": "bf16", "preset `fp8-attention`": "fp8-attention"},
    ),
    "| Llama 3.2 1B from transformers |": (
        *("speed-llama-1b-h200", ("llama_1b",)),
        {
            "BF16, the whole model": "bf16",
            "torchao FP8, tensorwise, whole": "torchao fp8 tensorwise",
            "`fp8-train`, the whole model": "fp8-train",
            "`fp8-train`, equal blocks compiled once": "fp8-train, equal blocks once",
        },
    ),
}


@pytest.mark.parametrize("heading", OWN_PROCESSES)
def test_rows_of_own_processes_were_measured(heading: str) -> None:
    file, shapes, variants = OWN_PROCESSES[heading]
    document = measured(f"{file}.json")
    assert document["processes"] == "one per row"
    shown = {name: [cell.replace("*", "") for cell in cells] for name, *cells in table(heading)}
    decimals = 1 if len(shapes) > 1 or "1b" in file else 2
    expected: dict[str, list[str]] = {}
    for name, variant in variants.items():
        rows = [rows_of(f"{file}:{shape}")[variant] for shape in shapes]
        figures = [(f"{row['milliseconds']:.{decimals}f}", f"{row['peak'] / 2**30:.2f}") for row in rows]
        expected[name] = [", ".join(pair) for pair in figures] if len(shapes) > 1 else list(figures[0])
        if "1b" in file:
            expected[name].append(f"{rows[0]['first_seconds']:.0f}")
    assert shown == expected


def test_sentences_about_rows_of_own_processes_were_measured() -> None:
    text = " ".join(BENCHMARKS.split())
    experts, small = rows_of("speed-blocks-h200:experts"), rows_of("speed-llama-1b-h200")
    gain = experts["bf16"]["milliseconds"] / experts["native-fp8-experts"]["milliseconds"]
    assert f"{gain:.2f} times BF16's speed (target: 1.25)" in text
    whole, plain = small["fp8-train"], small["bf16"]
    assert f"takes {whole['first_seconds'] / plain['first_seconds']:.1f} times BF16's time" in text
    failed = measured("speed-blocks-h200.json")["failed"]
    spreads = {
        variant: [rows_of(f"speed-blocks-h200:{shape}")[variant]["spread"] for shape in ("llama-2048", "llama-4096")]
        for variant in ("bf16", "torchao fp8 tensorwise", "fp8-train")
    }
    shown = "BF16 {} and {} %, torchao {} and {} %, `fp8-train` {} and {} %"
    assert shown.format(*(round(100 * spread) for pair in spreads.values() for spread in pair)) in text
    for shape, shown in (("llama-2048", "71.6"), ("llama-4096", "112.9")):
        assert f"not counted: {shown} ms" in failed[shape]["deepseek-v3"]
    native = " ".join(page("native").split())
    ratios = []
    for variant in ("fp8-train", "torchao fp8 tensorwise"):
        for shape in ("llama-2048", "llama-4096"):
            rows = rows_of(f"speed-blocks-h200:{shape}")
            ratios.append(f"{rows[variant]['milliseconds'] / rows['bf16']['milliseconds']:.2f}")
    assert f"takes {ratios[0]} times BF16's time on Llama-like blocks of width 2048 and {ratios[1]} at 4096" in native
    assert f"(torchao {ratios[2]} and {ratios[3]};" in native


def test_the_sentences_about_fast_sums_were_measured() -> None:
    loss = measured("speed-llama-2048-h200.json")["losses"]["llama-2048"]["loss"]
    gaps = [
        round(loss[name] - loss["bf16"], 4)
        for name in ("native-fp8-packed, fast sums throughout", "torchao fp8 tensorwise", "native-fp8-packed")
    ]
    sentence = "loss is {} above BF16's, torchao's tensorwise {} and that of the row without fast accumulation {}."
    assert sentence.format(*gaps) in " ".join(BENCHMARKS.split())


def test_a_step_of_a_billion_parameters_was_measured() -> None:
    variants = {
        "BF16": "bf16",
        "BF16, torchao's 8-bit AdamW": "torchao AdamW8bit",
        "torchao FP8, tensorwise, and its 8-bit AdamW": "torchao fp8 tensorwise, AdamW8bit",
        "FP8, AdamW's state in E4M3, inputs recomputed": "native-fp8-gpt, sparing activations",
        "the same, weights also cast again in backward": "native-fp8-gpt",
    }
    rows = {result["variant"]: result for result in measured("speed-gpt-1b-h200.json")["rows"]["gpt-1b"]}
    shown = {name: [cell.replace("*", "") for cell in cells] for name, *cells in table("| | ms | GiB |")}
    assert shown == {
        name: [f"{rows[variant]['milliseconds']:.1f}", f"{rows[variant]['peak'] / 2**30:.1f}"]
        for name, variant in variants.items()
    }


def test_the_sentences_about_native_losses_were_measured() -> None:
    text = " ".join(BENCHMARKS.split())
    losses = measured("speed-losses-llama-2048-h200.json")["losses"]["llama-2048"]
    gap = losses["loss"]["native-fp8-packed"] - losses["loss"]["bf16"]
    assert f"is {gap:.4f} above BF16's and {losses['native_less_emulated']:.4f} above its own emulation's" in text
    assert f"Reordering the data alone moves the BF16 loss by {losses['spread']:.4f}" in text


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
        (result["format"], result["rounding"], result["mode"]): result
        for result in measured("formats-cpu.json")["rows"]
        if result["who"] == who
    }
    kinds = [("e4m3", "nearest"), ("e4m3", "stochastic"), ("bf16", "nearest")]
    for cell, kind in zip(row(start), kinds, strict=True):
        shown = cell.split(" / ") if cell else []
        for figure, mode in zip(shown, modes, strict=bool(shown)):
            result = times[(*kind, mode)]
            if figure == "does not round":
                assert not result["rounded"]
            else:
                # As many digits as are shown.
                digits = len(figure.partition(".")[2])
                assert abs(float(figure) - result["ns_per_element"]) <= 0.51 * 10**-digits


def test_the_speed_of_rounding_on_a_gpu_was_measured() -> None:
    text = " ".join(BENCHMARKS.split())
    for rounding, sentence in (
        ("nearest", "rounding runs at {} to {} % of the bandwidth"),
        ("stochastic", "stochastic at {} to {} %"),
    ):
        shares = [
            result["share_of_copy"]
            for result in measured("formats-h200.json")["rows"]
            if result["who"] == "bitplan" and result["mode"].startswith("compiled") and result["rounding"] == rounding
        ]
        assert sentence.format(f"{100 * min(shares):.0f}", f"{100 * max(shares):.0f}") in text


# What pages say about the code.


def test_every_rounding_mode_is_described() -> None:
    for mode in ("nearest", "nearest-away", "toward-zero", "stochastic"):
        assert f'`"{mode}"`' in page("formats")


def test_the_default_candidates_are_described() -> None:
    table = {row[0].strip(): row[1:] for line in page("measure").splitlines() if (row := line.strip("|").split("|"))}
    described = set()
    for kind, suffix in (("both operands", ""), ("mixed", ""), ("stochastic gradient", " stochastic-dy")):
        for scale, cell in zip(("tensor", "vector"), table[kind], strict=True):
            names = re.sub(r"\(.*?\)|stochastic-dy", "", cell).split(",")
            described |= {f"{name.strip()} {scale}{suffix}" for name in names}
    assert described == set(map(str, DEFAULT_CANDIDATES))


def test_every_suite_is_described() -> None:
    assert all(f"| `{name}` |" in page("compare") for name in SUITES)


def test_the_figures_of_schedules_are_so() -> None:
    text = page("schedules")
    rows = re.findall(r"^\| ([a-z-]+) \| ([A-Z, /]+) \| ([0-9. /]+) \|$", text, flags=re.MULTILINE)
    assert len(rows) == 3
    for group, names, costs in rows:
        for some, cost in zip(names.split("/"), costs.split("/"), strict=True):
            for name in some.split(","):
                relative_cost = schedule(name.strip(), low=3, high=8).summary(64000).relative_cost
                assert round(relative_cost, 3) == float(cost), (group, name)
    assert all(f"`{name}`" in text for name in SCHEDULE_NAMES if name not in TEN)
    assert f"({WINDOW} steps)" in page("range-test")
    assert f"({THRESHOLD:.0%}".replace("%", " %") in page("range-test")


def test_every_task_and_every_setting_is_described() -> None:
    text = page("tasks")
    for name in task_names():
        assert f"`{name}`" in text
        for setting in task_class(name).settings_class.__dataclass_fields__:
            assert f"`{setting}`" in text, (name, setting)


def test_every_file_of_a_run_is_described() -> None:
    folder = RunFolder("x")
    for path in vars(folder).values():
        if path != folder.path:
            assert f"`{path.name}" in page("runs")


def test_the_list_of_plans_that_memory_tries_is_described() -> None:
    shown = re.search(r"\(no plan, (.*?), packed\)", page("memory"), flags=re.DOTALL)
    assert shown is not None
    assert tuple(re.findall(r"`([\w-]+)`", shown[1])) == LADDER[1:]


# docs/how-to/auto.md

#: Row of the table of searches -> its search, and the candidates without rounding and of the last columns.
SEARCHES = {
    "Llama, 8 layers of 2048, 8 x 2048 tokens": (
        *("llama_2048", "no plan, constant masks dropped", "fp8 + gate + product + other + residual"),
    ),
    "the same with `--memory 6GiB`": (
        *("llama_2048:6GiB", "no plan, constant masks dropped"),
        "fp8 + gate + residual + product, half of each gate recomputed",
    ),
    "Llama, 4 layers of 4096, 4 x 4096 tokens": (
        *("llama_4096", "no plan, constant masks dropped", "fp8 + gate + residual + product + other"),
    ),
    "Llama-3.2-1B shape, 4 x 4096 tokens": ("llama_1b", "no plan, loss in chunks", "fp8 + gate + residual"),
    "ConvNeXt-T, 128 images": ("convnext_t", "no plan, recompute", "packed gate + product"),
    "MobileNet-v2, 256 images": ("mobilenet_v2", "no plan, recompute", "packed product"),
    "ViT-B/16, 128 images, `--memory 70%`": ("vit_b:70%", "no plan, recompute", "fp8 + gate"),
    "the same with `--memory 45%`": (*("vit_b:45%", "no plan, recompute", "fp8 + gate + product + other + residual"),),
    "Swin-T, 128 images, `--slowdown 1.03`": ("swin_t", "no plan, recompute", "fp8 + gate"),
    "EfficientNet-B0, 256 images": ("efficientnet_b0", "no plan, recompute", "packed product + residual"),
    "BERT-base, 64 x 512 tokens, `--slowdown 1.03`": (
        *("bert_base", "no plan, constant masks dropped", "fp8 + gate + product + other + residual"),
    ),
    "GPT-2, 16 x 1024 tokens, `--slowdown 1.03`": ("gpt2", "no plan, recompute", "no plan, recompute"),
    "T5-small, 64 x 512 tokens in, 64 x 128 out, `--slowdown 1.03`": ("t5_small", "no plan, recompute", "no plan"),
    "Whisper-tiny, 32 spectrograms, `--slowdown 1.03`": (
        *("whisper_tiny", "no plan, constant masks dropped", "no plan"),
    ),
    "ResNet-50, 256 images": ("resnet50", "no plan, recompute", "packed product"),
}


#: Row of the README's table of searches -> its row here.
README_SEARCHES = {
    "Llama, 8 layers of 2048": "Llama, 8 layers of 2048, 8 x 2048 tokens",
    "Llama, 8 layers of 2048, `--memory 6GiB`": "the same with `--memory 6GiB`",
    "Llama, 4 layers of 4096": "Llama, 4 layers of 4096, 4 x 4096 tokens",
    "ViT-B/16, `--memory 45%`": "the same with `--memory 45%`",
    "ConvNeXt-T": "ConvNeXt-T, 128 images",
    "MobileNet-v2": "MobileNet-v2, 256 images",
}


@pytest.mark.parametrize("row", README_SEARCHES)
def test_searches_of_the_readme_are_those_of_the_page(row: str) -> None:
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {row} |"))
    (other,) = (line for line in page("auto").splitlines() if line.startswith(f"| {README_SEARCHES[row]} |"))
    shown, expected = ([cell.replace("*", "") for cell in cells(text)] for text in (line, other))
    assert shown[1:4] == expected[1:4]
    assert "(chosen)" in expected[4]


@pytest.mark.parametrize("row", SEARCHES)
def test_searches_are_those_of_the_file(row: str) -> None:
    search, own_precision, candidate = SEARCHES[row]
    document = measured("auto-h200.json")["searches"][search]
    trials = {c["name"]: c["trial"] for c in document["candidates"] if c["trial"] is not None}
    rest = [t for name, t in trials.items() if name.startswith("no plan,")]
    best_in = "peak" if search.startswith("vit_b") else "milliseconds"
    assert trials[own_precision] == min(rest, key=lambda trial: trial[best_in])
    (line,) = (line for line in page("auto").splitlines() if line.startswith(f"| {row} |"))
    shown = [cell.replace("*", "") for cell in cells(line)]
    for cell, name in zip(shown[1:4], ("no plan", own_precision, candidate), strict=True):
        assert cell == f"{trials[name]['milliseconds']:.1f}, {trials[name]['peak'] / 2**30:.2f}"
    assert ("(chosen" in shown[4]) == (document["chosen"] == candidate)
    assert shown[4].startswith(candidate)


def test_losses_under_found_plans_are_those_of_the_file() -> None:
    plain, *planned = measured("auto-losses-h200.json")["models"]["vit_b"]["rows"]
    text = " ".join(page("auto").split())
    assert f"smaller than the {max(plain['losses']) - min(plain['losses']):.4f} by which" in text
    for row in planned:
        gap = f"{row['gap']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
        assert f"{gap} for {row['peak'] / 2**30:.2f} GiB" in text
        assert abs(row["gap"]) < max(plain["losses"]) - min(plain["losses"])
    assert f"the loss of {statistics.fmean(plain['losses']):.2f} without a plan" in text


# docs/benchmarks.md, an 8B on one 80-GB GPU


def test_the_8b_is_that_of_the_file() -> None:
    (row,) = (row for row in measured("fit-llama-3-8b-h200.json")["rows"] if row["way"] == "fp8")
    assert row["aim_reached"]
    peak, taken, speed = (
        f"{row['allocated'] / 1e9:.1f}",
        f"{row['reserved'] / 1e9:.1f}",
        f"{row['tokens_per_second']:,.0f}",
    )
    (line,) = (line for line in BENCHMARKS.splitlines() if line.startswith("| FP8, float32 weights in two parts"))
    assert [cell.replace("*", "") for cell in cells(line)][1:4] == [peak, taken, speed]
    assert f"{row['spare'] / 1e9:.1f} GB are left" in BENCHMARKS
    for text in (README, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")):
        assert f"{taken} GB" in text
        assert f"{speed} tokens a second" in text


# docs/benchmarks.md, losses under published recipes

RECIPE_ROWS = {"fp32": "FP32", "bf16-all": "BF16 (`bf16-all`)"}


def test_losses_of_recipes_are_those_of_the_file() -> None:
    for row in measured("recipe-losses-cpu.json")["rows"]:
        losses = list(row["losses"].values())
        name = RECIPE_ROWS.get(row["plan"], f"`{row['plan']}`")
        (line,) = (
            line for line in BENCHMARKS.splitlines() if line.startswith(f"| {name} | {statistics.fmean(losses):.4f}")
        )
        expected = "" if row["gap"] is None else f"{row['gap']:+.4f} ({row['low']:+.4f} to {row['high']:+.4f})"
        assert cells(line)[2] == expected
        if row["plan"] == "bf16-all":
            assert f"spread BF16's loss by {statistics.stdev(losses):.4f}" in BENCHMARKS
