"""The compiled loop: playing, learning CartPole, many seeds, and a command's start, in CPU seconds of one machine.

    python bench/compiled.py --json bench/results/compiled.json [--seeds 10] [--many 256] [--only steps learn …]
        [--other CHECKOUT]

steps   environment steps a CPU second with a policy of 64-64: our program, the ordinary way, jitted gymnax, SB3
learn   CPU seconds until 20 starts reach 475 on CartPole: the program once it is loaded, the ordinary way, rejax's PPO
        (its settings for gymnax's CartPole) and Stable-Baselines3's PPO (RL Zoo's settings, with constant rates),
        seed by seed in turn;
        evaluations are counted on all sides, imports and compiling are not
many    a run of one seed and of many, by the program that maps over seeds, once it is loaded
start   wall and CPU seconds of the whole command to its last step's line and to its end, what was compiled lying on
        the disk; with --other CHECKOUT in turn with that code
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TASKS = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0")
PRESET = {
    "gamma": 0.99, "group_size": 4, "groups_per_step": 2, "hidden": (32, 32), "num_iterations": 8,
    "decisions_per_minibatch": 2048, "target_kl": 0.1,
}  # fmt: skip
"""As the preset cartpole has it."""


def quartiles(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "all": values}


# --- playing --------------------------------------------------------------------------------------------------------


def program_of(id: str) -> tuple[Any, Any]:
    from grpo.control import GRPOTrainer
    from grpo.control.compiled.room import read_adam

    trainer = GRPOTrainer(env=id, compiled=True, hidden=(64, 64))
    assert trainer.compiled is not None and trainer.optimizer is not None
    return trainer.compiled.program, read_adam(trainer.source.policy, trainer.optimizer).flat_W


def ours(id: str, rows: int, steps: int) -> Any:
    """Members that begin anew, each where it began before, when their episode is over; for so many steps."""
    from grpo.control.compiled.play import acted, begin
    from grpo.envs.functions.numbers import numbers

    program, flat_W = program_of(id)
    task, policy, rules = program.task, program.policy, program.rules

    def go(flat_W: Any, seed: Any) -> Any:
        key = jax.random.key(seed)
        log_std_A = policy.log_std(flat_W)

        def one(t: Any, carry: Any) -> Any:
            now, total = carry
            now_key = jax.random.fold_in(key, t)
            noise = policy.head.noise(now_key, rows)
            action, _ = policy.head.sample(policy.out(flat_W, now.seen_LD), log_std_A, noise)
            now, reward_L = acted(task, rules, now, policy.head.to_env(action), now_key)

            def chosen(new: Any, old: Any) -> Any:
                return jnp.where(now.going_L.reshape(-1, *[1] * (new.ndim - 1)), old, new)

            return jax.tree.map(chosen, fresh, now), total + reward_L.sum()

        fresh = now = begin(task, jax.vmap(task.start)(jax.random.split(key, rows)))
        now, total = jax.lax.fori_loop(0, steps, one, (now, jnp.float64(0)))
        return total + now.seen_LD.sum()  # else what nobody asks for is left out

    with numbers():
        made = jax.jit(go).lower(flat_W, np.int32(0)).compile()
    return lambda seed: made(flat_W, np.int32(seed)).block_until_ready()


def gymnax(id: str, rows: int, steps: int) -> Any:
    """The same loop around gymnax's environment, which resets by itself; in float32, as it is meant."""
    import gymnax as library

    env, settings = library.make(id)
    sees, acts = env.observation_space(settings).shape[0], env.action_space(settings)
    choices = int(acts.n) if hasattr(acts, "n") else None
    drawn = np.random.default_rng(0)
    widths = [sees, 64, 64, choices or 1]
    layers = [
        (drawn.normal(size=(a, b)).astype(np.float32) / a**0.5, np.zeros(b, np.float32))
        for a, b in itertools.pairwise(widths)
    ]

    def go(seed: Any) -> Any:
        key = jax.random.key(seed)
        seen, state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key, rows), settings)

        def one(t: Any, carry: Any) -> Any:
            seen, state, total = carry
            now_key = jax.random.fold_in(key, t)
            x = seen
            for i, (weight, bias) in enumerate(layers):
                x = x @ weight + bias
                x = jnp.tanh(x) if i < len(layers) - 1 else x
            if choices is not None:
                action = jax.random.categorical(now_key, x)
            else:
                action = x + 0.6 * jax.random.normal(now_key, x.shape)
            seen, state, reward, *_ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
                jax.random.split(now_key, rows), state, action, settings
            )
            return seen, state, total + reward.sum()

        seen, _, total = jax.lax.fori_loop(0, steps, one, (seen, state, jnp.float32(0)))
        return total + seen.sum()  # else what nobody asks for is left out

    made = jax.jit(go).lower(np.int32(0)).compile()
    return lambda seed: made(np.int32(seed)).block_until_ready()


def ordinary(id: str, rows: int, steps: int) -> Any:
    """The ordinary way's fleet and policy."""
    from grpo.control import GRPOTrainer
    from grpo.envs.episodes import EpisodeRunner
    from grpo.envs.rules import EpisodeRules

    trainer = GRPOTrainer(env=id, hidden=(64, 64), group_size=rows, groups_per_step=1, num_envs=rows)
    source = trainer.source

    def go(seed: int) -> int:
        random, made = np.random.default_rng(seed), 0
        runner = EpisodeRunner(source.fleet, list(range(rows * 40)), EpisodeRules())
        while made < rows * steps and len(runner.row_L):
            acted = source.policy.act(runner.observation, random)
            stepped = runner.step(np.arange(len(runner.row_L)), source.policy.head.to_env(acted.recorded))
            made += len(runner.row_L)
            runner.move(stepped, np.ones(len(runner.row_L), np.int64))
        return made

    return go


def sb3(id: str, rows: int, steps: int) -> Any:
    """Stable-Baselines3's policy in its own vector of environments."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    envs = make_vec_env(id, rows, seed=0)
    model = PPO("MlpPolicy", envs, seed=0, device="cpu")

    def go(seed: int) -> int:
        seen = envs.reset()
        for _ in range(steps):
            seen = envs.step(model.predict(seen)[0])[0]
        return rows * steps

    return go


def rate(make: Any, id: str, rows: int, steps: int, repeats: int = 5) -> dict[str, Any]:
    go = make(id, rows, steps)
    go(0)
    found = []
    for seed in range(repeats):
        began = time.process_time()
        made = go(seed + 1)
        made = made if isinstance(made, int) else rows * steps
        found.append(made / (time.process_time() - began))
    return {"rows": rows} | quartiles(found)


def steps_part() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for id in TASKS:
        found[id] = {
            "compiled": [rate(ours, id, rows, 200) for rows in (64, 512)],
            "ordinary": rate(ordinary, id, 64, 60),
        }
        for name, measure in (
            ("gymnax", lambda: [rate(gymnax, id, rows, 200) for rows in (64, 512)]),  # noqa: B023
            ("stable_baselines3", lambda: rate(sb3, id, 64, 20, 3)),  # noqa: B023
        ):
            try:
                found[id][name] = measure()
            except ImportError as error:
                found[id][name] = f"not installed ({error.name})"
        print(id, json.dumps(found[id])[:300], flush=True)
    return found


# --- learning -------------------------------------------------------------------------------------------------------


def solved(seed: int, compiled: bool) -> dict[str, Any]:
    from grpo.control import GRPOTrainer

    trainer = GRPOTrainer(env="CartPole-v1", seed=seed, compiled=compiled, **PRESET)
    began = time.process_time()
    reports = trainer.train(steps=200, stop_at=475, evaluate_every=2, progress=None)
    took = time.process_time() - began
    reached = [report["eval/return"] for report in reports if "eval/return" in report][-1]
    judged = trainer.evaluate(100, seed=10_000 + seed).metrics()["return"]
    made = {"steps": len(reports), "env_steps": trainer.source.env_steps}
    return {"seed": seed, "cpu_s": took, **made, "return": reached, "other_starts": judged}


REJAX = {
    "agent_kwargs": {"activation": "tanh"}, "num_envs": 5, "num_steps": 100, "num_epochs": 5, "num_minibatches": 5,
    "learning_rate": 0.00075, "max_grad_norm": 0.5, "gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.01,
}  # fmt: skip
"""As its repository has them for CartPole."""


def rejax_learner() -> Any:
    """PPO in JAX, two iterations (1,000 steps) and an evaluation as one program each; at most 200,000 steps."""
    from rejax import PPO
    from rejax.evaluate import evaluate

    algo = PPO.create(env="CartPole-v1", **REJAX)
    further = jax.jit(lambda state: algo.train_iteration(algo.train_iteration(state)))

    def judge(state: Any, key: Any) -> Any:
        def act(seen: Any, key: Any) -> Any:
            chosen = algo.actor.apply(state.actor_ts.params, seen[None], method="_action_dist")
            return chosen.mode()[0]  # greedy, as the others are judged

        return evaluate(act, key, algo.env, algo.env_params, 20, 500)[1].mean()

    begin, judged = jax.jit(algo.init_state), jax.jit(judge)

    def solve(seed: int) -> dict[str, Any]:
        began, key = time.process_time(), jax.random.key(seed)
        state, reached, iterations = begin(key), 0.0, 0
        while reached < 475 and iterations < 200:
            state, iterations = further(state), iterations + 1
            reached = float(judged(state, jax.random.fold_in(key, iterations)))
        steps = 2 * iterations * algo.num_envs * algo.num_steps
        return {"seed": seed, "cpu_s": time.process_time() - began, "env_steps": steps, "return": reached}

    return solve


def sb3_learner() -> Any:
    """PPO as RL Zoo trains CartPole, judged every 2,048 steps on 20 greedy starts; at most 100,000 steps."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    zoo = {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0}

    def solve(seed: int) -> dict[str, Any]:
        model = PPO(
            "MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), seed=seed, learning_rate=0.001, clip_range=0.2,
            device="cpu", **zoo,
        )  # fmt: skip
        trial, reached, steps, began = make_vec_env("CartPole-v1", 8, seed=10_000 + seed), 0.0, 0, time.process_time()
        while reached < 475 and steps < 100_000:
            model.learn(2_048, reset_num_timesteps=False)
            steps += 2_048
            reached = evaluate_policy(model, trial, 20)[0]
        return {"seed": seed, "cpu_s": time.process_time() - began, "env_steps": steps, "return": float(reached)}

    return solve


def learn_part(count: int) -> dict[str, Any]:
    """Seed by seed, each learner in turn."""
    learners = {"compiled": lambda seed: solved(seed, True), "ordinary": lambda seed: solved(seed, False)}
    missing = {}
    for name, make in (("rejax", rejax_learner), ("stable_baselines3", sb3_learner)):
        try:
            learners[name] = make()
        except ImportError as error:
            missing[name] = f"not installed ({error.name})"
    for solve in learners.values():
        solve(999)  # programs are loaded, and whatever else comes once
    found: dict[str, list[Any]] = {name: [] for name in learners}
    for seed in range(count):
        for name, solve in learners.items():
            found[name].append(solve(seed))
        print("learn", seed, {name: round(rows[-1]["cpu_s"], 3) for name, rows in found.items()}, flush=True)
    told = {name: {"runs": rows, "cpu_s": quartiles([row["cpu_s"] for row in rows])} for name, rows in found.items()}
    return told | {f"{name}_missing": why for name, why in missing.items()}


# --- many seeds, and a command's start ------------------------------------------------------------------------------


def command(*words: str, where: Path) -> dict[str, float]:
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    words = (sys.executable, "-m", "grpo", "train", *words, f"--logdir={where}")
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall_s": time.perf_counter() - began, "cpu_s": cpu}


def many_part(count: int, folder: Path, repeats: int = 3) -> dict[str, Any]:
    """One seed and many in turn, as a user asks for them; the first time compiles."""
    command("cartpole", "--compiled", "--seeds=1", where=folder / "first")
    runs: dict[str, list[dict[str, float]]] = {"one": [], "many": []}
    for i in range(repeats):
        for name, seeds in (("one", 1), ("many", count)):
            where = folder / f"{name}-{i}"
            runs[name].append(command("cartpole", "--compiled", f"--seeds={seeds}", where=where))
    found: dict[str, Any] = {"seeds": count}
    for name, made in runs.items():
        found[name] = {key: quartiles([run[key] for run in made]) for key in ("wall_s", "cpu_s")}
    values = []
    for run in sorted((folder / "many-0").glob("seed-*/metrics.jsonl")):
        rows = [json.loads(line) for line in run.read_text().splitlines()]
        values.append(max(row["eval/return"] for row in rows if row.get("eval/return") is not None))
    found["solved"] = sum(value >= 475 for value in values)
    found["ratio"] = {key: found["many"][key]["median"] / found["one"][key]["median"] for key in ("wall_s", "cpu_s")}
    print("many", found, flush=True)
    return found


def started(*words: str, where: Path, code: Path | None) -> dict[str, float]:
    """A whole command, video and curve included: seconds to its last step's line, to its end, and of processors."""
    own = os.environ | {"PYTHONUNBUFFERED": "1"} | ({} if code is None else {"PYTHONPATH": str(code)})
    before, began, last, by_then = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0.0, 0.0
    words = (sys.executable, "-m", "grpo", "train", "cartpole", *words, f"--logdir={where}")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=own, cwd=where.parent) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step="):
                last, by_then = time.perf_counter() - began, _cpu_of(process.pid)
    assert process.returncode == 0
    end, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"last_step_wall_s": last, "last_step_cpu_s": by_then, "wall_s": end, "cpu_s": cpu}


def _cpu_of(pid: int) -> float:
    """CPU seconds of a process so far, all its threads together; Linux tells."""
    told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")


def start_part(folder: Path, other: Path | None, repeats: int = 7) -> dict[str, Any]:
    """In turn, also with another checkout's code, whose first runs compile what later ones find."""
    ways = {"compiled": (("--compiled",), None), "ordinary": ((), None)}
    if other is not None:
        ways |= {"compiled_before": (("--compiled",), other), "ordinary_before": ((), other)}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for i in range(-1, repeats):
        for name, (words, code) in ways.items():
            made = started(*words, where=folder / f"{name}-{i}", code=code)
            runs[name] += [made] if i >= 0 else []
    found = {name: {key: quartiles([run[key] for run in made]) for key in made[0]} for name, made in runs.items()}
    for name, told in found.items():
        print("start", name, {key: round(values["median"], 3) for key, values in told.items()}, flush=True)
    return found


def versions() -> dict[str, str]:
    found = {}
    for name in ("jax", "jaxlib", "gymnasium", "gymnax", "rejax", "stable_baselines3", "torch", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--many", type=int, default=256)
    parser.add_argument("--only", nargs="+", default=["steps", "learn", "start", "many"])
    parser.add_argument("--other", type=Path, help="start: a checkout of another version, timed in turn")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = json.loads(given.json.read_text()) if given.json.exists() else {}
    found["machine"] = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    found["versions"] = versions()
    with tempfile.TemporaryDirectory() as place:
        for name in given.only:
            found[name] = {
                "steps": steps_part,
                "learn": lambda: learn_part(given.seeds),
                "start": lambda: start_part(Path(place), given.other),
                "many": lambda: many_part(given.many, Path(place)),
            }[name]()
            given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
