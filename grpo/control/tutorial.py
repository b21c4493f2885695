"""A well-known tutorial's constructor, in its own meaning: a group is a window of steps, `batch_size` counts decisions.

    GRPOTrainer(env, actor, optimizer, clip_ratio, beta, gamma, epochs, batch_size, group_size).train(total_updates)

What it leaves unsaid is that document's default, its attributes can be read, its W&B names are reported beside ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo.control.config import ControlConfig
from grpo.control.source import ControlSource
from grpo.dialects import translate
from grpo.report import StepReport
from grpo.run.start import MOST
from grpo.trainer import Trainer

DEFAULTS = {
    "loss_type": "window",
    "kl_estimator": "exact",
    "group_by": "steps",
    "group_size": 200,
    "groups_per_step": 1,
    "num_iterations": 10,
    "decisions_per_minibatch": 32,
    "learning_rate": 3e-4,
    "max_grad_norm": 0.5,
    "target_kl": None,
}
"""What the tutorial leaves unsaid, when its words are used."""
UPDATES = 300
"""Of `train()` without a number."""

ITS_OWN = frozenset({"clip_ratio", "epochs", "batch_size"})
"""Words that say by themselves that the tutorial is meant."""
SHARED = frozenset({"beta", "gamma", "group_size"})
"""Words that are ours as well."""
NEUTRAL = frozenset({"env", "seed", "device"})
"""Ours that the tutorial has nothing to say about."""
MANY = 64
"""Tries from one start beyond which a window of steps may have been meant."""


def is_meant(given: Mapping[str, Any], whole: bool) -> bool:
    """Whether these settings mean the tutorial; where that is not plain, a line says what was taken.

    whole: an actor and an optimizer are given, as the tutorial always does.
    """
    if given.get("group_by", "steps") != "steps":
        return False
    if ITS_OWN & set(given):
        return True
    if "group_by" in given or set(given) - SHARED - NEUTRAL:
        return False
    size = given.get("group_size", DEFAULTS["group_size"])
    if whole:
        print(f"read as the tutorial's words: a group is a window of {size} steps; for episodes say group_by='start'")
        return True
    if size > MANY and "group_size" in given:
        print(f"group_size={size}: as many episodes from one start; for a window of steps say group_by='steps'")
    return False


def configured(given: Mapping[str, Any]) -> ControlConfig:
    """Settings in the tutorial's words, with its defaults."""
    ours, _ = translate(given, "tutorial")
    unsaid = {name: value for name, value in DEFAULTS.items() if name not in ours}
    return ControlConfig(_dialect="tutorial", **unsaid, **given)


class Reported:
    """Before and after each step: the names under which the tutorial logs, and its list of episodes' returns."""

    def __init__(self, source: ControlSource, ep_rewards: list[float]) -> None:
        self._source, self._ep_rewards = source, ep_rewards

    def before(self, trainer: Trainer) -> None:
        """Nothing."""

    def after(self, trainer: Trainer, report: StepReport) -> None:
        """After each step."""
        if self._source.windows is not None:
            self._ep_rewards += self._source.windows.returns
            del self._ep_rewards[:-MOST]
        names = {"update": float(report.step - 1), "avg_reward": report.get("return")}
        report.metrics |= names | {"kl_divergence": report.get("kl")}


class Setting:
    """An attribute of the tutorial's trainer that is a setting here: it can be read, and says how to change it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        return self if trainer is None else getattr(trainer.config, self._name)

    def __set__(self, trainer: Any, value: Any) -> None:
        raise AttributeError(f"{self._name} stays as it is in a trainer; make one with {self._name}={value!r}")


ELSEWHERE = {
    "ep_rewards": "the returns of whole episodes are kept with the tutorial's words; else see report['return']",
    "collect_rollout": "a window is trainer.source.collect(CollectRequest(trainer.steps_done)).rollouts, and a step of "
    "training trainer.step()",
    "_calc_returns": "returns are grpo.core.advantages.reward_to_go",
    "learn": "train(total_timesteps=…), or steps=…, or stop_at=… trains here",
    "predict": "train(folder=…), then grpo.load(folder).predict(observation)",
    "save": "train(folder=…) keeps everything; grpo.load(folder).save(…) writes a folder to hand on",
}
"""Other attributes of the tutorial and of Stable-Baselines3, each with what there is instead."""
