"""Why a pole that is balanced in imagination is not balanced for good: what the model knows of the ends of the track.

    python bench/worldmodel_edges.py --starts usual,ends --seeds 0,1,2     # four minutes of one core a cell

The preset `dreamer` on CartPole to 10,000 environment steps, on one thread, twenty greedy episodes on usual starts
every 250. At the first three looks that are bad after a good one, of the episodes that ended: where, with which
angle; how far off the decoder is about where the cart stands, by where it stands; and, from states so many steps
before the end, how likely the model holds an end within 32 steps when the policy goes on, beside the share of the
same actions that end there in the environment, and how far out 16 of the actions lead in both. `ends` changes one
thing: half of the episodes that are learned from begin near an end of the track, moving towards it. Writes
bench/results/worldmodel_edges.json after every cell, and the table into docs/worldmodel.md; what is there is not run
again.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any, ClassVar

import cells
import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.classic_control import CartPoleEnv
from pages import put_into

from grpo.envs.spaces import put, zeros
from grpo.worldmodel import GRPOTrainer
from grpo.worldmodel.evaluate import Players, starts
from grpo.worldmodel.model.rssm import Latent

RESULTS = Path(__file__).parent / "results" / "worldmodel_edges.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "worldmodel.md"
END, EVERY, EPISODES, GOOD = 10_000, 250, 20, 475.0
BANDS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.4)
BEFORE, TRIES, HORIZON, HALF = (4, 8, 16, 24, 32), 16, 32, 16
STARTS = {"usual": "usual", "ends": "half at the ends"}
LOOKED_INTO = 3
"""Bad looks."""


class Track(CartPoleEnv):
    """CartPole whose episodes may begin near the ends of the track; counts what is seen of them."""

    at_ends: ClassVar[bool] = False
    learning: ClassVar[bool] = False
    off: ClassVar[int] = 0
    """Episodes that were learned from and ended off the track."""

    def step(self, action: int) -> Any:
        found = super().step(action)
        Track.off += Track.learning and bool(abs(found[0][0]) > 2.4)
        return found

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        seen, info = super().reset(seed=seed, options=options)
        if Track.at_ends and self.np_random.random() < 0.5:
            side, place, speed = self.np_random.choice([-1, 1]), *self.np_random.uniform([1.8, 0.0], [2.4, 1.5])
            self.state = np.array([side * place, side * speed, *seen[2:]])
            seen = self.state.astype(np.float32)
        return seen, info


gym.register("Track-v0", entry_point=Track, max_episode_steps=500)


def learned(seed: int, at_ends: bool, settings: dict[str, str]) -> dict[str, Any]:
    """One cell: its curve, and what was found where it fell."""
    trainer = GRPOTrainer(env="Track-v0", vector="serial", seed=seed, device="cpu", **settings)
    curve: list[tuple[int, float]] = []
    falls: list[dict[str, Any]] = []
    Track.off = 0
    while not curve or curve[-1][0] < END:
        Track.at_ends, Track.learning = at_ends, True
        steps = int(trainer.step()["env_steps"])
        if steps < (curve[-1][0] if curve else 250) + EVERY:
            continue
        Track.at_ends = Track.learning = False
        tapes = played(trainer)
        curve.append((steps, float(np.mean([len(tape["action"]) for tape in tapes]))))
        print(f"  {steps} {curve[-1][1]:.0f}", flush=True)
        if curve[-1][1] < GOOD <= max(found for _, found in curve) and len(falls) < LOOKED_INTO:
            falls.append(
                {
                    "env_steps": steps,
                    "seen_off_the_track": Track.off,
                    **fallen(trainer, [tape for tape in tapes if "end" in tape]),
                }
            )
    trainer.source.close()
    about = {"seed": seed, "starts": STARTS["ends" if at_ends else "usual"], "settings": settings}
    return about | {"curve": curve, "falls": falls}


def key(cell: dict[str, Any]) -> tuple[bool, list[tuple[str, str]], int]:
    """What makes a cell another one, and where it stands."""
    return cell["starts"] != STARTS["usual"], list(cell["settings"].items()), cell["seed"]


@torch.no_grad()
def played(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    """Greedy episodes on usual starts: what was seen, done and believed in each, and where it ended if it did."""
    source = trainer.source
    fleet = source.copies.fleet(EPISODES)
    players = Players(source.view, source.model, source.policy, EPISODES, True, 0)
    seen = fleet.reset(np.arange(EPISODES), starts(trainer.config.seed, EPISODES)).observation
    tapes: list[dict[str, Any]] = [{"seen": [], "action": [], "latent": [], "painted": []} for _ in range(EPISODES)]
    live = np.arange(EPISODES)
    while len(live):
        action, latent = players.decide(seen), players._eyes.latent
        (painted,) = source.model.decoder.observations(source.model.decoder(latent.deter, latent.stoch)).values()
        for e in live:
            tapes[e]["seen"].append(np.array(seen[e]))
            tapes[e]["action"].append(int(action[e]))
            tapes[e]["latent"].append(Latent(latent.deter[e].clone(), latent.stoch[e].clone()))
            tapes[e]["painted"].append(float(painted[e, 0]))
        stepped = fleet.step(live, action[live])
        seen = zeros(fleet.observation_space, EPISODES)
        put(seen, live, stepped.observation)
        for row in np.flatnonzero(stepped.terminated_M):
            tapes[live[row]]["end"] = np.array(stepped.observation[row])
        live = live[~(stepped.terminated_M | stepped.truncated_M)]
    return tapes


def fallen(trainer: GRPOTrainer, tapes: list[dict[str, Any]]) -> dict[str, Any]:
    """What the model knew of episodes that ended."""
    place = np.array([seen[0] for tape in tapes for seen in tape["seen"]])
    error = np.array([x for tape in tapes for x in tape["painted"]]) - place
    off = {}
    for low, high in itertools.pairwise(BANDS):
        inside = (abs(place) >= low) & (abs(place) < high)
        off[f"{low}-{high}"] = float(np.sqrt((error[inside] ** 2).mean())) if inside.any() else None
    near = [_foreseen(trainer, tapes, before) for before in BEFORE]
    ends = [tape["end"] for tape in tapes]
    return {
        "ended": len(tapes),
        "off_the_track": sum(bool(abs(end[0]) > 2.4) for end in ends),
        "largest_angle": float(max(abs(end[2]) for end in ends)),
        "decoder_off": off,
        "end_within_32": {str(before): one for before, one in zip(BEFORE, near, strict=True)},
    }


@torch.no_grad()
def _foreseen(trainer: GRPOTrainer, tapes: list[dict[str, Any]], before: int) -> dict[str, float] | None:
    """So many steps before the end: how likely the model holds an end within the horizon, and how often it came."""
    rows = [(tape["seen"][-before], tape["latent"][-before]) for tape in tapes if len(tape["action"]) > before]
    if not rows:
        return None
    start = Latent(torch.stack([one.deter for _, one in rows]), torch.stack([one.stoch for _, one in rows]))
    dreamt = trainer.source._imagination(start, TRIES, HORIZON, torch.Generator().manual_seed(1))
    model = 1 - dreamt.continue_NH.prod(1)
    came, gone = zip(
        *(
            rolled(rows[n // TRIES][0], actions)
            for n, actions in enumerate(dreamt.action_NH.reshape(len(model), HORIZON).tolist())
        ),
        strict=True,
    )
    (painted,) = trainer.source.model.decoder.observations(
        trainer.source.model.decoder(dreamt.latent.deter, dreamt.latent.stoch)
    ).values()
    moved = (painted[:, HALF, 0] - painted[:, 0, 0]).mul(
        torch.tensor([np.sign(row[0][0]) for row in rows for _ in range(TRIES)])
    )
    return {
        "model": float(model.mean()),
        "environment": float(np.mean(came)),
        "model_moves": float(moved.mean()),
        "environment_moves": float(np.mean(gone)),
    }


def rolled(seen: np.ndarray, actions: list[int]) -> tuple[bool, float]:
    """Whether these actions end the episode, from what is seen of a state, and how far out they go in half of them."""
    env = CartPoleEnv()
    env.reset(seed=0)
    env.state = seen.astype(np.float64)
    path = []
    for action in actions:
        env.steps_beyond_terminated = None  # it goes on beyond the end, to see where to
        path.append(env.step(int(action)))
    return any(step[2] for step in path), float((path[HALF - 1][0][0] - seen[0]) * np.sign(seen[0]))


def table(found: list[dict[str, Any]]) -> str:
    """A row a cell."""
    heads = (
        "starts", "seed", "first good look", "good looks from there on", "ended off the track, of those looked into",
        "such ends seen in learning", "an end within 32 steps, 8 before it: model, environment",
        "moved by 16 actions, 32 before it: model, environment",
    )  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for cell in found:
        good = [value >= GOOD for _, value in cell["curve"]]
        first = good.index(True) if any(good) else len(good)
        falls = cell["falls"]
        near, far = ([one for fall in falls if (one := fall["end_within_32"][before])] for before in ("8", "32"))
        texts = [
            ", ".join([cell["starts"], *(f"`{name}={value}`" for name, value in cell["settings"].items())]),
            str(cell["seed"]),
            f"{cell['curve'][first][0]:,}" if first < len(good) else "never",
            f"{sum(good[first:])} of {len(good[first:])}",
            f"{sum(fall['off_the_track'] for fall in falls)} of {sum(fall['ended'] for fall in falls)}",
            ", ".join(str(fall["seen_off_the_track"]) for fall in falls),
            "; ".join(f"{one['model']:.2f}, {one['environment']:.2f}" for one in near),
            "; ".join(f"{one['model_moves']:.2f}, {one['environment_moves']:.2f}" for one in far),
        ]
        lines.append(f"| {' | '.join(texts)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", default="usual,ends")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, in every cell")
    a = parser.parse_args()
    settings = dict(word.split("=", 1) for word in a.set)
    torch.set_num_threads(1)
    for kind in a.starts.split(","):
        for seed in map(int, a.seeds.split(",")):
            there = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"cells": []}
            if any(key(cell) == (kind != "usual", list(settings.items()), seed) for cell in there["cells"]):
                continue
            print(f"{kind}, seed {seed}", flush=True)
            cell = learned(seed, kind == "ends", settings)
            there = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"cells": []}
            kept = sorted([*there["cells"], cell], key=key)
            about = {"machine": cells.machine("cpu"), "versions": cells.versions(), "cells": kept}
            RESULTS.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    if RESULTS.exists():
        put_into(PAGE, Path(__file__).name, table(json.loads(RESULTS.read_text(encoding="utf-8"))["cells"]) + "\n")


if __name__ == "__main__":
    main()
