"""Trains one golden case. This is the only file of the golden tests that calls bitplan: edit it when names move.

What a case trains must never change: model sizes, data, optimizers, learning rates and seeds below belong to the stored
numbers. Adapt imports and calls only.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from golden_cases import STEPS, Case, plan_document
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import bitplan
from bitplan.executions.native.backends import Float8Backend, Int8Backend
from bitplan.lab.models.graph_networks import GCN, symmetric_neighbours
from bitplan.lab.models.language_models import GPT, LlamaBlocks
from bitplan.lab.models.resnet import BasicBlock, ResNet, cifar_resnet
from bitplan.lab.targets import load_target
from bitplan.lab.tasks.lstm_lm import CarriedLSTM
from bitplan.lab.tasks.registry import find_task

SEED = 20
DRAWN_MODELS = (
    "resnet20",
    "resnet18",
    "mobilenet-v2",
    "squeezenet",
    "shufflenet-v2",
    "resnet18-imagenet",
    "mobilenet-v2-imagenet",
    "gpt-tiny",
    "lstm",
    "gcn",
)
DRAWN_TASKS = ("digits", "detection", "graph")


@dataclass
class Setup:
    """A model with its data, one batch a step, and its optimizer."""

    model: nn.Module
    batches: list[tuple[tuple[Tensor, ...], Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: torch.optim.Optimizer


@dataclass
class Result:
    """What a case is compared by, and facts that tests assert but do not store."""

    losses: list[str]
    weights: str
    promotions: int = 0
    native_products: int = 0

    def stored(self) -> dict[str, Any]:
        return {"losses": self.losses, "weights": self.weights}


# --- bitplan's interface ---


def build_setup(case: Case, device: str) -> Setup:
    """The model, data and optimizer of a case; the same for every plan and execution, except for the memory format."""
    torch.manual_seed(SEED)
    setup = SETUPS[case.model]()
    data = setup.batches
    if case.execution == "native" and case.model.startswith("resnet"):
        # Convolutions have a native path only with their channels last.
        setup.model.to(memory_format=torch.channels_last)
        data = [((x.contiguous(memory_format=torch.channels_last),), y) for (x,), y in data]
    if device != "cpu":
        setup.model.to(device)
        data = [(tuple(x.to(device) for x in inputs), target.to(device)) for inputs, target in data]
    return Setup(setup.model, data, setup.loss, setup.optimizer)


def attach_plan(setup: Setup, case: Case) -> Any:
    """The plan attached to the model; None for the cases without a plan."""
    document = plan_document(case.plan)
    if document is None:
        return None
    plan = document if isinstance(document, str) else bitplan.Plan.from_dict(document)
    recompute = () if case.recompute == "no" else case.recompute
    execution = bitplan.Native(min_macs=0, recompute=recompute) if case.execution == "native" else case.execution
    return bitplan.attach(setup.model, plan, steps=STEPS, example=setup.batches[0][0], seed=SEED, execution=execution)


def compile_model(setup: Setup, run: Any, case: Case) -> Any:
    """What the training loop calls."""
    if case.compiler == "eager":
        return setup.model
    if case.compiler == "aot_eager":
        return torch.compile(setup.model, backend="aot_eager", fullgraph=True)
    if run is None:
        return torch.compile(setup.model, fullgraph=True)
    return run.compile()


def train_step(call: Any, setup: Setup, run: Any, step: int) -> float:
    inputs, target = setup.batches[step]
    setup.optimizer.zero_grad(set_to_none=True)
    loss = setup.loss(call(*inputs), target)
    loss.backward()
    setup.optimizer.step()
    if run is not None:
        run.step()
    return float(loss.detach())


@contextmanager
def native_units(case: Case, device: str) -> Iterator[Counter[str]]:
    """Every CPU counts as one with INT8 and FP8 units: torch multiplies codes on all of them, if slowly.

    Counts the products that they multiply, except in compiled code, which must be traced as it is.
    """
    products: Counter[str] = Counter()
    with ExitStack() as stack:
        if case.execution == "native" and device == "cpu":
            for unit in (Int8Backend, Float8Backend):
                stack.enter_context(mock.patch.object(unit, "is_available", lambda self, device: device.type == "cpu"))
                if case.compiler == "eager":
                    stack.enter_context(mock.patch.object(unit, "multiply", _counted(unit.multiply, products)))
        yield products


def _counted(multiply: Callable[..., Tensor], products: Counter[str]) -> Callable[..., Tensor]:
    def counted(unit: Any, *args: Any, **kwargs: Any) -> Tensor:
        products[type(unit).__name__] += 1
        return multiply(unit, *args, **kwargs)

    return counted


def initial_digests() -> dict[str, str]:
    """Digests of what is drawn before any training: weights of built-in models, and weights and batches of tasks.

    Tasks are those whose data come with bitplan and do not depend on the Python version.
    """
    digests = {}
    with torch.random.fork_rng():
        for name in DRAWN_MODELS:
            torch.manual_seed(SEED)
            digests[f"model/{name}"] = digest(load_target(name).model)
        for name in DRAWN_TASKS:
            torch.manual_seed(SEED)
            task = find_task(name, seed=SEED)
            digests[f"task/{name}"] = digest(task.model())
            for step in (0, 1, 30):
                leaves = tree_leaves(task.batch(step))
                tensors = {str(number): tensor for number, tensor in enumerate(leaves)}
                digests[f"task/{name}/batch-{step}"] = digest_of_tensors(tensors)
    return digests


# --- training ---


def train(case: Case, device: str = "cpu", resume_at: int | None = None) -> Result:
    """Train a case for all of its steps; `resume_at` saves before that step, and goes on with new objects."""
    with deterministic(device), native_units(case, device) as products, warnings.catch_warnings():
        warnings.simplefilter("ignore", bitplan.errors.BitplanWarning)
        setup = build_setup(case, device)
        run = attach_plan(setup, case)
        call = compile_model(setup, run, case)
        setup.model.train()
        torch.manual_seed(SEED + 1)  # of dropout
        losses = []
        for step in range(STEPS):
            if step == resume_at:
                saved = save(setup, run)
                if run is not None:
                    run.detach()
                setup = build_setup(case, device)
                run = attach_plan(setup, case)
                call = compile_model(setup, run, case)
                load(saved, setup, run)
                setup.model.train()
            losses.append(train_step(call, setup, run, step).hex())
        result = Result(losses, digest(setup.model))
        if run is not None:
            result.promotions = len(run.promotions())
            result.native_products = products.total()
            run.detach()
        return result


def save(setup: Setup, run: Any) -> bytes:
    file = io.BytesIO()
    state = {"model": setup.model.state_dict(), "optimizer": setup.optimizer.state_dict(), "rng": torch.get_rng_state()}
    if run is not None:
        state["run"] = run.state_dict()
    torch.save(state, file)
    return file.getvalue()


def load(saved: bytes, setup: Setup, run: Any) -> None:
    """Load into new objects. The state of a run is plain enough for ``weights_only``."""
    state = torch.load(io.BytesIO(saved), weights_only=True)
    setup.model.load_state_dict(state["model"])
    setup.optimizer.load_state_dict(state["optimizer"])
    if run is not None:
        run.load_state_dict(state["run"])
    torch.set_rng_state(state["rng"])


def digest(model: nn.Module) -> str:
    return digest_of_tensors(model.state_dict())


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes, dtypes and bytes, in the order of the mapping."""
    hashed = hashlib.sha256()
    for name, tensor in tensors.items():
        hashed.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


@contextmanager
def deterministic(device: str) -> Iterator[None]:
    """One thread and deterministic kernels; torch's compiler and its generators are left as they were."""
    threads = torch.get_num_threads()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    if device != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch._dynamo.reset()
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(was_deterministic)


# --- models and data ---


def _images(model: nn.Module, batch: int, side: int) -> Setup:
    """Ten classes, each a random picture, with noise."""
    pictures = torch.randn(10, 3, side, side)
    batches = []
    for _ in range(STEPS):
        labels = torch.randint(10, (batch,))
        batches.append(((pictures[labels] + 0.5 * torch.randn(batch, 3, side, side),), labels))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    return Setup(model, batches, F.cross_entropy, optimizer)


def _token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _text(vocabulary: int, length: int, batch: int) -> list[tuple[tuple[Tensor, ...], Tensor]]:
    """Each token determines the next, but for every eighth, which is random."""
    follows = torch.randperm(vocabulary)
    batches = []
    for _ in range(STEPS):
        tokens = [torch.randint(vocabulary, (batch,))]
        for _ in range(length):
            following = torch.where(torch.rand(batch) < 0.125, torch.randint(vocabulary, (batch,)), follows[tokens[-1]])
            tokens.append(following)
        text = torch.stack(tokens, 1)
        batches.append(((text[:, :-1].contiguous(),), text[:, 1:].contiguous()))
    return batches


def _gpt(vocabulary: int, length: int, features: int, batch: int, layers: int = 2) -> Setup:
    model = GPT(tokens=vocabulary, length=length, layers=layers, heads=2, features=features)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Setup(model, _text(vocabulary, length, batch), _token_loss, optimizer)


def _lstm() -> Setup:
    """The LSTM that carries its state from batch to batch; text runs along the first axis."""
    model = CarriedLSTM(16, 24, 1, 0.2, texts=8)
    batches = [((x.t().contiguous(),), y.t().contiguous()) for (x,), y in _text(16, 8, 8)]
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    return Setup(model, batches, _token_loss, optimizer)


def _graph() -> Setup:
    nodes, features, classes = 64, 16, 4
    model = GCN((features, 32, classes), dropout=0.2, norm="batch")
    labels = torch.randint(classes, (nodes,))
    centres = torch.randn(classes, features)
    edges = torch.randint(nodes, (2, 4 * nodes))
    same = labels[edges[0]] == labels[edges[1]]
    graph = symmetric_neighbours(edges[:, same | (torch.rand(4 * nodes) < 0.2)], nodes)
    x = centres[labels] + torch.randn(nodes, features)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return Setup(model, [((x, *graph), labels)] * STEPS, F.cross_entropy, optimizer)


class _Llama(nn.Module):
    """Llama-like blocks between a frozen embedding and their loss, in bfloat16 as on accelerators."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = LlamaBlocks(width, 2, 3 * width, heads=2)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(tokens)))
        return logits.float()


def _llama() -> Setup:
    model = _Llama(256, 128).bfloat16()
    return Setup(model, _text(256, 64, 8), _token_loss, torch.optim.AdamW(model.parameters(), lr=1e-3))


SETUPS: dict[str, Callable[[], Setup]] = {
    "resnet": lambda: _images(cifar_resnet(8, classes=10, width=0.5), 8, 8),
    "gpt": lambda: _gpt(32, 16, 32, 4),
    "lstm": _lstm,
    "graph": _graph,
    # For Inductor, which takes minutes to compile those above under some plans.
    "resnet-tiny": lambda: _images(ResNet(BasicBlock, [1], [8], 10), 8, 8),
    "gpt-tiny": lambda: _gpt(32, 16, 32, 4, layers=1),
    # For accelerators, whose FP8 units want multiples of 16.
    "resnet-wide": lambda: _images(cifar_resnet(8, classes=10), 32, 16),
    "gpt-wide": lambda: _gpt(256, 64, 128, 8),
    "llama-bf16": _llama,
}
