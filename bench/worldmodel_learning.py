"""Environment steps until a task is learned in imagination: each kind of actor on the same world model, a seed a cell.

    python bench/worldmodel_learning.py --actors group,critic --seeds 0,1,2
    python bench/worldmodel_learning.py --env Pendulum-v1 --stop-at -300 --env-steps 10000
    python bench/worldmodel_learning.py --task reacher --actors random,group,critic --seeds 0
    python bench/worldmodel_learning.py --task reacher --name reacher_scaled --set scale_observations=true
    python bench/worldmodel_learning.py --task cup --name cup_limited --set scale_observations=true --set max_std=1
    python bench/worldmodel_learning.py --task image --actors random,group --seeds 0 --device cuda
    python bench/worldmodel_learning.py --task image --draw
    python bench/worldmodel_learning.py --suite --page docs/worldmodel.md

A cell is the preset `dreamer` with the task's settings, on one thread. Every so many environment steps, greedy episodes
are played on starts that training never uses; a cell is over when their score is `--stop-at` and as many episodes on
starts that nobody has looked at confirm it, or after `--env-steps`, prefill included. The score is the mean return, or
with `--success-above` the share of episodes that return more than that; where there is nothing to stop at,
`drawn` is the mean return of as many episodes whose actions are drawn rather than the likeliest. `played` is that of
the last twenty that were learned from. Seconds are CPU seconds of the process and seconds of the clock, evaluations
included. `control` is the control room's preset `cartpole`, judged the same way; `random` draws every action evenly.
Cells that are in the file already are not run again; several processes may add to one file. Writes worldmodel_NAME.json
to bench/results or `--out`, after every look; where observations are pictures, also what the world model predicted.
`--draw` runs nothing and makes the curves and the film of what is there; `--suite` neither, and prints the table of the
tasks of the DeepMind control suite, which `--page` puts into a page with its picture.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pages import put_into

from grpo.app.builders import configs
from grpo.app.look import FRESH
from grpo.app.settings import flag_layer, preset_layer, resolve

RESULTS = Path(__file__).parent / "results"
SUITE = {"swingup": "cartpole-swingup", "cup": "ball_in_cup-catch", "reacher": "reacher-easy", "walker": "walker-walk"}
"""The tasks that share a table and a picture."""
WAYS = {"": "", "_held": ", max_std=1", "_scaled": ", scaled observations", "_limited": ", scaled, max_std=1"}
"""What a task was run with, as file names have it and as the table says it."""
LOOKS = 5
"""Looks that are averaged beside the last one: a look is twenty episodes, and a policy changes between them."""
TASKS: dict[str, dict[str, Any]] = {
    "cartpole": {"env": "CartPole-v1", "env_steps": 10_000, "stop_at": 475.0, "every": 250, "episodes": 20},
    "swingup": {"env": "dm_control/cartpole-swingup-v0", "env_steps": 20_000, "every": 2000, "episodes": 20},
    "walker": {"env": "dm_control/walker-walk-v0", "env_steps": 20_000, "every": 2000, "episodes": 20},
    "reacher": {"env": "dm_control/reacher-easy-v0", "env_steps": 20_000, "every": 2000, "episodes": 20},
    "cup": {"env": "dm_control/ball_in_cup-catch-v0", "env_steps": 20_000, "every": 2000, "episodes": 20},
    "image": {
        "env": "MiniGrid-Empty-Random-6x6-v0", "env_steps": 10_000, "stop_at": 0.9, "every": 500, "episodes": 50,
        "success_above": 0.0,
    },
}  # fmt: skip
SPARSE = {"vector": "serial", "action_repeat": "4", "size": "0.5m", "horizon": "16", "scale": "none"}
SETTINGS: dict[str, dict[str, str]] = {
    "cartpole": {},
    "swingup": {"vector": "serial", "action_repeat": "8", "size": "0.5m", "horizon": "16"},
    "walker": {"vector": "serial", "action_repeat": "4", "size": "0.5m", "horizon": "16"},
    "reacher": SPARSE | {"entropy_coef": "3e-4"},
    "cup": SPARSE | {"entropy_coef": "3e-4"},
    "image": {
        "pixels": "true", "vector": "serial", "max_episode_steps": "30", "size": "0.5m", "batch_size": "8",
        "batch_length": "16", "train_ratio": "32", "horizon": "12", "prefill": "1000", "scale": "none",
        "entropy_coef": "1e-3",
    },
}  # fmt: skip
"""What each task changes in the preset. Actions are held, as PlaNet (arXiv 1811.04551) does; where
rewards are sparse, returns are not divided by the batch's deviation, which makes noise of nothing."""


def made(actor: str, env: str, seed: int, device: str, settings: dict[str, str]) -> Any:
    """The trainer of a cell."""
    if actor == "control":
        layers = [preset_layer("cartpole"), flag_layer([("seed", str(seed))])]
    else:
        own = {"env": env, "actor": "group" if actor == "random" else actor, "seed": str(seed), "device": device}
        layers = [preset_layer("dreamer"), flag_layer([*own.items(), *settings.items()])]
    resolved = resolve(layers, configs())
    return configs()[resolved.task].trainer(resolved.config)


class Task:
    """What a cell is judged by."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.env_steps, self.every, self.episodes = a.env_steps, a.every, a.episodes
        self.stop_at, self.success_above, self.minutes = a.stop_at, a.success_above, a.minutes
        self.through = a.through

    def scored(self, return_E: np.ndarray) -> dict[str, float]:
        """Mean return, and the share of successes where they are told by the return."""
        found = {"return": float(return_E.mean()), "return_std": float(return_E.std())}
        if self.success_above is not None:
            found["success"] = float((return_E > self.success_above).mean())
        return found

    def good(self, found: dict[str, float]) -> bool:
        """Whether that is enough."""
        return self.stop_at is not None and found.get("success", found["return"]) >= self.stop_at


def learned(trainer: Any, task: Task, tell: Any) -> dict[str, Any]:
    """Train one cell; its curve and what it came to. `tell` gets what there is after each look."""
    began, used, due, solved = time.perf_counter(), time.process_time(), task.every, None
    curve: list[dict[str, float]] = []

    def judged(fresh: bool = False) -> dict[str, float]:
        seed = trainer.config.seed + FRESH if fresh else None
        found = task.scored(trainer.evaluate(task.episodes, seed=seed).return_E)
        if task.stop_at is None:
            found["drawn"] = float(trainer.evaluate(task.episodes, greedy=False, seed=seed).return_E.mean())
        return found

    while True:
        report = trainer.step()
        late = time.perf_counter() - began > 60 * task.minutes
        if report["env_steps"] < due and report["env_steps"] < task.env_steps and not late:
            continue
        due = report["env_steps"] + task.every
        found = judged()
        spent = {"cpu_s": time.process_time() - used, "wall_s": time.perf_counter() - began}
        curve.append({"env_steps": report["env_steps"], **found, "played": report["return"], **spent})
        shown = "  ".join(f"{name} {value:8.2f}" for name, value in found.items())
        print(f"  {report['env_steps']:6.0f} steps  {shown}  {spent['wall_s']:6.0f} s", flush=True)
        if task.good(found) and solved is None:
            fresh = judged(fresh=True)
            if task.good(fresh):
                solved = {**curve[-1], "fresh": fresh.get("success", fresh["return"])}
        enough = solved is not None and not task.through
        over = enough or report["env_steps"] >= task.env_steps or late
        cell = {"solved": solved, "wall_s": spent["wall_s"], "whole": over, "curve": curve}
        if over:
            return cell | {"final": judged(fresh=True)}
        tell(cell)


def idled(trainer: Any, task: Task) -> dict[str, Any]:
    """Actions drawn evenly, on the same starts."""
    from grpo.worldmodel.evaluate import starts

    fleet = trainer.source.copies.fleet(task.episodes)
    seeds = starts(trainer.config.seed + FRESH, task.episodes)
    space, total_E = fleet.action_space, np.zeros(task.episodes)
    space.seed(trainer.config.seed)
    fleet.reset(np.arange(task.episodes), seeds)
    live = np.arange(task.episodes)
    while len(live):
        stepped = fleet.step(live, np.stack([space.sample() for _ in live]))
        total_E[live] += stepped.reward_M
        live = live[~(stepped.terminated_M | stepped.truncated_M)]
    return {"solved": None, "wall_s": 0.0, "whole": True, "curve": [], "final": task.scored(total_E)}


# --- what is kept ---------------------------------------------------------------------------------------------------


def keep(path: Path, about: dict[str, Any], cell: dict[str, Any]) -> None:
    """Put a cell into the file, in place of what was there of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (Path(tempfile.gettempdir()) / f"{path.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = read(path) | about
        kept["cells"] = [other for other in kept["cells"] if key(other) != key(cell)] + [cell]
        kept["cells"].sort(key=lambda one: (one["actor"], one["seed"]))
        written = path.with_suffix(".tmp")
        written.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        written.replace(path)


def read(path: Path) -> dict[str, Any]:
    """The file as it is."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": []}
    return found


def key(cell: dict[str, Any]) -> tuple[Any, ...]:
    """What makes a cell another one."""
    return cell["actor"], cell["seed"], tuple(sorted(cell["settings"].items()))


def keep_forecast(trainer: Any, path: Path) -> None:
    """What the world model predicts of replayed sequences, where they are pictures: for the film."""
    from grpo.worldmodel.show import MOST_SIDE_BY_SIDE, forecasts

    source = trainer.source
    found = forecasts(source.learner, source.replay.peek(16, 0), torch.Generator().manual_seed(0))
    film = next((f for f in found.values() if f.truth.ndim == 5), None)
    if film is not None:
        parts = {name: getattr(film, name)[:MOST_SIDE_BY_SIDE] for name in ("truth", "prediction", "error")}
        np.savez_compressed(path, **{name: x.cpu().numpy() for name, x in parts.items()})


# --- what is drawn --------------------------------------------------------------------------------------------------


def called(cell: dict[str, Any]) -> str:
    """What a cell is about."""
    return " ".join([cell["actor"], *(f"{name}={value}" for name, value in cell["settings"].items())])


def draw(cells: list[dict[str, Any]], path: Path, env: str) -> None:
    """All curves in one picture; chance is a level."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, kinds = figure.add_subplot(), list(dict.fromkeys(map(called, cells)))
    for cell in cells:
        kind = called(cell)
        look: dict[str, Any] = {
            "color": f"C{kinds.index(kind)}",
            "label": kind if cell["seed"] == 0 else None,
            "linewidth": 1,
        }
        measure = "success" if "success" in cell.get("final", {}) else "return"
        points = [(point["env_steps"], point[measure]) for point in cell["curve"]]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", **look)
        else:
            axes.axhline(cell["final"][measure], linestyle=":", **look)
    axes.set_xlabel("environment steps (decisions)")
    axes.set_ylabel(f"greedy {measure}, {env}")
    axes.set_xscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def draw_suite(folder: Path, path: Path) -> None:
    """Greedy and drawn return of each task against decisions, a line a seed; chance is a level."""
    from matplotlib.figure import Figure

    colours = {("group", ""): "tab:blue", ("critic", ""): "tab:orange", ("group", "_held"): "tab:cyan",
               ("group", "_scaled"): "tab:green", ("group", "_limited"): "tab:purple"}  # fmt: skip
    found = {
        task: [(cell, way) for way in WAYS for cell in read(folder / f"worldmodel_{task}{way}.json")["cells"]]
        for task in SUITE
    }
    figure = Figure(figsize=(9, 5), layout="constrained")
    for row, (measure, said) in zip(
        figure.subplots(2, len(found), sharex=True, sharey=True),
        {"return": "greedy", "drawn": "drawn"}.items(),
        strict=True,
    ):
        for axes, (task, cells) in zip(row, found.items(), strict=True):
            for cell, way in cells:
                if colour := colours.get((cell["actor"], way)):
                    points = [(point["env_steps"] / 1000, point[measure]) for point in cell["curve"]]
                    axes.plot(*zip(*points, strict=True), marker=".", lw=1.1, color=colour, alpha=0.8)
                elif cell["actor"] == "random":
                    axes.axhline(cell["final"]["return"], color="black", lw=0.9, ls=":")
            axes.grid(alpha=0.3)
            if measure == "return":
                axes.set_title(SUITE[task], fontsize=10)
            else:
                axes.set_xlabel("thousand decisions")
        row[0].set_ylabel(f"return, {said} actions")
    for (actor, way), colour in colours.items():
        figure.axes[0].plot([], [], color=colour, label=f"{actor}{WAYS[way]}")
    figure.axes[0].plot([], [], color="black", lw=0.9, ls=":", label="drawn evenly")
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def draw_film(path: Path) -> None:
    """What was predicted, as forecast.mp4 has it."""
    from grpo.envs.video import write_video
    from grpo.worldmodel.model.world_model import Forecast
    from grpo.worldmodel.show import FPS, _film

    with np.load(path) as kept:
        film = _film(Forecast(*(kept[name] for name in ("truth", "prediction", "error"))))
    write_video(film, path.with_suffix(".mp4"), FPS)


def table(folder: Path) -> str:
    """Markdown: what each seed came to, on fresh starts at the end and as a mean of the last looks.

    `worldmodel_TASK_held.json` is the same with `max_std`, `…_scaled.json` with `scale_observations`, `…_limited.json`
    with both, as far as they were run.
    """
    looks = [f"{name}, last {LOOKS} looks" for name in ("greedy", "drawn")]
    names = ["task", "actor", "greedy", "drawn", *looks, "decisions"]
    lines = [f"| {' | '.join(names)} |", "|---|---|" + "--:|" * (len(names) - 2)]
    for task in SUITE:
        kinds = {way: read(folder / f"worldmodel_{task}{way}.json")["cells"] for way in WAYS}
        rows = [(way, actor, f"{actor}{said}") for way, said in WAYS.items() for actor in ("group", "critic")]
        for way, actor, said in rows:
            cells = sorted((c for c in kinds[way] if c["actor"] == actor), key=lambda cell: int(cell["seed"]))
            if not cells:
                continue
            columns = [[cell["final"][name] for cell in cells] for name in ("return", "drawn")]
            for name in ("return", "drawn"):
                columns.append([np.mean([point[name] for point in cell["curve"][-LOOKS:]]) for cell in cells])
            columns.append([cell["curve"][-1]["env_steps"] for cell in cells])
            texts = [", ".join(f"{x:.0f}" for x in column) for column in columns]
            lines.append(f"| {SUITE[task]} | {said} | {' | '.join(texts)} |")
        chance = [f"{cell['final']['return']:.0f}" for cell in kinds[""] if cell["actor"] == "random"]
        lines += [f"| {SUITE[task]} | drawn evenly | – | {x} | – | – | – |" for x in chance]
    return "\n".join(lines) + "\n"


def tell_suite(folder: Path, page: Path | None) -> None:
    """The table of the control suite; into a page with its picture."""
    files = {task: folder / f"worldmodel_{task}.json" for task in SUITE}
    if missing := [str(path) for path in files.values() if not path.exists()]:
        raise SystemExit(f"{missing[0]} is not there; measure it first, with --task")
    made = table(folder)
    print(made, end="")
    if page is not None:
        picture = page.parent / "figures" / "worldmodel-suite.png"
        shown = f"![greedy and drawn return, a line a seed](figures/{picture.name})"
        put_into(page, "worldmodel_learning.py", f"{made}\n{shown}\n")
        draw_suite(folder, picture)


def told(cell: dict[str, Any]) -> str:
    """A line for a person."""
    solved, final = cell["solved"], cell.get("final", {})
    said = f"{solved['env_steps']:.0f} steps, {solved['cpu_s']:.0f} s" if solved else "not reached"
    ended = "  ".join(f"{name} {value:.3g}" for name, value in final.items())
    return f"{called(cell)}, seed {cell['seed']}: {said}; at the end {ended}, {cell['wall_s']:.0f} s"


def main() -> None:
    """Run what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, help="an environment with its settings and limits")
    parser.add_argument("--env", help="another environment (CartPole-v1)")
    parser.add_argument("--name", help="of the result (the task's or environment's)")
    parser.add_argument("--actors", default="group,critic", help="of group, bootstrap, critic, control, random")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--env-steps", type=int)
    parser.add_argument("--stop-at", type=float)
    parser.add_argument("--success-above", type=float, help="a return above which an episode is a success")
    parser.add_argument("--every", type=int, help="environment steps between looks")
    parser.add_argument("--episodes", type=int, help="of a look")
    parser.add_argument("--minutes", type=float, default=1e9, help="of the clock that a cell may take")
    parser.add_argument("--through", action="store_true", help="go on to the end, whatever is reached")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results go")
    parser.add_argument("--draw", action="store_true", help="run nothing, draw what is there")
    parser.add_argument("--suite", action="store_true", help=f"run nothing, print the table of {', '.join(SUITE)}")
    parser.add_argument("--page", type=Path, metavar="MD", help="write that table into this page, between its marks")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the preset")
    a = parser.parse_args()
    if a.suite:
        tell_suite(a.out, a.page)
        return
    chosen = a.task or "cartpole"
    for name, value in (TASKS[chosen] | {"success_above": TASKS[chosen].get("success_above")}).items():
        given = getattr(a, name)
        setattr(a, name, value if given is None else given)
    torch.set_num_threads(1)
    path = a.out / f"worldmodel_{a.name or a.task or a.env.split('-')[0].split('/')[-1].lower()}.json"
    flags = {name: value for name, _, value in (item.partition("=") for item in a.set)}
    done = {key(cell) for cell in read(path)["cells"] if cell.get("whole", True)}
    chip = torch.cuda.get_device_name() if a.device == "cuda" else platform.processor() or platform.machine()
    about = {
        "env": a.env,
        "env_steps": a.env_steps,
        "machine": {"chip": chip, "cores": os.cpu_count()},
        "versions": {name: metadata.version(name) for name in ("torch", "gymnasium", "numpy")},
        "stop_at": a.stop_at,
        "task": SETTINGS[chosen],
    }
    for seed in map(int, a.seeds.split(",")):
        for actor in () if a.draw else a.actors.split(","):
            cell = {"actor": actor, "seed": seed, "settings": flags}
            if key(cell) in done:
                continue
            print(f"{a.env}, {actor}, seed {seed}", flush=True)
            trainer, task = made(actor, a.env, seed, a.device, SETTINGS[chosen] | flags), Task(a)
            if actor == "random":
                found = idled(trainer, task)
            else:
                found = learned(trainer, task, lambda found, cell=cell: keep(path, about, {**cell, **found}))
                if actor != "control":
                    keep_forecast(trainer, path.with_name(f"{path.stem}_{actor}_{seed}.npz"))
            trainer.source.close()
            keep(path, about, {**cell, **found})
    kept = read(path)
    if a.draw:
        draw(kept["cells"], path.with_suffix(".png"), kept["env"])
        for film in path.parent.glob(f"{path.stem}_*.npz"):
            draw_film(film)
    for cell in kept["cells"]:
        print(told(cell))


if __name__ == "__main__":
    main()
