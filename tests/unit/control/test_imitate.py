"""A warm start: an expert is imitated once, exactly, and what it cannot be is said."""

import numpy as np
import pytest
import torch
from gymnasium import spaces as gs

from grpo.config import ConfigError
from grpo.control import ControlConfig, GRPOTrainer
from grpo.control.groups import EXPERT, seeds
from grpo.control.imitate import _rows, read, shown_by, write
from grpo.envs.fleet import EnvError
from grpo.envs.heads import make_head
from grpo.optimizers import Adam
from tests.unit.control.reach import Reach

HERE = "tests.unit.control.reach"


def make(**settings) -> GRPOTrainer:
    usual = {"env": Reach, "vector": "serial", "hidden": (32,), "group_size": 4, "groups_per_step": 2, "num_envs": 5}
    usual |= {"end_on_success": True, "warm_start_passes": 60, "warm_start_episodes": 12, "eval_episodes": 30}
    return GRPOTrainer(**usual | {"warm_start": f"{HERE}:straight"} | settings)


def weights(made):
    return {name: p.detach().clone() for name, p in made.policy.parameters().items()}


# --- what is learned ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"action_chunk": 3},
        {"memory": 8},
        {"action_chunk": 2, "logprob_type": "token_level"},
        {"action_head": "squashed", "scale_observations": True},
        {"action_head": "beta"},
    ],
    ids=["plain", "chunks", "memory", "tokens", "squashed", "beta"],
)
def test_a_policy_that_imitates_succeeds_where_it_did_not(more):
    report = make(**more).step()
    before, after = (report[f"warm_start/{when}/success"] for when in ("before", "after"))
    assert before <= 0.4 and after >= 0.8 and report["warm_start/imitated"] == 12.0
    for when in ("before", "after"):
        low, share, high = (report[f"warm_start/{when}/success{end}"] for end in ("_low", "", "_high"))
        assert 0.0 <= low <= share <= high <= 1.0 and low < high


def test_an_expert_is_imitated_once_and_not_again_after_a_resumption(tmp_path):
    def run(folder, steps):
        made = make(beta=0.01)
        reports = made.train(steps=steps, folder=tmp_path / folder, evaluate_every=2, progress=None)
        return weights(made), reports

    whole, reports = run("whole", 4)
    assert ["warm_start/imitated" in report for report in reports] == [True, False, False, False]
    run("cut", 2)
    again, later = run("cut", 4)
    assert not any("warm_start/imitated" in report for report in later)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_what_was_imitated_keeps_the_units_it_was_seen_in():
    """Observations of tries are others than those shown: in their units the policy would do something else."""
    made = make(scale_observations=True)
    made.source.warm_up()
    before = {name: value.copy() for name, value in made.source.scaling.arrays().items()}
    made.step()
    assert before and all((value == made.source.scaling.arrays()[name]).all() for name, value in before.items())
    other = make(scale_observations=True, warm_start=None, warm_start_passes=100, warm_start_episodes=50)
    other.step()
    assert other.source.scaling.count > 0


def test_the_divergence_is_measured_to_the_policy_that_imitates():
    made = make(beta=0.01)
    made.source.warm_up()
    warm = weights(made)
    other = make(beta=0.01)
    for hook in other.hooks:
        hook.before(other)
    assert all(torch.equal(p, warm[name]) for name, p in other.reference.parameters().items())
    assert not all(torch.equal(p, warm[name]) for name, p in made.reference.parameters().items())


def imitated(**settings):
    made = make(**settings)
    made.source.warm_up()
    return weights(made)


def test_the_rate_falls_to_the_last_pass():
    """Two passes at the whole rate move the weights more than one at the whole and one at half of it."""
    begun, once = weights(make()), imitated(warm_start_passes=1)
    constant = imitated(warm_start_passes=2)
    falling = imitated(warm_start_passes=2, warm_start_lr_schedule="linear")
    moved = [name for name in once if not torch.equal(begun[name], once[name])]  # all but the deviation
    assert moved
    for name in moved:
        half, whole = (falling[name] - once[name]).norm(), (constant[name] - once[name]).norm()
        assert half > 0 and torch.isclose(half, whole / 2, rtol=0.02)


def test_weights_that_decay_are_smaller_and_without_decay_they_are_what_adam_makes(monkeypatch):
    plain, some = imitated(), imitated(warm_start_weight_decay=1.0)
    with monkeypatch.context() as before:
        before.setattr("grpo.control.imitate.AdamW", lambda made, lr, weight_decay: Adam(made, lr=lr))
        adam = imitated(warm_start_weight_decay=1.0)
    assert all(torch.equal(plain[name], adam[name]) for name in plain)

    def size(found):
        return sum(float(p.norm()) for p in found.values())

    assert size(some) < 0.95 * size(plain)


def test_the_deviation_is_left_to_explore_with():
    made = make(log_std=-0.3)
    made.source.warm_up()
    assert made.policy.head.log_std_A.tolist() == [pytest.approx(-0.3)] * 2


def test_the_expert_s_steps_count():
    made = make()
    made.source.warm_up()
    assert made.source.env_steps > 12 and not made.source.cold


def test_each_place_of_a_chunk_is_a_beginning():
    made = make(action_chunk=3)
    source = made.source
    shown = shown_by(made.config, source.fleet, source.policy.head, seeds(0, 0, EXPERT, 4))
    rows = _rows(source.policy, source.scaling, shown)
    length = shown.mask_NT.sum(1)
    expected = sorted(n - first for n in length.tolist() for first in range(3) if n > first)
    assert sorted(rows.mask_NT.sum(1).tolist()) == expected
    second = np.flatnonzero(length > 1)[0]
    row = next(i for i in range(len(shown), len(rows)) if torch.equal(
        rows.inputs["observation"][i, 0], torch.as_tensor(shown.observation[second, 1])))  # fmt: skip
    assert torch.equal(rows.inputs["action"][row, 0], torch.as_tensor(shown.action_NT[second, 1]))


# --- recorded episodes ----------------------------------------------------------------------------------------------


def test_recorded_episodes_teach_the_same_as_the_expert_itself(tmp_path):
    made = make()
    source = made.source
    shown = shown_by(made.config, source.fleet, source.policy.head, seeds(0, 0, EXPERT, 12))
    path = write(tmp_path / "shown.npz", shown, source.policy.head)
    again = read(path, source.fleet, source.policy.head)
    assert np.array_equal(again.mask_NT, shown.mask_NT)
    np.testing.assert_allclose(again.action_NT[again.mask_NT], shown.action_NT[shown.mask_NT], atol=1e-6)
    np.testing.assert_array_equal(again.observation[again.mask_NT], shown.observation[shown.mask_NT])
    assert make_from(path).step()["warm_start/after/success"] >= 0.8


def make_from(path):
    settings = {"env": Reach, "vector": "serial", "hidden": (32,), "group_size": 4, "groups_per_step": 2}
    return GRPOTrainer(**settings, end_on_success=True, warm_start=str(path), eval_episodes=30)


def test_a_trained_policy_is_recorded_for_another(tmp_path):
    made = make()
    made.source.warm_up()
    path = made.record(tmp_path / "mine.npz", episodes=15)
    with np.load(path) as file:
        assert set(file.files) == {"observation", "action", "episode"} and len(np.unique(file["episode"])) >= 12
    assert make_from(path).step()["warm_start/after/success"] >= 0.7


class Parts(Reach):
    """Told in parts, moved by keys."""

    observation_space = gs.Dict({"at": Reach.observation_space, "time": gs.Dict({"left": gs.Discrete(13)})})
    action_space = gs.MultiDiscrete([3, 3], start=[-1, -1])

    def reset(self, *, seed=None, options=None):
        return self._told(super().reset(seed=seed)[0]), {}

    def step(self, action):
        seen, *rest = super().step(action)
        return self._told(seen), *rest

    def _told(self, seen):
        return {"at": seen, "time": {"left": self.limit - self.t}}


def keys(seen):
    return -np.sign(np.where(np.abs(seen["at"]) > 0.3, seen["at"], 0)).astype(int)


def test_observations_in_parts_are_recorded_and_read(tmp_path):
    settings = {"env": Parts, "vector": "serial", "hidden": (32,), "end_on_success": True}
    made = GRPOTrainer(**settings)
    source = made.source
    config = made.config.but(warm_start=f"{__name__}:keys")
    shown = shown_by(config, source.fleet, source.policy.head, seeds(0, 0, EXPERT, 5))
    path = write(tmp_path / "parts.npz", shown, source.policy.head)
    with np.load(path) as file:
        assert set(file.files) == {"observation/at", "observation/time/left", "action", "episode"}
        assert file["action"].min() == -1
    again = read(path, source.fleet, source.policy.head)
    for one, other in ((again.action_NT, shown.action_NT), (again.observation["at"], shown.observation["at"])):
        np.testing.assert_array_equal(one[again.mask_NT], other[shown.mask_NT])
    left = [x.observation["time"]["left"][x.mask_NT] for x in (again, shown)]
    np.testing.assert_array_equal(*left)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"action": np.zeros((3, 2))}, "has no array 'episode'; it has action"),
        ({"action": np.zeros((3, 2)), "episode": np.zeros(3, int)}, "has no array 'observation'"),
        (
            {"action": np.zeros((2, 2)), "episode": np.zeros(3, int), "observation": np.zeros((3, 2))},
            "action has 2 rows, episode has 3",
        ),
        (
            {"action": np.zeros((3, 5)), "episode": np.zeros(3, int), "observation": np.zeros((3, 2))},
            r"action has the shape \(5,\), it must be \(2,\)",
        ),
        (
            {"action": np.full((3, 2), np.nan), "episode": np.zeros(3, int), "observation": np.zeros((3, 2))},
            r"action, row 0: \[nan nan\] is not in Box",
        ),
        (
            {"action": np.zeros((0, 2)), "episode": np.zeros(0, int), "observation": np.zeros((0, 2))},
            "has no episodes",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path, arrays, message):
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(ConfigError, match=f"^warm_start: .*bad.npz.*{message}"):
        make_from(path).step()


def test_a_file_that_is_none_is_named(tmp_path):
    path = tmp_path / "text.npz"
    path.write_text("nothing of the kind")
    with pytest.raises(ConfigError, match=r"text\.npz cannot be read as recorded episodes"):
        make_from(path).step()
    np.savez(path, action=np.array([{"code": 1}], dtype=object), episode=np.zeros(1, int))
    with pytest.raises(ConfigError, match=r"text\.npz cannot be read as recorded episodes: Object arrays"):
        make_from(path).step()
    with pytest.raises(ConfigError, match=r"gone\.npz cannot be read"):
        make_from(tmp_path / "gone.npz").step()


# --- experts that are none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", "raising fails: KeyError: 'no such part'"),
        ("shapeless", r"shapeless gives array\(0.*, the action space is Box"),
        ("hopeless", "hopeless: none of 12 episodes can be imitated: it never succeeds"),
        ("nobody", "reach has no nobody"),
    ],
)
def test_an_expert_that_cannot_be_imitated_is_named(name, message):
    with pytest.raises(EnvError, match=message):
        make(warm_start=f"{HERE}:{name}").step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warm_start_passes": 3}, "warm_start_passes has no effect here: it needs warm_start"),
        ({"warm_start_episodes": 3}, "warm_start_episodes has no effect here: it needs warm_start"),
        ({"warm_start_weight_decay": 0.1}, "warm_start_weight_decay has no effect here: it needs warm_start"),
        ({"warm_start_lr_schedule": "linear"}, "warm_start_lr_schedule has no effect here: it needs warm_start"),
        ({"warm_start": "a.npz", "warm_start_episodes": 3}, "recorded episodes are all imitated"),
    ],
)
def test_settings_without_effect_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ControlConfig(**settings)


# --- pieces ---------------------------------------------------------------------------------------------------------

BOX = gs.Box(np.array([-2.0, 0.0], np.float32), np.array([3.0, 1.0], np.float32))
SPACES = {
    "gaussian": (BOX, "gaussian", 1e-6),
    "squashed": (BOX, "squashed", 0.003),
    "beta": (BOX, "beta", 1e-5),
    "Discrete": (gs.Discrete(5, start=-2), "auto", 0),
    "MultiDiscrete": (gs.MultiDiscrete([3, 2], start=[1, -1]), "auto", 0),
    "MultiBinary": (gs.MultiBinary(3), "auto", 0),
}


@pytest.mark.parametrize("name", SPACES)
def test_an_action_becomes_a_record_and_is_the_same_action_again(name):
    space, kind, near = SPACES[name]
    space.seed(0)
    actions = np.stack([space.sample() for _ in range(50)])
    head = make_head(space, kind)
    recorded = head.from_env(actions)
    assert recorded.shape == (50, *head.shape) and recorded.dtype == head.dtype
    np.testing.assert_allclose(head.to_env(recorded), actions, atol=near)
