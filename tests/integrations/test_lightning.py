"""Plans inside the Trainer of Lightning: the callback and the precision plugin."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trainer_plans import HISTORY, SCHEDULE

import bitplan as bp
from bitplan.capture.scopes import is_planned
from bitplan.errors import MissingPackageError, PlanError, RunError
from bitplan.integrations.lightning import BitplanCallback, BitplanPrecision

X = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        (x,) = batch
        loss: Tensor = (self(x).squeeze(-1) - x.sum(-1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Late(Module):
    """Makes its layers in configure_model()."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def fit(
    folder: Path,
    parts: list[Any],
    module: LightningModule | None = None,
    resume: Path | None = None,
    data: Tensor = X,
    **settings: Any,
) -> Any:
    """`parts`: callbacks, and plugins of precision."""
    module = Module() if module is None else module
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[part for part in parts if isinstance(part, Callback)],
        plugins=[part for part in parts if not isinstance(part, Callback)],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_steps": 6, "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, **settings},
    )
    loader = DataLoader(TensorDataset(data), batch_size=4)
    trainer.fit(module, loader, DataLoader(TensorDataset(X[:8]), batch_size=4), ckpt_path=resume)
    return module


def is_same(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("kind", [BitplanCallback, BitplanPrecision])
def test_it_rounds_as_attach_does(tmp_path: Path, kind: Any) -> None:
    module = fit(tmp_path, [kind(HISTORY)])
    assert type(module) is Module  # detached
    assert not is_same(module, fit(tmp_path, []))
    by_hand = Module()
    optimizer = by_hand.configure_optimizers()
    with bp.attach(by_hand, HISTORY, optimizer=optimizer):
        for x in X[:24].split(4):
            optimizer.zero_grad()
            by_hand.training_step((x,), 0).backward()
            optimizer.step()
    assert is_same(module, by_hand)
    assert module.losses == by_hand.losses


def test_modules_that_are_made_later_are_planned(tmp_path: Path) -> None:
    for kind in (BitplanCallback, BitplanPrecision):
        late = fit(tmp_path, [kind(HISTORY)], Late())
        assert late.losses == fit(tmp_path, [kind(HISTORY)]).losses


@pytest.mark.parametrize(
    "settings",
    [{"precision": "bf16-mixed"}, {"precision": "bf16-true"}, {"accumulate_grad_batches": 2, "max_steps": 3}],
    ids=["bf16-mixed", "bf16-true", "accumulation"],
)
def test_packed_equals_emulate(tmp_path: Path, settings: dict[str, Any]) -> None:
    plan = {"version": 1, "rules": [{"match": "*", "op": "linear", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}]}
    emulated = fit(tmp_path, [BitplanCallback(plan)], **settings)
    packed = fit(tmp_path, [BitplanCallback(plan, execution="packed")], **settings)
    assert emulated.losses == packed.losses
    assert emulated.losses != fit(tmp_path, [], **settings).losses


@pytest.mark.parametrize("kind", [BitplanCallback, BitplanPrecision])
def test_accumulation_counts_optimizer_steps(tmp_path: Path, kind: Any) -> None:
    part = kind(SCHEDULE)
    fit(tmp_path, [part], max_epochs=2, max_steps=-1, accumulate_grad_batches=5)  # 12 batches: 5, 5 and 2
    assert part.run.steps_done == 6
    assert part.run.steps == 6


@pytest.mark.parametrize("kind", [None, BitplanCallback, BitplanPrecision])
@pytest.mark.parametrize("plan", [HISTORY, SCHEDULE], ids=["history", "schedule"])
@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 2}], ids=["", "accumulation"])
def test_every_checkpoint_resumes_bit_for_bit(tmp_path: Path, kind: Any, plan: Any, settings: Any) -> None:
    """In the middle of an epoch, too: all batches are equal, because Lightning begins the epoch's data again."""
    checkpoint = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    settings = {"data": X[:4].repeat(12, 1), **settings}
    whole = fit(tmp_path, [*([] if kind is None else [kind(plan)]), checkpoint], enable_checkpointing=True, **settings)
    for step in (1, 4):
        parts = [] if kind is None else [kind(plan)]
        resumed = fit(tmp_path, parts, resume=tmp_path / f"step={step}.ckpt", **settings)
        assert is_same(whole, resumed)
        micro_batches = step * settings.get("accumulate_grad_batches", 1)
        assert resumed.losses == whole.losses[micro_batches:]


def test_a_checkpoint_without_the_plan_is_refused_or_begins_with_empty_histories(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=4)
    whole = fit(tmp_path, [BitplanCallback(HISTORY), checkpoint], enable_checkpointing=True)
    plain = tmp_path / "plain"
    checkpoint = ModelCheckpoint(plain, "{step}", save_top_k=-1, every_n_train_steps=4)
    fit(plain, [checkpoint], enable_checkpointing=True)
    for kind in (BitplanCallback, BitplanPrecision):
        with pytest.raises(RunError, match="fresh_state=True"):
            fit(tmp_path, [kind(HISTORY)], resume=plain / "step=4.ckpt")
    content = torch.load(tmp_path / "step=4.ckpt", weights_only=True)  # nothing in it is executed
    content["callbacks"].pop("BitplanCallback")
    torch.save(content, tmp_path / "without.ckpt")
    fresh = fit(tmp_path, [BitplanCallback(HISTORY, fresh_state=True)], resume=tmp_path / "without.ckpt")
    assert not is_same(whole, fresh)  # so the tests of resuming can fail
    content["callbacks"]["BitplanCallback"] = {"global_step": 3, "run": {}}
    torch.save(content, tmp_path / "other.ckpt")
    with pytest.raises(RunError, match="after 3 steps"):
        fit(tmp_path, [BitplanCallback(HISTORY)], resume=tmp_path / "other.ckpt")


def test_copies_for_weight_averaging_and_a_module_that_holds_its_run(tmp_path: Path) -> None:
    class Holding(Module):
        def on_train_start(self) -> None:
            self.run = next(c for c in self.trainer.callbacks if isinstance(c, BitplanCallback)).run  # type: ignore[attr-defined]

    checkpoint = ModelCheckpoint(tmp_path, "last", every_n_train_steps=3)
    parts = [BitplanCallback(HISTORY), EMAWeightAveraging(), checkpoint]
    fit(tmp_path, parts, Holding(), enable_checkpointing=True)
    assert (tmp_path / "last.ckpt").is_file()


def test_gan_like_loops_count_a_step_for_each_round_of_optimizers(tmp_path: Path) -> None:
    class TwoOptimizers(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.zero_grad()
                self.manual_backward(self(batch[0]).square().mean())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net[number].parameters(), lr=0.1) for number in (0, 2)]

    callback = BitplanCallback(HISTORY)
    fit(tmp_path, [callback], TwoOptimizers(), max_steps=-1, max_epochs=1)
    assert callback.run is not None
    assert callback.run.steps_done == 12


def test_scalars_go_to_the_loggers(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="log", version="0")
    fit(tmp_path, [BitplanCallback(SCHEDULE, stats=True)], logger=logger, log_every_n_steps=2)
    lines = (tmp_path / "log" / "0" / "metrics.csv").read_text().splitlines()
    header = lines[0].split(",")
    column = header.index("bitplan/bits/cycle")
    assert [line.split(",")[column] for line in lines[1:] if line.split(",")[column]] == ["3.0", "8.0", "8.0"]
    assert "bitplan/overflow" in header


def test_example_input_array_serves_plans_with_selectors(tmp_path: Path) -> None:
    module = Module()
    with pytest.raises(PlanError, match="example="):
        fit(tmp_path, [BitplanCallback("fp8-train", execution="emulate")], module)
    module = Module()
    module.example_input_array = X[:4]
    callback = BitplanCallback("fp8-train", execution="emulate")
    fit(tmp_path, [callback], module)
    assert callback.run is not None
    assert callback.run.coverage().unrounded == ("net.2/linear.0",)


# --- Bad input


def test_a_plan_that_matches_nothing_raises_before_the_first_step(tmp_path: Path) -> None:
    for rule, token in (
        ({"match": "no_such", "w": "int8"}, "no_such"),
        ({"match": "*", "op": "conv2d", "w": "int8"}, "conv2d"),
    ):
        for kind in (BitplanCallback, BitplanPrecision):
            module = Module()
            with pytest.raises(PlanError, match=token):
                fit(tmp_path, [kind({"version": 1, "rules": [rule]})], module)
            assert is_same(module, Module())
            assert not is_planned(module)  # also after an exception


def test_two_plans_raise(tmp_path: Path) -> None:
    class Other(BitplanCallback):
        """Lightning itself refuses two callbacks of one class without a state_key."""

    for parts in (
        [BitplanCallback(HISTORY), Other(HISTORY)],
        [BitplanCallback(HISTORY), BitplanPrecision(HISTORY)],
    ):
        with pytest.raises(PlanError, match="two plans"):
            fit(tmp_path, parts)


def test_a_plan_that_comes_too_late_names_the_right_hook(tmp_path: Path) -> None:
    class AddsOne(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.callbacks.append(BitplanCallback(HISTORY))

    class AddsToo(Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            bp.attach(pl_module, HISTORY)

    with pytest.raises(PlanError, match=r"setup\(\)"):
        fit(tmp_path, [AddsOne()])
    with pytest.raises(PlanError, match="already"):
        fit(tmp_path, [AddsToo(), BitplanCallback(HISTORY)], Late())
    for kind in (BitplanCallback, BitplanPrecision):
        with pytest.raises(PlanError, match=r"compiled.*on_fit_start\(\)"):
            fit(tmp_path, [kind(HISTORY)], torch.compile(Module(), backend="eager"))  # type: ignore[arg-type]


def test_a_fit_without_end_has_no_schedule(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="max_steps"):
        fit(tmp_path, [BitplanCallback(SCHEDULE)], max_steps=-1, max_epochs=-1)


def test_a_callback_serves_several_fits(tmp_path: Path) -> None:
    callback = BitplanCallback(HISTORY)
    first, second = (fit(tmp_path, [callback]) for _ in range(2))
    assert is_same(first, second)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "bitplan.integrations.lightning", raising=False)
    with pytest.raises(MissingPackageError, match=r"bitplan\[lightning\]"):
        importlib.import_module("bitplan.integrations.lightning")
