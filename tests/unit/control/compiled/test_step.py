"""The compiled step against the ordinary one on the same randomness; its runs: folder, resume, faults, other ways."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import grpo
from grpo.config import ConfigError
from grpo.control import GRPOTrainer
from grpo.errors import SamplesFailed

pytest.importorskip("jax")

from grpo.app.many import sweep, together
from grpo.cli import main
from grpo.control.compiled import room, seeds
from grpo.envs.fleet import EnvError
from grpo.envs.functions.named import find_task
from grpo.envs.functions.numbers import numbers
from grpo.run.signals import StopSignals

SMALL = {
    "hidden": (8,), "group_size": 4, "groups_per_step": 2, "num_iterations": 3, "target_kl": None, "eval_episodes": 4,
    "video": False,
}  # fmt: skip
POLE = {
    "env": "CartPole-v1", "compiled": True, "max_episode_steps": 24, "gamma": 0.99, "decisions_per_minibatch": 4096,
    **SMALL,
}  # fmt: skip
WORDS = ["--env=CartPole-v1", "--compiled", "--max-episode-steps=24", "--gamma=0.99", "--decisions-per-minibatch=4096"]
WORDS += ["--hidden=[8]", "--group-size=4", "--groups-per-step=2", "--num-iterations=3", "--target-kl=null"]
WORDS += ["--eval-episodes=4", "--run.steps=4", "--run.evaluate-every=2", "--run.best-by=eval/return", "--parallel=1"]
PUSH = """
import jax, jax.numpy as np

actions = [(-2.0, 2.0)]
limit = 9

def start(key):
    return {"place": jax.random.uniform(key, (), minval=-1), "speed": 0.0}

def step(state, action, key):
    speed = state["speed"] + 0.3 * action[0] + 0.01 * jax.random.normal(key)
    place = state["place"] + 0.3 * speed
    return {"place": place, "speed": speed}, -np.square(place), np.abs(place) > 4

def see(state):
    return np.stack([state["place"], state["speed"]])
"""


def push(tmp_path: Path) -> dict:
    (tmp_path / "push.py").write_text(PUSH)
    env = f"{tmp_path / 'push.py'}:step"
    own = {"scale_observations": True, "action_repeat": 2, "report_entropy": True, "clip_rewards": 3.0}
    return {"env": env, **own, **SMALL}


@pytest.mark.parametrize("task", ["a pole", "a function of the user's"])
def test_on_the_same_randomness_the_step_is_the_ordinary_one(task, tmp_path, monkeypatch) -> None:
    settings = POLE if task == "a pole" else push(tmp_path)
    ours, ordinary = GRPOTrainer(seed=3, **settings), GRPOTrainer(seed=3, **settings | {"compiled": False})
    assert ours.compiled is not None and ordinary.compiled is None
    played = []
    note = ours.source.note
    monkeypatch.setattr(ours.source, "note", lambda episodes: played.append(episodes) or note(episodes))
    monkeypatch.setitem(type(ours.source).collect.__globals__, "play", lambda *a, **k: played[-1])
    for _ in range(3):
        mine, theirs = ours.step(), ordinary.step()
        np.testing.assert_allclose(mine.experience.advantage_NT, theirs.experience.advantage_NT, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(mine.scores.logp_NT, theirs.scores.logp_NT, rtol=2e-4, atol=2e-4)
        assert set(mine) == set(theirs)
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=3e-3, abs=3e-4), name
        for name, p in ordinary.policy.parameters().items():
            torch.testing.assert_close(ours.policy.parameters()[name], p, rtol=2e-3, atol=2e-4)
        for old, new in zip(ordinary.optimizer.state.values(), ours.optimizer.state.values(), strict=True):
            torch.testing.assert_close(new["exp_avg_sq"], old["exp_avg_sq"], rtol=5e-3, atol=1e-6)
        ours.load_state(ours.state())  # what is in the tensors is all there is
        with torch.no_grad():
            for name, p in ordinary.policy.parameters().items():
                p.copy_(ours.policy.parameters()[name])
    if task != "a pole":
        assert ours.source.scaling.count == ordinary.source.scaling.count > 0
        broken = GRPOTrainer(seed=3, **settings)
        broken.source.scaling.mean[""][:] = np.nan  # nothing that is seen is a number then
        with pytest.raises(SamplesFailed, match="8 of 8 samples failed: step: an observation or a reward"):
            broken.train(steps=2, progress=None)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_is_resumed_exactly_and_is_a_run_like_any_other(tmp_path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    GRPOTrainer(**POLE).train(steps=4, evaluate_every=2, folder=whole, progress=None)
    GRPOTrainer(**POLE).train(steps=2, evaluate_every=2, folder=cut, progress=None)
    GRPOTrainer(**POLE).train(steps=4, evaluate_every=2, folder=cut, progress=None)
    assert lines(cut) == lines(whole) and len(lines(whole)) == 4
    assert GRPOTrainer(seed=1, **POLE).step()["return"] != lines(whole)[0]["return"]
    last = lines(whole)[-1]
    policy = grpo.load(whole, "last")
    try:
        assert policy.trainer.evaluate(4).metrics()["return"] == last["eval/return"]  # by the ordinary way
        assert policy.predict(np.zeros(4, np.float32))[0] in (0, 1)
    finally:
        policy.close()
    assert (whole / "curve.png").exists() and any((whole / "samples").iterdir())


def test_a_run_goes_on_the_way_it_began() -> None:
    compiled, ordinary, same = GRPOTrainer(**POLE), *(GRPOTrainer(**POLE | {"compiled": False}) for _ in range(2))
    ordinary.load_state(compiled.state())  # to look at it, say
    with pytest.raises(ConfigError, match=r"compiled, and here it cannot be: .*; the warning before says what"):
        ordinary.step()
    with pytest.warns(UserWarning, match="not compiled: the run was played the ordinary way"):
        compiled.load_state(same.state())  # begun where JAX was not installed
    assert compiled.step().metrics == same.step().metrics
    assert "compiled" not in compiled.state().values["source"]


def test_hooks_and_a_changed_learning_rate_are_heard() -> None:
    trainer, heard = GRPOTrainer(**POLE), []

    class Heard:
        def before(self, trainer) -> None:
            trainer.optimizer.param_groups[0]["lr"] = 0.0

        def after(self, trainer, report) -> None:
            heard.append(report.step)

    trainer.hooks += (Heard(),)
    before = [p.clone() for p in trainer.policy.parameters().values()]
    assert trainer.step()["updates"] == 3 and heard == [1]
    assert all(map(torch.equal, before, trainer.policy.parameters().values()))


TORN = """
import jax, jax.numpy as np

actions = [(-1.0, 1.0)]
limit = 4

def start(key):
    return jax.random.uniform(key, (2, 2), minval=-1)

def step(state, action, key):
    torn = jax.random.bernoulli(key, 0.05)
    return np.where(torn, np.nan, state + 0.1 * action[0]), -np.abs(state[0, 0]), False
"""


def test_an_episode_that_fails_costs_nothing_but_itself(tmp_path, capsys) -> None:
    (tmp_path / "torn.py").write_text(TORN)
    trainer = GRPOTrainer(env=f"{tmp_path / 'torn.py'}:step", **SMALL)
    failed = 0.0
    for _ in range(8):
        report = trainer.step()
        failed += report["failed"]
        assert report["updates"] == 3 and report["updates_skipped"] == 0
    assert 0 < failed < 64
    words = [f"--env={tmp_path / 'torn.py'}:step", *(word for word in WORDS[5:] if "run.steps" not in word)]
    words += ["--run.steps=8", "--seeds=1", "--seed=4"]
    assert main(["train", *words, "--run.failure-budget=1", f"--logdir={tmp_path / 'runs'}"]) == 0
    rows = lines(tmp_path / "runs" / "seed-4")
    assert len(rows) == 8 and sum(row["failed"] for row in rows) > 0
    assert all(row["reward"] is not None for row in rows)
    capsys.readouterr()
    assert main(["train", *words, "--run.failure-budget=0", f"--logdir={tmp_path / 'more'}"]) == 1
    assert "samples failed: an observation or a reward" in capsys.readouterr().out


BLINDED = """
import jax, jax.numpy as np

actions = 2
limit = 6

def start(key):
    key, own = jax.random.split(key)
    return {"key": key, "x": jax.random.uniform(own, (2,), minval=-1), "blind": False}

@jax.jit
def step(state, action):
    key, own = jax.random.split(state["key"])
    x = state["x"] + 0.1 * (2 * action - 1)
    return {"key": key, "x": x, "blind": jax.random.bernoulli(own, 0.03)}, -np.abs(x).sum(), False

def see(state):
    return np.where(state["blind"], np.inf, state["x"])
"""


def test_what_is_infinite_for_a_moment_fails_an_episode_and_spoils_no_scaling(tmp_path) -> None:
    """The state holds one of JAX's keys, and the function is compiled already: both are usual there."""
    (tmp_path / "blinded.py").write_text(BLINDED)
    trainer = GRPOTrainer(env=f"{tmp_path / 'blinded.py'}:step", **SMALL, scale_observations=True)
    failed = sum(trainer.step()["failed"] for _ in range(6))
    assert trainer.compiled is not None and 0 < failed < 48
    assert np.isfinite(trainer.source.scaling.mean[""]).all() and np.isfinite(trainer.source.scaling.square[""]).all()
    starts = room.stacked([find_task(trainer.config.env).seeded(one) for one in (0, 1)])  # as of several seeds
    assert starts["x"].shape == (2, 2) and starts["key"].shape == (2,)


@pytest.mark.slow
def test_a_compiled_trainer_does_without_the_compiler_of_torch() -> None:
    made = "trainer = grpo.control.GRPOTrainer(env='CartPole-v1', compiled=True); trainer.load_state(trainer.state())"
    script = f"import sys, grpo.control; {made}; assert trainer.compiled; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"


def test_a_state_of_one_number_is_seen_as_a_vector(tmp_path) -> None:
    step = "def step(state, action): return state, 1.0, False"
    (tmp_path / "one.py").write_text(f"actions = 2\ndef start(key): return 0.5\n{step}\n")
    assert GRPOTrainer(env=f"{tmp_path / 'one.py'}:step", **SMALL).source.fleet.observation_space.shape == (1,)
    task = find_task(f"{tmp_path / 'one.py'}:step")
    assert task.see(task.seeded(0)).shape == (1,)
    with pytest.raises(ConfigError, match=r"draws has no effect here: .*compiled=false"):  # by default, as others
        GRPOTrainer(env=f"{tmp_path / 'one.py'}:step", draws="episode", **SMALL)
    assert GRPOTrainer(env=f"{tmp_path / 'one.py'}:step", draws="episode", compiled=False, **SMALL).compiled is None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("return state, 1.0", "step must return three things"),
        (
            "return (state, 1.0, True) if state[0] > 1 else (state, 0.0, False)",
            "JAX cannot follow step .*jnp.where in place",
        ),
    ],
)
def test_a_function_that_is_wrong_says_what_is(wrong, told, tmp_path) -> None:
    start = "import jax\nactions = 2\ndef start(key): return jax.random.normal(key, (2,))"
    (tmp_path / "wrong.py").write_text(f"{start}\ndef step(state, action): {wrong}\n")
    with pytest.raises(EnvError, match=told):
        GRPOTrainer(env=f"{tmp_path / 'wrong.py'}:step", **SMALL)


def test_a_jax_that_is_too_old_is_no_obstacle_to_training(monkeypatch) -> None:
    monkeypatch.setattr("grpo.envs.functions.task.metadata.version", lambda name: "0.7.2")
    with pytest.warns(UserWarning, match="not compiled: JAX 0.7.2 is too old .*--upgrade"):
        assert GRPOTrainer(**POLE).compiled is None


def test_a_loss_of_whole_trajectories_gets_them_whole() -> None:
    assert not GRPOTrainer(env="CartPole-v1", compiled=True, loss_type="vespo", **SMALL).compiled.program.passes.apart


@pytest.mark.parametrize("advantage", ["linear", "step"])
def test_group_ids_that_are_known_are_not_sorted(advantage, monkeypatch) -> None:
    """XLA takes longer for that than for a pass over what was played."""
    jax = pytest.importorskip("jax")
    monkeypatch.setattr(jax.numpy, "unique", lambda *given, **how: pytest.fail("ids were sorted"))
    made = GRPOTrainer(env="CartPole-v1", compiled=True, advantage=advantage).compiled
    with numbers():
        jax.eval_shape(made.program.step, made._adam(), made._scale(), room.seed_key(0), np.int32(0))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"env": "FrozenLake-v1"}, "one vector without memory"),
        ({"env": "LunarLander-v3"}, "LunarLander-v3 is no function"),
        ({"advantage": "fitted"}, "advantage=fitted"),
        ({"group_by": "branch"}, "group_by=branch"),
        ({"beta": 0.1}, "beta=0.1"),
        ({"env": "Pendulum-v1", "entropy_type": "token_level", "entropy_coef": 0.1}, "entropy_type=token_level"),
        ({"memory": 4, "decisions_per_minibatch": None}, "memory"),
        ({"rows_per_minibatch": 4, "decisions_per_minibatch": None}, "rows_per_minibatch=4"),
    ],
)
def test_what_cannot_be_compiled_says_why_and_is_played_the_ordinary_way(given, why) -> None:
    with pytest.warns(UserWarning, match=f"not compiled: .*{why}.*the ordinary way"):
        trainer = GRPOTrainer(**POLE | given)
    assert trainer.compiled is None


def test_gymnasiums_tasks_are_not_compiled_unless_asked() -> None:
    assert GRPOTrainer(env="CartPole-v1").compiled is None


class OneLeg(StopSignals):
    """Somebody who wants to stop while the first leg is under way."""

    looks = 0

    @property
    def reason(self) -> str | None:
        OneLeg.looks += 1
        return "interrupted" if OneLeg.looks > 2 else None

    @reason.setter
    def reason(self, value: str | None) -> None:
        pass


def test_seeds_are_trained_together_stopped_and_gone_on_with_exactly(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(seeds, "LEG", 3)
    monkeypatch.setattr(together, "BLOCK", 2)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["train", *WORDS, "--seeds=3", f"--logdir={whole}"]) == 0
    told = capsys.readouterr().out
    assert "eval/return: mean" in told and "the best of them: grpo eval" in told
    assert (whole / "curve.png").exists() and len((whole / "table.csv").read_text().splitlines()) == 4

    alone = GRPOTrainer(seed=1, **POLE)
    reports = alone.train(steps=4, evaluate_every=2, progress=None)
    for row, report in zip(lines(whole / "seed-1"), reports, strict=True):
        assert {*row} - {"step", "samples"} == {*report}
        for name, value in report.items():
            assert row[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name

    policy = grpo.load(whole / "seed-1", "last")
    assert policy.trainer.evaluate(4).metrics()["return"] == lines(whole / "seed-1")[-1]["eval/return"]
    policy.close()

    monkeypatch.setattr(sweep, "StopSignals", OneLeg)
    assert main(["train", *WORDS, "--seeds=3", f"--logdir={cut}"]) == 130
    assert [len(lines(cut / f"seed-{i}")) for i in (0, 1)] == [3, 3] and not (cut / "seed-2").exists()
    assert f"go on with: grpo train --resume {cut}" in capsys.readouterr().out
    monkeypatch.setattr(sweep, "StopSignals", StopSignals)
    assert main(["train", "--resume", str(cut), "--parallel=1"]) == 0
    for i in range(3):
        assert lines(cut / f"seed-{i}") == lines(whole / f"seed-{i}")
    settings = json.loads((cut / "seed-2" / "config.json").read_text())
    assert settings["seed"] == 2 and settings["run"]["logdir"].endswith("seed-2")
