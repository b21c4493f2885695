"""A run whose start was kept: the trainer and source that a command needs of it, without PyTorch, Gymnasium or JAX.

    start from the disk ─► weights, moments, scaling as NumPy arrays ─► its programs, step by step ─► the same metrics,
                           samples and checkpoints as the room's own trainer leaves (`grpo.control.compiled.room`)

That trainer is asked for whatever else there is: to go on with a run, to evaluate it another way, to export it.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from grpo.agreement import here
from grpo.control.compiled import record, starts
from grpo.control.compiled.plain import PlainHead, PlainPolicy
from grpo.control.compiled.starts import Start
from grpo.control.compiled.weights import Weights, flat
from grpo.control.config import ControlConfig
from grpo.control.episodes import Episodes, measured
from grpo.control.rows import StepRows
from grpo.errors import warn
from grpo.protocols import Alone, Phase, State, as_part, no_phase, part
from grpo.report import StepReport, nonfinite_in_a_row, reward_metrics
from grpo.rollouts import Rollouts, Scores
from grpo.run.runs import Runs


def prepared(config: ControlConfig) -> Prepared | None:
    """A trainer of these settings, where their start was kept; None: it has to be made."""
    if not config.compiled or here().size > 1:
        return None
    start = starts.read(starts.key(config))
    if start is None:
        return None
    with suppress(Exception):  # of a file that an older version left, or of another JAX: the other way knows better
        return Prepared(config, start)
    return None


class PreparedSource:
    """What the run asks of where its tries come from."""

    headline = ("return", "episode_length", "env_steps", "eval/return")
    panels = ("return", "episode_length", "success", "eval/return")

    def __init__(self, config: ControlConfig, policy: Callable[[], PlainPolicy], video: int) -> None:
        self._config, self._policy, self._video, self._rows = config, policy, video, StepRows()
        self.env_steps, self.episodes = 0, 0
        self.scale: Any = None
        """Running scaling of observations: count, mean and mean square, where they are scaled."""
        self._metrics: dict[str, float | None] = {}

    def note(self, played: Episodes) -> int:
        """Episodes that a program has played: counted, measured, kept to be shown; the number of the first row."""
        self.env_steps, self.episodes = self.env_steps + played.env_steps, self.episodes + int(played.ok_N.sum())
        counted: dict[str, float | None] = {"env_steps": float(self.env_steps), "episodes": float(self.episodes)}
        self._metrics = measured(played) | counted
        return self._rows.add(played, 0)

    def metrics(self) -> Mapping[str, float | None]:
        """Of the episodes played last."""
        return self._metrics

    def show(self, rows: Rollouts) -> list[dict[str, Any]]:
        """Actions, rewards and what was seen."""
        return self._rows.show(rows)

    def entropies(self, rows: Rollouts) -> np.ndarray:
        """Of each action, by the policy as it is now."""
        entropy_NT = np.zeros(rows.mask_NT.shape, np.float32)
        entropy_NT[rows.mask_NT] = self._policy().entropy(rows.inputs["observation"][rows.mask_NT])
        return entropy_NT

    def leave(self, folder: Path) -> Mapping[str, Path]:
        """A video of the policy on one independent start."""
        if not self._config.video:
            return {}
        from grpo.control.evaluate import watch  # here: it loads Gymnasium, after the last step was told
        from grpo.control.scaling import Scaling
        from grpo.envs.make import EnvFactory

        config, path = self._config, folder / "video.mp4"
        factory = EnvFactory(config.env, config.env_kwargs, config.max_episode_steps)
        scaling = Scaling(factory.make().observation_space, config.scale_observations)
        if self.scale is not None:
            scaling.load(self.scale[0], {"mean/": self.scale[1], "square/": self.scale[2]})
        policy: Any = self._policy()
        watch(factory, policy, scaling, config.rules, [self._video], video=path)
        return {"video": path}

    def close(self) -> None:
        """Nothing is open."""


class _Pace:
    """Nothing is asked for ahead of its step."""

    until = 0

    def measures(self) -> dict[str, float]:
        """Of what nobody waits for."""
        return {}


class Prepared(Runs):
    """The room's trainer, as far as a run by command asks it."""

    task, measure, evaluates_every = "control", "return", 5
    commands = ("view", "eval", "export")
    config: ControlConfig

    def __init__(self, config: ControlConfig, start: Start) -> None:
        from grpo.control.compiled.loaded import Loaded, expect_solvers

        self.config, self.recipe, self._start = config, config.recipe, start
        self.phase: Phase = no_phase
        self.steps_done, self.ranks, self.pace, self.hooks = 0, Alone(), _Pace(), ()
        self.run_folder: Any = None
        values, arrays = start.values, start.arrays
        self._facts = record.Facts(**values["facts"], group_N=arrays["group_N"])
        self._weights = Weights(tuple((name, tuple(shape)) for name, shape in values["shapes"]))
        self._head = PlainHead(values["head"], part(arrays, "head"))
        self._starts = [arrays[f"starts/{i}"] for i in range(len(part(arrays, "starts")))]
        self._key = arrays["key"]
        self._adam: list[Any] = []
        """Weights, moments, steps that were taken, learning rate: as a program takes them."""
        self._version, self._nonfinite_in_a_row = 0, 0
        self.source: Any = PreparedSource(config, self._policy, values["video"])
        self.load_state(State(values["values"], part(arrays, "state")))
        files, outs = values["files"], values["outs"]
        data = {what: starts.expect_bytes(files[what]) for what in files}
        if self._facts.linear:
            expect_solvers()
        self._step, self._judge = (Loaded(data[what], outs[what]) for what in ("step", "judged"))
        self._evaluate(0)  # where jaxlib has other calls by now, that is known before the first step
        for notice in self.recipe.notices():
            warn(notice)

    def _policy(self) -> PlainPolicy:
        return PlainPolicy(self._weights, self._adam[0], self.config.activation, self._head)

    @property
    def run_name(self) -> str:
        """The environment's name, as a folder can be called."""
        return "".join(c if c.isalnum() or c in "-_" else "-" for c in self._facts.env)

    # --- the step ---------------------------------------------------------------------------------------------------

    def step(self, states: Sequence[Any] | None = None) -> StepReport:
        """Sample a group from each start, compare, learn."""
        with self.phase("compiled"):
            leaves = [*self._adam, *(self.source.scale or ()), self._key, np.int32(self.steps_done)]
            made = self._step(leaves)
        adam = made.adam
        self._adam = [adam.flat_W, adam.mean_W, adam.square_W, adam.count, adam.rate]
        if made.scale is not None:
            self.source.scale = [float(made.scale.count), made.scale.mean_D, made.scale.square_D]
        played = record.episodes(made, self._facts)
        learned = record.experience(made, self._facts, self.config, played, self.source.note(played))
        updates = record.updates(made.told, self._facts.names, learned)
        self._version += int(made.told.taken_K.sum())
        metrics = {**reward_metrics(learned.rollouts, self.recipe), **updates.metrics()}
        metrics |= dict(self.source.metrics()) | record.explained(made, self._facts)
        self.steps_done += 1
        scores = Scores(record.cut(made.last_logp_NT, record.longest(made)))
        report = StepReport(self.steps_done, metrics, learned, scores)
        self._nonfinite_in_a_row = nonfinite_in_a_row(self._nonfinite_in_a_row, updates, report)
        return report

    @property
    def evaluation(self) -> Callable[[int], Mapping[str, Any]]:
        """On starts that training never uses."""
        return self._evaluate

    def _evaluate(self, step: int) -> Mapping[str, float | None]:
        return record.judged(*self._judge([self._adam[0], *(self.source.scale or ()), *self._starts, self._key]))

    # --- what must be kept ------------------------------------------------------------------------------------------

    def state(self) -> State:
        """What the room's own trainer would save."""
        values = copy.deepcopy(dict(self._start.values["values"]))
        values |= {"steps_done": self.steps_done, "nonfinite_in_a_row": self._nonfinite_in_a_row}
        values["version"] = self._version
        count = {} if self.source.scale is None else {"count": self.source.scale[0]}
        values["source"] |= {"env_steps": self.source.env_steps, "episodes": self.source.episodes, **count}
        flat_W, mean_W, square_W, updates, _ = self._adam
        arrays = as_part("policy", self._weights.apart(flat_W))
        if self.steps_done:
            means, squares = self._weights.apart(mean_W), self._weights.apart(square_W)
            values["optimizer"]["state"] = {str(i): {} for i in range(len(means))}
            for i, name in enumerate(means):
                moments = {"step": updates, "exp_avg": means[name], "exp_avg_sq": squares[name]}
                arrays |= as_part(f"optimizer/{i}", moments)
        if self.source.scale is not None:
            _, mean_D, square_D = self.source.scale
            arrays |= as_part("source/scaling", {"mean/": mean_D, "square/": square_D})
        return State(values, {name: np.array(x) for name, x in arrays.items()})

    def load_state(self, state: State) -> None:
        """Go on exactly where `state` was taken: by this trainer, or by the room's own before its first step."""
        values, arrays = state.values, state.arrays
        policy, moments = part(arrays, "policy"), part(arrays, "optimizer")
        order = [name for name, _ in self._weights.shapes]
        flat_W = flat({name: policy[name] for name in order})
        rate = np.float32(values["optimizer"]["param_groups"][0]["lr"])

        def moment(key: str) -> np.ndarray:
            if not moments:
                return np.zeros_like(flat_W)
            return flat({name: moments[f"{i}/{key}"] for i, name in enumerate(order)})

        count = np.float32(moments.get("0/step", 0.0))
        self._adam = [flat_W, moment("exp_avg"), moment("exp_avg_sq"), count, rate]
        self.steps_done = operator.index(values["steps_done"])
        self._nonfinite_in_a_row = operator.index(values["nonfinite_in_a_row"])
        self._version = operator.index(values["version"])
        self.source.env_steps, self.source.episodes = values["source"]["env_steps"], values["source"]["episodes"]
        scaling = part(arrays, "source/scaling")
        if scaling:
            self.source.scale = [float(values["source"]["count"]), scaling["mean/"], scaling["square/"]]

    # --- all else ---------------------------------------------------------------------------------------------------

    def export(self, path: str | Path) -> Path:
        """The greedy policy as an ONNX file, by the room's own trainer."""
        from grpo.control.trainer import GRPOTrainer

        trainer = GRPOTrainer(config=self.config)
        trainer.load_state(self.state())
        return trainer.export(path)
