"""Episodes that travel: put together again they are what was played."""

from dataclasses import fields

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from grpo.control.networks import make_network
from grpo.control.parcels import flat, whole
from grpo.control.play import play
from grpo.control.policy import ActorPolicy
from grpo.control.scaling import Scaling
from grpo.distributed.wire import packed, unpacked
from grpo.envs.draws import EpisodeDraws
from grpo.envs.heads import make_head
from grpo.envs.make import make_fleet
from grpo.envs.spaces import leaves
from grpo.protocols import State


class Room(gym.Env):
    """Episodes of 1 to 5 steps; observations inside observations; some seeds cannot begin."""

    things = spaces.Dict({"key": spaces.Discrete(3), "map": spaces.MultiBinary(4)})
    observation_space = spaces.Dict({"at": spaces.Box(-9, 9, (2,)), "things": things})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed and seed % 8 == 0:
            raise ValueError(f"seed {seed} has no door")
        self._left = 1 + seed % 5
        return self._seen(), {}

    def _seen(self):
        key, at = self.np_random.integers(3), self.np_random.normal(size=2).astype(np.float32)
        return {"at": at, "things": {"key": int(key), "map": np.array([1, 0, 1, 0], np.int8)}}

    def step(self, action):
        self._left -= 1
        return self._seen(), float(action), self._left == 0, False, {}


@pytest.mark.parametrize("scaled", [False, True])
def test_parts_are_the_whole(scaled):
    fleet = make_fleet(Room, 3, kind="serial")
    head = make_head(fleet.action_space)
    policy = ActorPolicy(make_network(fleet.observation_space, head.size, (4,), "tanh", 0, 0), head)
    scaling, starts = Scaling(fleet.observation_space, scaled), [8, 16, 2, 4, 3, 24, 11]

    def part(rows):
        draws = EpisodeDraws((0,), rows)
        return play(fleet, policy, scaling, starts[rows.start : rows.stop], draws, keep_out=True)

    # The first part has no episode that began, the second no row at all.
    parts = [flat(part(range(2))), State({}, {}), flat(part(range(2, 6))), flat(part(range(6, 7)))]
    found, played = whole([unpacked(packed(one)) for one in parts]), part(range(7))
    assert {row: error.split("seed")[1][:3] for row, error in found.errors.items()} == {0: " 8 ", 1: " 16", 5: " 24"}
    for field in fields(played):
        if field.name == "errors":
            continue
        for one, other in zip(leaves(vars(found)[field.name]), leaves(vars(played)[field.name]), strict=True):
            of_decisions = field.name in ("observation", "raw") or field.name.endswith(("_NT", "_NTF"))
            made = played.mask_NT if of_decisions else ...
            np.testing.assert_allclose(one[made], other[made], rtol=1e-5)  # a product's digits follow the batch's size
            assert one.dtype == other.dtype and one.shape == other.shape
    assert (found.raw is found.observation) == (not scaled)
