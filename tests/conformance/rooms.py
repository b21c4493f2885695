"""Every policy, source and reference that is here, small: `ROOMS[name]()` is (policy, source, reference)."""

from __future__ import annotations

from typing import Any

import torch

from grpo import bandit, control
from grpo.models import ModelPolicy, ModelSource, reference_of
from grpo.reference import FrozenReference
from tests import toys
from tests.unit.language.functions import digits
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

Room = tuple[Any, Any, Any]


def bandit_room() -> Room:
    config = bandit.BanditConfig(group_size=4, groups_per_step=2, beta=0.1)
    return _seats(bandit.make_trainer(config))


def models_room() -> Room:
    torch.manual_seed(0)
    policy = ModelPolicy(toys.Softmax())
    reference = reference_of(toys.Softmax())
    return policy, ModelSource(policy, toys.Match(), 4, [0, 1, 2], 2), reference


def control_room(**settings: Any) -> Room:
    usual = {"env": "CartPole-v1", "group_size": 4, "groups_per_step": 2, "hidden": (8,)}
    return _seats(control.GRPOTrainer(**usual | settings))


def language_room(**settings: Any) -> Room:
    from grpo.language import GRPOConfig, GRPOTrainer

    usual = {"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 6, "preflight": False}
    config = GRPOConfig(**usual | {"reward_workers": 1, "beta": 0.1, "device": "cpu"} | settings)
    rows = [{"prompt": f"What is {a}+{a}?", "answer": str(a + a)} for a in range(6)]
    trainer = GRPOTrainer(tiny_model(), digits, config, train_dataset=rows, processing_class=tiny_tokenizer())
    return _seats(trainer)


def worldmodel_room(**settings: Any) -> Room:
    from tests.unit.worldmodel.worlds import make

    return _seats(make(beta=0.1, **settings))


def _seats(trainer: Any) -> Room:
    return trainer.policy, trainer.source, trainer.reference or FrozenReference.copy_of(trainer.policy)


ROOMS = {
    "bandit": bandit_room,
    "models": models_room,
    "control episodes": control_room,
    "control continuous": lambda: control_room(env="Pendulum-v1", scale_observations=True),
    "control branches": lambda: control_room(group_by="branch"),
    "control steps": lambda: control_room(group_by="steps", advantage="step", group_size=20, groups_per_step=1),
    "control chunks": lambda: control_room(action_chunk=4),
    "language": language_room,
    "language adapter": lambda: language_room(lora_rank=4),
    "worldmodel": worldmodel_room,
}
