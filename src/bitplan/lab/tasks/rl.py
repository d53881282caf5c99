"""Reinforcement learning: proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347) on gymnasium's classic
control, after CleanRL's single-file implementation (Huang et al. 2022).

The policy in training makes a rollout under its plan, which several epochs of updates use. The state of the
environments and the rollout are in the task's memory, so that a resumed run goes on with the same transitions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from bitplan.analysis.memory.fakes import copy_without_plan
from bitplan.errors import TaskError, nearest_names
from bitplan.lab.tasks.task import Metric, Settings, Task, decayed, fused_for, generator, shuffled
from bitplan.numerics.wire_format import ACTIONS, EPISODE, HELD_OUT_EPISODE, RANDOM_ACTIONS, RANDOM_EPISODE

#: Environment -> the numbers of an observation, and actions.
ENVIRONMENTS = {"CartPole-v1": (4, 2), "Acrobot-v1": (6, 3)}

#: Where the plan holds: in rollouts and updates, or in one of them, which then disagree about the policy.
ROUNDED = ("both", "rollout", "update")

#: Episodes of an evaluation.
EPISODES = 100


@dataclass(frozen=True)
class PPOSettings(Settings):
    """A recipe that reaches 500 on CartPole within 50,000 transitions; a step is an update."""

    steps: int = 2000
    #: Transitions of an update.
    batch: int = 256
    evaluate_every: int = 500
    lr: float = 1e-3
    clip: float = 0.5
    environment: str = "CartPole-v1"
    #: Environments that step together.
    environments: int = 8
    #: Steps of each environment between two rounds of updates.
    rollout: int = 128
    #: Times that the transitions of a rollout are learned from.
    epochs: int = 10
    #: Of future rewards, in a step.
    discount: float = 0.98
    #: Of future advantages in addition: lambda of generalised advantage estimation.
    trace: float = 0.9
    #: How far the probability of an action may move from that in the rollout before an update no longer gains from it.
    clip_ratio: float = 0.2
    #: Weights of the entropy and of the value error in the loss.
    entropy: float = 0.0
    value: float = 0.5
    #: Of both hidden layers of policy and value.
    features: int = 64
    #: both, rollout or update: where the plan holds.
    rounded: str = "both"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, choices in (("environment", ENVIRONMENTS), ("rounded", ROUNDED)):
            if getattr(self, name) not in choices:
                wrong = getattr(self, name)
                raise TaskError(f"there is no {name} {wrong!r}; {nearest_names(wrong, choices)}")
        for name in ("environments", "rollout", "epochs", "features"):
            if getattr(self, name) < 1:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.transitions % self.batch:
            raise TaskError(
                f"batch={self.batch} does not divide the environments={self.environments} times rollout={self.rollout} "
                f"transitions of a rollout: choose one that does."
            )
        for name in ("discount", "trace"):
            if not 0 <= getattr(self, name) <= 1:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be from 0 to 1.")
        if not self.clip_ratio > 0:
            raise TaskError(f"clip_ratio is {self.clip_ratio}; it must be above 0.")
        for name in ("entropy", "value"):
            if not getattr(self, name) >= 0:
                raise TaskError(f"{name} is {getattr(self, name)}; it must be at least 0.")

    @property
    def transitions(self) -> int:
        """Transitions of a rollout."""
        return self.environments * self.rollout

    @property
    def updates(self) -> int:
        """Updates that use a rollout."""
        return self.epochs * self.transitions // self.batch


class ActorCritic(nn.Module):
    """Observations (batch, numbers) to the logits of actions and the value of each; two networks of tanh layers."""

    def __init__(self, numbers: int, actions: int, features: int) -> None:
        super().__init__()
        self.actor = _network(numbers, features, actions, last=0.01)
        self.critic = _network(numbers, features, 1, last=1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(observations), self.critic(observations).squeeze(-1)


def _network(numbers: int, features: int, outputs: int, last: float) -> nn.Sequential:
    linear = [nn.Linear(numbers, features), nn.Linear(features, features), nn.Linear(features, outputs)]
    for layer, gain in zip(linear, (math.sqrt(2), math.sqrt(2), last), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


# --- Environments


class Environments:
    """Copies of an environment that step together; the next episode begins where one ends.

    Each episode begins from a seed of its own, and gymnasium's classic control draws nothing later, so that the state
    is a few numbers and no generator.
    """

    def __init__(self, name: str, count: int, *where: int | str) -> None:
        """
        :param where: what the seeds of the episodes derive from.
        """
        made = [_gymnasium().make(name) for _ in range(count)]
        self._limit = int(made[0].spec.max_episode_steps)
        self._environments: list[Any] = [environment.unwrapped for environment in made]
        self._where = where
        #: Episodes begun, and steps of the present one, by environment.
        self._episodes, self._elapsed = [0] * count, [0] * count
        self._observations = np.stack([self._begin(index) for index in range(count)])

    @property
    def observations(self) -> Tensor:
        """A copy of the present observation of each environment."""
        return torch.from_numpy(self._observations.copy())

    def _begin(self, index: int) -> NDArray[np.float32]:
        seed = generator(*self._where, index, self._episodes[index]).initial_seed() % 2**32
        self._episodes[index] += 1
        self._elapsed[index] = 0
        observation: NDArray[np.float32]
        observation, _ = self._environments[index].reset(seed=seed)
        return observation

    def step(self, actions: list[int], indices: list[int] | None = None) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Rewards, whether each episode ended, and last observations of episodes that only the time limit ended.

        :param indices: the environments that act; all of them by default.
        """
        rewards, ended, cut = [], [], {}
        for position, (index, action) in enumerate(zip(indices or range(len(actions)), actions, strict=True)):
            observation, reward, is_terminated, _, _ = self._environments[index].step(action)
            self._elapsed[index] += 1
            is_end = is_terminated or self._elapsed[index] >= self._limit
            if is_end and not is_terminated:
                cut[position] = torch.from_numpy(observation)
            rewards.append(float(reward))
            ended.append(is_end)
            self._observations[index] = self._begin(index) if is_end else observation
        return torch.tensor(rewards), torch.tensor(ended), cut

    def state(self) -> dict[str, Any]:
        """Everything that the next steps depend on, as tensors and plain values."""
        physical = np.array([environment.state for environment in self._environments], dtype=np.float64)
        return {
            "physical": torch.from_numpy(physical),
            "observations": self.observations,
            "episodes": [*self._episodes],
            "elapsed": [*self._elapsed],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore the :meth:`state`."""
        for environment, row in zip(self._environments, state["physical"].numpy(), strict=True):
            environment.reset()  # clears what is left of an episode that ended
            environment.state = row.copy()
        self._observations = state["observations"].numpy().copy()
        self._episodes, self._elapsed = [*state["episodes"]], [*state["elapsed"]]


def _gymnasium() -> Any:
    """The package; raises an error if it is not installed."""
    try:
        import gymnasium
    except ModuleNotFoundError as error:
        raise TaskError("rl needs gymnasium, which is not installed: run \"pip install 'bitplan[rl]'\".") from error
    return gymnasium


# --- Rollouts


@dataclass(frozen=True)
class Rollout:
    """Transitions that updates learn from; every tensor has a row for each."""

    observations: Tensor
    actions: Tensor
    #: Of the actions, when they were taken.
    log_probabilities: Tensor
    advantages: Tensor
    returns: Tensor

    def batch(self, chosen: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Inputs and target of an update; advantages have mean 0 and variance 1."""
        advantages = self.advantages[chosen]
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
        return self.observations[chosen], (
            self.actions[chosen],
            self.log_probabilities[chosen],
            advantages,
            self.returns[chosen],
        )


def make_rollout(
    environments: Environments, policy: nn.Module | None, recipe: PPOSettings, draws: torch.Generator
) -> Rollout:
    """Let the policy act for a rollout; None: all actions are equally probable, and all values 0."""
    observations, actions, log_probabilities, values, rewards, ended = ([] for _ in range(6))
    cut: list[tuple[int, int, Tensor]] = []
    for step in range(recipe.rollout):
        observations.append(environments.observations)
        logits, value = _act(policy, observations[-1], ENVIRONMENTS[recipe.environment][1])
        # Where the policy is broken, its actions are arbitrary, and the next loss is NaN.
        chosen = torch.multinomial(logits.exp().nan_to_num(1.0), 1, generator=draws).squeeze(1)
        actions.append(chosen)
        log_probabilities.append(logits.gather(1, chosen[:, None]).squeeze(1))
        values.append(value)
        reward, is_end, last = environments.step(chosen.tolist())
        rewards.append(reward)
        ended.append(is_end)
        cut += [(step, index, observation) for index, observation in last.items()]
    # The time limit is not part of the problem: what an episode would have gained after it counts, as estimated.
    final = torch.stack([*environments.observations, *(observation for _, _, observation in cut)])
    _, final_values = _act(policy, final, 1)
    for (step, index, _), value in zip(cut, final_values[recipe.environments :], strict=True):
        rewards[step][index] += recipe.discount * value
    advantages = torch.empty(recipe.rollout, recipe.environments)
    following, advantage = final_values[: recipe.environments], torch.zeros(recipe.environments)
    for step in reversed(range(recipe.rollout)):
        goes_on = (~ended[step]).float()
        error = rewards[step] + recipe.discount * following * goes_on - values[step]
        advantage = error + recipe.discount * recipe.trace * goes_on * advantage
        advantages[step], following = advantage, values[step]
    parts = [torch.stack(part) for part in (observations, actions, log_probabilities)]
    return Rollout(*(part.flatten(0, 1) for part in (*parts, advantages, advantages + torch.stack(values))))


def _act(policy: nn.Module | None, observations: Tensor, actions: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the actions, and values, on the CPU."""
    if policy is None:
        return torch.full((len(observations), actions), -math.log(actions)), torch.zeros(len(observations))
    device = next(policy.parameters()).device
    with torch.no_grad():
        logits, values = policy(observations.to(device))
    return logits.float().log_softmax(-1).cpu(), values.float().cpu()


# --- The task


class ReinforcementLearning(Task):
    """PPO; the metric is the mean return of :data:`EPISODES` episodes with the most probable actions."""

    name = "rl"
    summary = "a policy for CartPole or Acrobot"
    settings_class: ClassVar[type[PPOSettings]] = PPOSettings
    settings: PPOSettings
    batches_need_model = True

    #: The last rollout of random actions, and its number.
    _random: tuple[int, Rollout] | None = None

    @property
    def rounds_updates(self) -> bool:
        return self.settings.rounded != "rollout"

    @cached_property
    def metric(self) -> Metric:
        """Mean return; the trivial predictor acts at random."""
        return Metric("return", "higher", self._mean_return(None))

    def model(self) -> nn.Module:
        recipe = self.settings
        return ActorCritic(*ENVIRONMENTS[recipe.environment], recipe.features)

    # --- data

    def batch(self, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Transitions of random actions, for planners, which have a step and no policy."""
        recipe, where = self.settings, (self.seed, step // self.settings.updates)
        if self._random is None or self._random[0] != where[1]:
            environments = Environments(recipe.environment, recipe.environments, RANDOM_EPISODE, *where)
            self._random = where[1], make_rollout(environments, None, recipe, generator(RANDOM_ACTIONS, *where))
        return self._random[1].batch(self._chosen(step))

    def _chosen(self, step: int) -> Tensor:
        """The transitions of an update: every epoch is an order of its own of all."""
        return shuffled(step, self.settings.batch, self.settings.transitions, self.seed)

    def example(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        batch, (numbers, _) = self.settings.batch, ENVIRONMENTS[self.settings.environment]
        target = torch.zeros(batch, dtype=torch.long), *(torch.zeros(batch) for _ in range(3))
        return torch.zeros(batch, numbers), target

    def batch_of(self, model: nn.Module, step: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Transitions of the rollout that `step` uses; `model` makes it now if `step` is the first to use it."""
        number = step // self.settings.updates
        if self.memory.get("rollout") != number:
            self._roll_out(model, number)
        rollout = Rollout(**self.memory["transitions"])
        return rollout.batch(self._chosen(step))

    def _roll_out(self, model: nn.Module, number: int) -> None:
        recipe = self.settings
        environments = Environments(recipe.environment, recipe.environments, EPISODE, self.seed)
        if number:
            environments.load(self.memory["environments"])
        rollout = make_rollout(environments, self._acting(model), recipe, generator(ACTIONS, self.seed, number))
        updated = model if self.rounds_updates else copy_without_plan(model)
        log_probabilities, _ = _act(updated, rollout.observations, 1)
        present = log_probabilities.gather(1, rollout.actions[:, None]).squeeze(1)
        self.memory = {
            "rollout": number,
            "transitions": dict(vars(rollout)),
            "environments": environments.state(),
            "mismatch": float((present - rollout.log_probabilities).abs().mean()),
        }

    def _acting(self, model: nn.Module) -> nn.Module:
        """The policy that acts: `model` under its plan, or a copy in its own precision."""
        return copy_without_plan(model) if self.settings.rounded == "update" else model

    # --- recipe

    def loss(self, output: tuple[Tensor, Tensor], target: tuple[Tensor, ...]) -> Tensor:
        recipe = self.settings
        (logits, values), (actions, before, advantages, returns) = output, target
        log_probabilities = logits.log_softmax(-1)
        ratio = (log_probabilities.gather(1, actions[:, None]).squeeze(1) - before).exp()
        clipped = ratio.clamp(1 - recipe.clip_ratio, 1 + recipe.clip_ratio)
        gain = torch.minimum(ratio * advantages, clipped * advantages).mean()
        entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
        return recipe.value * (values - returns).square().mean() - gain - recipe.entropy * entropy

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), self.settings.lr, eps=1e-5, fused=fused_for(model.parameters()))

    def learning_rate(self, step: int) -> float:
        return decayed("linear", step, self.settings.steps)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The mean return, and how far the updates' policy was from the rollout's before the last round of updates.

        That is the mean difference of log-probabilities of the rollout's actions. Besides an option that rounds one of
        the two only, scales that depend on the batch cause it.
        """
        return {"return": self._mean_return(self._acting(model)), "mismatch": self.memory.get("mismatch", 0.0)}

    def _mean_return(self, policy: nn.Module | None) -> float:
        """Of episodes that are the same in every run; without a policy, actions are random."""
        recipe = self.settings
        environments = Environments(recipe.environment, EPISODES, HELD_OUT_EPISODE)
        draws = generator(RANDOM_ACTIONS)
        total, running = 0.0, [*range(EPISODES)]
        while running:
            logits, _ = _act(policy, environments.observations[running], ENVIRONMENTS[recipe.environment][1])
            best = torch.multinomial(logits.exp(), 1, generator=draws)[:, 0] if policy is None else logits.argmax(1)
            rewards, ended, _ = environments.step(best.tolist(), running)
            total += float(rewards.sum())
            running = [index for index, is_end in zip(running, ended.tolist(), strict=True) if not is_end]
        return total / EPISODES
