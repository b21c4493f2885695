"""Acting beside learning: the same steps a round later, whichever of the two is faster; and actions that are held."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from grpo.config import ConfigError
from grpo.errors import SamplesFailed
from grpo.run.folder import RunFolder
from grpo.run.loop import run
from grpo.worldmodel.acting import Lanes
from grpo.worldmodel.background import _ended
from tests.unit.worldmodel.worlds import make, same, weights


class Slow(gym.Env):
    """Counts its steps, pays 1 for each, and takes its time."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, pause=0.0, length=20):
        self.pause, self.length = pause, length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        time.sleep(self.pause)
        self.t += 1
        return np.array([self.t], np.float32), 1.0, False, self.t == self.length, {}


def trained(steps, trainer=None, **settings):
    trainer = make(**settings) if trainer is None else trainer
    return trainer, [trainer.step() for _ in range(steps)]


def test_as_many_steps_are_played_and_learned_from_as_in_lockstep():
    one, lockstep = trained(4)
    two, beside = trained(4, acting="beside")
    for name in ("env_steps", "samples", "model/updates", "replay_steps"):
        assert [report[name] for report in lockstep] == [report[name] for report in beside], name
    assert not same(weights(one.policy.module), weights(two.policy.module))  # somebody a round older played
    for made in (one, two):
        made.source.close()


def test_it_does_not_matter_who_is_faster():
    one, _ = trained(4, env=Slow, vector="serial", acting="beside")
    two, _ = trained(4, env=Slow, env_kwargs={"pause": 0.02}, vector="serial", acting="beside")
    assert same(weights(one.source.learner.model), weights(two.source.learner.model))
    assert same(weights(one.policy.module), weights(two.policy.module))
    for made in (one, two):
        made.source.close()


@pytest.mark.parametrize("more", [{}, {"replay_memory": 64, "replay_capacity": 200}])
def test_what_was_saved_in_the_middle_of_it_goes_on_exactly(more, tmp_path):
    settings = {"acting": "beside", **more}
    whole, uncut = make(**settings), []
    whole.source.folder = tmp_path / "whole"
    for _ in range(6):
        uncut.append(dict(whole.step()))
        whole.state()  # a checkpoint changes nothing
    cut = make(**settings)
    cut.source.folder = tmp_path / "cut"
    trained(3, cut)
    again = make(**settings)
    again.source.folder = tmp_path / "cut"
    again.load_state(cut.state())
    cut.source.close()
    assert [dict(report) for report in trained(3, again)[1]] == uncut[3:]
    assert same(weights(whole.policy.module), weights(again.policy.module))
    for made in (whole, again):
        made.source.close()


def test_the_next_steps_are_played_while_nobody_waits_for_them(monkeypatch):
    real, threads = Lanes.tick, []

    def tick(self, *arguments):
        threads.append(threading.current_thread() is threading.main_thread())
        return real(self, *arguments)

    monkeypatch.setattr(Lanes, "tick", tick)
    trainer, _ = trained(1, acting="beside")
    trainer.state()
    first = threads.count(True)
    assert first > 0 and threads.count(False) > 0
    trained(2, trainer)
    assert threads.count(True) == first
    trainer.source.close()
    assert not acting()


def test_the_copy_that_plays_follows_the_learner():
    trainer, _ = trained(3, acting="beside")
    source = trainer.source
    beside = source.collector.background
    assert not same(weights(beside.policy.module), weights(trainer.policy.module))  # it is a step behind
    source.state()
    beside.refresh()
    assert same(weights(beside.policy.module), weights(trainer.policy.module))
    assert same(weights(beside.model.encoder), weights(source.learner.model.encoder))
    assert same(weights(beside.model.rssm), weights(source.learner.model.rssm))
    assert beside.model.decoder is source.learner.model.decoder  # nobody plays with it
    trainer.source.close()


@pytest.mark.slow
def test_adapters_are_played_with_too(tmp_path):
    parent = make()
    parent.train(steps=1, folder=tmp_path / "parent", progress=None)
    tuned, _ = trained(3, acting="beside", init_from=str(tmp_path / "parent"), adapter_rank=2, pretrain=None)
    tuned.state()
    tuned.source.collector.background.refresh()
    assert same(weights(tuned.source.collector.background.policy.module), weights(tuned.policy.module))
    tuned.source.close()


def test_what_goes_wrong_in_the_thread_is_told_where_it_is_waited_for(monkeypatch):
    trainer, _ = trained(1, acting="beside")
    trainer.state()

    def fails(self, *arguments):
        raise SamplesFailed("no episode could begin")

    monkeypatch.setattr(Lanes, "tick", fails)
    trainer.step()
    with pytest.raises(SamplesFailed, match="no episode could begin"):
        trainer.step()
    trainer.source.close()


def test_a_checkpoint_survives_a_round_that_failed_and_plays_it_again(monkeypatch):
    whole, uncut = trained(3, acting="beside")
    trainer, _ = trained(1, acting="beside")
    trainer.state()
    real, ticks = Lanes.tick, []

    def fails(self, *arguments):
        ticks.append(real(self, *arguments))
        if len(ticks) > 2:
            raise SamplesFailed("no episode could begin")

    monkeypatch.setattr(Lanes, "tick", fails)
    trainer.step()
    state = trainer.state()
    assert len(ticks) == 3
    with pytest.raises(SamplesFailed, match="no episode could begin"):
        trainer.step()
    monkeypatch.undo()
    again = make(acting="beside")
    again.load_state(state)
    report = again.step()
    for name in ("env_steps", "samples", "model/updates", "replay_steps"):
        assert report[name] == uncut[2][name], name
    for made in (whole, trainer, again):
        made.source.close()


def test_an_episode_that_was_given_up_beside_counts_after_a_resume_too():
    trainer, _ = trained(1, acting="beside")
    trainer.state()
    trainer.source.collector._lanes.stream.failures.append("it broke")
    again = make(acting="beside")
    again.load_state(trainer.state())
    for made in (trainer, again):
        with pytest.warns(UserWarning, match="it broke"):
            assert made.step()["failed"] == 1
        made.source.close()


def test_the_thread_has_the_same_share_of_the_cores_whenever_it_begins():
    trainer = make(acting="beside")
    beside, go, found, before = trainer.source.collector.background, threading.Event(), [], torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        beside.begin(lambda tape: (go.wait(60), found.append(torch.get_num_threads())))
        torch.set_num_threads(1)  # as in a scan
        go.set()
        beside.finish()
    finally:
        torch.set_num_threads(before)
    assert found == [2]
    trainer.source.close()


# --- leaving --------------------------------------------------------------------------------------------------------

MOST = 20_000
"""Steps of a round that takes too long for anybody to wait for it: minutes."""


@pytest.fixture
def endless(monkeypatch):
    """Rounds beside learning have that many steps; those that were played so far, and an event for the first."""
    real, ticks, playing = Lanes.tick, [], threading.Event()

    def tick(self, *arguments):
        made = real(self, *arguments)
        if threading.current_thread() is not threading.main_thread():
            ticks.append(made)
            self.stream.env_steps -= made if len(ticks) < MOST else 0
            playing.set()
        return made

    monkeypatch.setattr(Lanes, "tick", tick)
    return ticks, playing


def acting():
    return [thread for thread in threading.enumerate() if thread.name.startswith("acting")]


def test_a_second_ctrl_c_does_not_wait_for_the_round(endless, tmp_path):
    ticks, playing = endless
    trainer = make(acting="beside")

    def press(point):
        """As the second step begins; and again while it waits for its steps."""
        if point == "step" and trainer.steps_done == 1:
            assert playing.wait(300)
            os.kill(os.getpid(), signal.SIGINT)
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    folder = RunFolder.create(tmp_path / "run", task="worldmodel", config={}, created="2026-11-15T10:15:00Z", seed=5)
    with pytest.raises(KeyboardInterrupt):
        run(trainer, 5, folder, progress=None, curve=False, sample_every=None, at=press)
    assert acting()
    trainer.source.close()
    assert not acting() and len(ticks) < MOST


def test_going_back_does_not_wait_for_the_round(endless):
    ticks, playing = endless
    trainer = make(acting="beside")
    begun = trainer.state()
    first = dict(trainer.step())
    assert playing.wait(300)
    trainer.load_state(begun)
    assert len(ticks) < MOST
    assert dict(trainer.step()) == first
    trainer.source.close()
    assert len(ticks) < MOST


SCRIPT = """
import threading
from grpo.worldmodel.acting import Lanes
from grpo.worldmodel.background import _ended
from tests.unit.worldmodel.worlds import make

real, playing = Lanes.tick, threading.Event()

def tick(self, *arguments):
    made = real(self, *arguments)
    if threading.current_thread() is not threading.main_thread():
        self.stream.env_steps -= made
        playing.set()
    return made

Lanes.tick = tick
make(acting="beside").step()
playing.wait()
raise KeyboardInterrupt
"""


@pytest.mark.slow
def test_a_script_that_is_interrupted_ends_without_the_round():
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, timeout=300, capture_output=True, text=True)
    assert ended.stderr.endswith("KeyboardInterrupt\n"), ended.stderr


# --- actions that are held ------------------------------------------------------------------------------------------


def test_the_thread_may_be_the_one_that_ends_it():
    work, outcome = SimpleQueue(), []

    def ending():
        try:
            _ended(thread, work, threading.Event())
        except RuntimeError as error:
            outcome.append(error)

    thread = threading.Thread(target=ending)
    thread.start()
    thread.join()
    assert not outcome and work.get() is None


def test_a_held_action_is_one_decision_and_its_rewards_add_up():
    trainer = make(Slow, vector="serial", action_repeat=3, prefill=60)
    trainer.step()
    batch = trainer.source.replay.peek(32, 0).batch
    first, last = batch["is_first"], batch["is_last"]
    assert (batch["reward"][~first & ~last] == 3).all() and (batch["reward"][last & ~first] == 2).all()
    assert set(np.unique(batch["vector"])) == {0, 3, 6, 9, 12, 15, 18, 20}  # 20 steps are six decisions and two thirds
    found = trainer.evaluate(2)
    assert found.return_E.tolist() == [20, 20] and found.length_E.tolist() == [7, 7]
    trainer.source.close()


def test_held_actions_are_resumed_exactly():
    settings = {"env": "Pendulum-v1", "action_repeat": 2, "vector": "serial"}
    whole, reports = trained(4, **settings)
    cut, _ = trained(2, **settings)
    again = make(**settings)
    again.load_state(cut.state())
    assert [dict(report) for report in trained(2, again)[1]] == [dict(report) for report in reports[2:]]
    for made in (whole, cut, again):
        made.source.close()


def test_actions_are_held_one_environment_at_a_time():
    with pytest.raises(ConfigError, match="action_repeat=2 needs environments one by one: vector=serial or processes"):
        make(action_repeat=2, vector="classic")
    trainer = make(action_repeat=2)  # auto takes what can
    assert trainer.source.collector.fleet.size == 2
    trainer.source.close()
