"""What a source, a trainer or a model may do besides what it must: one idea, one method or attribute each.

Nobody inherits from these. A class that has the method has the capability, and `isinstance` asks for it; a wrapper
that forwards by `__getattr__` alone has none (Python 3.12 looks without it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from grpo.core.arrays import Array
from grpo.protocols import Average, CollectRequest, Evaluated, Part, Phase, Player, PreflightFinding, Ranks
from grpo.rollouts import Rollouts, Taught

# --- of a source: what a person sees of it ----------------------------------------------------------------------------


@runtime_checkable
class Headlines(Protocol):
    """Names the metrics that a person wants to see first, while the run goes on.

    >>> class Digits:
    ...     headline = ("reward", "eval/accuracy")
    >>> isinstance(Digits(), Headlines)
    True
    """

    headline: Sequence[str]


@runtime_checkable
class Plots(Protocol):
    """Names the metrics that stand on top of curve.png.

    >>> class Digits:
    ...     panels = ("reward", "eval/accuracy")
    >>> isinstance(Digits(), Plots)
    True
    """

    panels: Sequence[str]


@runtime_checkable
class TellsEntropy(Protocol):
    """The entropy of each kept decision by the policy as it is now, (N, T); None where it cannot be told.

    >>> class Digits:
    ...     def entropies(self, rows):
    ...         return rows.old_logp_NT * 0 + 2.3
    >>> isinstance(Digits(), TellsEntropy)
    True
    """

    def entropies(self, rows: Rollouts) -> Array | None: ...


@runtime_checkable
class Films(Protocol):
    """Shows kept rows in motion: writes files that begin with `stem`, and names those of each row.

    >>> class Digits:
    ...     def film(self, rows, stem):
    ...         stem.with_name(f"{stem.name}-0.png").write_bytes(b"...")
    ...         return [[{"kind": "image", "name": "digit", "file": f"{stem.name}-0.png"}]]
    >>> isinstance(Digits(), Films)
    True
    """

    def film(self, rows: Rollouts, stem: Path) -> Sequence[Sequence[Mapping[str, str]]]: ...


@runtime_checkable
class Illustrates(Protocol):
    """Has small pictures of what kept rows began with: of each row the bytes of PNG files, by name.

    >>> class Digits:
    ...     def illustrate(self, rows):
    ...         return [{"digit-7.png": b"..."}]
    >>> isinstance(Digits(), Illustrates)
    True
    """

    def illustrate(self, rows: Rollouts) -> Sequence[Mapping[str, bytes]]: ...


@runtime_checkable
class Leaves(Protocol):
    """Makes something of the best policy when a run is over (a video, a model), and says where each kind of it lies.

    >>> class Digits:
    ...     def leave(self, folder):
    ...         (folder / "digits.txt").write_text("7")
    ...         return {"digits": folder / "digits.txt"}
    >>> isinstance(Digits(), Leaves)
    True
    """

    def leave(self, folder: Path) -> Mapping[str, Path]: ...


# --- of a source: what a run asks of it -------------------------------------------------------------------------------


@runtime_checkable
class Evaluates(Protocol):
    """Tries the policy on what it does not learn from, after this step, and gives further metrics.

    >>> class Digits:
    ...     def evaluate(self, step):
    ...         return {"accuracy": 0.9}
    >>> isinstance(Digits(), Evaluates)
    True
    """

    def evaluate(self, step: int) -> Mapping[str, float | None]: ...


@runtime_checkable
class Measures(Protocol):
    """Numbers that depend on the machine, so that they belong beside the timing and not among the metrics.

    >>> class Digits:
    ...     def measures(self):
    ...         return {"tokens_per_second": 1200.0}
    >>> isinstance(Digits(), Measures)
    True
    """

    def measures(self) -> Mapping[str, float]: ...


@runtime_checkable
class Timed(Protocol):
    """Divides its own time into phases: the run puts a stopwatch there, `with self.stopwatch("rewards"): …`.

    >>> from grpo.protocols import no_phase
    >>> class Digits:
    ...     stopwatch = no_phase
    >>> isinstance(Digits(), Timed)
    True
    """

    stopwatch: Phase


@runtime_checkable
class Divides(Protocol):
    """Collects some of a step's groups, where ranks share the work; without it every rank collects everything, alike.

    >>> import torch
    >>> from grpo.protocols import Slots
    >>> class Dice:
    ...     def collect_part(self, request):
    ...         own = request.slots.of(6)  # of six groups
    ...         if not own:
    ...             return Part(None, range(6))
    ...         group_N = torch.tensor(own).repeat_interleave(2)
    ...         one_NT = torch.ones(len(group_N), 1)
    ...         return Part(Rollouts(group_N, one_NT > 0, -one_NT, reward_N=one_NT[:, 0]), range(6))
    >>> isinstance(Dice(), Divides)
    True
    >>> Dice().collect_part(CollectRequest(0, slots=Slots(1, 3))).rollouts.group_N.tolist()
    [2, 2, 3, 3]
    """

    def collect_part(self, request: CollectRequest) -> Part: ...


@runtime_checkable
class CollectsAhead(Protocol):
    """Collects parts of a step (see `Divides`) in other threads while the policy learns, with weights of its own.

    `follow` has it sample with the policy's present weights from now on and call them by this number, in the tries'
    `version_NT`; what is under way goes on. It is called between updates alone, and may be called again with the same
    number. It gives the number of parts that can be collected at a time; 0: none, it has no weights of its own.

    >>> class Dice:
    ...     def follow(self, version):
    ...         self.version = version
    ...         return 1
    >>> isinstance(Dice(), CollectsAhead)
    True
    """

    def follow(self, version: int) -> int: ...


@runtime_checkable
class KnowsRanks(Protocol):
    """Shares work of its own among the ranks (an evaluation, say): the trainer says who they are.

    >>> from grpo.protocols import Alone
    >>> class Digits:
    ...     ranks = Alone()
    >>> isinstance(Digits(), KnowsRanks)
    True
    """

    ranks: Ranks


@runtime_checkable
class MakesRoom(Protocol):
    """Lets go of memory that it keeps between steps, from now on after each; says whether there was any.

    >>> class Cache:
    ...     kept = [0] * 1000
    ...     def make_room(self):
    ...         held, self.kept = bool(self.kept), []
    ...         return held
    >>> cache = Cache()
    >>> isinstance(cache, MakesRoom), cache.make_room(), cache.make_room()
    (True, True, False)
    """

    def make_room(self) -> bool: ...


@runtime_checkable
class KeepsFiles(Protocol):
    """Remembers more than memory holds: the run says in which folder, before the first step.

    >>> class Digits:
    ...     folder = None
    >>> isinstance(Digits(), KeepsFiles)
    True
    """

    folder: Path | None


@runtime_checkable
class ChecksData(Protocol):
    """Refuses a state that was saved with other data, as long as `same_data` is True; who only looks sets it False.

    >>> class Digits:
    ...     same_data = True
    >>> isinstance(Digits(), ChecksData)
    True
    """

    same_data: bool


# --- of a trainer -----------------------------------------------------------------------------------------------------


@runtime_checkable
class Preflights(Protocol):
    """Looks over a planned run before it costs anything.

    >>> from types import SimpleNamespace
    >>> class Trainer:
    ...     def preflight(self):
    ...         return [SimpleNamespace(level="warning", what="7 prompts", remedy="give more rows")]
    >>> isinstance(Trainer(), Preflights)
    True
    """

    def preflight(self) -> Sequence[PreflightFinding]: ...


@runtime_checkable
class EvaluatesEpisodes(Protocol):
    """A trainer that plays fresh episodes: `trainer.evaluate(20, greedy=True, seed=1).table()`.

    >>> class Trainer:
    ...     def evaluate(self, episodes=20, greedy=True, seed=None):
    ...         ...
    >>> isinstance(Trainer(), EvaluatesEpisodes)
    True
    """

    def evaluate(self, episodes: int, greedy: bool, seed: int | None) -> Evaluated: ...


@runtime_checkable
class EvaluatesPrompts(Protocol):
    """A trainer that answers held-out prompts: `trainer.evaluate("test.jsonl", samples=4).table()`.

    >>> class Trainer:
    ...     def evaluate(self, dataset=None, samples=None, limit=None):
    ...         ...
    >>> isinstance(Trainer(), EvaluatesPrompts)
    True
    """

    def evaluate(self, dataset: Any, samples: int | None, limit: int | None) -> Any: ...


@runtime_checkable
class Watches(Protocol):
    """Plays episodes for somebody to look at, in a window or a video; their returns.

    >>> class Trainer:
    ...     def watch(self, episodes=3, render=False, video=None):
    ...         return [200.0] * episodes
    >>> isinstance(Trainer(), Watches)
    True
    """

    def watch(self, episodes: int, render: bool, video: str | Path | None) -> list[float]: ...


@runtime_checkable
class Plays(Protocol):
    """Decides in an environment that somebody else plays.

    >>> class Trainer:
    ...     def player(self):
    ...         return None
    >>> isinstance(Trainer(), Plays)
    True
    """

    def player(self) -> Player: ...


@runtime_checkable
class Exports(Protocol):
    """Writes its policy as an ONNX file, checked against the original.

    >>> class Trainer:
    ...     def export(self, path):
    ...         return path
    >>> isinstance(Trainer(), Exports)
    True
    """

    def export(self, path: str | Path) -> Path: ...


@runtime_checkable
class SavesModel(Protocol):
    """Writes its model as a folder that transformers (or PEFT) loads.

    >>> class Trainer:
    ...     def save_model(self, output_dir=None, merge=False):
    ...         return Path(output_dir)
    >>> isinstance(Trainer(), SavesModel)
    True
    """

    def save_model(self, output_dir: str | Path | None, merge: bool) -> Path: ...


# --- of a policy, of a user's policy model, and of the parts of a room ------------------------------------------------


@runtime_checkable
class Teaches(Protocol):
    """Says how likely recorded decisions would have been to it, and perhaps which others: see `grpo.rollouts.Taught`.

    >>> class Expert:
    ...     def teach(self, rows):
    ...         return Taught(logp_NT=rows.old_logp_NT * 0 - 0.1)
    >>> isinstance(Expert(), Teaches)
    True
    """

    def teach(self, rows: Rollouts) -> Taught: ...


@runtime_checkable
class KeepsUp(Protocol):
    """A teacher that changes with who is taught: what it keeps of the policy follows it after every step.

    >>> class Behind:
    ...     average = None  # a grpo.protocols.Average
    >>> isinstance(Behind(), KeepsUp)
    True
    """

    average: Average


@runtime_checkable
class ScoresRows(Protocol):
    """A SequencePolicy or a Reference, and not a user's PolicyModel: it scores recorded decisions itself.

    >>> class Coin:
    ...     def score(self, rows, entropy=False):
    ...         ...
    >>> isinstance(Coin(), ScoresRows)
    True
    """

    def score(self, rows: Rollouts) -> Any: ...


@runtime_checkable
class GivesEntropy(Protocol):
    """A PolicyModel that knows its entropy, shaped like its log-probs; else it is estimated from those.

    >>> import torch
    >>> class Coin:
    ...     def get_entropy(self, states, actions):
    ...         return torch.full((len(states),), 0.693)
    >>> isinstance(Coin(), GivesEntropy)
    True
    """

    def get_entropy(self, states: list[Any], actions: list[Any]) -> Array: ...


@runtime_checkable
class GivesMask(Protocol):
    """A PolicyModel whose log-probs are (N, T) says which of these decisions were made.

    >>> import torch
    >>> class Speller:
    ...     def get_mask(self, states, actions):
    ...         longest = max(map(len, actions))
    ...         return torch.tensor([[t < len(word) for t in range(longest)] for word in actions])
    >>> Speller().get_mask(["", ""], ["no", "yes"]).tolist()
    [[True, True, False], [True, True, True]]
    """

    def get_mask(self, states: list[Any], actions: list[Any]) -> Array: ...


@runtime_checkable
class Closes(Protocol):
    """Holds something (processes, files, sockets) that must be let go of; a second time does nothing.

    >>> from io import StringIO
    >>> isinstance(StringIO(), Closes)
    True
    """

    def close(self) -> Any: ...


OF_A_SOURCE = (
    *(Headlines, Plots, TellsEntropy, Films, Illustrates, Leaves),
    *(Evaluates, Measures, Timed, Divides, CollectsAhead, KnowsRanks, MakesRoom, KeepsFiles, ChecksData),
)
"""Every capability that a run looks for in a source."""
