"""Plans inside the Trainer of Transformers: real trainers, small random models."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_training import DATA, STEPS, TOKENS, losses, make_model, make_trainer
from torch import Tensor, nn
from trainer_plans import HISTORY
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

import bitplan as bp
from bitplan.capture.scopes import is_planned
from bitplan.errors import BitplanWarning, MissingPackageError, PlanError, RunError
from bitplan.integrations.transformers import BitplanCallback
from bitplan.runtime.state_file import STATE_FILE, load_state

NO_SAVE = {"save_strategy": "no", "max_steps": 3}
WEIGHTS_8: dict[str, Any] = {"version": 1, "rules": [{"match": "*", "op": "linear", "w": "int8"}]}
CPT: dict[str, Any] = {
    "version": 1,
    "schedules": {"cycle": {"name": "steps", "bits": [3, 5, 8], "at": ["30%", "60%"]}},
    "rules": [{"match": "*", "op": "linear", "w": {"format": "int", "bits": "cycle", "scale": "tensor"}}],
}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def trained(output: Path, plan: Any, *, resume: Any = None, options: Any = None, **settings: Any) -> Trainer:
    callbacks: list[TrainerCallback] = [] if plan is None else [BitplanCallback(plan, **(options or {}))]
    trainer = make_trainer(output, callbacks, **settings)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


# --- Training


def test_a_trainer_rounds_as_a_loop_of_its_own_does(tmp_path: Path) -> None:
    """Against the same steps by hand; the control is a Trainer without a plan."""
    settings = {**NO_SAVE, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    model = make_model()
    model.config.attention_dropout = 0.0
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    start = weights(model)
    trainer = trained(tmp_path, "fp8-linear", model=model, train_sampling_strategy="sequential", **settings)
    assert type(trainer.model) is LlamaForCausalLM  # detached
    by_hand = make_model()
    by_hand.load_state_dict(start)
    by_hand.config.attention_dropout = 0.0
    for layer in by_hand.model.layers:
        layer.self_attn.attention_dropout = 0.0
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=1e-2)
    with bp.attach(by_hand, "fp8-linear", optimizer=optimizer):
        for rows in TOKENS[:12].split(4):
            by_hand(input_ids=rows, labels=rows, num_items_in_batch=torch.tensor(4 * 11)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert is_same(weights(trainer.model), weights(by_hand))
    assert not is_same(weights(trainer.model), start)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"bf16": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=["plain", "accumulation", "bf16", "checkpointing", "reentrant"],
)
def test_packed_equals_emulate_and_neither_equals_no_plan(tmp_path: Path, settings: dict[str, Any]) -> None:
    without = losses(trained(tmp_path, None, **NO_SAVE, **settings))
    emulated = trained(tmp_path, HISTORY, **NO_SAVE, **settings)
    packed = trained(tmp_path, HISTORY, options={"execution": "packed"}, **NO_SAVE, **settings)
    assert losses(emulated) == losses(packed)
    assert losses(emulated) != without
    assert max(abs(a - b) for a, b in zip(losses(emulated), without, strict=True)) < 0.2
    assert not any(is_planned(module) for module in emulated.model.modules())
    rows = TOKENS[:2]
    assert emulated.model(input_ids=rows, labels=rows).loss.isfinite()  # detaching leaves mixed precision working


def test_checkpointed_activations_change_no_bit(tmp_path: Path) -> None:
    plain = trained(tmp_path, HISTORY, **NO_SAVE)
    for reentrant in (False, True):
        settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        assert losses(trained(tmp_path, HISTORY, **NO_SAVE, **settings)) == losses(plain)


def test_accumulation_counts_optimizer_steps(tmp_path: Path) -> None:
    callback = BitplanCallback(CPT)
    make_trainer(tmp_path, [callback], **NO_SAVE, gradient_accumulation_steps=3).train()
    assert callback.run is not None
    assert callback.run.steps_done == 3


def test_a_preset_with_selectors_takes_its_example_from_the_data(tmp_path: Path) -> None:
    callback = BitplanCallback("fp8-train", execution="emulate")
    trainer = make_trainer(tmp_path, [callback], **NO_SAVE)
    assert callback.run is not None
    assert callback.run.coverage().unrounded == (
        "model.layers.0.self_attn/scaled_dot_product_attention.0",
        "lm_head/linear.0",
    )
    trainer.train()
    assert losses(trainer) != losses(trained(tmp_path, None, **NO_SAVE))


def test_a_loss_in_chunks_trains_and_evaluates(tmp_path: Path) -> None:
    plan = {**WEIGHTS_8, "loss": "chunked"}
    chunked = trained(tmp_path, plan, eval_strategy="steps", eval_steps=3, **NO_SAVE)
    whole = trained(tmp_path, WEIGHTS_8, eval_strategy="steps", eval_steps=3, **NO_SAVE)
    assert losses(chunked) == pytest.approx(losses(whole), rel=1e-4)
    assert [line for line in chunked.state.log_history if "eval_loss" in line]


def test_the_example_draws_no_random_numbers_and_unknown_columns_are_dropped(tmp_path: Path) -> None:
    """A plan of no consequence: the losses are those of a Trainer without one, dropout and shuffling included."""
    plan = {"version": 1, "rules": [{"match": "lm_head", "w": "e8m23"}]}
    without = losses(trained(tmp_path, None, **NO_SAVE))
    with pytest.raises(PlanError, match="changes nothing"):
        trained(tmp_path, plan, **NO_SAVE)
    fine = {"version": 1, "rules": [{"match": "lm_head", "w": {"format": "e8m22"}}]}
    assert losses(trained(tmp_path, fine, **NO_SAVE)) == pytest.approx(without, rel=1e-5)


def test_evaluation_during_training_and_generation_afterwards(tmp_path: Path) -> None:
    trainer = trained(tmp_path, HISTORY, eval_strategy="steps", eval_steps=1, **NO_SAVE)
    assert len([line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]) == 3
    tokens = trainer.model.eval().generate(TOKENS[:2, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert tokens.shape == (2, 7)
    plain = make_model().eval()
    plain.load_state_dict(trainer.model.state_dict())
    assert torch.equal(tokens, plain.generate(TOKENS[:2, :4], max_new_tokens=3, do_sample=False, pad_token_id=0))


def test_what_is_saved_loads_without_bitplan(tmp_path: Path) -> None:
    trainer = trained(tmp_path, HISTORY)
    folder = tmp_path / f"checkpoint-{STEPS}"
    loaded, info = LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    assert is_same(weights(loaded), weights(trainer.model))
    assert "bitplan" not in (folder / "config.json").read_text()


def test_scalars_are_logged_with_the_loss_and_before_other_callbacks(tmp_path: Path) -> None:
    seen = []

    class Logger(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    trainer = make_trainer(tmp_path, [Logger(), BitplanCallback(CPT, stats=True)], **NO_SAVE)
    trainer.train()
    history = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["bitplan/step"] for line in history] == [1, 2, 3]
    assert [line["bitplan/bits/cycle"] for line in history] == [5, 8, 8]
    assert all(0 < line["bitplan/error"] < 1 for line in history)
    assert [line["bitplan/step"] for line in seen if "loss" in line] == [1, 2, 3]
    assert "bitplan/step" not in seen[-1]  # the summary of the run


def test_torch_compile_of_the_trainer_rounds_alike(tmp_path: Path) -> None:
    settings = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    compiled = trained(tmp_path, WEIGHTS_8, model=Regression(), **NO_SAVE, **settings)
    assert losses(compiled) == losses(trained(tmp_path, WEIGHTS_8, model=Regression(), **NO_SAVE))


class Regression(nn.Module):
    """Any module whose output has a loss can be trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        predicted = self.body(input_ids.float() / 64)
        return {"loss": (predicted.squeeze(-1) - labels.float().mean(-1) / 64).square().mean(), "predicted": predicted}


@pytest.mark.usefixtures("without_inductor")
def test_a_packed_model_is_compiled_by_the_callback_and_restored_afterwards(tmp_path: Path) -> None:
    plan = {"version": 1, "rules": [{"match": "*", "op": "linear", "x": "e4m3", "w": "e4m3", "dy": "e5m2"}]}
    eager = trained(tmp_path, plan, model=Regression(), options={"execution": "packed"}, **NO_SAVE)
    torch._dynamo.utils.counters.clear()
    model = Regression()
    compiled = trained(tmp_path, plan, model=model, options={"execution": "packed", "compile": True}, **NO_SAVE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-4)
    assert model._compiled_call_impl is None
    assert type(model) is Regression


# --- Resuming


def test_a_killed_run_that_is_resumed_ends_with_the_bits_of_the_whole_one(tmp_path: Path) -> None:
    """Killed by SIGKILL in another process after step 3; the last checkpoint is that of step 2."""
    whole = trained(tmp_path / "whole", HISTORY)
    output = tmp_path / "killed"
    output.mkdir()
    script = Path(__file__).parents[1] / "helpers" / "hf_training.py"
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    process = subprocess.Popen(
        [sys.executable, script, output, "3"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        for _ in range(6000):
            if (output / "paused").exists() or process.poll() is not None:
                break
            time.sleep(0.05)
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        assert (output / "paused").exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2"]
    resumed = trained(output, HISTORY, resume=True)
    assert is_same(weights(resumed.model), weights(whole.model))
    assert losses(resumed) == losses(whole)
    states = [load_state(tmp_path / run / f"checkpoint-{STEPS}" / STATE_FILE) for run in ("whole", "killed")]
    assert states[0]["step"] == states[1]["step"] == STEPS
    for path, (names, record) in states[0]["records"].items():
        assert names == states[1]["records"][path][0]
        assert torch.equal(record, states[1]["records"][path][1])


@pytest.mark.parametrize("plan", [CPT, "int8-minmax", "fp8-train"], ids=["schedule", "minmax", "fp8-train"])
def test_resuming_from_a_folder_anywhere(tmp_path: Path, plan: Any) -> None:
    """The new output folder has a checkpoint of the same step from another run, which must not be taken."""
    options = {"execution": "emulate"}
    whole = trained(tmp_path / "whole", plan, options=options)
    trained(tmp_path / "new", "bf16-all", max_steps=4)
    resumed = trained(tmp_path / "new", plan, options=options, resume=str(tmp_path / "whole" / "checkpoint-4"))
    assert is_same(weights(resumed.model), weights(whole.model))


def test_without_its_state_a_checkpoint_is_refused_or_begins_with_empty_histories(tmp_path: Path) -> None:
    whole = trained(tmp_path, HISTORY)
    folder = tmp_path / "checkpoint-4"
    (folder / STATE_FILE).unlink()
    with pytest.raises(RunError, match="fresh_state=True"):
        trained(tmp_path, HISTORY, resume=str(folder))
    fresh = trained(tmp_path, HISTORY, resume=str(folder), options={"fresh_state": True})
    assert fresh.state.global_step == STEPS
    assert not is_same(weights(fresh.model), weights(whole.model))  # so the test above can fail


def test_a_state_of_another_plan_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, HISTORY)
    folder = tmp_path / "checkpoint-4"
    with pytest.raises(PlanError, match="another plan"):
        trained(tmp_path, WEIGHTS_8, resume=str(folder))
    path = folder / STATE_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RunError, match=r"bitplan\.safetensors cannot be read"):
        trained(tmp_path, HISTORY, resume=str(folder))
    path.write_bytes((tmp_path / "checkpoint-2" / STATE_FILE).read_bytes())
    with pytest.raises(RunError, match="2 steps of the plan"):
        trained(tmp_path, HISTORY, resume=str(folder))


def test_other_steps_move_the_schedule_and_are_refused(tmp_path: Path) -> None:
    trained(tmp_path, CPT)
    with pytest.raises(PlanError, match="steps=6"):
        trained(tmp_path, CPT, resume=str(tmp_path / "checkpoint-4"), max_steps=8)


# --- Bad input


def test_a_plan_that_matches_nothing_raises_when_the_trainer_is_made(tmp_path: Path) -> None:
    for rule, token in (
        ({"match": "no_such_layer", "w": "int8"}, "no_such_layer"),
        ({"match": "model.*", "op": "conv2d", "w": "int8"}, "conv2d"),
    ):
        model = make_model()
        with pytest.raises(PlanError, match=token):
            make_trainer(tmp_path, [BitplanCallback({"version": 1, "rules": [rule]})], model=model)
        assert not is_planned(model)


def test_a_stream_needs_an_example_only_where_the_plan_does(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(DATA)

    class StreamTrainer(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "train_dataset": Stream()})

    def stream_trainer(plan: Any, **options: Any) -> Trainer:
        return make_trainer(tmp_path, [BitplanCallback(plan, **options)], kind=StreamTrainer, **NO_SAVE)

    with pytest.raises(PlanError, match="example=batch"):
        stream_trainer("fp8-train")
    batch = {"input_ids": TOKENS[:4], "labels": TOKENS[:4]}
    stream_trainer("fp8-train", execution="emulate", example=batch).train()
    stream_trainer(HISTORY).train()
    nothing = {"version": 1, "rules": [{"match": "*", "op": "conv2d", "w": "int8"}]}
    trainer = stream_trainer(nothing)
    before = weights(trainer.model)
    with pytest.raises(PlanError, match="conv2d"):
        trainer.train()
    assert is_same(weights(trainer.model), before)


def test_two_callbacks_raise(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="one BitplanCallback"):
        make_trainer(tmp_path, [BitplanCallback("fp8-linear"), BitplanCallback("fp8-linear")])
    callback = BitplanCallback("fp8-linear")
    make_trainer(tmp_path, [callback])
    with pytest.raises(PlanError, match="new callback"):
        make_trainer(tmp_path, [callback])


def test_a_callback_that_is_added_later_names_the_right_place(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [], **NO_SAVE)
    trainer.add_callback(BitplanCallback("fp8-linear"))
    with pytest.raises(PlanError, match="on_init_end"):
        trainer.train()


def compiled_model() -> Any:
    return torch.compile(make_model(), backend="eager")


def compiled_in_place() -> Any:
    model = make_model()
    model.compile(backend="eager")
    return model


def data_parallel() -> Any:
    return nn.DataParallel(make_model())


@pytest.mark.parametrize(
    ("make", "token"), [(compiled_model, "compiled"), (compiled_in_place, "compiled"), (data_parallel, "DataParallel")]
)
def test_a_model_that_arrives_too_late_names_the_right_hook(tmp_path: Path, make: Any, token: str) -> None:
    with pytest.raises(PlanError, match=rf"{token}.*on_init_end"):
        make_trainer(tmp_path, [BitplanCallback("fp8-linear")], model=make())


def test_torch_compile_of_a_packed_plan_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="compile=True"):
        make_trainer(tmp_path, [BitplanCallback("fp8-linear", execution="packed")], torch_compile=True)


def test_another_model_than_the_planned_one_raises(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, [BitplanCallback("fp8-linear")], **NO_SAVE)
    trainer.model_init = lambda: make_model()
    with pytest.raises(PlanError, match="model_init"):
        trainer.train()


def test_a_trainer_trains_once(tmp_path: Path) -> None:
    trainer = trained(tmp_path, WEIGHTS_8, **NO_SAVE)
    with pytest.raises(PlanError, match="new Trainer"):
        trainer.train()


def test_a_mistake_in_a_plan_raises_where_the_callback_is_made() -> None:
    with pytest.raises(PlanError, match="fp8-lineer"):
        BitplanCallback("fp8-lineer")
    with pytest.raises(PlanError, match="pakced"):
        BitplanCallback("fp8-linear", execution="pakced")


@pytest.mark.parametrize("extra", ["transformers"])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, extra: str) -> None:
    monkeypatch.setitem(sys.modules, extra, None)
    monkeypatch.delitem(sys.modules, f"bitplan.integrations.{extra}", raising=False)
    with pytest.raises(MissingPackageError, match=rf"bitplan\[{extra}\]"):
        importlib.import_module(f"bitplan.integrations.{extra}")


# --- TRL


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl, which is not installed")
def test_the_sft_trainer_of_trl_trains_under_a_plan_and_says_what_it_computes_itself(tmp_path: Path) -> None:
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = {f"w{number}": number for number in range(60)} | {"<pad>": 60, "<eos>": 61, "<unk>": 62}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    data = Dataset.from_dict({"text": [" ".join(f"w{token % 60}" for token in row) for row in TOKENS.tolist()]})

    def sft(plan: Any) -> list[float]:
        arguments = SFTConfig(
            str(tmp_path),
            use_cpu=True,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            disable_tqdm=True,
            report_to=[],
            logging_steps=1,
            max_steps=3,
            save_strategy="no",
            max_length=16,
            bf16=False,
        )
        callbacks = [] if plan is None else [BitplanCallback(plan)]
        trainer = SFTTrainer(make_model(), arguments, train_dataset=data, processing_class=fast, callbacks=callbacks)
        trainer.train()
        return losses(trainer)

    with pytest.warns(BitplanWarning, match=r"lm_head/linear\.0 .* does not run"):
        planned = sft("fp8-linear")
    assert planned != sft(None)
    with pytest.raises(PlanError, match="lm_head"):
        sft({"version": 1, "rules": [{"match": "lm_head", "w": "int4"}]})
