"""The presets deepseek-v3 and nvfp4 round what the reports say: every choice, seen at the operands that are multiplied.

The grids are written out here. Operands are those of the matrix products that torch runs, whatever made them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitplan
from bitplan.plans import Plan

#: Rows of the widest layer's input, its inputs and outputs: not all of them multiples of a block.
TOKENS, WIDTH, HIDDEN, CLASSES = 96, 160, 288, 10

E4M3 = torch.tensor(
    sorted({m * 2.0 ** (e - 3) for e in range(-6, 9) for m in range(16)} - {480.0}), dtype=torch.float64
)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


class Net(nn.Module):
    """Three layers, a router whose scores are ranked, a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        for weight in (self.up.weight, self.down.weight):  # other scales in every tile
            spread = torch.exp2(torch.randn(len(weight) // 16, weight.shape[1] // 16))
            weight.data *= spread.repeat_interleave(16, 0).repeat_interleave(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        scores, _ = self.router(x).topk(2)
        gate = scores.softmax(-1)[:, :1]
        return self.head(x + gate * self.down(torch.relu(self.up(x))))  # type: ignore[no-any-return]


class Products(TorchDispatchMode):
    """Records the operands of every matrix product, or of every call of another function."""

    def __init__(self, function: Any = torch.ops.aten.mm.default) -> None:
        super().__init__()
        self.function = function
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.function:
            self.seen.append((args[0].detach().double(), args[1].detach().double()))
        return func(*args, **(kwargs or {}))


#: The products of a step of :class:`Net` in the order in which they run: fprop, dgrad and wgrad of each layer.
RUNS_AS = {"router": (1, 12, 11), "up": (2, 9, 10), "down": (3, 7, 8), "head": (4, 6, 5)}


def outliers(*shape: int, seed: int) -> Tensor:
    """Normal numbers, some of them a hundred times as large: a few outliers and a few rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    x[torch.rand(*shape, generator=generator) < 0.003] *= 100
    return x


@contextmanager
def trained(plan: Any, **options: Any) -> Iterator[tuple[Net, Tensor, Any]]:
    torch.manual_seed(0)
    net, x = Net(), outliers(TOKENS, WIDTH, seed=1)
    with bitplan.attach(net, plan, example=x, execution="emulate", **options) as run:
        yield net, x, run


def step(net: Net, x: Tensor) -> Products:
    """The products of forward and backward."""
    net.zero_grad()
    with Products() as products:
        y = net(x)
        y.backward(outliers(*y.shape, seed=2) / 1000)
    assert len(products.seen) == 14
    return products


def operands_of(layer: str, products: Products) -> dict[str, Tensor]:
    """The six operands of a layer as matrices whose last axis is the summed one."""
    fprop, dgrad, wgrad = (products.seen[number] for number in RUNS_AS[layer])
    slots = {"fprop.x": fprop[0], "fprop.w": fprop[1].t(), "dgrad.dy": dgrad[0], "dgrad.w": dgrad[1].t()}
    if wgrad[0].shape[1] != TOKENS:  # some products run transposed
        wgrad = (wgrad[1].t(), wgrad[0].t())
    return {**slots, "wgrad.dy": wgrad[0], "wgrad.x": wgrad[1].t()}


def operands(plan: Any, layer: str, **options: Any) -> dict[str, Tensor]:
    with trained(plan, **options) as (net, x, _):
        return operands_of(layer, step(net, x))


def tiles_of(matrix: Tensor, rows: int, columns: int) -> Iterator[Tensor]:
    for strip in matrix.split(rows):
        yield from strip.split(columns, 1)


def scales_of(matrix: Tensor, rows: int, columns: int, largest: float) -> Tensor:
    """What maps the largest magnitude of each tile to the largest value of the format."""
    return torch.stack([tile.abs().max() / largest for tile in tiles_of(matrix, rows, columns)])


def share_on_grid(matrix: Tensor, rows: int, columns: int, grid: Tensor, tops: tuple[float, ...]) -> float:
    """The share of tiles with all values on the grid times a scale, which maps the largest to one of `tops`."""
    good = [
        not bool(tile.any()) or any(float(_distance(tile, tile.abs().max() / top, grid)) < 1e-6 for top in tops)
        for tile in tiles_of(matrix, rows, columns)
    ]
    return sum(good) / len(good)


def _distance(tile: Tensor, scale: Tensor, grid: Tensor) -> Tensor:
    """The largest distance to the grid, relative to the largest value."""
    steps = (tile / scale).abs()
    return ((steps.unsqueeze(-1) - grid).abs().amin(-1) / steps.max()).max()


LINES = ("fprop.x", "dgrad.dy", "wgrad.dy", "wgrad.x")


# --- deepseek-v3


@pytest.mark.parametrize("name", ["deepseek-v3", "nvfp4"])
def test_what_the_reports_keep_in_high_precision_is_left_alone(name: str) -> None:
    """The head, gates of experts, and every product without a weight; embeddings and norms are no products."""
    with trained(name) as (net, x, run):
        changed = step(net, x)
        kept = {path for path in RUNS_AS if not _is_rounded(run.plan, path)}
    assert kept == {"router", "head"}
    assert _is_rounded(run.plan, "first") == (name == "deepseek-v3")
    with trained({"version": 1, "rules": [{"match": "head", "activation": "bf16"}]}) as (net, x, _):
        plain = step(net, x)
    head, plain_head = (operands_of("head", products) for products in (changed, plain))
    assert torch.equal(head["dgrad.dy"], plain_head["dgrad.dy"]) or name == "nvfp4"
    assert torch.equal(head["fprop.w"], plain_head["fprop.w"])
    assert not torch.equal(operands_of("up", changed)["fprop.w"], operands_of("up", plain)["fprop.w"])


def _is_rounded(plan: Plan, path: str) -> bool:
    return not plan.decide(path, "linear.0").changes_nothing


@pytest.mark.parametrize("layer", ["up", "down"])
def test_deepseek_v3_has_e4m3_and_a_scale_for_128_of_activations_and_gradients(layer: str) -> None:
    for slot, matrix in operands("deepseek-v3", layer).items():
        if slot not in LINES:
            continue
        assert share_on_grid(matrix, 1, 128, E4M3, (448.0,)) == 1, slot
        scales = scales_of(matrix, 1, 128, 448.0)
        assert len(scales.unique()) > 0.9 * len(scales), slot
        assert share_on_grid(matrix, len(matrix), matrix.shape[1], E4M3, (448.0,)) == 0, slot
        assert share_on_grid(matrix, 1, 128, E4M3[E4M3.log2() % 0.25 == 0], (448.0,)) < 0.5, f"{slot}: fewer values do"


@pytest.mark.parametrize("layer", ["up", "down"])
def test_deepseek_v3_has_one_scale_for_128_x_128_of_a_weight_in_both_products(layer: str) -> None:
    slots = operands("deepseek-v3", layer)
    assert torch.equal(slots["fprop.w"], slots["dgrad.w"].t())
    for slot in ("fprop.w", "dgrad.w"):
        assert share_on_grid(slots[slot], 128, 128, E4M3, (448.0,)) == 1
        scales = scales_of(slots[slot], 128, 128, 448.0)
        assert len(scales.unique()) == len(scales) == 6
        assert share_on_grid(slots[slot], len(slots[slot]), slots[slot].shape[1], E4M3, (448.0,)) == 0


def test_deepseek_v3_takes_the_amax_of_the_tensor_itself() -> None:
    """A step with values 1,024 times as large is rounded as the step before: nothing comes from the past."""
    with trained("deepseek-v3") as (net, x, run):
        before = step(net, x).seen[0][0]
        run.step()
        after = step(net, x * 1024).seen[0][0]
    assert torch.equal(before * 1024, after)


def test_deepseek_v3_bounds_the_error_of_outliers_better_than_a_scale_for_the_tensor() -> None:
    tensor = {"version": 1, "rules": [{"match": "*", "op": "linear", "x": {"format": "e4m3", "scale": "tensor"}}]}
    errors = []
    for plan in ("deepseek-v3", tensor):
        with trained(plan) as (net, x, _):
            x[3, 5] = 1e8
            rounded = step(net, x).seen[0][0]
        others = x.double() != 1e8
        errors.append(float((rounded - x)[others].norm() / x[others].norm()))
    assert 1e-3 < errors[0] < 0.1 < 0.9 < errors[1]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("Mixtral", {"num_local_experts": 3, "intermediate_size": 144}),
        ("Qwen3Moe", {"num_experts": 3, "moe_intermediate_size": 144, "decoder_sparse_step": 1, "head_dim": 16}),
    ],
)
def test_deepseek_v3_rounds_grouped_products_of_experts(name: str, sizes: dict[str, Any]) -> None:
    """Lines along the summed axis of each pass, and tiles of each expert's matrix alone, which are not multiples."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=160, num_hidden_layers=1, max_position_embeddings=128, **heads, **sizes
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_experts_implementation("grouped_mm")
    batch = {"input_ids": torch.randint(0, 64, (2, TOKENS))}
    with (
        bitplan.attach(model, "deepseek-v3", example=batch, execution="emulate") as run,
        Products(torch.ops.aten._grouped_mm.default) as products,
    ):
        model(**batch).logits.sum().backward()
    assert not any("experts" in label for label in run.coverage().unrounded)
    by_experts = [pair for pair in products.seen if pair[1].dim() == 3]
    by_rows = [pair for pair in products.seen if pair[1].dim() == 2]
    assert (len(by_experts), len(by_rows)) == (4, 2)  # fprop and dgrad, and wgrad, of two products
    lines = [left for left, _ in products.seen] + [right.t() for _, right in by_rows]
    for matrix in lines:
        assert share_on_grid(matrix, 1, 128, E4M3, (448.0,)) == 1
        assert share_on_grid(matrix, 128, 128, E4M3, (448.0,)) < 0.1
    assert {matrix.shape[1] for matrix in lines} == {160, 288, 144, 4 * TOKENS}
    for _, stack in by_experts:
        assert len(stack) == 3
        assert all(share_on_grid(matrix, 128, 128, E4M3, (448.0,)) == 1 for matrix in stack)
        assert all(share_on_grid(matrix, *matrix.shape, E4M3, (448.0,)) == 0 for matrix in stack)
        scales = torch.cat([scales_of(matrix, 128, 128, 448.0) for matrix in stack])
        assert len(scales.unique()) == len(scales) >= 3 * 4


# --- nvfp4

#: The largest magnitude of a block is 6 scales; rounded stochastically it may be the value below.
NEAREST, STOCHASTIC = (6.0,), (6.0, 4.0)


@pytest.mark.parametrize("layer", ["up", "down"])
def test_nvfp4_has_e2m1_in_blocks_of_16_along_the_sum(layer: str) -> None:
    for slot, matrix in operands("nvfp4", layer).items():
        if slot not in LINES:
            continue
        tops = STOCHASTIC if slot.endswith("dy") else NEAREST
        assert share_on_grid(matrix, 1, 16, E2M1, tops) == 1, slot
        assert share_on_grid(matrix, 1, 32, E2M1, tops) < 0.5, slot
        scales = scales_of(matrix, 1, 16, 6.0)
        assert 8 < len(scales.unique()) <= (254 if slot.endswith("x") else 500), slot  # few: they are E4M3 themselves


def test_nvfp4_has_block_scales_in_e4m3_and_a_scale_for_the_tensor() -> None:
    x = operands("nvfp4", "up")["fprop.x"]
    scales = scales_of(x, 1, 16, 6.0).unique()
    in_units = scales / scales.max() * 448  # the block with the largest value has the largest scale
    assert float(((in_units.unsqueeze(-1) - E4M3).abs().amin(-1) / in_units).max()) < 1e-6
    assert not bool(((in_units.log2() % 1) == 0).all())  # no powers of two, as MX has


@pytest.mark.parametrize("layer", ["up", "down"])
def test_nvfp4_has_tiles_of_16_x_16_of_a_weight_in_both_products(layer: str) -> None:
    slots = operands("nvfp4", layer)
    assert torch.equal(slots["fprop.w"], slots["dgrad.w"].t())
    assert share_on_grid(slots["fprop.w"], 16, 16, E2M1, NEAREST) == 1
    assert share_on_grid(slots["fprop.w"], 32, 32, E2M1, NEAREST) < 0.5


#: Rotated, and practically not rounded: 24 bits.
ROTATED = {"format": "fp32", "rotate": "hadamard"}


def with_rule(rule: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": ["up", "down"], "op": "linear", **rule}]}


def sylvester(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def test_the_rotation_is_a_hadamard_matrix_with_signs_that_both_operands_share() -> None:
    plain, rotated = (operands(with_rule(rule), "down") for rule in ({"fprop.x": "fp16"}, {"wgrad": ROTATED}))
    signs = []
    for slot in ("wgrad.x", "wgrad.dy"):
        back = (rotated[slot].reshape(-1, TOKENS // 16, 16) @ sylvester(16)).reshape(rotated[slot].shape)
        ratio = (back * plain[slot]).reshape(-1, 16).sum(0) / plain[slot].square().reshape(-1, 16).sum(0)
        torch.testing.assert_close(ratio.abs(), torch.ones(16, dtype=torch.float64), rtol=1e-2, atol=0)
        signs.append(ratio.sign())
    assert torch.equal(signs[0], signs[1])
    assert 4 <= int((signs[0] < 0).sum()) <= 12  # signs flip at random, and are the same in every run:
    assert [int(sign > 0) for sign in signs[0]] == [0, 0, 1, 0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("tokens", [96, 45, 1])
def test_a_rotation_leaves_the_product_as_it_is_in_exact_arithmetic(gemm: str, tokens: int) -> None:
    """In float64, where rounding to float32 is all that differs; also where tokens are no multiple of 16."""
    results = []
    for rule in ({gemm: ROTATED}, {gemm: "fp32"}):
        torch.manual_seed(0)
        layer = nn.Linear(24, 40, bias=False, dtype=torch.float64)
        x = outliers(2, tokens, 24, seed=1).double().requires_grad_()
        plan = {"version": 1, "rules": [{"match": "*", "op": "linear", **rule}]}
        with bitplan.attach(layer, plan, example=x, execution="emulate"), Products() as products:
            y = layer(x)
            y.backward(outliers(*y.shape, seed=2).double())
        assert x.grad is not None
        assert layer.weight.grad is not None
        results.append(([y, x.grad, layer.weight.grad], products.seen))
    for one, two in zip(results[0][0], results[1][0], strict=True):
        assert float((one - two).norm() / two.norm()) < 1e-6
    differing = [
        number
        for number, (one, two) in enumerate(zip(results[0][1], results[1][1], strict=True))
        if not all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(one, two, strict=True))
    ]
    assert differing == [{"fprop": 0, "dgrad": 1, "wgrad": 2}[gemm]]


@pytest.mark.parametrize(
    ("quantizer", "least", "most"),
    [
        # Where many values share a scale, or the scale is a power of two, an outlier costs its neighbours most.
        ({"format": "int4", "scale": "tensor"}, 0.0, 0.6),
        ({"format": "mxfp4"}, 0.0, 0.85),
        # NVFP4's blocks of 16 bound an outlier's harm themselves: their squared error stays about the same.
        ({"format": "nvfp4"}, 0.9, 1.2),
    ],
)
def test_a_rotation_reduces_the_error_of_outliers_where_scales_are_coarse(
    quantizer: dict[str, Any], least: float, most: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(512, 64, generator=generator) for _ in range(2))
    for tensor in (x, dy):
        tensor[torch.rand(512, 64, generator=generator) < 1 / 16] *= 6
    exact = dy.double().t() @ x.double()
    errors = []
    for rotation in ({"rotate": "hadamard"}, {}):
        layer = nn.Linear(64, 64, bias=False)
        plan = {"version": 1, "rules": [{"match": "*", "op": "linear", "wgrad": {**quantizer, **rotation}}]}
        with bitplan.attach(layer, plan, example=x, execution="emulate"):
            layer(x).backward(dy)
        assert layer.weight.grad is not None
        errors.append(float((layer.weight.grad.double() - exact).norm() / exact.norm()))
    assert 0.02 < errors[0] < 0.5
    assert least < errors[0] / errors[1] < most


def test_nvfp4_rotates_both_operands_of_the_weight_gradient_and_no_others() -> None:
    slots = operands("nvfp4", "down")
    exact = operands(with_rule({"wgrad": ROTATED}), "down")
    plain = operands(with_rule({"fprop.x": "fp16"}), "down")
    for slot, matrix in slots.items():
        by_rotation, without = (_error(matrix, source[slot]) for source in (exact, plain))
        if slot.startswith("wgrad"):
            assert by_rotation < 0.35 < 1 < without, slot
        else:
            assert without < 0.35, slot


def _error(rounded: Tensor, exact: Tensor) -> float:
    return float((rounded - exact).norm() / exact.norm())


@pytest.mark.parametrize("slot", ["dgrad.dy", "wgrad.dy"])
def test_stochastic_gradients_of_nvfp4_are_unbiased(slot: str) -> None:
    """The mean over steps approaches the gradient itself; that of rounding to nearest does not."""
    exact = operands(with_rule({"wgrad": ROTATED}), "down")[slot]
    steps = 64

    def mean_of(plan: Any) -> tuple[Tensor, Tensor]:
        draws = []
        with trained(plan) as (net, x, run):
            for _ in range(steps):
                draws.append(operands_of("down", step(net, x))[slot])
                run.step()
        return torch.stack(draws).mean(0), torch.stack(draws).std(0)

    mean, spread = mean_of("nvfp4")
    assert bool((spread > 0).double().mean() > 0.5)
    # With standard error spread / sqrt(steps), squared deviations add up to the number of values; saturation at the
    # largest value of a block, whose scale may round down, biases a few.
    standard = ((mean - exact).square().sum() / (spread.square() / steps).sum()).sqrt()
    assert 0.8 < float(standard) < 1.3
    nearest = {"format": "nvfp4"}
    rotated = {**nearest, "rotate": "hadamard"}
    fixed, none = mean_of(with_rule({"dgrad.dy": nearest, "wgrad.dy": rotated, "wgrad.x": rotated}))
    assert float(none.max()) == 0
    assert float((mean - exact).norm()) < 0.5 * float((fixed - exact).norm())


def test_activations_and_weights_of_nvfp4_are_rounded_to_nearest() -> None:
    first = operands("nvfp4", "down", seed=1)
    second = operands("nvfp4", "down", seed=2)
    assert all(torch.equal(first[slot], second[slot]) == (not slot.endswith("dy")) for slot in first)


@pytest.mark.parametrize("name", ["deepseek-v3", "nvfp4"])
def test_packed_and_compiled_execution_have_the_same_numbers(name: str) -> None:
    gradients = []
    for execution, compiles in (("emulate", False), ("packed", False), ("emulate", True)):
        torch.manual_seed(0)
        net, x = Net(), outliers(TOKENS, WIDTH, seed=1)
        with bitplan.attach(net, name, example=x, execution=execution):
            y = (torch.compile(net, fullgraph=True, backend="aot_eager") if compiles else net)(x)
            y.backward(outliers(*y.shape, seed=2) / 1000)
        gradients.append([y.detach(), *(parameter.grad for parameter in net.parameters())])
    eager, packed, compiled = gradients
    assert all(torch.equal(one, two) for one, two in zip(eager, packed, strict=True))
    for one, two in zip(eager, compiled, strict=True):
        # Sums in another order put single values on the neighbouring grid point.
        assert float((one - two).norm() / one.norm()) < 0.02


# --- a rotation that makes no sense


@pytest.mark.parametrize(
    ("rule", "token"),
    [
        ({"wgrad.x": ROTATED}, "wgrad.dy is not"),
        ({"wgrad.x": ROTATED, "wgrad.dy": {**ROTATED, "rotate_size": 32}}, "is not in the same way"),
        ({"x": ROTATED, "dy": ROTATED}, "no operand of one product"),
        ({"weight": ROTATED}, "no operand of one product"),
        ({"wgrad.x": ROTATED, "wgrad.dy": {"until": "50%", "use": ROTATED, "then": "nvfp4"}}, "is not in the same way"),
        ({"wgrad": {**ROTATED, "rotate_size": 12}}, "power of two"),
        ({"wgrad": {"format": "e4m3", "rotate_size": 32}}, "give rotate"),
        ({"wgrad": {"format": "e4m3", "rotate": "givens"}}, "hadamard"),
        ({"wgrad": {**ROTATED, "promote": {"to": "bf16", "error": 0.1}}}, "drop promote"),
    ],
)
def test_a_rotation_of_one_operand_alone_is_refused_in_one_sentence(rule: dict[str, Any], token: str) -> None:
    with pytest.raises(bitplan.BitplanError, match=token) as caught:
        bitplan.attach(nn.Linear(8, 8), {"version": 1, "rules": [{"match": "*", "op": "linear", **rule}]}, steps=4)
    assert "\n" not in str(caught.value)


def test_the_refusal_of_a_rotation_names_its_own_line_once(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("version: 1\nrules:\n- match: '*'\n  activation: {format: nvfp4, rotate: hadamard}\n")
    with pytest.raises(bitplan.BitplanError, match="no operand of one product") as caught:
        Plan.load(file)
    assert str(caught.value).startswith(f"{file}:4: rules[0].activation: rotate")
    assert str(caught.value).count("plan.yaml") == 1


def test_both_operands_may_stop_to_rotate_together() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(16, 16)
    rule = {"match": "*", "op": "linear", "wgrad": {"until": "50%", "use": ROTATED, "then": "keep"}}
    with bitplan.attach(layer, {"version": 1, "rules": [rule]}, example=x, steps=4, execution="emulate") as run:
        operands = []
        for _ in range(4):
            with Products() as products:
                layer(x).sum().backward()
            operands.append(products.seen[-1][1])
            run.step()
    assert [torch.equal(one, operands[-1]) for one in operands] == [False, False, True, True]


@pytest.mark.parametrize("call", [lambda x, w: nn.functional.conv1d(x.t()[None], w.t()[..., None]), torch.mv])
def test_products_without_a_common_axis_are_not_rotated(call: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8) if call is not torch.mv else torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return call(x, self.weight)

    with (
        bitplan.attach(model := Other(), {"version": 1, "rules": [{"match": "*", "wgrad": ROTATED}]}),
        pytest.raises(bitplan.BitplanError, match="rotate applies to operands of linear layers"),
    ):
        model(torch.randn(8, 8))


def test_a_frozen_convolution_is_not_rotated_either() -> None:
    model, x = nn.Conv2d(16, 16, 3).requires_grad_(False), torch.randn(1, 16, 8, 8)
    rule = {"match": "*", "fprop": ROTATED, "frozen": {"format": "int8", "scale": "channel"}}
    with (
        pytest.raises(bitplan.BitplanError, match="rotate applies to operands of linear layers"),
        bitplan.attach(model, {"version": 1, "rules": [rule]}, execution="packed"),
    ):
        model(x)


@pytest.mark.parametrize("execution", ["emulate", "packed"])
def test_a_frozen_linear_layer_rotates_both_operands(execution: str) -> None:
    """Its product in float32 is that of the unrotated codes, and its operands are others."""
    model, x = nn.Linear(32, 16, bias=False).requires_grad_(False), torch.randn(4, 32)
    results = []
    for rounding in (ROTATED, "fp16"):
        rule = {"match": "*", "fprop": rounding, "frozen": {"format": "int8", "scale": "channel"}}
        with bitplan.attach(model, {"version": 1, "rules": [rule]}, execution=execution), Products() as products:
            results.append((model(x), products.seen[0][0]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-3, atol=1e-3)
    assert not torch.allclose(results[0][1], results[1][1], atol=0.1)
