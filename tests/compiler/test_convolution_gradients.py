"""Input gradients of convolutions as forward convolutions: their values, and where graphs have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import bitplan
from bitplan import Plan
from bitplan.compiler import convolution_gradients
from bitplan.compiler.convolution_gradients import (
    InputGradientPass,
    input_gradient,
    is_forward_convolution,
    replace_input_gradients,
    with_input_gradients,
)
from bitplan.compiler.graph_passes import OPTION

#: Sizes of an image, of a kernel, and paddings.
PLAIN = [
    ((7, 7), (3, 3), (1, 1)),
    ((8, 5), (3, 3), (0, 2)),
    ((6, 9), (2, 4), (0, 0)),
    ((9, 6), (4, 2), (3, 1)),
    ((5, 8), (1, 5), (0, 2)),
    ((4, 4), (1, 1), (0, 0)),
    ((11,), (4,), (2,)),
    ((4, 5, 6), (3, 2, 1), (1, 1, 0)),
]
#: stride, padding, dilation, transposed, groups
REFUSED = [
    ([2, 2], [1, 1], [1, 1], False, 1),
    ([1, 2], [1, 1], [1, 1], False, 1),
    ([1, 1], [1, 1], [2, 2], False, 1),
    ([1, 1], [1, 1], [1, 1], True, 1),
    ([1, 1], [1, 1], [1, 1], False, 2),
    ([1, 1], [3, 1], [1, 1], False, 1),
]


def convolution(x: Tensor, w: Tensor, padding: tuple[int, ...], **settings: Any) -> Tensor:
    function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[w.dim() - 2]
    return function(x, w, padding=padding, **settings)


def randn(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("image", "kernel", "padding"), PLAIN)
def test_the_gradient_is_that_of_autograd(image: tuple[int, ...], kernel: tuple[int, ...], padding: Any) -> None:
    torch.manual_seed(0)
    x, w = randn(2, 3, *image), randn(4, 3, *kernel)
    y = convolution(x, w, padding)
    dy = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, x, dy)
    ones = [1] * len(image)
    assert is_forward_convolution(w, ones, list(padding), ones, False, 1)
    torch.testing.assert_close(input_gradient(dy, w, list(padding)), expected)


@pytest.mark.parametrize("settings", REFUSED)
def test_other_convolutions_keep_their_gradients(settings: Any) -> None:
    assert not is_forward_convolution(torch.zeros(4, 4, 3, 3), *settings)


class OnCpu(InputGradientPass):
    """The pass, for a CPU; notes how many gradients it replaced."""

    replaced: list[int]

    def change(self, graph: fx.Graph) -> None:
        self.replaced.append(replace_input_gradients(graph, "cpu"))

    def uuid(self) -> None:  # no caches: a graph that came from one would not be changed here
        return None


@pytest.fixture
def on_cpu() -> OnCpu:
    graph_pass = OnCpu()
    graph_pass.replaced = []
    return graph_pass


class Net(nn.Module):
    """The convolutions of stride 1 are the second and, with a frozen weight, the fifth; the first has a fixed input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.plain = nn.Conv2d(4, 6, (3, 2), padding=(1, 0))
        self.strided = nn.Conv2d(6, 6, 3, stride=2)
        self.grouped = nn.Conv2d(6, 6, 3, groups=2, padding=1)
        self.frozen = nn.Conv2d(6, 2, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in (self.stem, self.plain, self.strided, self.grouped, self.frozen):
            x = torch.tanh(convolution(x))
        return x


#: Operands rounded once for both of their products, whose gradients are autograd's, and each operand by itself.
RULES: dict[str, Any] = {
    "none": {},
    "shared": {"x": "e5m10", "w": "e5m10", "dy": "e5m10"},
    "slots": {"fprop.x": "e5m10", "dgrad.w": "e5m10", "dgrad.dy": "e5m10", "wgrad.dy": "e8m7"},
}


@pytest.mark.parametrize("name", RULES)
def test_compiled_gradients_equal_eager_ones(name: str, on_cpu: OnCpu) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Net().double().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64)
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", **RULES[name]}] if RULES[name] else []})
    with bitplan.attach(model, plan, example=x, execution="emulate") as run:
        results = []
        for call in (model, run.compile(options={OPTION: on_cpu})):
            y = call(x)
            results.append(
                [y, *torch.autograd.grad(y.square().sum(), [p for p in model.parameters() if p.requires_grad])]
            )
    torch.testing.assert_close(results[1], results[0])
    assert sum(on_cpu.replaced) == 2


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_runs_have_the_pass_where_cudnn_is_deterministic(
    is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", is_deterministic)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda model, **settings: given.append(settings["options"]))
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "x": "e4m3"}]})
    with bitplan.attach(nn.Conv2d(3, 4, 3), plan, example=torch.randn(1, 3, 4, 4), execution="emulate") as run:
        run.compile()
    assert isinstance(given[0].get(OPTION), InputGradientPass) == is_deterministic


def test_the_pass_follows_passes_of_the_user() -> None:
    graphs: list[fx.Graph] = []
    (chosen,) = with_input_gradients({OPTION: graphs.append}).values()
    chosen(fx.Graph())
    assert len(graphs) == 1
    assert chosen.uuid() is None
    assert with_input_gradients({OPTION: chosen}) == {OPTION: chosen}
    assert isinstance(InputGradientPass().uuid(), tuple)


def test_a_switch_leaves_gradients_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution_gradients, "REPLACES", False)
    assert with_input_gradients({"max_autotune": True}) == {"max_autotune": True}
