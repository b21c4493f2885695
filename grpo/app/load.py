"""What was trained, back in Python: `grpo.load("runs/pole")`.

policy = grpo.load("runs/pole")            # a run folder, one that save wrote, a .onnx file, or an id of the hub
action, state = policy.predict(observation)
policy.save("pole"); policy.push_to_hub("me/pole")

model = grpo.load("runs/tiny")             # a language model: of a run, a folder that transformers loads, a hub id
model.generate("4 1 3 2")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from grpo.app.look import FRESH, speaker, trained
from grpo.app.onnx_policy import OnnxPlayer
from grpo.app.policy_folder import write_policy
from grpo.capabilities import EvaluatesEpisodes, Exports, Plays, SavesModel
from grpo.config import ConfigError
from grpo.protocols import Player, Playing
from grpo.run import hub
from grpo.run.door import door
from grpo.run.trainer import GRPOTrainer


@door
def load(path: str | Path, checkpoint: str = "best", *, trust: bool = False) -> Policy | Model:
    """The policy or model of a run folder, of what `save` and `grpo export` wrote, or of the hub.

    checkpoint: best, last or a step's number, of a run. trust: also where that runs code which came with the folder.
    """
    place = Path(path)
    if place.suffix == ".onnx":
        return Policy(OnnxPlayer(place), place)
    if hub.is_id(str(path)):
        found = hub.policy(str(path))
        if found is None:
            return Model(speaker(str(path), checkpoint, trust), place)
        place = found
    if not place.exists():
        raise ConfigError(f"{path}: there is nothing; give a run folder, a saved one, a .onnx file or owner/name")
    if not (place / hub.MARK).exists():
        return Model(speaker(str(place), checkpoint, trust), place)
    trainer, saved = trained(place, checkpoint, judged=False, trust=trust)
    if trainer.task == "language":
        return Model(trainer, place)
    if not isinstance(trainer, Plays):
        trainer.source.close()
        raise ConfigError(f"{place}: a run of the task {trainer.task} leaves no policy to ask; see grpo view")
    return Policy(trainer.player(), place, trainer, saved.path)


def write(
    path: Path, which: str, target: Path | None, repo: str | None, private: bool, merge: bool, trust: bool
) -> str:
    """`grpo export --to`, `--push`: what was trained as a folder, or on the hub; where it is."""
    found = load(path, which, trust=trust)
    how = {"merge": True} if merge else {}  # of language models alone
    try:
        places = [] if target is None else [str(found.save(target, **how))]
        return "\n".join([*places, *([] if repo is None else [found.push_to_hub(repo, private, **how)])])
    finally:
        found.close()


class Policy:
    """What a run in an environment learned. `predict` is as in Stable-Baselines3; `act` remembers by itself."""

    def __init__(
        self, player: Player, origin: Path, trainer: GRPOTrainer | None = None, checkpoint: Path | None = None
    ) -> None:
        self._player, self.origin, self._trainer, self._checkpoint = player, origin, trainer, checkpoint
        self._own: Playing | None = None
        self._begun = 0

    @property
    def trainer(self) -> GRPOTrainer:
        """The trainer as the checkpoint left it: its settings, network, source."""
        if self._trainer is None:
            raise ConfigError(f"{self.origin} is a file that only plays; load the run folder for more")
        return self._trainer

    def predict(
        self, observation: Any, state: Playing | None = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[Any, Playing | None]:
        """The action for an observation, or actions for several; and what is remembered, for the next call.

        state: what the last call gave; None: episodes begin, or nothing is remembered, as of most policies.
        episode_start: which of several begin anew.
        """
        action, playing = self._decided(observation, state, episode_start, deterministic)
        return action, playing if playing.remembers else None

    def _decided(
        self, observation: Any, state: Playing | None, episode_start: Any, deterministic: bool
    ) -> tuple[Any, Playing]:
        rows, single = self._player.rows(observation)
        count = _count(rows)
        playing = self._begin(count) if state is None else state
        if state is not None and episode_start is not None:
            playing.forget(np.broadcast_to(np.asarray(episode_start, dtype=bool), count))
        action_M = playing.decide(rows, deterministic)
        return (action_M[0] if single else action_M), playing

    def _begin(self, count: int) -> Playing:
        """Episodes begin, each time with chance of their own: whoever passes no state on draws anew all the same."""
        self._begun += 1
        return self._player.players(count, self._begun - 1)

    def act(self, observation: Any, deterministic: bool = True) -> Any:
        """The action for one observation of the episode that is under way; `reset` begins another."""
        action, self._own = self._decided(observation, self._own, None, deterministic)
        return action

    def reset(self) -> None:
        """Another episode begins: what `act` remembers is forgotten."""
        self._own = None

    def evaluate(self, episodes: int = 20, deterministic: bool = True, seed: int | None = None) -> dict[str, Any]:
        """Mean return and more, of episodes from starts that the run has never seen; seed: of other ones."""
        if not isinstance(self.trainer, EvaluatesEpisodes):
            raise ConfigError(f"{self.origin}: this task has nothing to evaluate")
        seed = self.trainer.config.seed + FRESH if seed is None else seed
        found: Any = self.trainer.evaluate(episodes, deterministic, seed)
        return dict(found.metrics())

    def export(self, path: str | Path) -> Path:
        """The greedy policy as an ONNX file, checked against this one."""
        if not isinstance(self.trainer, Exports):
            raise ConfigError(f"{self.origin}: this task has no policy that can be exported")
        return self.trainer.export(path)

    def save(self, folder: str | Path) -> Path:
        """A folder with the weights, settings, card, curve and video, which `grpo.load` and `grpo eval` take."""
        return write_policy(self.trainer, self.origin, self._checkpoint, Path(folder))

    def push_to_hub(self, repo: str, private: bool = False) -> str:
        """Upload what `save` writes, as owner/name; returns where it is."""
        return _pushed(self.save, repo, private, "Policy")

    def close(self) -> None:
        """Let go of environments and processes."""
        if self._trainer is not None:
            self._trainer.source.close()


class Model:
    """A language model that was trained: `generate`, and the module and tokenizer themselves."""

    def __init__(self, trainer: Any, origin: Path) -> None:
        self.trainer, self.origin = trainer, origin

    @property
    def model(self) -> Any:
        """The module, as transformers knows it."""
        return self.trainer.model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.trainer.tokens.tokenizer

    def generate(
        self, prompt: str | Sequence[Any], count: int | None = None, seed: int | None = None, **sampling: Any
    ) -> Any:
        """Answers: to a text or a conversation a string, with `count` a list of so many; to a list of prompts a list.

        Each call draws anew; with `seed`, the same answers whenever it is asked. sampling: temperature (0: the
        likeliest tokens), top_p, top_k, max_new_tokens …; what is left out is the run's.
        """
        single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], Mapping))
        made = self.trainer.generate([prompt] if single else list(prompt), count or 1, seed, **sampling)
        answers = made if count is not None else [some[0] for some in made]
        return answers[0] if single else answers

    def save(self, folder: str | Path, merge: bool = False) -> Path:
        """A folder that transformers (or PEFT, unless merged) loads, with its card."""
        if not isinstance(self.trainer, SavesModel):
            raise ConfigError(f"{self.origin}: this task has no model that can be saved")
        return self.trainer.save_model(folder, merge=merge)

    def push_to_hub(self, repo: str, private: bool = False, merge: bool = False) -> str:
        """Upload what `save` writes, as owner/name; returns where it is."""
        return _pushed(partial(self.save, merge=merge), repo, private, "Model")

    def close(self) -> None:
        """Let go of the engine."""
        self.trainer.source.close()


def _pushed(save: Any, repo: str, private: bool, what: str) -> str:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        return hub.push(save(Path(place) / "folder"), repo, private, what, kept=False)


def _count(tree: Any) -> int:
    """Rows of a tree."""
    return _count(next(iter(tree.values()))) if isinstance(tree, dict) else len(tree)
