"""Formats that a user registers: AF4, a posit and a logarithmic one, against a search in float64."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

import bitplan as bp
from bitplan import extensions
from bitplan.errors import FormatError, PlanError
from bitplan.numerics import formats
from bitplan.numerics.formats import CodebookFormat, get_format, register_format


def posit(bits: int, exponent_bits: int) -> list[float]:
    """All values of a posit but NaR, by its definition: regime, exponent, fraction."""
    values = [0.0]
    for code in range(1, 1 << (bits - 1)):
        digits = format(code, f"0{bits - 1}b")
        run = len(digits) - len(digits.lstrip(digits[0]))
        regime = run - 1 if digits[0] == "1" else -run
        rest = digits[run + 1 :]
        exponent = int(rest[:exponent_bits].ljust(exponent_bits, "0") or "0", 2)
        fraction = rest[exponent_bits:]
        share = int(fraction, 2) / (1 << len(fraction)) if fraction else 0.0
        value = 2.0 ** (regime * (1 << exponent_bits) + exponent) * (1 + share)
        values += [value, -value]
    return values


#: Yoshida 2023, "NF4 isn't information theoretically optimal (and that's good)", for blocks of 64.
AF4 = [
    *(-1.0, -0.69441008, -0.51243739, -0.3736951, -0.25607552, -0.14982478, -0.04934812, 0.0),
    *(0.04273164, 0.12934483, 0.21961274, 0.31675666, 0.42563882, 0.55496234, 0.72424863, 1.0),
]
LOGARITHMIC = [0.0, *(sign * 2.0 ** (-step / 2) for step in range(15) for sign in (-1, 1))]
BOOKS = {"af4": AF4, "posit8": posit(8, 1), "log5": LOGARITHMIC}


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, CodebookFormat]:
    """No format is registered before a test, and none after it."""
    registered: dict[str, CodebookFormat] = {}
    monkeypatch.setattr(formats, "_REGISTERED", registered)
    formats._parse_once.cache_clear()
    return registered


def nearest(x: torch.Tensor, values: list[float]) -> np.ndarray:
    """The value at the least distance in float64; at ties, that with the even code."""
    book = np.sort(np.array(values, np.float32)).astype(np.float64)
    distances = np.abs(x.double().numpy().reshape(-1, 1) - book)
    least = distances == distances.min(1, keepdims=True)
    even = least & (np.arange(len(book)) % 2 == 0)
    result: np.ndarray = book[np.where(even.any(1), even.argmax(1), least.argmax(1))]
    return result


def inputs(values: list[float]) -> torch.Tensor:
    """Values, the middles between them, their neighbours in float32, and random numbers beyond both ends."""
    book = torch.tensor(values, dtype=torch.float32).sort().values
    middles = ((book[1:].double() + book[:-1].double()) / 2).float()
    exact = torch.cat([book, middles])
    around = [torch.nextafter(exact, torch.full_like(exact, limit)) for limit in (-math.inf, math.inf)]
    drawn = torch.randn(500, generator=torch.Generator().manual_seed(0)) * book.abs().max() / 2
    return torch.cat([exact, *around, drawn, drawn / 100])


def test_a_posit_has_its_known_values() -> None:
    values = posit(8, 1)
    assert len(set(values)) == 255
    assert (max(values), min(v for v in values if v > 0)) == (2.0**12, 2.0**-12)
    assert {1.0, 1.0625, 1.9375, 4096.0, -0.25} <= set(values)


@pytest.mark.parametrize("name", BOOKS)
def test_rounding_is_the_nearest_value_eager_and_compiled_and_packs_to_its_bits(name: str) -> None:
    values = BOOKS[name]
    made = register_format(name, values)
    assert get_format(name) is made
    assert made.bits == math.ceil(math.log2(len(values)))
    x = inputs(values)
    rounded = bp.quantize(x, name)
    assert np.array_equal(rounded.double().numpy(), nearest(x, values))
    if name == "log5":  # hundreds of values take long to trace: tests/numerics/test_codebook.py has one such book
        assert torch.equal(torch.compile(lambda t: bp.quantize(t, name), backend="aot_eager")(x), rounded)
    packed = bp.pack(x, name)
    assert packed.payload.numel() == math.ceil(x.numel() * made.bits / 8)
    assert torch.equal(packed.unpack(), rounded)
    scaled = bp.quantize(x.view(-1)[:960].view(15, 64), name, scale="block", block=64)
    assert torch.equal(bp.pack(x[:960].view(15, 64), name, scale="block", block=64).unpack(), scaled)


def test_a_plan_counts_saves_and_trains_with_it() -> None:
    register_format("af4", AF4)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 2))
    x, rule = torch.randn(256, 64), {"match": "*", "op": "relu", "activation": {"format": "af4", "scale": "tensor"}}
    plan = bp.Plan.from_dict({"version": 1, "rules": [rule]})
    losses = []
    for execution in ("emulate", "packed"):
        with bp.attach(model, plan, example=x, execution=execution) as run:
            losses.append(model(x).square().mean().item())
            assert run.scalars()["bitplan/mean_bits"] < 32
    assert losses[0] == losses[1] != model(x).square().mean().item()
    saved = [
        bp.estimate_memory(model, x, None, None, chosen, execution="packed").activations for chosen in (None, plan)
    ]
    assert 256 * 128 * 3 < saved[0] - saved[1] < 256 * 128 * 4  # float32 to 4 bits, and some signs of ReLU


def test_a_plan_file_holds_the_values(registry: dict[str, CodebookFormat]) -> None:
    register_format("af4", AF4)
    plan = bp.Plan.from_dict({"version": 1, "rules": [{"match": "*", "weight": "af4", "frozen": "af4"}]})
    text, pickled = plan.to_yaml(), pickle.dumps(plan)
    for read in (lambda: bp.Plan.from_yaml(text), lambda: pickle.loads(pickled)):
        registry.clear()
        formats._parse_once.cache_clear()
        with pytest.raises(FormatError, match="af4"):
            get_format("af4")
        assert read() == plan
        assert len(get_format("af4").values()) == 16
    assert "formats" not in bp.Plan.preset("lora-4bit").to_dict()


@pytest.mark.parametrize("name", ["e4m3", "int8", "mxfp4", "keep", "float", "e9m9x", "a b", "", "Own"])
def test_names_that_stand_for_something_else_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="cannot name"):
        register_format(name, [0, 1])


@pytest.mark.parametrize(
    ("values", "token"), [([1], "2 to 256"), (range(300), "2 to 256"), ([1, "x"], "numbers"), ([1, 1], "distinct")]
)
def test_values_are_checked(values: list[float], token: str) -> None:
    with pytest.raises(FormatError, match=token):
        register_format("mine", values)


def test_a_name_keeps_its_values() -> None:
    assert register_format("mine", [1, -1]) == register_format("mine", [-1.0, 1.0])
    for name in ("mine", "nf4", "bf16"):
        with pytest.raises(FormatError, match="choose another name"):
            register_format(name, [0, 1])
    with pytest.raises(PlanError, match=r"p\.yaml:2: formats\.mine"):
        bp.Plan.from_yaml("version: 1\nformats: {mine: [0, 1]}", "p.yaml")
    with pytest.raises(PlanError, match="cannot name a quantizer"):
        bp.Plan.from_dict({"version": 1, "quantizers": {"mine": "bf16"}})


def test_entry_points_are_imported_for_unknown_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []

    class Entry:
        dist = None

        def __init__(self, name: str, value: object) -> None:
            self.name, self.value = name, value

        def load(self) -> object:
            loaded.append(self.name)
            if self.value is None:
                raise ImportError("no such module")
            return self.value

    found = [Entry("third-party", [-1, 0, 1]), Entry("made", lambda: [0, 1]), Entry("e4m3", [0, 1]), Entry("bad", None)]
    monkeypatch.setattr(extensions, "entry_points", lambda group: found if group == "bitplan.formats" else [])
    extensions._entries.cache_clear()
    try:
        assert get_format("e4m3").max == 448
        assert loaded == []
        assert get_format("third-party").values() == (-1.0, 0.0, 1.0)
        assert get_format("made").bits == 1
        with pytest.raises(bp.BitplanError, match="'bad'"):
            get_format("bad")
        assert loaded == ["third-party", "made", "bad"]
    finally:
        extensions._entries.cache_clear()
