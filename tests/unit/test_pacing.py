"""Tries asked for ahead of their step: the bound, the order, and what a checkpoint keeps of them."""

import math
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

import grpo
from grpo.capabilities import CollectsAhead
from grpo.config import ConfigError
from grpo.protocols import Collected, CollectRequest, Part, Slots, State
from grpo.rollouts import Rollouts, Scores, by_cost
from grpo.seeding import mixed

GROUPS, TRIES = 6, 4


class Arms:
    """A softmax over three arms."""

    def __init__(self):
        self.logits_V, self.version = torch.zeros(3, requires_grad=True), 0

    def score(self, rows, entropy=False):
        return Scores(self.logits_V.log_softmax(0)[rows.inputs][:, None])

    def parameters(self):
        return {"logits": self.logits_V}

    def split(self, rows, limit, halvings=0):
        return by_cost([1] * len(rows), limit, halvings)

    def train(self): ...
    def eval(self): ...


class Pulls:
    """Pulls with a copy of the weights, each group after a delay of its own; it writes down whatever is asked of it."""

    def __init__(self, policy, delay=0.0, seed=0):
        self.policy, self.delay, self.seed = policy, delay, seed
        self.copy_V, self.held, self.lock = policy.logits_V.detach().clone(), 0, threading.Lock()
        self.asked, self.taken, self.fails = [], [], set()
        self.under_way, self.most = 0, 0

    def follow(self, version):
        with self.lock:
            self.copy_V, self.held = self.policy.logits_V.detach().clone(), version
        return self.at_once

    at_once = 8

    def _groups(self, request, places):
        group, arm, logp, version = [], [], [], []
        for place in places:
            with self.lock:
                self.asked.append((request.step, place))
            if (request.step, place) in self.fails:
                raise ValueError(f"group {place} of step {request.step} is cursed")
            if self.delay:
                time.sleep(random.random() * self.delay)
            with self.lock:  # whichever weights are there now
                logp_V, held = self.copy_V.log_softmax(0), self.held
            draw = torch.Generator().manual_seed(mixed(self.seed, request.step, request.attempt, place))
            drawn = torch.multinomial(logp_V.exp(), TRIES, replacement=True, generator=draw)
            group += [place] * TRIES
            arm.append(drawn)
            logp.append(logp_V[drawn])
            version += [held] * TRIES
        arm_N = torch.cat(arm)
        old_logp_NT = torch.cat(logp)[:, None]
        return Rollouts(
            group_N=torch.tensor(group),
            mask_NT=torch.ones(len(arm_N), 1, dtype=torch.bool),
            old_logp_NT=old_logp_NT,
            sampled_logp_NT=old_logp_NT,
            version_NT=torch.tensor(version)[:, None],
            reward_N=(arm_N == 2).float(),
            inputs=arm_N,
        )

    def collect(self, request):
        self.follow(request.step)
        starts = list(range(GROUPS)) if request.starts is None else list(request.starts)
        found = self._groups(request, range(len(starts)))
        return Collected(found, starts)

    def collect_part(self, request):
        own = request.slots.of(GROUPS)
        with self.lock:
            self.under_way += len(own)
            self.most = max(self.most, self.under_way)

        def finish(whole, besides):
            with self.lock:
                self.taken += [(request.step, group) for group in sorted(set(whole.rollouts.group_N.tolist()))]
                self.under_way -= GROUPS
            return whole

        return Part(self._groups(request, own) if own else None, range(GROUPS), finish=finish)

    def state(self):
        return State({"pulled": len(self.taken)}, {})

    def load_state(self, state): ...

    def metrics(self):
        return {}

    def show(self, rows):
        return [{"arm": arm} for arm in rows.inputs.tolist()]

    def close(self): ...


def made(staleness, delay=0.0, steps=None, **settings):
    policy = Arms()
    source = Pulls(policy, delay)
    config = grpo.GRPOConfig(
        learning_rate=0.1, group_size=TRIES, groups_per_step=GROUPS, staleness=staleness, beta=0, **settings
    )
    trainer = grpo.GRPOTrainer(config, policy, source=source)
    trainer.pace.until = steps
    return trainer


@pytest.mark.parametrize("staleness", [0.3, 0.5, 1.0, 1.7, 3.0])
def test_the_bound_holds_nothing_is_dropped_and_no_start_comes_twice(staleness):
    steps = 8
    trainer = made(staleness, delay=0.002, steps=steps)
    source = trainer.source
    ages = []
    for _ in range(steps):
        report = trainer.step()
        ages.append(report.metrics["staleness/max"])
        assert trainer.pace.under_way() <= math.floor(staleness * GROUPS)  # this step's are learned from
        assert set(report.experience.rollouts.group_N.tolist()) == set(range(GROUPS))
    assert source.most <= math.floor((1 + staleness) * GROUPS)
    everything = [(step, place) for step in range(steps) for place in range(GROUPS)]
    assert sorted(source.asked) == everything  # once each, and nothing beyond the run
    assert source.taken == everything
    assert ages[0] == 0 and max(ages) <= math.ceil(staleness)
    assert trainer.policy.logits_V.softmax(0)[2] > 0.6


def test_a_fraction_is_the_share_of_a_step_that_is_a_step_old():
    trainer = made(0.5, steps=6)
    for _ in range(5):
        report = trainer.step()
        while not all(asked.part.done() for asked in trainer.pace._asked):
            time.sleep(0.001)
    assert report.metrics["staleness"] == pytest.approx(0.5)
    assert trainer.config.recipe.mismatch == "truncate"
    assert report.metrics["mismatch_kl"] > 0


def test_staleness_0_is_the_run_that_asks_nothing_ahead_whatever_the_delays():
    def weights(**settings):
        trainer = made(0.0, **settings)
        lines = [trainer.step().metrics for _ in range(4)]
        return trainer.policy.logits_V.detach(), lines

    plain, delayed = weights(), weights(delay=0.003)
    assert torch.equal(plain[0], delayed[0]) and plain[1] == delayed[1]
    assert not any("staleness" in line and line["staleness"] for line in plain[1])


def test_a_checkpoint_keeps_groups_that_have_ended_and_the_others_are_asked_for_again():
    trainer = made(2.0, steps=6)
    for _ in range(2):
        trainer.step()
    while not all(asked.part.done() for asked in trainer.pace._asked):
        time.sleep(0.001)
    trainer.pace._asked[1] = replace(trainer.pace._asked[1], part=Future())  # this one has not ended yet
    state = trainer.state()
    assert [told["step"] for told in state.values["ahead"]] == [2]
    again = made(2.0, steps=6)
    again.load_state(state)
    for _ in range(4):
        again.step()
    asked = again.source.asked
    assert sorted(asked) == [(step, place) for step in (3, 4, 5) for place in range(GROUPS)]
    assert again.source.taken == [(step, place) for step in (2, 3, 4, 5) for place in range(GROUPS)]
    # Saved by a run that asks ahead, taken up by one that does not, and the other way round.
    plain = made(0.0)
    plain.load_state(state)
    assert plain.step().step == 3
    later = made(1.0, steps=5)
    later.load_state(plain.state())
    assert later.step().step == 4 and later.pace.under_way() == GROUPS


def test_a_failure_while_sampling_ahead_is_raised_at_its_step():
    trainer = made(1.0)
    trainer.source.fails = {(1, 3)}
    trainer.step()
    with pytest.raises(ValueError, match="group 3 of step 1 is cursed"):
        trainer.step()


def test_starts_without_signal_are_asked_for_again_at_once():
    trainer = made(1.0, steps=3, no_signal="resample", max_attempts=3)
    for _ in range(3):
        report = trainer.step()
    assert report.metrics["attempts"] >= 1


def test_who_waits_for_whom_is_measured():
    trainer = made(1.0, delay=0.02, steps=4)
    trainer.step()
    told = trainer.pace.measures()
    assert 0 < told["learner_waits"] <= 1 and 0 <= told["sampler_waits"] < 1
    assert made(0.0).pace.measures() == {}


def test_what_cannot_be_asked_ahead_is_refused_with_the_remedy():
    policy = Arms()
    source = Pulls(policy)
    with pytest.raises(ConfigError, match="needs a sampler with weights of its own"):
        grpo.GRPOTrainer(grpo.GRPOConfig(staleness=1), policy, source=type("Plain", (), {"collect": source.collect})())
    assert isinstance(source, CollectsAhead)
    alike = made(1.0)
    alike.source.at_once = 0  # it samples with the policy's own weights
    with pytest.raises(ConfigError, match="needs a sampler with weights of its own"):
        alike.step()
    with pytest.raises(ConfigError, match="leave out states, or staleness"):
        made(1.0).step([0, 1])
    with pytest.raises(ConfigError, match="old_logp=recorded"):
        grpo.GRPOConfig(staleness=1, old_logp="recorded")
    with pytest.raises(ConfigError, match="needs mismatch=truncate or mask"):
        grpo.GRPOConfig(staleness=0.3, mismatch="none")
    with pytest.raises(ConfigError, match="staleness"):
        grpo.GRPOConfig(staleness=-1)


def test_parts_of_a_step_are_even_runs_of_its_window():
    assert [list(Slots(rank, 2, (3, 8)).of(20)) for rank in range(2)] == [[3, 4, 5], [6, 7]]
    assert CollectRequest(0).slots.window is None
