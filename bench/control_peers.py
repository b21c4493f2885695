"""What `control.py` compares with: the tasks, the judge that is the same for everybody, the clock, and the peers.

A peer learns until `meter.over`. It starts the meter before it builds anything and calls `meter.look` after every
update; the meter does the rest.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import runpy
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

FIRST_SEED = 1_000_003
"""Starts on which everybody is judged are counted up from here; training seeds from small numbers."""
CONFIRM = 100
"""Further starts on which the policy that reached the threshold is played."""

Act = Callable[[np.ndarray], Any]
"""Observations of several environments → an action for each."""


@dataclass(frozen=True)
class Task:
    """What is to be learned, and when it counts as learned."""

    id: str
    threshold: float
    """Mean greedy return, reached at two looks in a row: a single one may be luck."""
    every: int
    """Environment steps between two looks."""
    wrap: str | None = None
    """Module and name of a wrapper that peers without convolutions need."""
    episodes: int = 20
    """Starts at each look; more where the environment itself throws dice."""

    first: int = FIRST_SEED
    """The first of those starts."""

    @property
    def seeds(self) -> range:
        return range(self.first, self.first + self.episodes)

    def make(self, wrapped: bool = True) -> gym.Env:
        if self.id.startswith("MiniGrid"):
            import minigrid  # noqa: F401  it registers the ids
        env = gym.make(self.id)
        if self.wrap is None or not wrapped:
            return env
        module, name = self.wrap.split(":")
        return getattr(__import__(module, fromlist=[name]), name)(env)

    @cached_property
    def discrete(self) -> bool:
        env = self.make()
        return isinstance(env.action_space, gym.spaces.Discrete)

    @cached_property
    def flat(self) -> bool:
        space = self.make().observation_space
        return isinstance(space, gym.spaces.Box) and len(space.shape) == 1


FLAT = "minigrid.wrappers:FlatObsWrapper"
TASKS = {
    "cartpole": Task("CartPole-v1", 475, 1000, first=2_000_003),  # the preset was tuned on the usual starts
    "acrobot": Task("Acrobot-v1", -100, 5000),
    "mountaincar": Task("MountainCar-v0", -110, 10_000),
    "pendulum": Task("Pendulum-v1", -200, 5000),
    "inverted-pendulum": Task("InvertedPendulum-v5", 950, 2000),
    "lunarlander": Task("LunarLander-v3", 200, 10_000),
    "frozenlake": Task("FrozenLake-v1", 0.7, 5000, episodes=200),
    "taxi": Task("Taxi-v4", 7.0, 10_000),
    "minigrid-empty": Task("MiniGrid-Empty-Random-5x5-v0", 0.9, 2000, FLAT),
    "minigrid-doorkey": Task("MiniGrid-DoorKey-5x5-v0", 0.9, 5000, FLAT),
}


class Judge:
    """Mean return of a greedy policy over some seeds, in environments that training never touches."""

    def __init__(self, task: Task) -> None:
        self._task, self._envs = task, []

    def __call__(self, act: Act, seeds: range) -> float:
        self._envs += [self._task.make() for _ in range(len(seeds) - len(self._envs))]
        seen = [env.reset(seed=seed)[0] for env, seed in zip(self._envs, seeds, strict=False)]
        total, plays = np.zeros(len(seen)), list(range(len(seen)))
        while plays:
            actions, going = act(np.stack([seen[i] for i in plays])), []
            for i, action in zip(plays, actions, strict=True):
                seen[i], reward, terminated, truncated, _ = self._envs[i].step(action)
                total[i] += float(reward)
                if not (terminated or truncated):
                    going.append(i)
            plays = going
        return float(total.mean())


@dataclass
class Meter:
    """CPU seconds of this process without its imports and evaluations, until the threshold or the cap."""

    task: Task
    threshold: float
    cap: float
    """CPU seconds."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(environment steps, CPU seconds, mean greedy return) of every look."""
    reached: bool = False
    confirmed: float | None = None
    """Mean greedy return of the policy that reached it, on CONFIRM further starts."""

    def __post_init__(self) -> None:
        self.judge = Judge(self.task)
        self._next, self._start, self._aside = self.task.every, 0.0, 0.0

    def start(self) -> None:
        """From here on everything counts."""
        self._start = time.process_time()

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._start - self._aside

    @property
    def over(self) -> bool:
        return self.reached or self.cpu_s > self.cap

    def look(self, steps: int, evaluate: Callable[[range], float], last: bool = False) -> bool:
        """After an update: evaluate where it is due, aside from the clock; whether to stop."""
        if steps < self._next and not last and self.cpu_s <= self.cap:
            return False
        self._next = (steps // self.task.every + 1) * self.task.every
        cpu_s, before = self.cpu_s, time.process_time()
        found = evaluate(self.task.seeds)
        good = found >= self.threshold and cpu_s <= self.cap
        self.reached = good and bool(self.curve) and self.curve[-1][2] >= self.threshold
        self.curve.append((steps, round(cpu_s, 4), found))
        if self.reached:
            further = self.task.first + self.task.episodes
            self.confirmed = evaluate(range(further, further + CONFIRM))
        self._aside += time.process_time() - before
        return self.over

    def result(self) -> dict[str, Any]:
        """The row of this run; where the threshold was never reached, how far it got and what that took."""
        steps, cpu_s, found = self.curve[-1]
        return {
            "reached": self.reached,
            "cpu_s": cpu_s,
            "env_steps": steps,
            "final_return": found,
            "confirmed_return": self.confirmed,
            "curve": [list(point) for point in self.curve],
        }


def warm_up() -> None:
    """What libraries load or build on first use is an import, not learning."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    optimizer = torch.optim.Adam(network.parameters())
    torch.distributions.Categorical(logits=network(torch.zeros(1, 2))).entropy().sum().backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()


# --- Stable-Baselines3 ---------------------------------------------------------------------------------------------


def linear(start: float) -> Callable[[float], float]:
    return lambda remaining: remaining * start


MINIGRID = {
    "normalize": True,
    "n_envs": 8,
    "n_timesteps": 1e5,
    "n_steps": 128,
    "batch_size": 64,
    "gae_lambda": 0.95,
    "gamma": 0.99,
    "n_epochs": 10,
    "ent_coef": 0.0,
    "learning_rate": 2.5e-4,
    "clip_range": 0.2,
}
ZOO: dict[str, dict[str, Any]] = {
    "cartpole": {
        "n_envs": 8,
        "n_timesteps": 1e5,
        "n_steps": 32,
        "batch_size": 256,
        "gae_lambda": 0.8,
        "gamma": 0.98,
        "n_epochs": 20,
        "ent_coef": 0.0,
        "learning_rate": linear(0.001),
        "clip_range": linear(0.2),
    },
    "acrobot": {
        "normalize": True,
        "n_envs": 16,
        "n_timesteps": 1e6,
        "n_steps": 256,
        "gae_lambda": 0.94,
        "gamma": 0.99,
        "n_epochs": 4,
        "ent_coef": 0.0,
    },
    "mountaincar": {
        "normalize": True,
        "n_envs": 16,
        "n_timesteps": 1e6,
        "n_steps": 16,
        "gae_lambda": 0.98,
        "gamma": 0.99,
        "n_epochs": 4,
        "ent_coef": 0.0,
    },
    "pendulum": {
        "n_envs": 4,
        "n_timesteps": 1e5,
        "n_steps": 1024,
        "gae_lambda": 0.95,
        "gamma": 0.9,
        "n_epochs": 10,
        "ent_coef": 0.0,
        "learning_rate": 1e-3,
        "clip_range": 0.2,
        "use_sde": True,
        "sde_sample_freq": 4,
    },
    "inverted-pendulum": {  # the zoo's entry is for InvertedPendulum-v2
        "normalize": True,
        "n_envs": 1,
        "n_timesteps": 1e6,
        "batch_size": 64,
        "n_steps": 32,
        "gamma": 0.999,
        "learning_rate": 0.000222425,
        "ent_coef": 1.37976e-07,
        "clip_range": 0.4,
        "n_epochs": 5,
        "gae_lambda": 0.9,
        "max_grad_norm": 0.3,
        "vf_coef": 0.19816,
    },
    "lunarlander": {
        "n_envs": 16,
        "n_timesteps": 1e6,
        "n_steps": 1024,
        "batch_size": 64,
        "gae_lambda": 0.98,
        "gamma": 0.999,
        "n_epochs": 4,
        "ent_coef": 0.01,
    },
    "minigrid-empty": MINIGRID,
    "minigrid-doorkey": MINIGRID,
}
"""PPO settings of RL Baselines3 Zoo (DLR-RM/rl-baselines3-zoo, hyperparams/ppo.yml, April 2026). A task that is not
here (FrozenLake, Taxi) is not in the zoo either: it gets the zoo's default, PPO's own settings for 1e6 steps."""


def train_sb3(task: Task, name: str, seed: int, meter: Meter) -> None:
    """PPO of Stable-Baselines3 with the zoo's settings."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    settings = dict(ZOO.get(name, {}))
    steps, copies = int(settings.pop("n_timesteps", 1e6)), settings.pop("n_envs", 1)
    meter.start()
    envs = make_vec_env(task.make, n_envs=copies, seed=seed)
    normalized = VecNormalize(envs, gamma=settings.get("gamma", 0.99)) if settings.pop("normalize", False) else None
    model = PPO("MlpPolicy", normalized or envs, seed=seed, device="cpu", **settings)

    def act(seen: np.ndarray) -> np.ndarray:
        seen = seen if normalized is None else normalized.normalize_obs(seen)
        return model.predict(seen, deterministic=True)[0]

    class Look(BaseCallback):
        def _on_rollout_start(self) -> None:  # the last update is done, the next rollout has not begun
            if self.num_timesteps:
                meter.look(self.num_timesteps, partial(meter.judge, act))

        def _on_step(self) -> bool:
            return not meter.over

    model.learn(steps, callback=Look())
    if not meter.reached:
        meter.look(model.num_timesteps, partial(meter.judge, act), last=True)


def rollout_sb3(seed: int, repeats: int = 5, steps: int = 512) -> list[float]:
    """Environment steps a CPU second of `collect_rollouts` alone: CartPole, 8 copies, policy and critic of 64-64."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env("CartPole-v1", n_envs=8, seed=seed)
    model = PPO("MlpPolicy", envs, n_steps=steps, seed=seed, device="cpu")
    _, callback = model._setup_learn(8 * steps * (repeats + 1))
    rates = []
    for _ in range(repeats + 1):
        start = time.process_time()
        model.collect_rollouts(model.env, callback, model.rollout_buffer, steps)
        rates.append(8 * steps / (time.process_time() - start))
    return rates[1:]  # the first loads and builds


# --- CleanRL -------------------------------------------------------------------------------------------------------


class Finished(Exception):
    """CleanRL's script knows no other way to stop."""


def train_cleanrl(checkout: Path, task: Task, seed: int, meter: Meter) -> None:
    """CleanRL's cleanrl/ppo.py from a checkout, unchanged and with its own settings.

    It is written for Gymnasium 0.29, so it gets what that gave: batches that reset in the same step. It logs to
    TensorBoard at the end of each update; in its place stands a writer that looks, and writes nothing (in its favour).
    """

    class Writer:
        def __init__(self, *_: Any) -> None:
            meter.start()  # arguments are read, nothing is built yet

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            if tag == "charts/SPS":
                agent = sys._getframe(1).f_globals["agent"]
                if meter.look(step, partial(meter.judge, partial(_greedy, agent.actor))):
                    raise Finished

        def add_text(self, *_: Any) -> None: ...
        def close(self) -> None: ...

    class Batch(gym.vector.SyncVectorEnv):
        def __init__(self, makers: Any) -> None:
            super().__init__(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)

        def step(self, actions: Any) -> Any:
            *found, info = super().step(actions)
            info.pop("final_info", None)  # the script only prints it, and expects an older layout
            return *found, info

    sys.modules["torch.utils.tensorboard"] = types.SimpleNamespace(SummaryWriter=Writer)  # type: ignore[assignment]
    gym.vector.SyncVectorEnv = Batch  # type: ignore[misc]
    import tyro  # noqa: F401  before the clock starts

    sys.argv = ["ppo.py", "--seed", str(seed), "--env-id", task.id, "--no-cuda"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(Finished):
        runpy.run_path(str(checkout / "cleanrl" / "ppo.py"), run_name="__main__")


# --- a plain loop --------------------------------------------------------------------------------------------------


def train_tutorial(task: Task, seed: int, meter: Meter, updates: int = 1000) -> None:
    """GRPO as tutorials have it: windows of one environment, each step's return z-scored within its window.

    Windows of 200 steps, each from a reset; 10 epochs of minibatches of 32; Adam 3e-4; clip 0.2; 0.001·KL(old‖new).
    Minibatches are slices of a permutation, which is cheaper than a DataLoader.
    """
    window, gamma, clip, beta = 200, 0.99, 0.2, 0.001
    meter.start()
    torch.manual_seed(seed)
    env = task.make()
    sizes = [int(env.observation_space.shape[0]), 64, 64, int(env.action_space.n)]
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    actor = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-4)
    env.reset(seed=seed)
    for update in range(1, updates + 1):
        seen, logits, action, reward, over = [], [], [], [], []
        state = env.reset()[0]
        for _ in range(window):
            seen.append(torch.as_tensor(state, dtype=torch.float32))
            with torch.no_grad():
                logits.append(actor(seen[-1]))
                action.append(torch.distributions.Categorical(logits=logits[-1]).sample())
            state, gain, terminated, truncated, _ = env.step(action[-1].item())
            reward.append(gain)
            over.append(terminated or truncated)
            if over[-1]:
                state = env.reset()[0]
        returns, following = [0.0] * window, 0.0
        for t in reversed(range(window)):
            following = reward[t] + gamma * following * (not over[t])
            returns[t] = following
        seen_T, old_T, action_T, return_T = (
            torch.stack(seen),
            torch.stack(logits),
            torch.stack(action),
            torch.tensor(returns),
        )
        advantage_T = (return_T - return_T.mean()) / (return_T.std() + 1e-8)
        for _ in range(10):
            for rows in torch.randperm(window).split(32):
                new = torch.distributions.Categorical(logits=actor(seen_T[rows]))
                old = torch.distributions.Categorical(logits=old_T[rows])
                ratio = (new.log_prob(action_T[rows]) - old.log_prob(action_T[rows])).exp()
                gain = torch.minimum(ratio * advantage_T[rows], ratio.clamp(1 - clip, 1 + clip) * advantage_T[rows])
                loss = beta * torch.distributions.kl_divergence(old, new).mean() - gain.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
                optimizer.step()
        if meter.look(update * window, partial(meter.judge, partial(_greedy, actor)), last=update == updates):
            return


def _greedy(actor: nn.Module, seen: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return actor(torch.as_tensor(seen, dtype=torch.float32)).argmax(-1).numpy()
