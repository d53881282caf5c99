from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bitplan.errors import TaskError
from bitplan.lab.tasks.images import NETWORKS, Digits, DigitsSettings, ImageSettings
from bitplan.lab.tasks.registry import find_task


class Knows(nn.Module):
    """Tells the right class of every image but the first `wrong` ones it sees, and counts what it is shown."""

    def __init__(self, labels: Tensor, wrong: int) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1))
        self.labels, self.wrong = labels, wrong
        self.seen, self.shapes = 0, set[tuple[int, ...]]()

    def forward(self, images: Tensor) -> Tensor:
        self.shapes.add(tuple(images.shape))
        places = (self.seen + torch.arange(len(images))) % len(self.labels)
        self.seen += len(images)
        reported = torch.where(places < self.wrong, (self.labels[places] + 1) % 10, self.labels[places])
        return nn.functional.one_hot(reported, 10).float() * 50


@pytest.mark.parametrize("batch", [128, 360, 100, 500])
def test_accuracy_counts_every_held_out_image_once_and_shapes_never_change(batch: int) -> None:
    task = find_task("digits", [f"batch={batch}"])
    assert isinstance(task, Digits)
    model = Knows(task.data.held_out.labels, wrong=36)
    figures = task.evaluate(model)
    assert figures["accuracy"] == pytest.approx(0.9)
    assert figures["validation_loss"] == pytest.approx(5.0, rel=1e-3)  # a tenth of them cost 50 each
    assert model.shapes == {(batch, 3, 8, 8)}


def test_trivial_is_the_commonest_class_of_training_on_held_out_images() -> None:
    task = Digits()
    commonest = torch.bincount(task.data.training.labels).argmax()
    assert task.metric.trivial == pytest.approx(float((task.data.held_out.labels == commonest).float().mean()))
    assert (task.metric.name, task.metric.better) == ("accuracy", "higher")


def test_batches_are_a_function_of_seed_and_step() -> None:
    first, second = Digits(seed=1), Digits(seed=1)
    third = first.batch(3)
    for step in (5, 0):
        second.batch(step)
    torch.manual_seed(99)  # the global generator is not asked
    assert all(torch.equal(a, b) for a, b in zip(third, second.batch(3), strict=True))
    assert not torch.equal(third[0], first.batch(4)[0])
    assert not torch.equal(third[0], Digits(seed=2).batch(3)[0])


def test_batches_do_not_touch_torch_s_generator() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    Digits().batch(0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_takes_a_batch(name: str) -> None:
    task = Digits(DigitsSettings(model=name, width=0.25, batch=2))
    with torch.no_grad():
        assert task.model().eval()(task.batch(0)[0]).shape == (2, 10)


def test_width_makes_networks_narrower() -> None:
    sizes = [
        sum(parameter.numel() for parameter in Digits(DigitsSettings(width=width)).model().parameters())
        for width in (0.5, 1.0, 2.0)
    ]
    assert sizes[0] * 3 < sizes[1]
    assert sizes[1] * 3 < sizes[2]


def test_the_cifar_recipe_is_the_papers() -> None:
    task = find_task("cifar10")
    assert task.settings == type(task.settings)(**vars(ImageSettings()))
    assert [task.learning_rate(step) for step in (0, 31_999, 32_000, 48_000)] == [1, 1, 0.1, 0.01]
    (group,) = task.optimizer(nn.Linear(2, 2)).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 1e-4)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("model=resnet21", r"there is no model 'resnet21'; did you mean "),
        ("decay=fast", r"there is no decay 'fast'"),
        ("width=0", r"width is 0\.0; it must be above 0\."),
        ("momentum=1", r"momentum is 1\.0; it must be at least 0 and below 1\."),
        ("weight_decay=nan", r"weight_decay is nan; it must be at least 0\."),
        ("pad=-1", r"pad is -1; it must be at least 0\."),
    ],
)
def test_settings_that_make_no_sense_are_one_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        find_task("digits", [setting])
