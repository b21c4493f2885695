"""Where the control room's tries come from: groups of episodes, judged and handed over as `Rollouts`.

Letters: F numbers of the network, E tokens of an action.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo.config import ConfigError
from grpo.control.baselines.room import RoomBaseline
from grpo.control.chunks import by_token, paid_together
from grpo.control.config import ROOM_BASELINES, ControlConfig
from grpo.control.episodes import Episodes, learned_from, measured
from grpo.control.evaluate import Evaluator
from grpo.control.films import film
from grpo.control.groups import (
    EXPERT,
    TRAINING,
    TRUNKS,
    expect_anchors,
    inner_groups,
    seeds,
    starts_of,
    tries,
)
from grpo.control.imitate import imitate, shown_by
from grpo.control.parcels import flat, whole
from grpo.control.play import play
from grpo.control.policy import ActorPolicy
from grpo.control.rows import StepRows
from grpo.control.scaling import Scaling
from grpo.control.stream import StepWindows
from grpo.envs.copies import EnvCopies
from grpo.envs.draws import EpisodeDraws, Random
from grpo.envs.episodes import Start
from grpo.envs.fleet import EnvError, Fleet
from grpo.envs.spaces import take
from grpo.errors import warn
from grpo.protocols import Alone, Collected, CollectRequest, Part, Ranks, State, as_part, part
from grpo.rollouts import Rollouts, Status
from grpo.seeding import generator


@dataclass(frozen=True)
class Tried:
    """A step's tries before they are played."""

    starts: list[Any]
    group_N: np.ndarray
    played: Sequence[Start] = ()
    """Where each begins; nothing: they are parts of streams."""
    found: Episodes | None = None
    """Whole episodes that were played to find the starts."""
    random: Random | None = None
    """Where one generator serves all of them."""


class ControlSource:
    """Plays groups of episodes with the policy. It owns the environments, the scaling and, if asked for, a critic."""

    headline = ("return", "episode_length", "env_steps", "eval/return")
    """What a person wants to see first."""

    panels = ("return", "episode_length", "success", "eval/return")
    """What its curves show first."""

    def __init__(
        self,
        policy: ActorPolicy,
        scaling: Scaling,
        fleet: Fleet,
        copies: EnvCopies,
        config: ControlConfig,
    ) -> None:
        self.policy, self.scaling, self.fleet, self.config = policy, scaling, fleet, config
        streams = config.group_by == "steps"
        if streams and fleet.size < config.groups_per_step:
            raise EnvError(
                f"{fleet.name}: group_by=steps needs a copy for each group; set groups_per_step=1, or pass an id"
            )
        if config.group_by == "anchor":
            expect_anchors(fleet.observation_space, fleet.name)
        self.evaluator = Evaluator(policy, scaling, copies, config)
        self.windows = StepWindows(fleet, config) if streams else None
        self.baseline = RoomBaseline(fleet, policy, scaling, config) if config.judged_by in ROOM_BASELINES else None
        self.env_steps, self.episodes = 0, 0
        self.cold = config.warm_start is not None
        """Whether there is an expert that has not been imitated yet."""
        self.ranks: Ranks = Alone()
        """Who shares the episodes; the trainer says."""
        self._began: str | None = None
        """How actions were drawn when the run was saved that this one goes on from."""
        self._metrics: dict[str, float | None] = {}
        self._rows = StepRows()

    # --- a warm start ----------------------------------------------------------------------------------------------

    def warm_up(self) -> dict[str, float | None]:
        """Imitate the expert, once; how good the policy was before and is after it."""
        before = self.evaluator.evaluate().metrics()
        starts = seeds(self.config.seed, 0, EXPERT, self.config.warm_start_episodes)
        shown = shown_by(self.config, self.fleet, self.policy.head, starts)
        logp = imitate(self.policy, self.scaling, shown, self.config)
        after = self.evaluator.evaluate().metrics()
        self.cold, self.env_steps = False, self.env_steps + shown.env_steps
        found: dict[str, float | None] = {"imitated": float(len(shown)), "logp": logp}
        found |= {f"before/{name}": value for name, value in before.items()}
        found |= {f"after/{name}": value for name, value in after.items()}
        return {f"warm_start/{name}": value for name, value in found.items()}

    # --- tries ------------------------------------------------------------------------------------------------------

    @property
    def draws(self) -> str:
        """What actions are drawn with: as it is set, as the run began, or as it begins now."""
        return self.config.draws or self._began or ("episode" if self.ranks.size > 1 else "step")

    def collect(self, request: CollectRequest) -> Collected:
        """A group of tries from each start."""
        if self.windows is None:
            tried = self._tried(request)
            return self._told(tried, request, self._play(tried, request, range(len(tried.played))))
        self.policy.eval()
        random = generator(self.config.seed, request.step, request.attempt)
        episodes, group_N = self.windows.next(self.policy, self.scaling, random)
        return self._told(Tried(list(range(self.config.groups_per_step)), group_N), request, episodes)

    def collect_part(self, request: CollectRequest) -> Part:
        """Some of the episodes; all of them, where they cannot be told apart: then every rank plays alike."""
        if self.windows is not None or self.draws == "step":
            found = self.collect(request)
            return Part(None, found.starts, whole=lambda _: found)
        tried = self._tried(request)
        own = request.slots.of(len(tried.played))
        beside = flat(self._play(tried, request, own)) if own else State({}, {})
        return Part(None, tried.starts, beside, whole=lambda told: self._told(tried, request, whole(told)))

    def _tried(self, request: CollectRequest) -> Tried:
        """What is to be played."""
        config, random = self.config, self._random(request, TRUNKS, range(self.config.groups_per_step))
        self.policy.eval()
        starts, found = (
            starts_of(config, request.step, self.fleet, self.policy, self.scaling, random)
            if request.starts is None
            else (list(request.starts), None)
        )
        played, group_N = tries(config, starts)
        return Tried(starts, group_N, played, found, random)

    def _random(self, request: CollectRequest, stream: int, places: range) -> Random:
        """What is drawn with at these places of the step."""
        key = (self.config.seed, request.step, request.attempt)
        return EpisodeDraws((*key, stream), places) if self.draws == "episode" else generator(*key)

    def _play(self, tried: Tried, request: CollectRequest, own: range) -> Episodes:
        """Of what is to be played, the episodes at these places."""
        random = self._random(request, TRAINING, own) if self.draws == "episode" else tried.random
        keep = self._keeps_old or self.policy.columns.width > 1
        starts = tried.played[own.start : own.stop]
        return play(self.fleet, self.policy, self.scaling, starts, random, self.config.rules, keep_out=keep)

    def _told(self, tried: Tried, request: CollectRequest, episodes: Episodes) -> Collected:
        """Everybody's episodes: counted, judged, handed over."""
        found = tried.found
        self.env_steps += episodes.env_steps + (0 if found is None else found.env_steps)
        first = self._rows.add(episodes, request.attempt, tried.played if self.windows is None else None)
        rollouts = self._rollouts(episodes, tried.group_N, first)
        self._measure(episodes if found is None else found, request.attempt)
        # Pictures would be copied for nothing; and what was imitated was seen in units that have to stay.
        if self.scaling.mean and self.config.warm_start is None:
            self.scaling.update(take(episodes.raw, episodes.mask_NT))
        return Collected(rollouts, tried.starts)

    def note(self, episodes: Episodes) -> int:
        """Episodes that a program has played: counted, measured, kept to be shown; the number of the first row."""
        self.env_steps += episodes.env_steps
        first = self._rows.add(episodes, 0)
        self._measure(episodes, 0)
        return first

    @property
    def _keeps_old(self) -> bool:
        """Whether the exact KL to the policy that sampled is asked for."""
        recipe = self.config.recipe
        return bool(recipe.beta) and recipe.kl_estimator == "exact"

    def _rollouts(self, episodes: Episodes, group_N: np.ndarray, first: int) -> Rollouts:
        """What the algorithm gets of these episodes, whose rows are numbered from `first` on."""
        device, columns = self.policy.device, self.policy.columns
        reward_NT = learned_from(episodes, self.config)
        if self.config.reward_type == "chunk_level":
            reward_NT = paid_together(reward_NT, episodes.length_N, columns.size)

        def tensor(x: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
            return torch.as_tensor(x, dtype=dtype, device=device)

        inputs: dict[str, Any] = {
            "observation": self.policy.tensors(episodes.observation),
            "action": tensor(episodes.action_NT),
            "row": first + torch.arange(len(episodes), device=device)[:, None].expand(episodes.mask_NT.shape),
        }
        if self._keeps_old and episodes.out_NTF is not None:
            with torch.no_grad():
                inputs["old"] = self.policy.head.describe(tensor(episodes.out_NTF))
        status_N = np.full(len(episodes), int(Status.TRUNCATED))
        status_N[episodes.terminated_N] = int(Status.TERMINATED)
        status_N[~episodes.ok_N] = int(Status.FAILED)
        inner_NT = inner_groups(self.config, episodes, group_N)
        baseline_NT = None
        if self.baseline is not None:
            baseline_NT = self.baseline.of(episodes, inputs["observation"], reward_NT, group_N)
        rollouts = Rollouts(
            group_N=tensor(group_N),
            mask_NT=tensor(episodes.mask_NT),
            old_logp_NT=tensor(episodes.logp_NT, torch.float32),
            reward_NT=tensor(reward_NT, torch.float32),
            inputs=inputs,
            group_NT=None if inner_NT is None else tensor(inner_NT),
            baseline_NT=None if baseline_NT is None else tensor(baseline_NT, torch.float32),
            status_N=tensor(status_N),
        )
        if columns.width == 1:
            return rollouts
        with torch.no_grad():
            token_NTE = self.policy.head.token_logp(tensor(episodes.out_NTF), inputs["action"])
        return by_token(rollouts, columns, token_NTE)

    def _measure(self, episodes: Episodes, attempt: int) -> None:
        """Whole episodes as the environment scores them; of starts that are asked for again, only how many."""
        ok_N = episodes.ok_N
        known_N = episodes.success_N[ok_N & ~np.isnan(episodes.success_N)]
        if self.windows is not None:
            finished = self.windows.stream.finished
            self.episodes = self.windows.stream.ended
            found: dict[str, float | None] = {
                "return": float(np.mean([total for total, _ in finished])) if finished else None,
                "episode_length": float(np.mean([length for _, length in finished])) if finished else None,
            }
        else:
            self.episodes += int(ok_N.sum())
            found = measured(episodes)
        found |= {"success": float(known_N.mean())} if len(known_N) else {}
        judged = {} if self.baseline is None else self.baseline.metrics
        found = self._metrics if attempt else found | judged
        self._metrics = found | {"env_steps": float(self.env_steps), "episodes": float(self.episodes)}

    # --- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self, step: int) -> Mapping[str, float | None]:
        """Metrics on starts that training never uses, the same ones every time."""
        return self.evaluator.evaluate(ranks=self.ranks).metrics()

    def leave(self, folder: Path) -> Mapping[str, Path]:
        """A video of the policy on one independent start, for the run folder."""
        if not self.config.video:
            return {}
        path = folder / "video.mp4"
        self.evaluator.watch(1, video=path)
        return {"video": path}

    def film(self, rows: Rollouts, stem: Path) -> list[list[dict[str, str]]]:
        """The episodes of these rows once more, as films beside the samples."""
        if not self.config.films or not self._rows.replayable:
            return []
        tapes = self._rows.tapes(rows, self.policy.head, self.config.action_repeat)
        return film(self.evaluator.copies.single, self.fleet, tapes, stem)

    # --- what must be kept, and what can be seen --------------------------------------------------------------------

    def state(self) -> State:
        """Counters, scaling, critic, a module's buffers, streams under way; other episodes begin anew every step."""
        values: dict[str, Any] = {"env_steps": self.env_steps, "episodes": self.episodes, "count": self.scaling.count}
        values |= {"cold": self.cold, "way": self.policy.way, "draws": self.draws}
        parts: dict[str, Mapping[str, Any]] = {"scaling": self.scaling.arrays()}
        parts["buffer"] = {name: x.detach().clone() for name, x in self.policy.network.named_buffers()}
        if self.baseline is not None:
            parts |= self.baseline.parts()
        if self.windows is not None:
            values["streams"], parts["streams"] = self.windows.values(), self.windows.arrays()
        named = {key: x for name, arrays in parts.items() for key, x in as_part(name, arrays).items()}
        return State(values, {key: torch.as_tensor(x) for key, x in named.items()})

    def expect_way(self, values: Mapping[str, Any]) -> None:
        """Refuse weights that were learned for pictures read another way: they would fit, and see something else."""
        if values.get("way", 0) != self.policy.way:
            raise ConfigError(
                "the checkpoint is of a policy that reads pictures another way (an earlier version's, or an actor of "
                "your own); train anew, or pass that actor"
            )

    def load_state(self, state: State) -> None:
        """Go on from there."""
        self.env_steps, self.episodes = int(state.values["env_steps"]), int(state.values["episodes"])
        self.cold = bool(state.values.get("cold", False))
        first, self._began = self._began is None, str(state.values.get("draws", "step"))
        if first and self.draws != self._began and self.ranks.chief and self.windows is None:
            warn(
                f"draws={self.draws}: the run was saved with draws={self._began}, so its numbers are others from here "
                "on; it stays so when it is gone on with again"
            )
        elif self.ranks.size > 1 and self.ranks.chief and self.windows is None and self.draws == "step":
            warn(
                "the run drew all actions of a step with one generator when it was saved, and goes on so: every rank "
                "plays all episodes; --draws episode divides them, with other numbers from here on"
            )
        kept = {name: np.asarray(x) for name, x in state.arrays.items()}
        self.scaling.load(float(state.values["count"]), part(kept, "scaling"))
        buffers = part(kept, "buffer")
        for name, buffer in self.policy.network.named_buffers():
            buffer.copy_(torch.as_tensor(buffers[name]))
        if self.baseline is not None:
            self.baseline.load(kept)
        if self.windows is not None:
            self.windows.load(state.values["streams"], part(kept, "streams"))

    def metrics(self) -> Mapping[str, float | None]:
        """Of the episodes collected last."""
        return self._metrics

    @torch.no_grad()
    def entropies(self, rows: Rollouts) -> torch.Tensor | None:
        """Of each action, by the policy as it is now."""
        self.policy.eval()
        return self.policy.score(rows, entropy=True).entropy_NT

    def show(self, rows: Rollouts) -> list[dict[str, Any]]:
        """Actions, rewards, length of each row, what was seen if it is little, and what went wrong with it."""
        return self._rows.show(rows)

    def close(self) -> None:
        """End the environments and their processes."""
        self.fleet.close()
        self.evaluator.copies.close()
