"""A control run that is cut and resumed is the run that was not: weights, metrics and samples, byte for byte."""

import pytest
import torch
from torch import nn

from grpo.control import GRPOTrainer
from grpo.run.folder import RunFolder
from grpo.run.loop import run
from tests.faults import envs
from tests.faults.tiny import fingerprint

SMALL = {"group_size": 4, "groups_per_step": 2, "num_iterations": 2, "hidden": (16,), "seed": 5}
SMALL |= {"video": False, "films": False}
CASES = {
    "start, linear, scaled, films": {"scale_observations": True, "films": True},
    "windows of a stream": {"group_by": "steps", "advantage": "step", "group_size": 30, "scale_observations": True},
    "windows, serial": {"group_by": "steps", "advantage": "leave_one_out", "group_size": 30, "vector": "serial"},
    "windows, Gaussian": {"env": "Pendulum-v1", "group_by": "steps", "advantage": "step", "group_size": 30},
    "windows of pictures, judged until the next point": {
        "env": "tests.unit.control.catch:Catch",
        "env_kwargs": {"balls": 3},
        "group_by": "steps",
        "group_size": 12,
        "advantage": "fitted",
        "credit_until_reward": True,
        "gamma": 0.9,
        "vector": "serial",
    },
    "branch": {"group_by": "branch"},
    "branch, serial": {"group_by": "branch", "vector": "serial", "groups_per_step": 1},
    "anchor": {"env": "FrozenLake-v1", "group_by": "anchor", "advantage": "step", "gamma": 0.9},
    "batch, auto": {"group_by": "batch", "advantage": "auto"},
    "critic": {"advantage": "critic", "critic_passes": 2, "scale_observations": True},
    "memory": {"memory": 8, "rows_per_minibatch": 3},
    "Gaussian": {"env": "Pendulum-v1", "max_episode_steps": 30},
    "Beta": {"env": "Pendulum-v1", "max_episode_steps": 30, "action_head": "beta"},
    "processes": {"env": "tests.faults.envs:Walk", "vector": "processes", "workers": 2},
    "reference": {"beta": 0.1, "ref_sync_steps": 2, "ref_mixup_alpha": 0.5},
    "exact KL": {"beta": 0.1, "kl_estimator": "exact", "kl_to": "old", "kl_direction": "other_current"},
    "decisions apart": {"decisions_per_minibatch": 32, "num_envs": 3},
    "asked for again": {"env": "FrozenLake-v1", "advantage": "episode", "no_signal": "resample"},
}


class Cut(Exception):
    """Stands for a crash."""


def train(path, settings, steps=4, cut_at=None, evaluate_every=None):
    """Start a run, or go on with the one that is there; `cut_at`: a crash as this step begins."""
    left_out = {"hidden"} if "actor" in settings else {"films"} if settings.get("group_by") == "steps" else set()
    made = {name: value for name, value in (SMALL | settings).items() if name not in left_out}
    trainer = GRPOTrainer(**{"env": "CartPole-v1"} | made)

    def at(point):
        if point == "step" and trainer.steps_done + 1 == cut_at:
            raise Cut

    there = (path / "run.json").exists()
    about = {"task": "control", "config": {}, "created": "2026-11-15T10:15:00Z", "seed": 5}
    folder = RunFolder.open(path) if there else RunFolder.create(path, **about)
    options = {"checkpoint_every": 2, "sample_every": 3, "progress": None, "curve": False, "resume": there, "at": at}
    if evaluate_every is not None:
        options |= {"evaluate": trainer.source.evaluate, "evaluate_every": evaluate_every}
    try:
        # A SIGTERM that the suite gets, from a time limit say, ends a run politely and early: then say so.
        assert run(trainer, steps, folder, **options).reason == "done"
    finally:
        trainer.source.close()


@pytest.mark.parametrize("name", CASES)
def test_cut_and_resumed_is_the_same_run(name, tmp_path):
    """Cut as step 4 begins: step 3 is on record, the last checkpoint is that of step 2, so step 3 is done again."""
    train(tmp_path / "whole", CASES[name])
    with pytest.raises(Cut):
        train(tmp_path / "cut", CASES[name], cut_at=4)
    assert len(RunFolder.open(tmp_path / "cut").metrics()) == 3
    train(tmp_path / "cut", CASES[name])
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_an_only_copy_goes_on_where_its_stream_was(tmp_path):
    """It has no factory to prove anything with; its seed and actions lead back."""
    window = {"group_by": "steps", "advantage": "step", "groups_per_step": 1, "group_size": 7}
    train(tmp_path / "whole", window | {"env": envs.Walk()})
    with pytest.raises(Cut):
        train(tmp_path / "cut", window | {"env": envs.Walk()}, cut_at=4)
    train(tmp_path / "cut", window | {"env": envs.Walk()})
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_what_a_users_module_keeps_besides_its_weights_is_kept_too(tmp_path):
    """BatchNorm's running mean decides how it plays."""

    def own():
        torch.manual_seed(0)
        actor = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
        return {"actor": actor, "optimizer": torch.optim.SGD(actor.parameters(), lr=0.1, momentum=0.9)}

    train(tmp_path / "whole", own())
    with pytest.raises(Cut):
        train(tmp_path / "cut", own(), cut_at=4)
    train(tmp_path / "cut", own())
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_the_same_seed_is_the_same_run_and_another_is_not(tmp_path):
    for name, settings in {"one": {}, "same": {}, "other": {"seed": 6}}.items():
        train(tmp_path / name, settings)
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "same") != fingerprint(tmp_path / "other")


def test_who_steps_the_environments_changes_nothing(tmp_path):
    for vector in ("serial", "processes"):
        train(tmp_path / vector, {"env": "tests.faults.envs:Walk", "vector": vector, "num_envs": 8}, steps=3)
    assert fingerprint(tmp_path / "processes") == fingerprint(tmp_path / "serial")


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_observations": True, "eval_greedy": False},
        {"memory": 8},
        {"group_by": "steps", "advantage": "step", "group_size": 30},
        {"env": "tests.faults.envs:Walk", "vector": "serial"},
    ],
    ids=lambda settings: ", ".join(settings),
)
def test_evaluation_does_not_change_training(settings, tmp_path):
    train(tmp_path / "quiet", settings)
    train(tmp_path / "judged", settings, evaluate_every=1)
    quiet, judged = (RunFolder.open(tmp_path / name).metrics() for name in ("quiet", "judged"))
    assert all(row["eval/return"] is not None for row in judged)
    assert [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in judged] == quiet
    last = "checkpoints/step-00000004/arrays.safetensors"
    assert (tmp_path / "judged" / last).read_bytes() == (tmp_path / "quiet" / last).read_bytes()
