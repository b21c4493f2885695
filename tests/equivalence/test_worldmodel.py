"""A run in a learned world that is cut and resumed is the run that was not: replay, latents, moments, byte for byte."""

import pytest

from grpo.run.folder import RunFolder
from grpo.run.loop import run
from grpo.worldmodel import GRPOTrainer
from tests.faults.tiny import fingerprint

SMALL = {
    "envs": 2, "prefill": 40, "steps_per_collect": 10, "batch_size": 4, "batch_length": 8, "train_ratio": 16,
    "pretrain": 2, "horizon": 5, "group_size": 3, "groups_per_step": 4, "seed": 5, "video": False, "device": "cpu",
    "eval_episodes": 2, "films": False,
}  # fmt: skip
CASES = {
    "group, films": {"films": True},
    "whole futures, recipe grpo": {"loss_type": "grpo", "beta": 0.1},
    "several passes": {"num_iterations": 3, "rows_per_minibatch": 5},
    "critic, scaled observations": {"actor": "critic", "entropy_coef": 1e-3, "scale_observations": True},
    "bootstrap": {"actor": "bootstrap"},
    "fitted tail": {"tail": "fitted", "gae_lambda": 0.9},
    "reference that follows": {"beta": 0.1, "ref_sync_steps": 2, "ref_mixup_alpha": 0.5},
    "Gaussian": {"env": "Pendulum-v1", "max_episode_steps": 15, "max_std": 1.0},
    "squashed": {"env": "Pendulum-v1", "max_episode_steps": 15, "action_head": "squashed"},
    "processes": {"env": "tests.faults.envs:Walk", "vector": "processes", "workers": 2},
    "serial": {"env": "tests.faults.envs:Walk", "vector": "serial", "envs": 3},
    "model that stays": {"train_ratio": 0, "pretrain": None},
    "asked for again": {"loss_type": "grpo", "no_signal": "resample"},
}


class Cut(Exception):
    """Stands for a crash."""


def train(path, settings, steps=4, cut_at=None, evaluate_every=None, on_disk=True):
    """Start a run, or go on with the one that is there; `cut_at`: a crash as this step begins."""
    given = {name: value for name, value in (SMALL | settings).items() if value is not None}
    trainer = GRPOTrainer(**{"env": "CartPole-v1"} | given)

    def at(point):
        if point == "step" and trainer.steps_done + 1 == cut_at:
            raise Cut

    there = (path / "run.json").exists()
    about = {"task": "worldmodel", "config": {}, "created": "2026-11-15T10:15:00Z", "seed": 5}
    folder = RunFolder.open(path) if there else RunFolder.create(path, **about)
    trainer.source.folder = path if on_disk else None
    options = {"checkpoint_every": 2, "sample_every": 3, "progress": None, "curve": False, "resume": there, "at": at}
    if evaluate_every is not None:
        options |= {"evaluate": trainer.source.evaluate, "evaluate_every": evaluate_every}
    try:
        # A SIGTERM that the suite gets, from a time limit say, ends a run politely and early: then say so.
        assert run(trainer, steps, folder, **options).reason == "done"
    finally:
        trainer.source.close()


QUICK = {"group, films", "several passes", "critic, scaled observations", "squashed", "processes"}
"""Those that between them go through every part of what is kept; the others say the same of more settings."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES])
def test_cut_and_resumed_is_the_same_run(name, tmp_path):
    """Cut as step 4 begins: step 3 is on record, the last checkpoint is that of step 2, so step 3 is done again."""
    train(tmp_path / "whole", CASES[name])
    with pytest.raises(Cut):
        train(tmp_path / "cut", CASES[name], cut_at=4)
    assert len(RunFolder.open(tmp_path / "cut").metrics()) == 3
    train(tmp_path / "cut", CASES[name])
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


MEMORY, DISK = {}, {"replay_memory": 60, "replay_capacity": 160}


@pytest.mark.parametrize(
    "spilled", [pytest.param(MEMORY, id="memory", marks=pytest.mark.slow), pytest.param(DISK, id="disk")]
)
def test_a_long_run_is_cut_after_chunks_were_written_and_dropped(spilled, tmp_path):
    """The oldest chunks are gone by then, others lie only in files."""
    long = {"steps_per_collect": 30, "replay_capacity": 100, "train_ratio": 4} | spilled
    train(tmp_path / "whole", long, steps=7)
    with pytest.raises(Cut):
        train(tmp_path / "cut", long, steps=7, cut_at=6)
    train(tmp_path / "cut", long, steps=7)
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")
    assert len(list((tmp_path / "whole" / "replay").glob("steps-*.npy"))) > 2


@pytest.mark.slow
def test_without_a_folder_the_replay_is_in_the_checkpoint(tmp_path):
    train(tmp_path / "whole", {}, on_disk=False)
    with pytest.raises(Cut):
        train(tmp_path / "cut", {}, cut_at=4, on_disk=False)
    train(tmp_path / "cut", {}, on_disk=False)
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")


def test_the_same_seed_is_the_same_run_and_another_is_not(tmp_path):
    for name, settings in {"one": {}, "same": {}, "other": {"seed": 6}}.items():
        train(tmp_path / name, settings)
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "same") != fingerprint(tmp_path / "other")


def test_evaluation_does_not_change_training(tmp_path):
    train(tmp_path / "quiet", {})
    train(tmp_path / "judged", {}, evaluate_every=1)
    quiet, judged = (RunFolder.open(tmp_path / name).metrics() for name in ("quiet", "judged"))
    assert all(row["eval/return"] is not None for row in judged)
    assert [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in judged] == quiet
    last = "checkpoints/step-00000004/arrays.safetensors"
    assert (tmp_path / "judged" / last).read_bytes() == (tmp_path / "quiet" / last).read_bytes()


@pytest.mark.slow
def test_looking_at_the_best_and_going_on_changes_nothing(tmp_path):
    """A run that is done shows its best checkpoint; going on from its last one is as if it had never ended."""
    film = {"video": True, "films": True}
    train(tmp_path / "whole", film, steps=6, evaluate_every=2)
    train(tmp_path / "twice", film, steps=4, evaluate_every=2)
    assert (tmp_path / "twice" / "video.mp4").exists() and (tmp_path / "twice" / "forecast.png").exists()
    train(tmp_path / "twice", film, steps=6, evaluate_every=2)
    assert fingerprint(tmp_path / "twice") == fingerprint(tmp_path / "whole")
