"""Packed execution, eager: the numbers of emulate, bit for bit, and really fewer bytes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bitplan
from bitplan.analysis.memory import measure_memory
from bitplan.errors import BitplanWarning, PlanError
from bitplan.executions.packed.saved_tensors import SavedTensorPacker
from bitplan.lab.models.graph_networks import GCN, normalised_adjacency
from bitplan.lab.models.language_models import GPT, LSTMModel, next_token_loss
from bitplan.lab.models.resnet import cifar_resnet
from bitplan.lab.models.small_cnns import MobileNetV2
from bitplan.plans import Plan
from bitplan.runtime.attach import Attachment
from bitplan.runtime.rounded_mark import rounded_mark


def plan_of(**places: Any) -> Plan:
    return Plan.from_dict({"version": 1, "rules": [{"match": "*", **places}]})


EIGHT_BITS = plan_of(activation="e4m3", grad_activation="e5m2")
PLANS = {
    "unscaled": EIGHT_BITS,
    "scaled": plan_of(
        activation={"format": "int8", "scale": "tensor"},
        weight={"format": "int6", "scale": "channel"},
        grad_activation={"format": "e5m2", "scale": "tensor"},
    ),
    "min-max": plan_of(activation={"format": "int4", "scale": "channel", "range": "minmax"}),
    "blocks": plan_of(activation="mxfp6", weight="nvfp4"),
    "stochastic": plan_of(activation={"format": "e3m2", "rounding": "stochastic"}),
    "one bit": plan_of(activation={"format": "uint1", "scale": "tensor"}),
    "sixteen bits": plan_of(activation="bf16", weight="e6m9b0"),
    "slots": plan_of(fprop={"format": "int8", "scale": "vector"}, wgrad="e4m3", activation="e5m2"),
}


class Net(nn.Module):
    """One of each: convolution, norm, relu in two spellings, pooling, dropout, a residual, a saved view, softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.again, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x)))
        y = F.max_pool2d(y + self.again(y).relu_(), 4)
        left, right = self.head(self.drop(y.flatten(1))).chunk(2, 1)
        return torch.softmax(left, 1) * torch.tanh(right)


class Trained:
    """What some steps leave behind."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        execution: str,
        args: tuple[Any, ...],
        steps: int = 2,
        autocast: bool = False,
    ) -> None:
        torch.manual_seed(7)
        self.model = copy.deepcopy(model)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.losses = []
        with bitplan.attach(self.model, plan, execution=execution) as run:
            self.packer = getattr(run._execution, "packer", None)
            for _ in range(steps):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    output = self.model(*args)
                    loss = getattr(output, "logits", output).float().square().mean()
                self.kept = None if self.packer is None else (self.packer.packed_bytes, self.packer.plain_bytes)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                run.step()
                self.losses.append(loss.item())
        self.parameters = [p.detach().clone() for p in self.model.parameters()]


def assert_equal(a: Trained, b: Trained) -> None:
    assert a.losses == b.losses
    assert all(torch.equal(x, y) for x, y in zip(a.parameters, b.parameters, strict=True))


# --- the same numbers ---


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_packed_equals_emulate_bit_for_bit(name: str, autocast: bool) -> None:
    if autocast and name in ("sixteen bits", "blocks"):
        pytest.skip("finer than autocast's type, or not smaller")
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 3, 8, 8)
    packed = Trained(model, PLANS[name], "packed", (x,), autocast=autocast)
    assert_equal(packed, Trained(model, PLANS[name], "emulate", (x,), autocast=autocast))
    assert packed.kept is not None
    small, plain = packed.kept
    assert 0 < small < plain


def gpt2() -> tuple[nn.Module, tuple[Any, ...]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 64}
    config = transformers.GPT2Config(vocab_size=50, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes)
    return transformers.GPT2LMHeadModel(config), (torch.randint(50, (4, 64)),)


def bert() -> tuple[nn.Module, tuple[Any, ...]]:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=64, **sizes)
    return transformers.BertForMaskedLM(config), (torch.randint(50, (4, 64)),)


def graph() -> tuple[nn.Module, tuple[Any, ...]]:
    adjacency = normalised_adjacency(torch.randint(200, (2, 800)), 200)
    return GCN((32, 64, 64, 8)), (torch.randn(200, 32), adjacency)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "resnet8": lambda: (cifar_resnet(8), (torch.randn(4, 3, 32, 32),)),
    "mobilenet": lambda: (MobileNetV2(10, 0.25), (torch.randn(4, 3, 32, 32),)),
    "gpt2": gpt2,
    "bert": bert,
    "lstm": lambda: (LSTMModel(50, 32, layers=2), (torch.randint(50, (12, 8)),)),
    "gcn": graph,
}


@pytest.mark.parametrize("name", MODELS)
def test_real_models_train_alike(name: str) -> None:
    torch.manual_seed(0)
    model, args = MODELS[name]()
    torch.set_num_threads(1)  # an embedding's gradient is summed in any order by several
    plan = plan_of(activation={"format": "int8", "scale": "tensor"}, weight="e4m3", grad_activation="e5m2")
    assert_equal(Trained(model, plan, "packed", args, 1), Trained(model, plan, "emulate", args, 1))


@pytest.mark.parametrize(
    ("function", "autocast"),
    [
        (lambda x: x.t().square_(), False),
        (lambda x: x @ x.t(), True),
    ],
    ids=["overwritten", "cast"],
)
@pytest.mark.parametrize("scale", ["channel", "vector"])
def test_the_copy_of_a_transposed_square_has_scales_of_its_own(
    scale: str, function: Callable[[Tensor], Tensor], autocast: bool
) -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Spread()

        def forward(self, x: Tensor) -> Tensor:
            return function(self.inner(x))

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.logspace(-3, 3, 8).unsqueeze(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    rules = [
        {"match": "inner", "activation": {"format": "int8", "scale": scale}},
        {"match": "", "grad_activation": "bf16"},
    ]
    plan, x = Plan.from_dict({"version": 1, "rules": rules}), torch.randn(8, 8)
    trained = [Trained(Squared(), plan, kind, (x,), autocast=autocast) for kind in ("emulate", "packed")]
    assert_equal(*trained)


# --- fewer bytes, counted by the allocator ---


def squared(output: Any) -> Tensor:
    return getattr(output, "logits", output).float().square().mean()


def opened(model: nn.Module) -> Plan:
    """All tensors in 8 bits; a recurrent layer's too, for which it has to be opened."""
    rules = [{"match": "*", "activation": "e4m3", "grad_activation": "e5m2", "fprop.x": "e4m3", "wgrad.x": "e4m3"}]
    return Plan.from_dict({"version": 1, "rules": rules})


@pytest.mark.parametrize("name", MODELS)
def test_eight_bits_keep_a_quarter_of_float32_and_half_of_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    model, args = MODELS[name]()
    plan = opened(model) if name == "lstm" else EIGHT_BITS
    batch = args[0] if len(args) == 1 else args

    # Autocast keeps a copy of each product's weights in its own type, with a plan and without.
    copies = sum(2 * p.numel() for p in model.parameters() if p.dim() > 1)

    def kept(plan: Plan | None, execution: str, autocast: torch.dtype | None) -> int:
        memory = measure_memory(model, batch, squared, "none", plan, execution, steps=2, autocast=autocast)
        return memory.activations - (0 if autocast is None else copies)

    packed, plain = kept(plan, "packed", None), kept(None, "emulate", None)
    assert packed <= plain / 3.5, f"{packed} of {plain}: {plain / packed:.2f}"
    if name == "gcn":
        return  # torch's own sparse product has no gradient under autocast on a CPU
    try:
        plain = kept(None, "emulate", torch.bfloat16)
    except RuntimeError as error:  # torch alone, without a plan
        if name == "lstm" and "primitive descriptor" in str(error):
            pytest.skip("oneDNN has no bfloat16 LSTM for this CPU")
        raise
    packed = kept(plan, "packed", torch.bfloat16)
    assert packed <= plain / 1.9, f"{packed} of {plain}: {plain / packed:.2f}"


def test_nothing_grows_over_two_hundred_steps() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 3, 8, 8)
    with bitplan.attach(model, EIGHT_BITS, execution="packed") as run:
        for step in range(200):
            model(x).sum().backward()
            run.step()
            if step == 20:
                gc.collect()
                before = len([get_object for get_object in gc.get_objects() if isinstance(get_object, Tensor)])
        gc.collect()
        assert len([get_object for get_object in gc.get_objects() if isinstance(get_object, Tensor)]) <= before
        assert run._execution.packer.packed_bytes == 0


def test_a_forward_pass_without_a_backward_pass_frees_its_graph() -> None:
    """Tanh and softmax save their own outputs, which the plan does not round."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Softmax(-1)), torch.randn(2, 4)
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "*", "op": "linear", "activation": "e4m3"}]})
    run = bitplan.attach(model, plan, example=x, execution="packed")
    model(x)
    weight = weakref.ref(model[0].weight)
    del model, run
    gc.collect()
    assert weight() is None


# --- one copy, of live tensors only ---


def attached(model: nn.Module, plan: Plan = EIGHT_BITS) -> tuple[Attachment, SavedTensorPacker]:
    run = bitplan.attach(model, plan, execution="packed")
    assert getattr(run._execution, "packer", None) is not None
    return run, getattr(run._execution, "packer", None)


class Shared(nn.Module):
    """One tensor that three products keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.rest = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return sum(layer(y.view(-1, 64)).sum() for layer in self.rest)  # type: ignore[return-value]


@pytest.mark.parametrize("grad_at", [None, "producer", "consumer"])
def test_a_tensor_that_several_operations_keep_is_packed_once(grad_at: str | None) -> None:
    model = Shared()
    rule = {"match": "first", "activation": "e4m3"}
    rule |= {} if grad_at is None else {"grad_activation": "e5m2", "grad_at": grad_at}
    run, packer = attached(model, Plan.from_dict({"version": 1, "rules": [rule]}))
    with run:
        loss = model(torch.randn(8, 64))
        assert packer.packed_bytes == 8 * 64
        loss.backward()
        del loss
        assert packer.packed_bytes == 0


def test_parameters_and_inputs_are_not_packed() -> None:
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    run, packer = attached(model)
    with run:
        y = model(x)
        assert packer.packed_bytes == 0
        y.sum().backward()


def test_a_reused_address_is_not_mistaken_for_the_tensor_that_was_there() -> None:
    """Freed memory is given out again: what was noted of the old tensor must not be believed of the new one."""

    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(20):
                self.layer(x)  # rounded, noted and dropped at once
                fresh = torch.rand(x.shape)  # likely at the same address, on no grid
                assert rounded_mark(fresh) is None
                x = x * fresh.detach()
            return x

    torch.manual_seed(0)
    model, x = Reusing(), torch.randn(32, 64).requires_grad_()
    grads = []
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "layer", "activation": "e3m2"}]})
    for execution in ("packed", "emulate"):
        torch.manual_seed(1)
        with bitplan.attach(model, plan, execution=execution):
            grads.append(torch.autograd.grad(model(x).sum(), x)[0])
    assert torch.equal(*grads)


def test_a_tensor_that_was_written_to_is_kept_as_it_is() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            with torch.no_grad():
                y += 0.001
            return self.second(y)

    torch.manual_seed(0)
    model, x = Written(), torch.randn(4, 16)
    plan = Plan.from_dict({"version": 1, "rules": [{"match": "first", "activation": "e3m2"}]})
    assert_equal(Trained(model, plan, "packed", (x,)), Trained(model, plan, "emulate", (x,)))


def test_nan_in_a_format_without_a_code_for_it_survives() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.full((2, 8), torch.nan)
    with bitplan.attach(model, plan_of(activation="e2m1"), execution="packed"):
        model(x).sum().backward()
    assert model[0].weight.grad.isnan().all()


# --- together with others ---


def test_accumulated_micro_batches_and_a_graph_that_is_used_twice() -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(4, 3, 8, 8)
    grads = []
    for execution in ("packed", "emulate"):
        twin = copy.deepcopy(model)
        with bitplan.attach(twin, EIGHT_BITS, execution=execution):
            losses = [twin(part).square().sum() for part in x.chunk(2)]
            for loss in losses:
                loss.backward(retain_graph=True)
                loss.backward()
        grads.append([p.grad for p in twin.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Checkpointed(nn.Module):
    """Counts how often its block runs."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.before, self.block = nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.reentrant, self.runs = reentrant, 0

    def region(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.block(x)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.region, self.before(x), use_reentrant=self.reentrant)


#: What packing divides by, which a scope at work must not take for an operation of the model.
SCALES = {name: PLANS[name] for name in ("unscaled", "scaled", "min-max", "blocks")}
SCALES["scaled float"] = plan_of(activation={"format": "e4m3", "scale": "tensor"})
SCALES["powers of two"] = plan_of(activation={"format": "e4m3", "scale": "tensor", "power_of_two": True})


@pytest.mark.parametrize("plan", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_still_recomputes(reentrant: bool, plan: Plan) -> None:
    torch.manual_seed(0)
    model, x = Checkpointed(reentrant), torch.randn(4, 16)
    packed = Trained(model, plan, "packed", (x,))
    assert packed.model.runs == 4  # type: ignore[union-attr]
    assert_equal(packed, Trained(model, plan, "emulate", (x,)))


class Square(torch.autograd.Function):
    """A function of the user's own, which saves its input."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return 2 * x * grads[0]


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        squared: Tensor = Square.apply(self.first(x))  # type: ignore[no-untyped-call]
        return self.last(squared / 2)


@pytest.mark.parametrize("plan", SCALES.values(), ids=SCALES)
def test_what_a_function_of_ones_own_saves_is_packed_and_comes_back(plan: Plan) -> None:
    torch.manual_seed(0)
    model, x = OwnFunction(), torch.randn(4, 16)
    packed = Trained(model, plan, "packed", (x,))
    assert_equal(packed, Trained(model, plan, "emulate", (x,)))
    assert packed.kept is not None
    assert 0 < packed.kept[0] < packed.kept[1]


def test_a_checkpointed_model_as_a_whole_recomputes_and_packs_nothing() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), torch.randn(4, 16, requires_grad=True)
    run, packer = attached(model)
    with run:
        loss = checkpoint(model, x, use_reentrant=False).sum()
        assert packer.packed_bytes == 0
        loss.backward()
    assert x.grad is not None


def test_a_second_derivative_is_refused_in_a_sentence() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), torch.randn(4, 8, requires_grad=True)
    refusal = pytest.raises(PlanError, match=r"no second derivative: attach with execution='emulate'")
    with bitplan.attach(model, EIGHT_BITS, execution="packed"), refusal:
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_the_loss_is_packed_too_where_it_is_brought_in() -> None:
    torch.manual_seed(0)
    model, text = GPT(tokens=64, length=16, layers=1, heads=2, features=32), torch.randint(64, (4, 17))
    results = []
    for execution in ("packed", "emulate"):
        twin = copy.deepcopy(model)
        with bitplan.attach(twin, EIGHT_BITS, execution=execution) as run:
            loss = run.loss(next_token_loss)(twin(text[:, :-1]), text[:, 1:])
            loss.backward()
        results.append((loss.item(), [p.grad for p in twin.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_formats_that_change_are_packed_in_the_width_of_the_moment() -> None:
    torch.manual_seed(0)
    model, x = Shared(), torch.randn(8, 64)
    plan = Plan.from_dict(
        {
            "version": 1,
            "quantizers": {"low": {"format": "int", "bits": 8, "scale": "tensor"}},
            "rules": [{"match": "first", "activation": "low"}],
        }
    )
    run, packer = attached(model, plan)
    with run:
        for bits in (8, 4, 2, 6):
            run.set_format("low", f"int{bits}")
            loss = model(x)
            assert packer.packed_bytes == 8 * 64 * bits // 8 + 4
            loss.backward()
            del loss


def test_an_unknown_execution_is_refused_in_a_sentence() -> None:
    with pytest.raises(PlanError, match="did you mean packed"):
        bitplan.attach(nn.Linear(2, 2), EIGHT_BITS, execution="pack")


def test_memory_is_told_from_the_example_alone() -> None:
    model, x = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)), torch.randn(512, 64)
    kept = {}
    for execution in ("emulate", "packed"):
        with bitplan.attach(model, EIGHT_BITS, example=x, execution=execution) as run:
            result = run.memory()
        assert result.measured is None
        kept[execution] = result.estimated.activations
    assert kept["packed"] < kept["emulate"] / 3


def test_hooks_of_others_are_remarked_upon_since_nothing_is_packed_then() -> None:
    model, x = Shared(), torch.randn(8, 64)
    run, packer = attached(model)
    with run, torch.autograd.graph.save_on_cpu():
        with pytest.warns(BitplanWarning, match="nothing is packed inside of them"):
            loss = model(x)
        assert packer.packed_bytes == 0
        loss.backward()


def test_an_empty_batch_passes() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4), nn.Softmax(1))
    with bitplan.attach(model, EIGHT_BITS, execution="packed"):
        y = model(torch.randn(0, 8))
        y.sum().backward()
    assert y.shape == (0, 4)
    assert model[0].weight.grad.eq(0).all()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [2, 3, 5])
@pytest.mark.parametrize(("inputs", "outputs", "side"), [(1, 4, 7), (3, 16, 8), (16, 16, 8), (24, 5, 13), (64, 32, 4)])
@pytest.mark.parametrize("is_biased", [False, True])
def test_gradients_of_a_convolution_one_after_the_other_have_the_same_bits(
    inputs: int, outputs: int, side: int, kernel: int, stride: int, is_biased: bool
) -> None:
    torch.manual_seed(inputs + outputs)
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=is_biased)
    model = nn.Sequential(nn.Conv2d(inputs, inputs, 1), conv)
    plan = {"version": 1, "rules": [{"match": "*", "activation": "e4m3"}]}
    gradients = []
    for execution in ("emulate", "packed"):
        for samples in (1, 3):
            x = torch.randn(samples, inputs, side, side, generator=torch.Generator().manual_seed(1))
            with bitplan.attach(model, plan, execution=execution):
                model(x).square().sum().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
    for emulated, packed in zip(gradients[:2], gradients[2:], strict=True):
        assert all(torch.equal(*pair) for pair in zip(emulated, packed, strict=True))  # type: ignore[arg-type]
