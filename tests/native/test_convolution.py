"""Convolutions in native execution: products of matrices, held against float64, and what is emulated and why."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import bitplan
from bitplan import Plan
from bitplan.errors import PlanError
from bitplan.executions.native import convolution, paths
from bitplan.executions.native.backends import Float8Backend, Int8Backend
from bitplan.executions.native.convolution import im2col, is_channels_last
from bitplan.executions.native.gemm import codes_of
from bitplan.numerics.quantizer import Encoded

pytestmark = pytest.mark.filterwarnings("ignore:.*are emulated:bitplan.errors.BitplanWarning")

INT8 = {"format": "int8", "scale": "tensor"}
VECTOR = {"format": "int8", "scale": "vector"}
NOISY = {**INT8, "rounding": "stochastic"}
LATE = {**INT8, "history": 2}
E4M3 = {"format": "e4m3", "scale": "tensor"}
E5M2 = {"format": "e5m2", "scale": "tensor"}
PLANS: dict[str, dict[str, Any]] = {
    "tensor": {"x": INT8, "w": INT8, "dy": INT8},
    "vector": dict.fromkeys(("fprop", "dgrad", "wgrad"), VECTOR),
    "stochastic": {"x": NOISY, "w": NOISY, "dy": NOISY},
    "late": {"x": LATE, "w": LATE, "dy": LATE},
    "fp8": {"x": E4M3, "w": E4M3, "dy": E5M2},
    "fp8 vector": {item: {"format": "e4m3", "scale": "vector"} for item in ("fprop", "dgrad", "wgrad")},
    "forward only": {"fprop": INT8},
}
LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1x1": (lambda: nn.Conv2d(16, 24, 1), (3, 16, 7, 8)),
    "1x1, stride": (lambda: nn.Conv2d(16, 24, 1, stride=(2, 3)), (3, 16, 7, 8)),
    "one dimension": (lambda: nn.Conv1d(16, 24, 1, bias=False), (3, 16, 7)),
    "3x3": (lambda: nn.Conv2d(16, 24, 3, padding=1), (3, 16, 7, 8)),
    "3x2, dilation": (lambda: nn.Conv2d(16, 24, (3, 2), padding=(2, 0), dilation=2), (3, 16, 7, 8)),
    "3x3, stride": (lambda: nn.Conv2d(16, 24, 3, stride=2, padding=1), (3, 16, 7, 8)),
    "three dimensions": (lambda: nn.Conv3d(16, 8, 2), (2, 16, 3, 4, 3)),
}


def plan_of(**rule: Any) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", **rule}]})


def channels_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def image(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return channels_last(torch.randn(shape, generator=torch.Generator().manual_seed(1))).to(dtype)


def step(
    make: Any, x: Tensor, plan: Plan, execution: str, compiled: bool = False, **options: Any
) -> tuple[list[Tensor], list[str]]:
    """Result and gradients, and what fell back."""
    torch.manual_seed(0)
    model = make().to(x.dtype)
    chosen = bitplan.Native(**{"min_macs": 0, **options}) if execution == "native" else execution
    with bitplan.attach(model, plan, example=x, execution=chosen) as run:
        called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        arguments = x.detach().clone().requires_grad_()
        y = called(arguments)
        y.backward(channels_last(torch.linspace(-1, 1, y.numel()).reshape(y.shape)).to(y.dtype))
        fallen = [str(fallback) for fallback in run.fallbacks()] if execution == "native" else []
    return [y.detach(), arguments.grad, *(p.grad for p in model.parameters())], fallen  # type: ignore[list-item]


class Counted:
    """How often the units multiply."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for kind in (Int8Backend, Float8Backend):
            monkeypatch.setattr(kind, "multiply", self._counted(kind.multiply))

    def _counted(self, multiply: Any) -> Any:
        def counted(*arguments: Any) -> Tensor:
            self.count += 1
            return multiply(*arguments)  # type: ignore[no-any-return]

        return counted


def require_rows_of_float8(name: str) -> None:
    """Skip where torch's CPU cannot multiply float8 with a scale for each row."""
    if name != "fp8 vector":
        return
    a, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(a, a.t(), scale_a=scale, scale_b=scale.reshape(1, 16), out_dtype=torch.float32)
    except RuntimeError:
        pytest.skip("this torch multiplies float8 with one scale only")


@contextmanager
def noted() -> Iterator[list[Tensor]]:
    """What is kept for the backward pass, but for what a listing of the model keeps."""
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, FakeTensor):
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield kept


# --- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", PLANS)
def test_native_differs_from_emulate_by_the_order_of_accumulation_only(
    name: str, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_rows_of_float8(name)
    make, shape = LAYERS[layer]
    counted = Counted(monkeypatch)
    x, plan = image(shape), plan_of(**PLANS[name])
    native, fallen = step(make, x, plan, "native")
    passes = 1 if name == "forward only" else 2 if layer == "3x3, stride" else 3
    assert counted.count == passes
    assert len(fallen) == 3 - passes
    emulated, _ = step(make, x, plan, "emulate")
    for ours, theirs in zip(native, emulated, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))
    for ours, theirs in zip(native[:2], emulated[:2], strict=True):  # so that what follows takes its ways
        assert is_channels_last(ours) == is_channels_last(theirs) or layer == "one dimension"
    plain, _ = step(make, x, Plan.from_dict({"version": 1}), "emulate")
    assert not torch.allclose(native[0], plain[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("tensor", "1x1"), ("vector", "1x1, stride"), ("stochastic", "3x3"), ("fp8", "1x1, stride"), ("vector", "3x3")],
)
def test_compiled_it_is_the_same(name: str, layer: str) -> None:
    make, shape = LAYERS[layer]
    eager, _ = step(make, image(shape), plan_of(**PLANS[name]), "native")
    compiled, _ = step(make, image(shape), plan_of(**PLANS[name]), "native", compiled=True)
    for first, second in zip(eager, compiled, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layer", ["1x1", "1x1, stride", "3x3", "3x2, dilation"])
@pytest.mark.parametrize("scale", ["tensor", "vector"])
def test_the_products_are_those_of_the_rounded_operands_in_float64(layer: str, scale: str) -> None:
    """Scales along the right axes, by hand: (sample | output), (sample | input), (output | input)."""
    make, shape = LAYERS[layer]
    x = image(shape)

    def rounded(t: Tensor, kept: int) -> Tensor:
        axes = [axis for axis in range(t.dim()) if scale == "tensor" or axis != kept]
        step = t.float().abs().amax(axes, keepdim=True) / 127
        return torch.round(t.float() / step).double() * step.double()

    torch.manual_seed(0)
    model = make()
    model.bias = None
    arguments = x.clone().requires_grad_()
    with bitplan.attach(model, plan_of(**PLANS[scale]), example=x, execution=bitplan.Native(min_macs=0)) as run:
        assert run.fallbacks() == []
        y = model(arguments)
        dy = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
        y.backward(dy)
    w, like = model.weight.detach(), (model.stride, model.padding, model.dilation)

    def exact(x: Tensor, w: Tensor, dy: Tensor) -> list[Tensor]:
        x, w = x.requires_grad_(), w.requires_grad_()
        y = F.conv2d(x, w, None, *like)
        return [y.detach(), *torch.autograd.grad(y, (x, w), dy)]

    actual = (y.detach(), arguments.grad, model.weight.grad)
    for place, operands in enumerate(((0, 0, 0), (0, 1, 0), (1, 0, 1))):
        tensors = [rounded(t, kept) for t, kept in zip((x, w, dy), operands, strict=True)]
        expected = exact(*tensors)[place]
        ours = actual[place]
        assert ours is not None
        assert (ours.double() - expected).abs().max() <= 32 * 2**-23 * expected.abs().max()


@pytest.mark.parametrize("name", ["tensor", "vector"])
@pytest.mark.parametrize("layer", ["1x1", "3x3", "3x3, stride"])
def test_in_bfloat16_and_under_autocast_results_have_its_type(name: str, layer: str) -> None:
    make, shape = LAYERS[layer]
    for dtype, is_cast in ((torch.bfloat16, False), (torch.float32, True)):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            native, _ = step(make, image(shape, dtype), plan_of(**PLANS[name]), "native")
            emulated, _ = step(make, image(shape, dtype), plan_of(**PLANS[name]), "emulate")
        assert native[0].dtype == torch.bfloat16
        for ours, theirs in zip(native, emulated, strict=True):
            assert ours.dtype == theirs.dtype
            # Emulation's operands are rounded once more, to bfloat16, before they are multiplied.
            assert (ours - theirs).float().norm() <= 2e-2 * theirs.float().norm()


# --- layouts and memory ----------------------------------------------------------------------------------------------


def test_an_image_with_its_channels_last_is_a_matrix_without_a_copy() -> None:
    codes = image((2, 8, 3, 5)).to(torch.int8)
    matrix = codes_of(Encoded(codes, ()), torch.int8, 1)
    assert matrix.values.data_ptr() == codes.data_ptr()
    assert matrix.values.is_contiguous()
    assert matrix.values.shape == (30, 8)


def test_channels_last_is_seen_by_strides() -> None:
    x = image((2, 8, 3, 5))
    assert is_channels_last(x)
    assert is_channels_last(x[:, :4])  # a view of some channels
    assert is_channels_last(torch.randn(2, 8, 1, 1))  # both layouts at once
    assert is_channels_last(torch.randn(2, 7, 8).transpose(1, 2))
    for other in (x.contiguous(), x[:, ::2], x[:, :, 1:], torch.randn(2, 1, 3, 5), x.movedim(2, 3)):
        assert not is_channels_last(other)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [((3, 3), (1, 1), (1, 1), (1, 1)), ((2, 3), (2, 1), (0, 2), (1, 2)), ((1, 1), (1, 1), (1, 0), (1, 1))],
)
def test_unfolding_is_torchs_own(kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    x = torch.randint(-9, 9, (2, 6, 7, 4)).to(torch.int8)
    rows = im2col(x, kernel, stride, padding, dilation)
    theirs = F.unfold(x.movedim(-1, 1).float(), kernel, dilation, padding, stride)  # channels before places
    ours = rows.reshape(2, -1, kernel[0] * kernel[1], 4).permute(0, 3, 2, 1).reshape(theirs.shape)
    assert torch.equal(ours.float(), theirs)
    assert torch.equal(im2col(x.view(torch.float8_e4m3fn), kernel, stride, padding, dilation).view(torch.int8), rows)


@pytest.mark.parametrize(
    ("layer", "elements"), [("1x1", 3 * 56 * 16), ("1x1, stride", 3 * 4 * 3 * 16), ("3x3", 3 * 56 * 16)]
)
def test_what_is_kept_of_the_input_are_the_codes_of_what_is_looked_at(layer: str, elements: int) -> None:
    make, shape = LAYERS[layer]
    with noted() as kept:
        step(make, image(shape), plan_of(**PLANS["tensor"]), "native")
    weight = next(make().parameters()).numel()
    assert sorted(t.numel() for t in kept if t.dtype == torch.int8) == sorted([weight, elements])
    assert all(t.numel() <= 24 for t in kept if t.dtype != torch.int8)  # scales, and the bias


# --- fallbacks -------------------------------------------------------------------------------------------------------

KEPT = "; emulated, its input is saved as codes"
FALLBACKS: dict[str, tuple[Any, Tensor, list[str]]] = {
    "groups": (
        lambda: nn.Conv2d(16, 24, 1, groups=2),
        image((3, 16, 7, 8)),
        [f"all passes: convolutions in groups (2) have no native path{KEPT}"],
    ),
    "transposed": (
        lambda: nn.ConvTranspose2d(16, 8, 2, stride=2, output_padding=1),
        image((3, 16, 7, 8)),
        [f"all passes: transposed convolutions have no native path{KEPT}"],
    ),
    "layout": (
        lambda: nn.Conv2d(16, 24, 1),
        image((3, 16, 7, 8)).contiguous(),
        [
            "all passes: its input has not its channels last: do model.to(memory_format=torch.channels_last) and the "
            f"same to its input{KEPT}"
        ],
    ),
    "without a batch": (
        lambda: nn.Conv2d(16, 24, 1),
        image((3, 16, 7, 8))[0],
        ["all passes: an image without its batch has no native path"],
    ),
    "stride": (
        lambda: nn.Conv2d(16, 24, 3, stride=2),
        image((3, 16, 7, 8)),
        ["dgrad: a stride leaves gaps in the output gradient"],
    ),
    "wide padding": (
        lambda: nn.Conv2d(16, 24, 1, padding=1),
        image((3, 16, 7, 8)),
        ["dgrad: the padding is wider than the kernel"],
    ),
    "uneven padding": (
        lambda: nn.Conv2d(16, 24, 2, padding="same"),
        image((3, 16, 7, 8)),
        ["all passes: padding='same' with an even kernel has no native path"],
    ),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_a_fallback_says_why_and_gives_the_numbers_of_emulation(name: str) -> None:
    make, x, reasons = FALLBACKS[name]
    plan = plan_of(**PLANS["tensor"])
    native, fallen = step(make, x, plan, "native")
    kind = type(make()).__name__.lower().replace("convtranspose", "conv_transpose")
    assert fallen == [f"/{kind}.0, {reason}" for reason in reasons]
    with pytest.raises(PlanError, match="strict=True"):
        bitplan.attach(make(), plan, example=x, execution=bitplan.Native(min_macs=0, strict=True))
    emulated, _ = step(make, x, plan, "emulate")
    is_wholly = reasons[0].startswith("all")
    for place, (ours, theirs) in enumerate(zip(native, emulated, strict=True)):
        if is_wholly and place < 3:  # torch adds up a bias's gradient in other orders
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("quantizer", "dtype", "compiled"),
    [
        (INT8, torch.int8, False),
        (INT8, torch.int8, True),
        (VECTOR, torch.int8, False),
        (E4M3, torch.float8_e4m3fn, False),
        ("e5m2", torch.float8_e5m2, False),
    ],
)
def test_what_is_emulated_keeps_codes_of_its_input(quantizer: Any, dtype: torch.dtype, compiled: bool) -> None:
    def make() -> nn.Module:
        return nn.Conv2d(16, 24, 3, groups=4, bias=False)

    x = image((3, 16, 7, 8))
    for plan in (plan_of(x=quantizer, w=quantizer), plan_of(fprop=quantizer, wgrad=quantizer)):
        with noted() as kept:
            native, fallen = step(make, x, plan, "native", compiled)
        assert fallen[0].endswith(KEPT)
        emulated, _ = step(make, x, plan, "emulate")
        for ours, theirs in zip(native, emulated, strict=True):
            assert torch.equal(ours, theirs)
        assert [t.dtype for t in kept if t.numel() == x.numel()] == [dtype]


def test_what_does_not_fit_into_a_byte_is_kept_as_it_is() -> None:
    twelve = {"format": "int12", "scale": "tensor"}
    _, fallen = step(lambda: nn.Conv2d(16, 24, 1), image((3, 16, 7, 8)), plan_of(x=twelve, w=twelve), "native")
    assert not any(KEPT in item for item in fallen)
    assert any("no backend here multiplies int12 by int12" in item for item in fallen)


def test_small_and_narrow_convolutions_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = LAYERS["3x3"]
    plan = plan_of(**PLANS["tensor"])
    counted = Counted(monkeypatch)
    _, fallen = step(make, image(shape), plan, "native", min_macs=10**6)
    assert fallen == [f"/conv2d.0, all passes: 168 x 144 x 24 is too small to gain by it{KEPT}"]
    terms = paths.NativeTerms(min_channels_by_backend=(("int8", 17),))
    monkeypatch.setattr(
        import_module("bitplan.executions.native.execution"), "load_crossover", lambda device, dtype: terms
    )
    _, fallen = step(make, image(shape), plan, "native", min_macs=None)
    reason = "a convolution from 16 to 24 channels has too few channels to gain by im2col"
    assert fallen == [f"/conv2d.0, all passes: {reason}{KEPT}"]
    assert counted.count == 0
    make, shape = LAYERS["1x1"]
    assert step(make, image(shape), plan, "native", min_macs=None)[1] == []
    assert counted.count == 3


def test_a_scale_for_each_pixel_serves_1x1_only() -> None:
    pixel = {"format": "int8", "scale": "vector", "axis": 1}
    plan = plan_of(**{"fprop.x": pixel, "fprop.w": INT8})
    for layer, reason in (("1x1", None), ("3x3", "the scale of fprop.x changes along the sum")):
        make, shape = LAYERS[layer]
        native, fallen = step(make, image(shape), plan, "native")
        assert next((item for item in fallen if "fprop:" in item), None) == (reason and f"/conv2d.0, fprop: {reason}")
        for ours, theirs in zip(native, step(make, image(shape), plan, "emulate")[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))


def test_sizes_that_do_not_suit_a_unit_are_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitplan.executions.native import backends as units

    for place in (
        "bitplan.executions.native.fallbacks.supports_shape",
        "bitplan.executions.native.product.supports_shape",
    ):
        monkeypatch.setattr(place, lambda name, kind, sizes: units.supports_shape(name, "cuda", sizes))
    make, shape = LAYERS["1x1"]
    native, fallen = step(make, image(shape), plan_of(**PLANS["fp8"]), "native")
    assert fallen == [
        "/conv2d.0, fprop: the fp8 backend does not support the shape 168 x 16 x 24",
        "/conv2d.0, dgrad: the fp8 backend does not support the shape 168 x 24 x 16",
        f"/conv2d.0, wgrad: the fp8 backend does not support the shape 24 x 168 x 16{KEPT}",
    ]
    for ours, theirs in zip(native, step(make, image(shape), plan_of(**PLANS["fp8"]), "emulate")[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_an_empty_batch_is_one() -> None:
    model = nn.Conv2d(16, 8, 1)
    with bitplan.attach(model, plan_of(**PLANS["tensor"]), execution=bitplan.Native(min_macs=0)):
        y = model(image((0, 16, 3, 3)))
        y.sum().backward()
    assert y.shape == (0, 8, 3, 3)
    assert model.weight.grad is not None
    assert not model.weight.grad.any()


def test_statistics_are_those_of_emulation() -> None:
    model, x = nn.Conv2d(16, 24, 3, groups=2), image((3, 16, 7, 8))
    result = []
    for execution in (bitplan.Native(min_macs=0), "emulate"):
        with bitplan.attach(model, plan_of(x=INT8, w=INT8, dy=INT8), example=x, execution=execution, stats=True) as run:
            model(x).sum().backward()
            result.append(run.stats())
    assert result[0] == result[1]


# --- a whole model ---------------------------------------------------------------------------------------------------


def test_bottlenecks_learn_as_they_do_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    from bitplan.lab.models.resnet import Bottleneck

    def losses(execution: str) -> tuple[list[float], int]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            Bottleneck(16, 8, 1, "conv"),
            Bottleneck(32, 16, 2, "conv"),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 4),
        ).to(memory_format=torch.channels_last)
        x, target = image((8, 3, 8, 8)), torch.arange(8) % 4
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        chosen = bitplan.Native(min_macs=0) if execution == "native" else execution
        result = []
        with bitplan.attach(model, plan_of(**PLANS["tensor"]), example=x, execution=chosen) as run:
            for _ in range(6):
                loss = F.cross_entropy(model(x), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step()
                result.append(loss.item())
            fallen = len(run.fallbacks()) if execution == "native" else 0
        return result, fallen

    native, fallen = losses("native")
    assert fallen == 1  # the gradient through the 3x3 convolution with a stride
    assert native[-1] < 0.7 * native[0]
    emulated, _ = losses("emulate")
    assert native == pytest.approx(emulated, rel=2e-2)
    assert native[0] == pytest.approx(emulated[0], rel=1e-5)
    monkeypatch.setattr(convolution, "is_channels_last", lambda x: False)
    assert losses("native")[1] == 9


def test_a_compiled_bottleneck_is_the_eager_one() -> None:
    from bitplan.lab.models.resnet import Bottleneck

    def make() -> nn.Module:
        return Bottleneck(16, 8, 1, "conv").to(memory_format=torch.channels_last)

    result = [step(make, image((4, 16, 6, 6)), plan_of(**PLANS["tensor"]), "native", value) for value in (False, True)]
    assert [fallen for _, fallen in result] == [[], []]
    for eager, compiled in zip(*(results for results, _ in result), strict=True):
        # Batch norm rounds otherwise, whereupon a code or two may be others.
        assert (eager - compiled).norm() <= 2e-2 * eager.norm()
