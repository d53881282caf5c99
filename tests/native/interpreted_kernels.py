"""Holds the Triton kernels, interpreted on a CPU, against the plain torch beside them; prints how many cases agreed.

Triton's interpreter lacks some things that are put in here: a float8 conversion that rounds to nearest and saturates,
PTX, libdevice, multiplication and addition with one rounding, and loops whose bounds are numbers of the kernel.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bitplan.compiler.kernel_ops import launch_directly
from bitplan.executions.native.attention import (
    amax_by_head_reference,
    attention_reference,
    cast_by_head_reference,
    restore_by_head_reference,
    transpose_values,
)
from bitplan.executions.native.float8_block_cast import block_cast_reference
from bitplan.executions.native.float8_cast import (
    FORMATS,
    amax_reference,
    cast_reference,
    pad_rows,
    padded_cast_reference,
)
from bitplan.executions.native.gated_cast import (
    e4m3_reference,
    gated_amax_reference,
    gated_cast_reference,
    gated_grads_amax_reference,
    gated_grads_cast_reference,
)
from bitplan.executions.native.group_padding import pad_groups
from bitplan.executions.native.norm_cast import norm_amax_reference, norm_cast_reference
from bitplan.executions.native.recorded_cast import CASTS

KINDS = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}


def complete(interpreter: Any) -> None:
    """Put in what is missing."""
    convert, patch = interpreter._convert_float, interpreter._patch_lang_tensor

    def converted(arguments: Any, source: Any, target: Any, rounding: Any) -> Any:
        kind = KINDS.get(str(target))
        if kind is None:
            return convert(arguments, source, target, rounding)
        most = FORMATS[kind].max
        return torch.from_numpy(np.ascontiguousarray(arguments)).clamp(-most, most).to(kind).view(torch.uint8).numpy()

    def assembled(self: Any, asm: str, constraints: str, arguments: Any, types: Any, *more: Any) -> Any:
        """The pieces of PTX there are; what codes are combined with counts."""
        if "rcp" in asm:
            result = np.float32(1) / arguments[0].data
        elif "bf16x2" in asm:
            result = torch.from_numpy(np.ascontiguousarray(arguments[0].data)).bfloat16().float().numpy()
        else:
            kind = "fp8e4nv" if "e4m3x2" in asm else "fp8e5"
            result = converted(arguments[0].data, None, kind, None) ^ arguments[1].data.astype(np.uint8)
        return SimpleNamespace(get_result=lambda number: interpreter.TensorHandle(result, types[0].scalar))

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(np.float32), z.dtype)

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._convert_float, interpreter._patch_lang_tensor = converted, patched
    interpreter.InterpreterBuilder.create_fma = fused
    interpreter.InterpreterBuilder.create_inline_asm = assembled


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal to the bit, NaN being NaN."""
    first, second = first.float(), second.float()
    signs = torch.equal(first.signbit() | first.isnan(), second.signbit() | second.isnan())
    return signs and torch.equal(first.nan_to_num(nan=-1.0), second.nan_to_num(nan=-1.0))


def samples() -> list[torch.Tensor]:
    torch.manual_seed(0)
    ragged = torch.randn(130, 150) * 7
    small = [
        [-3.0, 0.0, -0.0],
        [1e-40, -1e-39, 1e-45],
        [3e38, -1e38, 1.0],
        [torch.inf, 1.0, 2.0],
        [torch.nan, 1.0, 2.0],
    ]
    return [ragged, ragged.bfloat16(), *(torch.tensor([row]) for row in small)]


def almost_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal, but for neighbours among float8 codes: NumPy's exponential and division are not torch's to the last bit,
    so that now and then a number is rounded to the other side."""
    first, second = first.float(), second.float()
    apart = (first != second) & ~(first.isnan() & second.isnan())
    return (
        bool((first - second)[apart].abs().le(0.26 * second[apart].abs()).all())
        and int(apart.sum()) <= 1 + first.numel() // 500
    )


def gates() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Gate, up, and the gradient of their product."""
    torch.manual_seed(1)
    ragged = (torch.randn(3, 330, 150) * 5).bfloat16()
    edges = torch.tensor([0.0, -0.0, 3.0, -20.0, 100.0, -80.0, 500.0]).bfloat16().expand(2, 7)
    return [(ragged[0], ragged[1], ragged[2]), (edges[:, :5], edges.flip(1)[:, :5].contiguous(), edges[:, 2:])]


def records(count: int) -> tuple[list[torch.Tensor], list[int]]:
    """Records, the second of which has met more, and where in each of them something is noted."""
    torch.manual_seed(2)
    made = [torch.rand(2, 5) / 1e30, torch.full((1, 5), 1e4), torch.zeros(3, 5)]
    return made[:count], [7, 1, 14][:count]


def noted(name: str, launch: Any, arguments: tuple[Any, ...], reported: Any, count: int) -> None:
    """A cast that notes gives what one that tells has given, and the records that torch makes of what was told."""
    kind = CASTS[getattr(torch.ops.bitplan, name).default]
    ours, cells = records(count)
    cast = launch(launch_directly, *kind.with_amax(arguments, False), records=ours, cells=cells)
    assert all(
        same(*pair) for number, pair in enumerate(zip(cast, reported, strict=True)) if number not in kind.amax_results
    )
    assert all(cast[number].numel() == 0 for number in kind.amax_results)
    for number, (record, before, cell) in enumerate(zip(ours, *records(count), strict=True)):
        top = reported[kind.amax_result_of(number)].amax()
        before.view(-1)[cell] = torch.maximum(before.view(-1)[cell], top)
        assert same(record, before), (name, record, before)


def gated() -> int:
    """The same for the kernels of a gate."""
    import triton.language as tl

    from bitplan.executions.native import gated_cast_kernel as kernels

    kernels.libdevice = SimpleNamespace(exp=lambda x: tl.exp(x))  # the interpreter has its own at work by then
    kernels.PARTS = 4
    agreed = 0
    for gate, up, grad in ((a.contiguous(), b.contiguous(), c.contiguous()) for a, b, c in gates()):
        small = e4m3_reference(gate), e4m3_reference(up)
        for kind, history_amax, codes in itertools.product(FORMATS, (0.0, 1.5), (False, True)):
            history, halves = torch.tensor(history_amax), (gate, up) if codes else small
            plain = gated_amax_reference(*halves, history, codes)
            parts = kernels.launch_gated_amax(launch_directly, *halves, history, codes)
            assert almost_same(parts.amax(), torch.zeros(()) if history_amax else plain.amax())
            rest = (kind, plain, history, True, True, True, codes)
            first, second = (
                kernels.launch_gated_cast(launch_directly, *halves, *rest),
                gated_cast_reference(*halves, *rest),
            )
            assert all(almost_same(*pair) for pair in zip(first[:3], second[:3], strict=True)), (gate, rest)
            assert torch.equal(first[0].float().t(), first[1].float())
            assert almost_same(first[3].amax(), second[3].amax())
            assert not codes or all(map(same, first[4:], second[4:]))
            if history_amax:
                noted("gated_cast", kernels.launch_gated_cast, (*halves, *rest), first, 1)
            agreed += 1
        for kind, history_amax, halves in itertools.product(FORMATS, (0.0, 1.5), ((gate, up), small)):
            arguments = (grad, *halves)
            history_amaxes = torch.tensor(history_amax), torch.tensor(3.0)
            plain_parts = gated_grads_amax_reference(*arguments, *history_amaxes)
            both = kernels.launch_gated_grads_amax(launch_directly, *arguments, *history_amaxes)
            expected = (torch.zeros(()),) * 2 if history_amax else [part.amax() for part in plain_parts]
            assert all(almost_same(part.amax(), second) for part, second in zip(both, expected, strict=True))
            rest = (kind, *plain_parts, *history_amaxes, True, True, True)
            first, second = (
                kernels.launch_gated_grads_cast(launch_directly, *arguments, *rest),
                gated_grads_cast_reference(*arguments, *rest),
            )
            for at in (0, 4):
                assert all(almost_same(*pair) for pair in zip(first[at : at + 3], second[at : at + 3], strict=True))
                assert torch.equal(first[at].float().t(), first[at + 1].float())
                assert almost_same(first[at + 3].amax(), second[at + 3].amax())
            if history_amax:
                noted("gated_grads_cast", kernels.launch_gated_grads_cast, (*arguments, *rest), first, 2)
            agreed += 1
        agreed += padded_gates(kernels, gate, up, grad)
    return agreed


def padded_gates(kernels: Any, gate: torch.Tensor, up: torch.Tensor, grad: torch.Tensor) -> int:
    """The same for groups of rows."""
    rows, history = gate.shape[0], torch.tensor(1.5)
    sources = pad_groups(torch.tensor([1, 1, rows - 1]), rows).sources
    plain, agreed = torch.zeros(1), 0
    for kind, codes in itertools.product(FORMATS, (False, True)):
        rest = (kind, plain, history, True, True, True, codes, None, sources)
        first = kernels.launch_gated_cast(launch_directly, gate, up, *rest)
        second = gated_cast_reference(gate, up, *rest)
        assert all(almost_same(*pair) for pair in zip(first[:3], second[:3], strict=True))
        assert almost_same(first[3].amax(), second[3].amax())
        assert torch.equal(pad_rows(first[0].float(), sources).t(), first[1].float())
        assert not codes or all(map(same, first[4:], second[4:]))
        noted("gated_cast", kernels.launch_gated_cast, (gate, up, *rest), first, 1)
        grads = (grad, gate, up, kind, plain, plain, history, torch.tensor(3.0), True, True, True, None, sources)
        first = kernels.launch_gated_grads_cast(launch_directly, *grads)
        second = gated_grads_cast_reference(*grads)
        for at in (0, 4):
            assert all(almost_same(*pair) for pair in zip(first[at : at + 3], second[at : at + 3], strict=True))
            assert torch.equal(pad_rows(first[at].float(), sources).t(), first[at + 1].float())
            assert almost_same(first[at + 3].amax(), second[at + 3].amax())
        noted("gated_grads_cast", kernels.launch_gated_grads_cast, grads, first, 2)
        agreed += 2
    return agreed


def norms() -> int:
    """The same for those of a norm; in NumPy the inverse of a root is another to the last bit, so it is given, too."""
    import triton.language as tl

    from bitplan.executions.native import norm_cast_kernel as kernels

    kernels.libdevice = SimpleNamespace(rsqrt=lambda x: tl.rsqrt(x))
    kernels.PARTS, kernels._BLOCK = 4, 64
    agreed = 0
    torch.manual_seed(2)
    weight, edges = torch.randn(150) * 3, torch.tensor([[3.0, 0.0, -0.0], [1e-40, 3e38, 1.0], [torch.nan, 1.0, 2.0]])
    for x, factor in (((torch.randn(130, 150) * 7).bfloat16(), weight.bfloat16()), (edges, weight[:3])):
        mean = x.float().square().mean(1)
        for kind, history_amax, eps, twice in itertools.product(FORMATS, (0.0, 1.5), (1e-6, None), (False, True)):
            arguments = (x, torch.rsqrt(mean + 1e-6) if eps is None else mean, factor, eps)
            alike = same if eps is None else almost_same
            history = torch.tensor(history_amax)
            plain = norm_amax_reference(*arguments, history, twice)
            parts = kernels.launch_norm_amax(launch_directly, *arguments, history, twice)
            assert alike(parts.amax(), torch.zeros(()) if history_amax else plain.amax())
            for layouts in ((True, True), (True, False), (False, True)):
                rest = (kind, plain, history, *layouts, True, None, twice)
                first, second = (
                    kernels.launch_norm_cast(launch_directly, *arguments, *rest),
                    norm_cast_reference(*arguments, *rest),
                )
                assert all(alike(*pair) for pair in zip(first[:3], second[:3], strict=True)), (arguments, rest)
                assert alike(first[3].amax(), second[3].amax())
                noted("norm_cast", kernels.launch_norm_cast, (*arguments, *rest), first, 1 + agreed % 3)
                agreed += 1
    return agreed


def blocks() -> int:
    """Codes and scales of blocks: lines of one magnitude each, zeros, subnormal numbers, infinity and NaN."""
    from bitplan.executions.native.float8_block_cast_kernel import launch_float8_block_cast

    torch.manual_seed(4)
    mixed = torch.randn(150, 260) * torch.logspace(-44, 37, 150)[:, None] * torch.logspace(-3, 2, 260)
    mixed[3], mixed[:, 5], mixed[7, 9], mixed[140, 200] = 0.0, -0.0, torch.inf, torch.nan
    agreed = 0
    normal = mixed[25:].bfloat16()  # the interpreter widens no subnormal bfloat16 number correctly
    for x in [*samples(), mixed, normal, mixed.half(), samples()[0].half()]:
        for tiles, power_of_two in itertools.product((False, True), (False, True)):
            for layouts in ((True, True), (True, False), (False, True)):
                arguments = (x, tiles, power_of_two, *layouts)
                results = launch_float8_block_cast(launch_directly, *arguments)
                for ours, plain in zip(results, block_cast_reference(*arguments), strict=True):
                    assert ours.shape == plain.shape
                    assert same(ours, plain), (arguments, ours, plain)
                agreed += 1
    return agreed


def attentions() -> int:
    """The same for attention; here the interpreter cuts off what torch rounds to bfloat16, so outputs are close only.

    Queries and keys of any number, with and without a causal mask, and heads that share keys.
    """
    from bitplan.executions.native import attention_kernel as kernels

    agreed = 0
    torch.manual_seed(3)
    x, scale = (torch.randn(2, 150, 3, 64) * 9).bfloat16().transpose(1, 2), torch.rand(3) / 30
    assert same(kernels.launch_attention_amax(launch_directly, x), amax_by_head_reference(x))
    for transposed in (False, True):
        codes = kernels.launch_attention_cast(launch_directly, x, scale, transposed)
        assert same(codes, cast_by_head_reference(x, scale, transposed))
        values = kernels.launch_attention_restore(launch_directly, codes, scale, 150, transposed)
        assert torch.allclose(values, restore_by_head_reference(codes, scale, 150, transposed), rtol=2**-7)
        agreed += 1
    shapes = [(130, 130, True), (100, 150, False), (64, 128, False)]
    options = itertools.product((True, False), (True, False), (True, False))
    for (queries, keys, is_causal), (interleaved, adds, descriptors) in itertools.product(shapes, options):
        tiles = kernels.Tiles(64, 64, 4, 1, descriptors, adds, interleaved)
        q, k, v = (
            (torch.randn(2, tokens, heads, 64) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
            for tokens, heads in ((queries, 4), (keys, 2), (keys, 2))
        )
        scales = [torch.rand(heads) / 50 for heads in (4, 2, 2)]
        arguments = (q, k, transpose_values(v, interleaved), *scales, 0.125, is_causal)
        out, sums = kernels.launch_attention_forward(launch_directly, *arguments, tiles)
        plain, plain_sums = attention_reference(*arguments, tiles.block_n, interleaved)
        assert torch.allclose(sums, plain_sums, atol=1e-5)
        assert (out.float() - plain.float()).norm() < 0.01 * plain.float().norm(), (tiles, queries, keys)
        agreed += 1
    return agreed


def padded() -> int:
    """The same for casts of groups: one row in a group of its own, an empty group, and rows that are in no group."""
    from bitplan.executions.native.float8_cast_kernel import launch_float8_padded_cast

    agreed = 0
    for x in samples():
        rows = x.shape[0]
        sources = pad_groups(torch.tensor([min(rows, 1), min(rows, 1), min(rows, 98)]), rows).sources
        plain = amax_reference(x, None)
        for kind, power_of_two, as_rows in itertools.product(FORMATS, (False, True), (False, True)):
            rest = (kind, plain, torch.tensor(0.0), power_of_two, as_rows, True)
            first = launch_float8_padded_cast(launch_directly, x, sources, *rest)
            second = padded_cast_reference(x, sources, *rest)
            assert all(same(*pair) for pair in zip(first[:3], second[:3], strict=True)), (x, rest)
            assert same(first[3].amax(), second[3].amax())
            noted("float8_padded_cast", launch_float8_padded_cast, (x, sources, *rest), first, 1 + agreed % 3)
            agreed += 1
    return agreed


def main() -> int:
    """How many cases agreed."""
    import triton.runtime.interpreter as interpreter

    complete(interpreter)
    from bitplan.executions.native.float8_cast_kernel import (
        launch_float8_amax,
        launch_float8_amax_batch,
        launch_float8_cast,
    )

    agreed = 0
    np.seterr(all="ignore")
    some, history_amaxes = samples()[1:6], [torch.tensor(float(number % 2)) for number in range(5)]
    for tops, x, history_amax in zip(
        launch_float8_amax_batch(launch_directly, some, history_amaxes), some, history_amaxes, strict=True
    ):
        assert same(tops.amax(), launch_float8_amax(launch_directly, x, history_amax).amax())
        assert tops.shape == (512,)
    for x in samples():
        for history_amax in (None, torch.tensor(0.0), torch.tensor(1.5)):
            ours, plain = launch_float8_amax(launch_directly, x, history_amax), amax_reference(x, history_amax)
            assert history_amax == 1.5 or same(ours.amax(), plain.amax())
            for kind, power_of_two in itertools.product(FORMATS, (False, True)):
                for scaled in (True, False) if history_amax is None and not power_of_two else (True,):
                    rest = (history_amax, power_of_two, True, True, True)
                    parts = plain if power_of_two else ours  # one part, or many
                    first = launch_float8_cast(launch_directly, x, kind, parts if scaled else None, *rest)
                    second = cast_reference(x, kind, plain if scaled else None, *rest)
                    assert all(same(*pair) for pair in zip(first[:3], second[:3], strict=True)), (x, rest, kind)
                    assert same(first[3].amax(), second[3].amax())
                    if power_of_two:
                        noted("float8_cast", launch_float8_cast, (x, kind, parts, *rest), first, 1 + agreed % 3)
                    agreed += 1
    return agreed + blocks() + padded() + gated() + norms() + attentions()


if __name__ == "__main__":
    print(main())
