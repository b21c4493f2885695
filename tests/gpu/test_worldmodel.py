"""The world-model room on a CUDA device: it plays, learns, imagines and paints there, and goes on from a state."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from grpo.protocols import CollectRequest
from grpo.worldmodel.show import forecasts
from tests.gpu.ways import same_way, weights
from tests.unit.worldmodel.worlds import make

pytestmark = pytest.mark.gpu


class Lamp(gym.Env):
    """A lit square in a picture, moved left or right; it should be in the middle."""

    observation_space = spaces.Box(0, 255, (32, 32, 3), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at, self.t = int(self.np_random.integers(8)), 0
        return self._seen(), {}

    def step(self, action):
        self.at, self.t = int(np.clip(self.at + 2 * action - 1, 0, 7)), self.t + 1
        return self._seen(), float(self.at == 4), False, self.t == 12, {}

    def _seen(self):
        picture = np.zeros((32, 32, 3), np.uint8)
        picture[12:16, 4 * self.at : 4 * self.at + 4] = 255
        return picture


KINDS = {
    "vectors": {"env": "CartPole-v1"},
    "numbers to choose": {"env": "Pendulum-v1", "actor": "critic"},
    "squashed": {"env": "Pendulum-v1", "action_head": "squashed", "actor": "bootstrap"},
    "pictures": {"env": Lamp, "vector": "serial", "image_size": 32},
    "half precision": {"env": "CartPole-v1", "precision": "bfloat16", "tail": "fitted", "replay_latents": "float16"},
    "beside": {"env": Lamp, "vector": "serial", "image_size": 32, "acting": "beside"},
}


def made(kind):
    return make(**KINDS[kind] | {"device": "cuda"})


@pytest.mark.parametrize("kind", KINDS)
def test_two_steps_are_learned_there_and_it_is_judged(kind):
    trainer = made(kind)
    first, second = trainer.step(), trainer.step()
    assert second["env_steps"] > first["env_steps"] and second["model/updates"] > first["model/updates"]
    assert all(np.isfinite(second[name]) for name in ("model/loss", "imagined/return", "loss"))
    assert all(p.is_cuda for p in trainer.policy.parameters().values())
    assert all(p.is_cuda for p in trainer.source.learner.model.parameters())
    rollouts = trainer.source.collect(CollectRequest(9)).rollouts
    assert rollouts.old_logp_NT.is_cuda and rollouts.inputs["flat"].is_cuda
    scored = trainer.policy.score(rollouts).logp_NT.detach()
    torch.testing.assert_close(scored, rollouts.old_logp_NT, rtol=1e-3, atol=1e-3)
    assert trainer.evaluate(2).return_E.shape == (2,)
    seen = forecasts(trainer.source.learner, trainer.source.replay.peek(4, 0), torch.Generator().manual_seed(0))
    assert all(forecast.prediction.is_cuda for forecast in seen.values())
    trainer.source.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_taken_up_again(kind):
    one, two = made(kind), made(kind)
    one.step()
    one.step()
    state = one.state()
    kept = {str(x.dtype) for name, x in state.arrays.items() if "replay/" not in name and x.is_floating_point()}
    assert kept <= {"torch.float32", "torch.float64"}, (
        kept
    )  # nothing of a checkpoint is rounded to what was computed in
    two.load_state(state)
    before = weights(one.policy.parameters().values())
    mine, other = one.step(), two.step()
    assert mine["env_steps"] == other["env_steps"] and mine["model/updates"] == other["model/updates"]
    assert mine["model/loss"] == pytest.approx(other["model/loss"], rel=0.05)
    same_way(before, *(weights(trainer.policy.parameters().values()) for trainer in (one, two)))
    for trainer in (one, two):
        trainer.source.close()
