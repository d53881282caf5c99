"""The kinds of statements that random models are made of.

Every kind has two spellings: the code of ``forward``, as people write it, and the same computation in single operations
of :class:`rounded_by_hand.Hand`, out of place and without modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rounded_by_hand import Hand
from torch import Tensor, nn

#: The shape of all tensors.
B, T, D = 2, 4, 8


@dataclass(frozen=True)
class Kind:
    """A kind of statement: ``{out}`` is the result, ``{a}`` and ``{b}`` are its inputs, ``{n}`` is a number."""

    code: str
    #: The same by hand: ``h`` is the scope of the module, ``m`` the module. Empty: there is no such text.
    by_hand: str
    #: In ``__init__``.
    init: str = ""
    #: Names of its operations, for rules.
    ops: str = ""
    #: The result is the first input, changed in place.
    in_place: bool = False
    #: The result may share memory with the first input.
    is_view: bool = False


def _activation(name: str, module: str) -> dict[str, Kind]:
    call = f'("{name}", F.{name} if hasattr(F, "{name}") else torch.{name}, {{a}})'
    return {
        name: Kind(f"{{out}} = torch.nn.functional.{name}({{a}})", f"{{out}} = h{call}", ops=name),
        f"{name} module": Kind(
            "{out} = self.act{n}({a})",
            f'{{out}} = h.child("act{{n}}"){call}',
            f"self.act{{n}} = nn.{module}()",
            ops=name,
        ),
    }


def _activation_in_place(name: str, module: str, *spellings: str) -> dict[str, Kind]:
    call = f'("{name}", F.{name}, {{a}})'
    kinds = {
        f"{name} in place {number}": Kind(f"{spelling}", f"{{a}} = h{call}", ops=name, in_place=True)
        for number, spelling in enumerate(spellings)
    }
    if module:
        kinds[f"{name} module in place"] = Kind(
            "self.act{n}({a})",
            f'{{a}} = h.child("act{{n}}"){call}',
            f"self.act{{n}} = nn.{module}(inplace=True)",
            ops=name,
            in_place=True,
        )
    return kinds


KINDS: dict[str, Kind] = {
    "linear": Kind(
        "{out} = self.fc{n}({a})",
        '{out} = h.child("fc{n}").product("linear", {a}, m.fc{n}.weight, m.fc{n}.bias)',
        "self.fc{n} = nn.Linear(D, D)",
        "linear",
    ),
    "linear without bias": Kind(
        "{out} = self.fc{n}({a})",
        '{out} = h.child("fc{n}").product("linear", {a}, m.fc{n}.weight)',
        "self.fc{n} = nn.Linear(D, D, bias=False)",
        "linear",
    ),
    "frozen linear": Kind(
        "{out} = self.fc{n}({a})",
        '{out} = h.child("fc{n}").product("linear", {a}, m.fc{n}.weight, m.fc{n}.bias)',
        "self.fc{n} = nn.Linear(D, D).requires_grad_(False)",
        "linear",
    ),
    "a layer twice": Kind(
        "{out} = self.fc{n}(self.fc{n}({a}))",
        '{out} = h.child("fc{n}").product("linear", {a}, m.fc{n}.weight, m.fc{n}.bias)\n'
        '{out} = h.child("fc{n}").product("linear", {out}, m.fc{n}.weight, m.fc{n}.bias)',
        "self.fc{n} = nn.Linear(D, D)",
        "linear",
    ),
    "tied weights": Kind(
        "{out} = F.linear(self.fc{n}({a}), self.fc{n}.weight)",
        '{out} = h.child("fc{n}").product("linear", {a}, m.fc{n}.weight, m.fc{n}.bias)\n'
        '{out} = h.product("linear", {out}, m.fc{n}.weight)',
        "self.fc{n} = nn.Linear(D, D)",
        "linear",
    ),
    "two modules with one weight": Kind(
        "{out} = self.up{n}(torch.tanh(self.fc{n}({a})))",
        '{out} = h.child("fc{n}").product("linear", {a}, m.fc{n}.weight, m.fc{n}.bias)\n'
        '{out} = h("tanh", torch.tanh, {out})\n'
        '{out} = h.child("up{n}").product("linear", {out}, m.up{n}.weight, m.up{n}.bias)',
        "self.fc{n}, self.up{n} = nn.Linear(D, D), nn.Linear(D, D)\nself.up{n}.weight = self.fc{n}.weight",
        "linear tanh",
    ),
    "x @ w.T": Kind(
        "{out} = {a} @ self.w{n}.T",
        '{out} = h.product("matmul", {a}, View(m.w{n}, lambda w: w.T))',
        "self.w{n} = nn.Parameter(torch.randn(D, D) / 3)",
        "matmul",
    ),
    "w on the left": Kind(
        "{out} = torch.matmul(self.w{n}, {a}.mT).mT",
        '{out} = h.product("matmul", m.w{n}, {a}.mT).mT',
        "self.w{n} = nn.Parameter(torch.randn(D, D) / 3)",
        "matmul",
    ),
    "w.chunk": Kind(
        "gate, up = self.w{n}.chunk(2, 0)\n{out} = torch.sigmoid(F.linear({a}, gate)) * F.linear({a}, up)",
        'gate = h.product("linear", {a}, View(m.w{n}, lambda w: w.chunk(2, 0)[0]))\n'
        'gate = h("sigmoid", torch.sigmoid, gate)\n'
        'up = h.product("linear", {a}, View(m.w{n}, lambda w: w.chunk(2, 0)[1]))\n'
        '{out} = h("mul", torch.mul, gate, up)',
        "self.w{n} = nn.Parameter(torch.randn(2 * D, D) / 3)",
        "linear sigmoid mul",
    ),
    "attention": Kind(
        "weights = torch.softmax({a} @ {b}.transpose(1, 2) * 0.3, -1)\n{out} = weights @ {a}",
        'weights = h("mul", lambda t: t * 0.3, h.product("matmul", {a}, {b}.transpose(1, 2)))\n'
        'weights = h("softmax", lambda t: torch.softmax(t, -1), weights)\n'
        '{out} = h.product("matmul", weights, {a})',
        ops="matmul mul softmax",
    ),
    "attention, masked_fill": Kind(
        "scores = ({a} @ {b}.mT).masked_fill(self.hidden{n}, -math.inf)\n{out} = F.softmax(scores, dim=-1) @ {b}",
        'scores = h.product("matmul", {a}, {b}.mT)\n'
        'scores = h.mask("masked_fill", lambda t: t.masked_fill(m.hidden{n}, -math.inf), scores)\n'
        'scores = h("softmax", lambda t: F.softmax(t, dim=-1), scores)\n'
        '{out} = h.product("matmul", scores, {b})',
        'self.register_buffer("hidden{n}", torch.ones(T, T, dtype=torch.bool).triu(1))',
        "matmul masked_fill softmax",
    ),
    "attention, sum with a mask": Kind(
        "mask = torch.full((T, T), torch.finfo({a}.dtype).min, dtype={a}.dtype).triu(1)\n"
        "{out} = torch.softmax({a} @ {b}.mT / 2 + mask, -1) @ {b}",
        "mask = torch.full((T, T), torch.finfo({a}.dtype).min, dtype={a}.dtype)\n"
        'mask = h.constant("triu", lambda t: t.triu(1), mask)\n'
        'scores = h("div", lambda t: t / 2, h.product("matmul", {a}, {b}.mT))\n'
        'scores = h.mask("add", torch.add, scores, mask)\n'
        'scores = h("softmax", lambda t: torch.softmax(t, -1), scores)\n'
        '{out} = h.product("matmul", scores, {b})',
        ops="matmul div add softmax",
    ),
    "fused attention": Kind(
        # With a dimension for heads, so that torch has a fused kernel.
        "{out} = F.scaled_dot_product_attention({a}[:, None], {b}[:, None], {b}[:, None], is_causal=True).squeeze(1)",
        "",
        ops="scaled_dot_product_attention matmul softmax",
    ),
    "einsum": Kind(
        '{out} = torch.einsum("bts,bsd->btd", torch.einsum("btd,bsd->bts", {a}, {b}) * 0.2, {a})',
        'scores = h.product("einsum", {a}, {b}, settings="btd,bsd->bts")\n'
        'scores = h("mul", lambda t: t * 0.2, scores)\n'
        '{out} = h.product("einsum", scores, {a}, settings="bts,bsd->btd")',
        ops="einsum mul",
    ),
    "conv1d": Kind(
        "{out} = self.conv{n}({a}.transpose(1, 2)).transpose(1, 2)",
        "{out} = {a}.transpose(1, 2)\n"
        '{out} = h.child("conv{n}").product("conv1d", {out}, m.conv{n}.weight, m.conv{n}.bias, settings=1)\n'
        "{out} = {out}.transpose(1, 2)",
        "self.conv{n} = nn.Conv1d(D, D, 3, padding=1)",
        "conv1d",
    ),
    "grouped conv1d": Kind(
        "{out} = self.conv{n}({a}.transpose(1, 2)).transpose(1, 2)",
        '{out} = h.child("conv{n}").product("conv1d", {a}.transpose(1, 2), m.conv{n}.weight, settings=2)\n'
        "{out} = {out}.transpose(1, 2)",
        "self.conv{n} = nn.Conv1d(D, D, 3, padding=1, groups=2, bias=False)",
        "conv1d",
    ),
    "conv2d": Kind(
        "{out} = self.conv{n}({a}.unsqueeze(1)).squeeze(1)",
        '{out} = h.child("conv{n}").product("conv2d", {a}.unsqueeze(1), m.conv{n}.weight, m.conv{n}.bias, settings=1)\n'
        "{out} = {out}.squeeze(1)",
        "self.conv{n} = nn.Conv2d(1, 1, 3, padding=1)",
        "conv2d",
    ),
    **_activation("relu", "ReLU"),
    **_activation("gelu", "GELU"),
    **_activation("tanh", "Tanh"),
    **_activation("silu", "SiLU"),
    **_activation_in_place("relu", "ReLU", "{a}.relu_()", "F.relu({a}, inplace=True)", "torch.relu_({a})"),
    **_activation_in_place("silu", "SiLU", "F.silu({a}, inplace=True)"),
    **_activation_in_place("hardswish", "Hardswish"),
    **_activation_in_place("tanh", "", "{a}.tanh_()"),
    "sum": Kind("{out} = {a} + {b}", '{out} = h("add", torch.add, {a}, {b})', ops="add"),
    "difference": Kind("{out} = {a}.sub({b})", '{out} = h("sub", torch.sub, {a}, {b})', ops="sub"),
    "product": Kind("{out} = {a} * {b}", '{out} = h("mul", torch.mul, {a}, {b})', ops="mul"),
    "sum in place": Kind("{a} += {b}", '{a} = h("add", torch.add, {a}, {b})', ops="add", in_place=True),
    "product in place": Kind("{a} *= {b}", '{a} = h("mul", torch.mul, {a}, {b})', ops="mul", in_place=True),
    "quotient in place": Kind(
        "{a} /= {a}.abs().amax() + 1",
        '{out} = h("abs", torch.abs, {a})\n{out} = h("amax", torch.amax, {out})\n'
        '{out} = h("add", lambda t: t + 1, {out})\n{a} = h("div", torch.div, {a}, {out})',
        ops="abs amax add div",
        in_place=True,
    ),
    "slice multiplied in place": Kind(
        "{a}[:, :2] *= {b}[:, :2]",
        '{a} = torch.cat((h("mul", torch.mul, {a}[:, :2], {b}[:, :2]), {a}[:, 2:]), 1)',
        ops="mul",
        in_place=True,
    ),
    "slice activated in place": Kind(
        "{a}[..., : D // 2].relu_()",
        '{a} = torch.cat((h("relu", F.relu, {a}[..., : D // 2]), {a}[..., D // 2 :]), -1)',
        ops="relu",
        in_place=True,
    ),
    "slice written": Kind(
        "{a}[:, 1] = {b}[:, 0]", "{a} = torch.cat(({a}[:, :1], {b}[:, :1], {a}[:, 2:]), 1)", in_place=True
    ),
    "view changed in place": Kind(
        "{a}.view(B, T * D).mul_(0.7)", '{a} = h("mul", lambda t: t * 0.7, {a})', ops="mul", in_place=True
    ),
    "layer norm": Kind(
        "{out} = self.norm{n}({a})",
        '{out} = h.child("norm{n}")("layer_norm", lambda x, w, b: F.layer_norm(x, (D,), w, b), {a}, m.norm{n}.weight, '
        "m.norm{n}.bias)",
        "self.norm{n} = nn.LayerNorm(D)",
        "layer_norm",
    ),
    "RMS norm": Kind(
        "{out} = self.norm{n}({a})",
        '{out} = h.child("norm{n}")("rms_norm", lambda x, w: F.rms_norm(x, (D,), w), {a}, m.norm{n}.weight)',
        "self.norm{n} = nn.RMSNorm(D)",
        "rms_norm",
    ),
    "batch norm": Kind(
        "{out} = self.norm{n}({a}.mT).mT",
        '{out} = h.child("norm{n}")("batch_norm", lambda x, w, b: F.batch_norm(x, m.norm{n}.running_mean, '
        "m.norm{n}.running_var, w, b, True), {a}.mT, m.norm{n}.weight, m.norm{n}.bias).mT",
        "self.norm{n} = nn.BatchNorm1d(D)",
        "batch_norm",
    ),
    "RMS norm written out": Kind(
        "square = {a}.pow(2).mean(-1, keepdim=True)\n{out} = {a} * torch.rsqrt(square + 1e-3) * self.gain{n}",
        'square = h("mean", lambda t: t.mean(-1, keepdim=True), h("pow", lambda t: t.pow(2), {a}))\n'
        'square = h("rsqrt", torch.rsqrt, h("add", lambda t: t + 1e-3, square))\n'
        '{out} = h("mul", torch.mul, h("mul", torch.mul, {a}, square), m.gain{n})',
        "self.gain{n} = nn.Parameter(torch.rand(D) + 0.5)",
        "pow mean add rsqrt mul",
    ),
    "dropout": Kind("{out} = self.drop{n}({a})", "{out} = {a}", "self.drop{n} = nn.Dropout(0.0)", is_view=True),
    "dropout function": Kind("{out} = F.dropout({a}, 0.0, self.training)", "{out} = {a}", is_view=True),
    "view": Kind(
        "{out} = {a}.reshape(B, T * D).view(B, T, D)", "{out} = {a}.reshape(B, T * D).view(B, T, D)", is_view=True
    ),
    "transposed copy": Kind(
        "{out} = {a}.transpose(1, 2).contiguous().transpose(1, 2)",
        "{out} = {a}.transpose(1, 2).contiguous().transpose(1, 2)",
    ),
    "split and cat": Kind(
        "left, right = {a}.split(D // 2, -1)\n{out} = torch.cat((right, left), -1)",
        '{out} = h("cat", lambda *t: torch.cat(t, -1), *reversed({a}.split(D // 2, -1)))',
        ops="cat",
    ),
    "unbind and stack": Kind(
        "{out} = torch.stack({a}.unbind(1)[::-1], 1)",
        '{out} = h("stack", lambda *t: torch.stack(t, 1), *{a}.unbind(1)[::-1])',
        ops="stack",
    ),
    "roll": Kind("{out} = {a}.roll(1, 1).flip(2)", "{out} = {a}.roll(1, 1).flip(2)"),
    "expanded": Kind(
        "{out} = {a} - {a}[:, :1].expand_as({a})",
        '{out} = h("sub", torch.sub, {a}, {a}[:, :1].expand_as({a}))',
        ops="sub",
    ),
    "positions in a buffer": Kind(
        "{out} = {a} + torch.sin(self.position{n} * 3)",
        'angle = h.constant("sin", torch.sin, h.constant("mul", lambda t: t * 3, m.position{n}))\n'
        '{out} = h("add", torch.add, {a}, angle)',
        'self.register_buffer("position{n}", torch.linspace(0, 1, T)[:, None])',
        "add",
    ),
    "positions of integers": Kind(
        "{out} = {a} * (torch.arange(T).to({a}.dtype)[:, None] / T)",
        'share = h.constant("div", lambda t: t / T, torch.arange(T).to({a}.dtype)[:, None])\n'
        '{out} = h("mul", torch.mul, {a}, share)',
        ops="mul",
    ),
    "branch on a shape": Kind(
        "if {a}.shape[1] > 3:\n    {out} = F.gelu({a})\nelse:\n    {out} = {a} * 2",
        '{out} = h("gelu", F.gelu, {a})',
        ops="gelu",
    ),
    "loop": Kind(
        "{out} = {a}\nfor turn in range(3):\n    {out} = torch.tanh({out}) if turn % 2 else {out} * 0.7",
        '{out} = h("mul", lambda t: t * 0.7, {a})\n{out} = h("tanh", torch.tanh, {out})\n'
        '{out} = h("mul", lambda t: t * 0.7, {out})',
        ops="mul tanh mul.1",
    ),
    "custom function": Kind("{out} = Swish.apply({a})", "{out} = SwishByHand.apply({a}, h)", ops="sigmoid mul"),
    "mask in a buffer": Kind(
        "{out} = torch.softmax({a} @ {b}.mT / 3 + self.causal{n}[:T, :T], -1) @ {a}",
        'scores = h("div", lambda t: t / 3, h.product("matmul", {a}, {b}.mT))\n'
        'scores = h.mask("add", torch.add, scores, m.causal{n}[:T, :T])\n'
        '{out} = h.product("matmul", h("softmax", lambda t: torch.softmax(t, -1), scores), {a})',
        'self.register_buffer("causal{n}", torch.full((T + 1, T + 1), -math.inf).triu(1))',
        "matmul div add softmax",
    ),
    "mask as an argument": Kind(
        "mask = torch.zeros(T, T, dtype={a}.dtype).masked_fill(torch.ones(T, T).triu(1) > 0, -1e9)\n"
        "{out} = self.masked{n}(torch.bmm({a}, {b}.mT), mask) @ {b}",
        "mask = torch.ones(T, T)\n"
        'mask = h.constant("triu", lambda t: t.triu(1), mask) > 0\n'
        'mask = h.constant("masked_fill", lambda t: t.masked_fill(mask, -1e9), torch.zeros(T, T, dtype={a}.dtype))\n'
        'scores = h.product("bmm", {a}, {b}.mT)\n'
        'inner = h.child("masked{n}")\n'
        'scores = inner.mask("add", torch.add, scores, mask)\n'
        'scores = inner("softmax", lambda t: torch.softmax(t, -1), scores)\n'
        '{out} = h.product("matmul", scores, {b})',
        "self.masked{n} = Masked()",
        "bmm matmul",
    ),
    "addmm": Kind(
        "{out} = torch.addmm(self.shift{n}, {a}.flatten(0, 1), self.w{n}.t()).view_as({a})",
        '{out} = h.product("addmm", {a}.flatten(0, 1), View(m.w{n}, lambda w: w.t()), m.shift{n}).view_as({a})',
        "self.w{n}, self.shift{n} = nn.Parameter(torch.randn(D, D) / 3), nn.Parameter(torch.randn(D))",
        "addmm",
    ),
    "dropout of a half": Kind(
        "{out} = self.drop{n}({a})",
        '{out} = h.child("drop{n}")("dropout", lambda t: F.dropout(t, 0.5, True), {a})',
        "self.drop{n} = nn.Dropout(0.5)",
        "dropout",
    ),
    "dropout in place": Kind(
        "F.dropout({a}, 0.5, True, True)",
        '{a} = h("dropout", lambda t: F.dropout(t, 0.5, True), {a})',
        ops="dropout",
        in_place=True,
    ),
    "detached gate": Kind(
        "{out} = {a} * torch.sigmoid({b}).detach()",
        '{out} = h("mul", torch.mul, {a}, h("sigmoid", torch.sigmoid, {b}).detach())',
        ops="mul sigmoid",
    ),
    "without gradients": Kind(
        "with torch.no_grad():\n    level = {b}.abs().mean()\n{out} = {a} / (level + 1)",
        "with torch.no_grad():\n"
        '    level = h("mean", torch.mean, h("abs", torch.abs, {b}))\n'
        '{out} = h("div", torch.div, {a}, h("add", lambda t: t + 1, level))',
        ops="abs mean add div",
    ),
    "where": Kind(
        "{out} = torch.where({a} > 0, {a}, {b} * 0.1)",
        '{out} = h("where", torch.where, {a} > 0, {a}, h("mul", lambda t: t * 0.1, {b}))',
        ops="where mul",
    ),
    "chain in place": Kind(
        "{a}.mul_(0.5).add_({b}, alpha=0.3).clamp_(-2, 2)",
        '{a} = h("mul", lambda t: t * 0.5, {a})\n'
        '{a} = h("add", lambda t, u: torch.add(t, u, alpha=0.3), {a}, {b})\n'
        '{a} = h("clamp", lambda t: t.clamp(-2, 2), {a})',
        ops="mul add clamp",
        in_place=True,
    ),
    "masked_fill in place": Kind(
        "{a}.masked_fill_({a} < -1, -1.0)",
        '{a} = h("masked_fill", lambda t, u: t.masked_fill(u, -1.0), {a}, {a} < -1)',
        ops="masked_fill",
        in_place=True,
    ),
    "parts overwritten": Kind(
        "{out} = torch.zeros_like({a})\n{out}[:, ::2] = {a}[:, ::2]\n{out}[:, 1::2] += {b}[:, 1::2]",
        'odd = h("add", torch.add, torch.zeros_like({a}[:, 1::2]), {b}[:, 1::2])\n'
        "{out} = torch.stack(({a}[:, ::2], odd), 2).flatten(1, 2)",
        ops="add",
    ),
    "heads": Kind(
        "q, k, v = self.qkv{n}({a}).view(B, T, 3, 2, D // 2).permute(2, 0, 3, 1, 4)\n"
        "{out} = (torch.softmax(q @ k.transpose(-2, -1), -1) @ v).transpose(1, 2).reshape(B, T, D)",
        'q, k, v = h.child("qkv{n}").product("linear", {a}, m.qkv{n}.weight, m.qkv{n}.bias)'
        ".view(B, T, 3, 2, D // 2).permute(2, 0, 3, 1, 4)\n"
        'weights = h("softmax", lambda t: torch.softmax(t, -1), h.product("matmul", q, k.transpose(-2, -1)))\n'
        '{out} = h.product("matmul", weights, v).transpose(1, 2).reshape(B, T, D)',
        "self.qkv{n} = nn.Linear(D, 3 * D)",
        "linear matmul softmax",
    ),
    "transposed conv1d": Kind(
        "{out} = self.conv{n}({a}.mT).mT",
        "",
        "self.conv{n} = nn.ConvTranspose1d(D, D, 3, padding=1)",
        "conv_transpose1d",
    ),
    "multi-head attention": Kind(
        "{out} = self.heads{n}({a}, {b}, {b}, need_weights=False)[0]",
        "",
        "self.heads{n} = nn.MultiheadAttention(D, 2, batch_first=True)",
        "scaled_dot_product_attention linear matmul",
    ),
    "weight norm": Kind(
        "{out} = self.fc{n}({a})",
        "",
        "self.fc{n} = torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, D))",
        "linear",
    ),
    "embedding of positions": Kind(
        "{out} = {a} + self.embedding{n}(torch.arange(T))",
        "lookup = lambda w: F.embedding(torch.arange(T), w)\n"
        '{out} = h.child("embedding{n}")("embedding", lookup, m.embedding{n}.weight)\n'
        '{out} = h("add", torch.add, {a}, {out})',
        "self.embedding{n} = nn.Embedding(T, D)",
        "embedding add",
    ),
    "module list": Kind(
        "{out} = {a}\nfor layer in self.layers{n}:\n    {out} = {out} + layer({out})",
        "{out} = {a}\nfor at, layer in enumerate(m.layers{n}):\n"
        '    new = h.child(f"layers{n}.{{at}}").product("linear", {out}, layer.weight, layer.bias)\n'
        '    {out} = h("add", torch.add, {out}, new)',
        "self.layers{n} = nn.ModuleList(nn.Linear(D, D) for _ in range(2))",
        "linear add add.1",
    ),
    "checkpointed function": Kind(
        "{out} = checkpoint(lambda t: torch.tanh(self.fc{n}(t) * 2), {a}, use_reentrant={reentrant})",
        '{out} = h.child("fc{n}").product("linear", {a}, m.fc{n}.weight, m.fc{n}.bias)\n'
        '{out} = h("tanh", torch.tanh, h("mul", lambda t: t * 2, {out}))',
        "self.fc{n} = nn.Linear(D, D)",
        "linear mul tanh",
    ),
}

#: Ways to call a block, only in the model itself.
CALLS: dict[str, Kind] = {
    "block": Kind(
        "{out} = self.block{block}({a})", '{out} = by_hand{block}(h.child("block{block}"), m.block{block}, {a})'
    ),
    "block twice": Kind(
        "{out} = self.block{block}(self.block{block}({a}))",
        '{out} = by_hand{block}(h.child("block{block}"), m.block{block}, {a})\n'
        '{out} = by_hand{block}(h.child("block{block}"), m.block{block}, {out})',
    ),
    "checkpointed block": Kind(
        "{out} = checkpoint(self.block{block}, {a}, use_reentrant={reentrant})",
        '{out} = by_hand{block}(h.child("block{block}"), m.block{block}, {a})',
    ),
}


class Masked(nn.Module):
    """Knows its mask by the name of an argument."""

    def forward(self, scores: Tensor, attention_mask: Tensor) -> Tensor:
        return torch.softmax(scores + attention_mask, -1)


class Swish(torch.autograd.Function):
    """A function whose backward pass is written by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grads[0] * (gate * (1 + x * (1 - gate)))


class SwishByHand(torch.autograd.Function):
    """Its forward pass is rounded, its backward pass is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Hand) -> Tensor:
        ctx.save_for_backward(x)
        return h("mul", torch.mul, x, h("sigmoid", torch.sigmoid, x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grads[0] * (gate * (1 + x * (1 - gate))), None
