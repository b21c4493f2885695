"""From episodes to rollouts: what the algorithm is told, what a person is told, what a checkpoint keeps."""

import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch

from grpo.control import GRPOTrainer
from grpo.control.baselines.room import place_in_group
from grpo.control.groups import TRAINING, seeds
from grpo.protocols import CollectRequest
from grpo.rollouts import Status
from grpo.run.checkpoint import check


class Task(gym.Env):
    """Pays 2 for action 1. Lasts 3 to 6 steps; ends by itself where that is even, else at the limit.

    Tells of success at the end if `tells`. Fails at step 2 of the starts in `fails`.
    """

    def __init__(self, tells=True, fails=()):
        self.observation_space = gym.spaces.Box(-10, 10, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.tells, self.fails = tells, fails

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.t = seed, 0
        self.length = int(self.np_random.integers(3, 7))
        return self._see(), {}

    def step(self, action):
        self.t += 1
        if self.t == 2 and self.start in self.fails:
            raise ArithmeticError("cannot go on")
        over, even = self.t == self.length, self.length % 2 == 0
        info = {"is_success": even} if self.tells and over else {}
        return self._see(), 2.0 * float(action), over and even, over and not even, info

    def _see(self):
        return np.array([self.t, self.length], np.float32)


def make(seed=0, tells=True, fails=(), **settings) -> GRPOTrainer:
    usual = {"vector": "serial", "group_size": 4, "groups_per_step": 3, "seed": seed, "hidden": (8,)}
    return GRPOTrainer(env=lambda: Task(tells, fails), **usual | settings)


def collect(made, step=0, **request):
    return made.source.collect(CollectRequest(step, **request)).rollouts


# --- metrics --------------------------------------------------------------------------------------------------------


def test_metrics_are_of_whole_episodes_as_the_environment_scores_them():
    made = make()
    rollouts = collect(made)
    length_N, total_N = rollouts.mask_NT.sum(1).numpy(), (rollouts.reward_NT * rollouts.mask_NT).sum(1).numpy()
    found = made.source.metrics()
    assert found["return"] == pytest.approx(total_N.mean()) and found["return_std"] == pytest.approx(total_N.std())
    assert found["episode_length"] == pytest.approx(length_N.mean())
    assert found["success"] == pytest.approx((length_N % 2 == 0).mean())
    assert found["env_steps"] == length_N.sum() and found["episodes"] == 12
    assert "baseline_explained" in found
    more = collect(made, 1)
    assert made.source.metrics()["env_steps"] == length_N.sum() + int(more.mask_NT.sum())
    assert made.source.metrics()["episodes"] == 24


def test_success_is_left_out_where_nobody_tells():
    made = make(tells=False)
    collect(made)
    assert "success" not in made.source.metrics() and made.source.metrics()["return"] is not None


def test_what_a_person_sees_first_is_among_the_metrics_of_a_step():
    made = make()
    report = made.train(steps=1, evaluate_every=1, progress=None)[0]
    assert set(made.source.headline) | set(made.source.panels) <= set(report)


# --- rollouts -------------------------------------------------------------------------------------------------------


def test_ends_are_told_apart():
    rollouts = collect(make())
    even = rollouts.mask_NT.sum(1) % 2 == 0
    assert rollouts.status_N[even].unique().tolist() == [int(Status.TERMINATED)]
    assert rollouts.status_N[~even].unique().tolist() == [int(Status.TRUNCATED)]


def test_a_failed_row_is_marked_shown_with_its_error_and_counted_apart():
    bad = seeds(0, 0, TRAINING, 3)[1]
    made = make(fails=(bad,))
    rollouts = collect(made)
    failed = rollouts.status_N == int(Status.FAILED)
    assert failed.tolist() == [False] * 4 + [True] * 4 + [False] * 4
    assert rollouts.mask_NT[failed].sum(1).tolist() == [1] * 4
    shown = made.source.show(rollouts)
    assert ["error" in row for row in shown] == failed.tolist()
    for i, row in enumerate(shown[4:8]):
        assert f" member {4 + i}, step 2: ArithmeticError: cannot go on ({__file__}:" in row["error"]
    assert made.source.show(rollouts.select([5]))[0]["error"] == shown[5]["error"]
    assert made.source.metrics()["episodes"] == 8
    healthy = (rollouts.reward_NT * rollouts.mask_NT).sum(1)[~failed]
    assert made.source.metrics()["return"] == pytest.approx(float(healthy.mean()))


def test_a_step_with_failed_rows_learns_from_the_others():
    bad = seeds(0, 0, TRAINING, 3)[1]
    made = make(fails=(bad,))
    before = [p.detach().clone() for p in made.policy.parameters().values()]
    report = made.step()
    assert report["failed"] == 4 and report["updates"] > 0 and report["updates_skipped"] == 0
    assert not report.experience.advantage_NT[4:8].any() and not report.experience.mask_NT[4:8].any()
    assert any(not torch.equal(a, b) for a, b in zip(before, made.policy.parameters().values(), strict=True))


@pytest.mark.parametrize("advantage", ["linear", "auto", "critic", "step", "batch_step", "leave_one_out", "episode"])
def test_when_everything_fails_nothing_is_learned(advantage):
    made = make(fails=(*seeds(0, 0, TRAINING, 3), *seeds(0, 1, TRAINING, 3)), advantage=advantage)
    before = {name: p.detach().clone() for name, p in made.policy.parameters().items()}
    for _ in range(2):
        report = made.step()
        assert report["failed"] == 12 and report["return"] is None and report["episodes"] == 0
    for name, parameter in made.policy.parameters().items():
        assert torch.equal(parameter, before[name])


def test_rows_show_what_was_done_and_paid():
    made = make()
    rollouts = collect(made)
    for i, row in enumerate(made.source.show(rollouts)):
        length = int(rollouts.mask_NT[i].sum())
        assert row["length"] == length == len(row["actions"]) == len(row["rewards"])
        assert row["rewards"] == [2.0 * action for action in row["actions"]]


# --- what is scaled, held, queued -----------------------------------------------------------------------------------


def test_reward_scale_is_for_the_algorithm_only():
    one, other = make(scale="none"), make(scale="none", reward_scale=0.25)
    plain, scaled = collect(one), collect(other)
    torch.testing.assert_close(scaled.reward_NT, 0.25 * plain.reward_NT)
    torch.testing.assert_close(scaled.baseline_NT, 0.25 * plain.baseline_NT, rtol=1e-5, atol=1e-6)
    assert one.source.metrics()["return"] == other.source.metrics()["return"]
    assert one.evaluate(3).return_E.tolist() == other.evaluate(3).return_E.tolist()


def test_a_decision_may_last_several_steps():
    made = make(action_repeat=2)
    rollouts = collect(made)
    first, decisions = rollouts.inputs["observation"], rollouts.mask_NT.sum(1)
    length_N = first[:, 0, 1]
    assert torch.equal(decisions.float(), torch.ceil(length_N / 2))
    assert torch.equal(first[0, : decisions[0], 0], 2.0 * torch.arange(decisions[0]))
    assert made.source.env_steps == int(length_N.sum())
    whole = (length_N % 2 == 0).nonzero()[:, 0]
    actions = rollouts.inputs["action"]
    torch.testing.assert_close(rollouts.reward_NT[whole], 4.0 * actions[whole] * rollouts.mask_NT[whole])
    assert 3 < made.evaluate(3).length_E.max() <= 6


def test_fewer_copies_than_episodes_play_the_same_starts_whole():
    many, few = make(num_envs=12), make(num_envs=5)
    one, other = collect(many), collect(few)
    assert (many.source.fleet.size, few.source.fleet.size) == (12, 5)
    torch.testing.assert_close(other.mask_NT, one.mask_NT)
    seen = [r.inputs["observation"][r.mask_NT] for r in (one, other)]
    torch.testing.assert_close(*seen)
    assert few.source.env_steps == many.source.env_steps
    assert few.step()["updates_skipped"] == 0


def test_places_in_a_group_are_counted():
    assert place_in_group(np.array([0, 0, 0, 1, 1])).tolist() == [0, 1, 2, 0, 1]
    assert place_in_group(np.array([1, 0, 1, 0, 1])).tolist() == [0, 0, 1, 1, 2]


# --- asked for again ------------------------------------------------------------------------------------------------


class Rare(gym.Env):
    """One reward in eight, for a lucky start and the right first action; the wrong one makes the episode longer."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(8)
    starts: tuple[list[int], ...] = ()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Rare.starts[-1].append(seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        if self.t == 1:
            self.lucky, self.last = action == 3, 1 + int(action) % 4
        return np.zeros(1, np.float32), float(self.lucky and self.t == 1), self.t >= self.last, False, {}


def test_starts_without_a_signal_are_asked_for_again_the_very_same(monkeypatch):
    played: list[list[int]] = []
    monkeypatch.setattr(Rare, "starts", played)
    played.append([])  # for the fleet's own check
    settings = {"advantage": "episode", "no_signal": "resample", "max_attempts": 3, "group_size": 3}
    made = GRPOTrainer(env=Rare, vector="serial", groups_per_step=6, seed=2, **settings)
    real, requests = made.source.collect, []

    def collected(request):
        played.append([])
        requests.append(request)
        return real(request)

    made.source.collect = collected
    report = made.step()
    assert report["attempts"] == 3 == len(requests)
    first, second, third = played[1:]
    assert len(first) == 18 and set(third) <= set(second) < set(first)
    assert [list(request.starts or ()) for request in requests[1:]] == [second[::3], third[::3]]
    kept = report.experience.rollouts
    reward_N = (kept.reward_NT * kept.mask_NT).sum(1)
    for group in kept.group_N.unique():
        assert 0 < reward_N[kept.group_N == group].sum() < 3
    assert report["env_steps"] > int(kept.mask_NT.sum())
    assert report["episodes"] == len(first) + len(second) + len(third)


class Longer(Rare):
    """Its wrong actions make it much longer."""

    def step(self, action):
        seen, reward, _, _, info = super().step(action)
        self.last = 1 + 5 * int(action) if self.t == 1 else self.last
        return seen, reward, self.t >= self.last, False, info


def test_tries_that_are_asked_for_again_may_be_longer_or_shorter():
    settings = {"advantage": "episode", "no_signal": "resample", "group_size": 3, "vector": "serial"}
    Rare.starts = ([],)
    for seed in range(6):
        report = GRPOTrainer(env=Longer, groups_per_step=6, seed=seed, **settings).step()
        assert report["updates_skipped"] == 0


def test_what_is_asked_for_again_does_not_flatter_the_metrics():
    """Starts without a signal are no fair sample: the return is that of the first tries."""
    settings = {"advantage": "episode", "no_signal": "resample", "group_size": 3, "vector": "serial"}
    Rare.starts = ([],)
    plain = GRPOTrainer(env=Rare, groups_per_step=6, seed=2, **settings | {"no_signal": "keep"}).step()
    again = GRPOTrainer(env=Rare, groups_per_step=6, seed=2, **settings).step()
    assert again["attempts"] > 1
    for name in ("return", "return_std", "episode_length", "reward"):
        assert again[name] == plain[name], name


def test_errors_of_every_attempt_stay_with_their_rows():
    bad = seeds(0, 0, TRAINING, 3)[0]
    made = make(fails=(bad,), advantage="episode", no_signal="keep")
    collect(made)
    second = collect(made, attempt=1, starts=[bad])
    third = collect(made, attempt=2, starts=[seeds(0, 0, TRAINING, 3)[1]])
    assert all("error" in row for row in made.source.show(second))
    assert not any("error" in row for row in made.source.show(third))


# --- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"scale_observations": True}, {"advantage": "critic"}, {"group_by": "steps", "advantage": "step"}],
    ids=str,
)
def test_a_source_goes_on_from_its_state(settings):
    one, other = make(**settings), make(**settings)
    collect(one)
    state = one.source.state()
    check(one.state())  # that JSON and arrays can keep it
    other.source.load_state(state)
    assert other.source.env_steps == one.source.env_steps and other.source.episodes == one.source.episodes
    first, second = collect(one, 1), collect(other, 1)
    torch.testing.assert_close(first.inputs["observation"], second.inputs["observation"], rtol=0, atol=0)
    assert one.source.metrics() == other.source.metrics()
    ours, theirs = one.source.state(), other.source.state()
    assert ours.values == theirs.values and ours.arrays.keys() == theirs.arrays.keys()
    for name, array in ours.arrays.items():
        assert torch.equal(torch.as_tensor(array), torch.as_tensor(theirs.arrays[name])), name


def test_states_are_copies():
    made = make(scale_observations=True, advantage="critic")
    collect(made)
    state = made.source.state()
    before = {name: torch.as_tensor(array).clone() for name, array in state.arrays.items()}
    collect(made, 1)
    for name, array in before.items():
        assert torch.equal(torch.as_tensor(state.arrays[name]), array), name


def test_other_draws_than_the_run_began_with_are_told_once():
    """The end of a run looks at its best checkpoint, which may be older than the change."""
    saved = GRPOTrainer(env=Task, vector="serial").source.state()
    source = GRPOTrainer(env=Task, vector="serial", draws="episode").source
    with pytest.warns(UserWarning, match="saved with draws=step, so its numbers are others"):
        source.load_state(saved)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.load_state(saved)
    assert source.draws == "episode"
