"""Playing whole episodes with a fleet, and the record that they leave.

    starts ─► EpisodeRunner ─► look, decide, step: live members only ─► Episodes (N × T)

An episode that fails is a row with an error, and the others go on. Nothing here knows what an advantage is.

Letters: L live members, M actions, F numbers of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from grpo.control.episodes import Episodes as Episodes
from grpo.control.scaling import Scaling
from grpo.envs.action_repeat import later
from grpo.envs.draws import Random, drawing
from grpo.envs.episodes import EpisodeRunner, Start
from grpo.envs.fleet import Fleet, Snapshot, Stepped, Tree
from grpo.envs.rules import EpisodeRules
from grpo.envs.spaces import take, zeros

if TYPE_CHECKING:
    from grpo.control.policy import ActorPolicy

INSIDE = "\x1f"
"""Between the keys of an observation inside an observation; no environment writes it."""


def play(
    fleet: Fleet,
    policy: ActorPolicy,
    scaling: Scaling,
    starts: Sequence[Start],
    random: Random | None,
    rules: EpisodeRules | None = None,
    *,
    keep_out: bool = False,
    visit: Callable[[EpisodeRunner], None] | None = None,
) -> Episodes:
    """One episode from each start; without `random` with the most likely actions. `visit` sees every decision."""
    rules = rules or EpisodeRules()
    runner = EpisodeRunner(fleet, starts, rules)
    record, memory = Record(len(starts), min(fleet.horizon or 256, 256)), policy.begin(len(runner.row_L))
    while len(runner.row_L):
        if visit is not None:
            visit(runner)
        seen = scaling(runner.observation)
        acted = policy.act(seen, None if random is None else drawing(random, runner.row_L), memory)
        actions, size = policy.head.to_env(acted.recorded), policy.columns.size
        at, raw, made_L = np.arange(len(runner.row_L)), runner.observation, np.zeros(len(runner.row_L), np.int64)
        stepped: Stepped | None = None
        for i in range(size):  # the chunk: those whose episode goes on act again, without looking
            mine = at * size + i
            now = runner.step(at, actions[mine])
            moment = {"action": acted.recorded[mine], "logp": acted.logp_M[mine], "reward": now.reward_M}
            moment |= named("seen", seen)
            if seen is not raw:
                moment |= named("raw", raw)
            if keep_out:
                moment["out"] = acted.out_MF[mine]
            record.write(runner.step_L[at] + i, runner.row_L[at], runner.longest + i, moment)
            made_L[at] += 1
            stepped = now if stepped is None else later(stepped, at, now)
            going = now.going_M
            if i == size - 1 or not going.any():
                break
            at, raw = at[going], take(now.observation, going)
            seen = scaling(raw)
        assert stepped is not None
        changed, memory = runner.move(stepped, made_L), acted.memory
        if changed is not None and memory is not None:
            memory = policy.seated(memory, *changed)
    if not record.begun:
        rows = len(starts)
        record.write(np.zeros(rows, np.int64), np.arange(rows), 0, _nothing(fleet, policy, rows, keep_out))
    return _episodes(record, runner, starts, rules.action_repeat)


class Record:
    """Arrays over (step, row) that grow in steps; one assignment writes all live members."""

    def __init__(self, rows: int, steps: int) -> None:
        self._rows, self._steps = rows, steps
        self._arrays: dict[str, np.ndarray] = {}

    def write(self, step_L: np.ndarray, row_L: np.ndarray, longest: int, moment: Mapping[str, np.ndarray]) -> None:
        """What the live members saw and did at their steps, of which `longest` is the largest."""
        if longest >= self._steps:
            for name, array in self._arrays.items():
                self._arrays[name] = np.concatenate([array, np.zeros_like(array)])
            self._steps *= 2
        at_L = step_L * self._rows + row_L
        for name, value in moment.items():
            if name not in self._arrays:
                self._arrays[name] = np.zeros((self._steps * self._rows, *value.shape[1:]), value.dtype)
            self._arrays[name][at_L] = value

    @property
    def begun(self) -> bool:
        """Whether anything was written."""
        return bool(self._arrays)

    def table(self, name: str, steps: int, copy: bool = True) -> np.ndarray | None:
        """(N, T, …), cut to `steps`; None where nothing was written. Without `copy` as it lies here."""
        array = self._arrays.get(name)
        if array is None:
            return None
        cut = np.swapaxes(array[: steps * self._rows].reshape(steps, self._rows, *array.shape[1:]), 0, 1)
        return np.ascontiguousarray(cut) if copy else cut

    def tree(self, name: str, steps: int, copy: bool = True) -> Tree:
        """An observation's tables, laid out as it was; None where nothing was written."""
        if name in self._arrays:
            return self.table(name, steps, copy)
        parts = {
            key.removeprefix(name + INSIDE).split(INSIDE)[0] for key in self._arrays if key.startswith(name + INSIDE)
        }
        return {part: self.tree(name + INSIDE + part, steps, copy) for part in sorted(parts)} or None


def _nothing(fleet: Fleet, policy: ActorPolicy, rows: int, keep_out: bool) -> dict[str, np.ndarray]:
    """The moment of a step in which no episode could begin: rows to hold the errors."""
    head = policy.head
    moment = {"action": np.zeros((rows, *head.shape), head.dtype), "logp": np.zeros(rows, np.float32)}
    moment |= {"reward": np.zeros(rows)} | named("seen", zeros(fleet.observation_space, rows))
    return moment | ({"out": np.zeros((rows, head.size), np.float32)} if keep_out else {})


def _episodes(record: Record, runner: EpisodeRunner, starts: Sequence[Start], action_repeat: int) -> Episodes:
    steps = max(int(runner.length_N.max()), 1)
    action_NT, logp_NT, reward_NT = (record.table(name, steps) for name in ("action", "logp", "reward"))
    assert action_NT is not None and logp_NT is not None and reward_NT is not None
    seen, raw = record.tree("seen", steps), record.tree("raw", steps)
    return Episodes(
        observation=seen,
        raw=seen if raw is None else raw,
        action_NT=action_NT,
        logp_NT=logp_NT,
        out_NTF=record.table("out", steps),
        reward_NT=reward_NT,
        mask_NT=np.arange(steps)[None] < runner.length_N[:, None],
        offset_N=np.array([len(s.actions) // action_repeat if isinstance(s, Snapshot) else 0 for s in starts]),
        terminated_N=runner.terminated_N,
        truncated_N=runner.truncated_N,
        success_N=runner.success_N,
        last=runner.last,
        errors=runner.errors,
        steps_N=runner.steps_N,
    )


# --- observations are an array, or a dict of observations -----------------------------------------------------------


def named(name: str, tree: Tree) -> dict[str, np.ndarray]:
    """An observation's arrays under names of their own, as `Record` keeps them."""
    if not isinstance(tree, dict):
        return {name: tree}
    return {key: x for part, inner in tree.items() for key, x in named(name + INSIDE + part, inner).items()}
