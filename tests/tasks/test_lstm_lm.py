from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from bitplan.analysis.sites import list_sites
from bitplan.errors import TaskError
from bitplan.lab.tasks.lstm_lm import CarriedLSTM, LSTMLanguageModelling, LSTMSettings
from bitplan.lab.tasks.registry import find_task
from bitplan.lab.train import RunFolder, train
from bitplan.lab.train.session import Session
from bitplan.planners.cpt import cpt_plan
from bitplan.plans import Plan
from bitplan.plans.loading import find_plan
from bitplan.runtime.attach import Attachment

SMALL = LSTMSettings(batch=3, length=5, features=8, dropout=0.0, evaluation=4)


def small(**changes: object) -> LSTMLanguageModelling:
    return LSTMLanguageModelling(LSTMSettings(**{**vars(SMALL), **changes}))  # type: ignore[arg-type]


def test_the_text_is_read_in_columns_without_a_gap() -> None:
    task = small()
    first, second = task.batch(0), task.batch(1)
    assert first[0].shape == (5, 3)
    assert torch.equal(first[0][1:], first[1][:-1])
    assert torch.equal(first[1][-1], second[0][0])
    column = torch.cat([task.batch(step)[0][:, 1] for step in range(4)])
    length = len(task.training) // 3
    assert torch.equal(column, task.training[length : length + 20])


def test_the_text_starts_again_after_its_end() -> None:
    task = small()
    chunks = (len(task.training) // 3 - 1) // 5
    assert torch.equal(task.batch(chunks)[0], task.batch(0)[0])
    assert not torch.equal(task.batch(chunks - 1)[0], task.batch(0)[0])


def test_two_chunks_are_read_like_one_of_twice_the_length() -> None:
    torch.manual_seed(0)
    model = CarriedLSTM(20, 8, 2, 0.0, 3)
    text = torch.randint(20, (10, 3))
    whole = CarriedLSTM(20, 8, 2, 0.0, 3)
    whole.load_state_dict(model.state_dict())
    parts = torch.cat([model(text[:5]), model(text[5:])])
    assert torch.allclose(parts, whole(text), atol=1e-6)
    # and not because the state does not matter
    model.hidden.zero_()
    model.cell.zero_()
    assert not torch.allclose(model(text[5:]), parts[5:], atol=1e-3)


def test_gradients_stop_between_chunks() -> None:
    model = CarriedLSTM(20, 8, 1, 0.0, 3)
    text = torch.randint(20, (5, 3))
    for _ in range(2):
        model(text).sum().backward()
    assert not model.hidden.requires_grad


def test_a_state_dict_holds_what_was_read() -> None:
    model = CarriedLSTM(20, 8, 1, 0.0, 3)
    model(torch.randint(20, (5, 3)))
    state = model.state_dict()
    assert state["hidden"].abs().sum() > 0
    other = CarriedLSTM(20, 8, 1, 0.0, 3)
    other.load_state_dict(state)
    text = torch.randint(20, (5, 3))
    assert torch.equal(model(text), other(text))


def test_evaluation_starts_empty_and_leaves_training_s_state() -> None:
    task = small()
    model = task.model()
    assert isinstance(model, CarriedLSTM)
    with torch.no_grad():
        fresh = task.evaluate(model.eval())
        model.train()(task.batch(0)[0])
        before = model.hidden.clone(), model.cell.clone()
        assert before[0].abs().sum() > 0
        assert task.evaluate(model.eval()) == fresh
    assert torch.equal(model.hidden, before[0])
    assert torch.equal(model.cell, before[1])


def test_evaluation_carries_its_own_state() -> None:
    task = small(evaluation=2)
    torch.manual_seed(0)
    model = task.model().eval()
    nn.init.normal_(model.decoder.weight)  # type: ignore[arg-type]
    with torch.no_grad():
        together = task.evaluate(model)["validation_loss"]
        apart = []
        for number in range(2):
            model.hidden.zero_()  # type: ignore[operator]
            model.cell.zero_()  # type: ignore[operator]
            text, following = task._rows(task.held_out, number)
            apart.append(float(task.loss(model(text), following)))
    assert abs(together - sum(apart) / 2) > 1e-4


def test_a_model_that_fails_in_evaluation_keeps_its_state() -> None:
    class Fails(CarriedLSTM):
        def forward(self, text: Tensor) -> Tensor:
            raise RuntimeError("boom")

    model = Fails(4000, 8, 1, 0.0, 3)
    model.hidden.fill_(3.0)
    with pytest.raises(RuntimeError, match="boom"):
        small().evaluate(model)
    assert bool((model.hidden == 3.0).all())


def test_listing_sites_leaves_the_state_alone() -> None:
    target = small().target()
    list_sites(target.model, target.batch, target.loss)
    assert target.model.hidden.abs().sum() == 0  # type: ignore[union-attr, operator]


def test_the_rate_is_divided_where_nothing_improved_and_a_resumed_task_knows() -> None:
    task = small()
    rates = []
    for perplexity in (100.0, 90.0, 95.0, 89.0, 89.0, float("nan")):
        task.after_evaluation({"perplexity": perplexity})
        rates.append(task.learning_rate(0))
    assert rates == [1, 1, 1 / 4, 1 / 4, 1 / 16, 1 / 64]
    resumed = small()
    resumed.memory = dict(task.memory)
    resumed.after_evaluation({"perplexity": 90.0})
    assert resumed.learning_rate(0) == 1 / 256
    assert all(isinstance(value, float) and value == value for value in task.memory.values())


def test_penn_treebank_s_recipe_and_shapes_need_no_files() -> None:
    task = find_task("ptb")
    assert (task.settings.lr, task.settings.clip, task.settings.batch, task.settings.length) == (20, 0.25, 20, 35)
    model = task.model()
    assert isinstance(model, CarriedLSTM)
    assert model.decoder.weight.shape == (10_000, 800)
    with pytest.raises(TaskError, match=r"the task ptb has no text of its own: set data= to a folder with ptb\.train"):
        task.batch(0)
    assert find_task("wikitext2").model().lstm.num_layers == 2  # type: ignore[union-attr]
    with pytest.raises(TaskError, match="or set download=true"):
        find_task("wikitext2").batch(0)


def test_penn_treebank_s_files_are_read(tmp_path: Path) -> None:
    for name, count in (("train", 60), ("valid", 30)):
        text = " no it was n't <unk> monday \n" * count
        (tmp_path / f"ptb.{name}.txt.gz").write_bytes(gzip.compress(text.encode()))
    task = find_task("ptb", [f"data={tmp_path}", "batch=2", "length=4", "features=8", "vocabulary=10"])
    sentence, following = task.batch(0)
    assert sentence.shape == task.example()[0].shape == (4, 2)
    assert len(task.training) == 60 * 7  # type: ignore[attr-defined]
    with torch.no_grad():
        assert task.evaluate(task.model().eval())["perplexity"] > 1
    assert task.metric.trivial < 10
    assert following.max() < 10


def test_the_test_text_is_read_once_at_the_end(tmp_path: Path) -> None:
    for part, text in (("train", "a b c d"), ("valid", "a b c d"), ("test", "d c b a")):
        (tmp_path / f"ptb.{part}.txt").write_text((text + "\n") * 30)
    recipe = ["steps=4", "evaluate_every=2", "batch=2", "length=3", "features=4", f"data={tmp_path}", "vocabulary=9"]
    run = tmp_path / "run"
    summary = train(find_task("ptb", recipe), folder=run)
    reported = [line for line in RunFolder(run).metrics() if line.get("evaluation")]
    assert ["test_perplexity" in line for line in reported] == [False, True]
    assert summary.metrics["test_perplexity"] != summary.metrics["perplexity"]
    (tmp_path / "ptb.test.txt").unlink()
    assert "test_perplexity" not in train(find_task("ptb", recipe), folder=tmp_path / "without").metrics


def test_a_compiled_run_evaluates_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "valid"):
        (tmp_path / f"ptb.{part}.txt").write_text("a b c d\nb d a\n" * 20)
    recipe = ["steps=2", "evaluate_every=2", "batch=2", "length=2", "features=4", f"data={tmp_path}", "vocabulary=9"]
    task = find_task("ptb", recipe)
    target = task.target()
    plan = cpt_plan(target.model, target.batch, target.loss, low=5, high=8)
    plain = train(task, plan, folder=tmp_path / "plain")
    made: list[bool] = []

    def traced(graph: torch.fx.GraphModule, example: object) -> Callable[..., object]:
        made.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr(Attachment, "compile", lambda run, **_: torch.compile(run.model, backend=traced))
    compiled = train(find_task("ptb", recipe), plan, folder=tmp_path / "compiled", compile=True)
    assert made == [True, False]
    assert compiled.metrics == plain.metrics


def test_a_compiled_backward_sees_the_state_that_forward_began_with(monkeypatch: pytest.MonkeyPatch) -> None:
    # What Inductor does, too: it keeps as little as it can for backward, and makes the rest again from what there is.
    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), partition_fn=min_cut_rematerialization_partition
    )
    monkeypatch.setattr(
        Attachment, "compile", lambda run, **_: torch.compile(run.model, fullgraph=True, backend=backend)
    )
    gradients = []
    for compiled in (False, True):
        task = small(length=2, vocabulary=20)
        target = task.target()
        plan = cpt_plan(target.model, target.batch, target.loss)
        session = Session(task, plan, execution="emulate", device=torch.device("cpu"), compile=compiled)
        assert isinstance(session.model, CarriedLSTM)
        torch.manual_seed(0)
        session.model.hidden.normal_()
        session.model.cell.normal_()
        session.forward_backward()
        gradients.append([parameter.grad for parameter in session.model.parameters()])
        session.close()
    for plain, compiled_one in zip(*gradients, strict=True):
        assert plain is not None
        assert torch.equal(plain, compiled_one)


@pytest.mark.parametrize(("plan", "is_whole"), [("int8-all", False), ("cpt", True), (None, False)])
def test_only_a_layer_that_is_written_out_is_one_graph(
    plan: str | None, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[bool] = []

    def noted(run: Attachment, *, fullgraph: bool, mode: str | None) -> nn.Module:
        requests.append(fullgraph)
        return run.model

    monkeypatch.setattr(Attachment, "compile", noted)
    task = small(vocabulary=20)
    target = task.target()
    chosen = cpt_plan(target.model, target.batch, target.loss) if plan == "cpt" else find_plan(plan) if plan else Plan()
    Session(task, chosen, execution="emulate", device=torch.device("cpu"), compile=True).close()
    assert requests == [is_whole]
