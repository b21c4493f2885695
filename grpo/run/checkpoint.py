"""Checkpoints that are whole or not there, and are found again.

tmp-step-00000010/            written here, each file fsynced, then renamed: a half-written one never has the name
    arrays.safetensors
    state.json
    manifest.json             sha256 of both and of itself, step, schema, versions, settings and their fingerprint
step-00000010/                what `load` reads, after checking every hash
latest                        name of the newest, for people and scripts; `resume_point` goes by number and validity
aside-step-00000020/          found broken, or newer than the one gone on from: kept, never read

`save` is `snapshot`, which holds up the training, and `publish`, which need not: it touches nothing but the files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from grpo.config import ConfigError
from grpo.core.arrays import Array, is_torch
from grpo.errors import line
from grpo.protocols import State
from grpo.run.arrays import as_saved, load_file, on_host, save_file
from grpo.run.files import DAMAGE, RESTORE, UNFIT, FolderError, Row, dumps, field, read_json, sync_folder
from grpo.run.folder import SCHEMA, RunFolder, expect_schema, versions
from grpo.run.inside import make_folder_inside, open_regular, remove_inside, rename_inside, write_inside
from grpo.run.redaction import same_but_hidden

if TYPE_CHECKING:
    from grpo.trainer import Trainer

POINTS = ("folder", "arrays", "state", "manifest", "rename", "pointer", "retention")
"""Where a save can be cut; `at` is called with the name once that much is done."""
FILES = ("arrays.safetensors", "state.json")
LARGEST_STATE = 1 << 30
"""Bytes of state.json: counters and names, also of the files of a large replay."""
HARMLESS = frozenset({"shard", "device", "rows_per_microbatch", "cuda_graphs", "torch_compile", "replay_folder",
                      "replay_memory", "draws"})  # fmt: skip
"""Settings that may differ on resume: where, by what, in what portions numbers are computed; `draws` warns."""


class CheckpointError(FolderError):
    """A checkpoint that cannot be written or gone on from."""


class Damaged(CheckpointError):
    """A checkpoint that cannot be trusted: the one before may do."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read and verified."""

    path: Path
    step: int
    state: State
    manifest: Row


def _nothing(point: str) -> None:
    pass


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint will hold, in memory that nobody else writes to."""

    step: int
    arrays: Mapping[str, Array]
    state: str
    """The text of state.json."""
    manifest: Row
    """All but the hashes."""


def snapshot(
    state: State,
    step: int,
    *,
    settings: Mapping[str, Any] | None = None,
    score: float | None = None,
    planned: bool = True,
) -> Snapshot:
    """Bring to this side what must be kept. The arrays of `state` must be its own, as those of `trainer.state` are.

    One that was not `planned` stays until the next, of any kind.
    """
    check(state)
    kinds = {name: "torch" if is_torch(array) else "numpy" for name, array in state.arrays.items()}
    manifest = {
        "schema": SCHEMA,
        "step": step,
        "score": score,
        "planned": planned,
        "versions": versions(),
        "fingerprint": fingerprint(settings or {}),
        "settings": settings or {},
    }
    return Snapshot(step, on_host(state.arrays), dumps({"values": state.values, "arrays": kinds}), manifest)


def publish(
    folder: RunFolder,
    taken: Snapshot,
    *,
    keep_last: int | None = None,
    keep_best: int = 0,
    at: Callable[[str], None] = _nothing,
) -> Path:
    """Write a checkpoint, then drop those nobody asked to keep.

    On any failure the older ones stay and the temporary folder is removed. `keep_last`: how many of the newest (None:
    all); `keep_best`: how many with the highest `score` beside them. One that was not planned is replaced by the next.
    """
    final = folder.checkpoints / f"step-{taken.step:08d}"
    temporary = folder.checkpoints / f"tmp-{final.name}"
    written = f"checkpoints/{temporary.name}"
    remove_inside(folder.path, written)
    try:
        make_folder_inside(folder.path, written)
        at("folder")
        _write_arrays(temporary / FILES[0], taken.arrays)
        at("arrays")
        _write(temporary / FILES[1], taken.state)
        at("state")
        manifest = taken.manifest | {"sha256": {name: _hash(temporary / name) for name in FILES}}
        _write(temporary / "manifest.json", dumps(manifest | {"self": fingerprint(manifest)}, indent=2))
        sync_folder(temporary)
        at("manifest")
        if final.exists():
            _remove(folder, final.name)
        rename_inside(folder.path, written, final.name)
        sync_folder(folder.checkpoints)
        at("rename")
    except BaseException:  # also Ctrl-C: no half checkpoint stays
        with suppress(OSError):
            remove_inside(folder.path, written)
        raise
    point_to(folder, final)
    at("pointer")
    _retain(folder, keep_last, keep_best)
    at("retention")
    return final


def save(
    folder: RunFolder,
    state: State,
    step: int,
    *,
    settings: Mapping[str, Any] | None = None,
    score: float | None = None,
    keep_last: int | None = None,
    keep_best: int = 0,
    at: Callable[[str], None] = _nothing,
) -> Path:
    """Publish `state` as the checkpoint of `step`; see `publish`."""
    taken = snapshot(state, step, settings=settings, score=score)
    return publish(folder, taken, keep_last=keep_last, keep_best=keep_best, at=at)


def load(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, checking every hash; a damaged file is named. One that is newer than we are is no damage."""
    path = Path(path)
    if not (path / "manifest.json").is_file():
        raise Damaged(f"{path} has no manifest.json: it is no checkpoint, or an unfinished one")
    with _damage():
        manifest = read_json(path / "manifest.json")
        field(manifest, "schema", int, path / "manifest.json")
    expect_schema(manifest, path / "manifest.json")
    with _damage():
        _expect_whole(manifest, path / "manifest.json")
        for name in FILES:
            if not (path / name).is_file():
                raise Damaged(f"{path / name} is missing")
            if _hash(path / name) != manifest["sha256"][name]:
                raise Damaged(f"{path / name} is damaged: it is not what the manifest was written for")
        return Checkpoint(path, manifest["step"], _state(path), manifest)


@contextmanager
def _damage() -> Iterator[None]:
    """What cannot be read is a checkpoint that cannot be trusted."""
    try:
        yield
    except Damaged:
        raise
    except FolderError as error:
        raise Damaged(str(error)) from error


def _expect_whole(manifest: Row, file: Path) -> None:
    """As it was written, with every field that is asked for later."""
    if manifest.pop("self", None) != fingerprint(manifest):
        raise Damaged(f"{file} is damaged: it was changed after it was written")
    for name in ("sha256", "settings", "versions"):
        field(manifest, name, dict, file)
    for name in FILES:
        field(manifest["sha256"], name, str, f"{file}: 'sha256'")
    if field(manifest, "step", int, file) < 0:
        raise Damaged(f"{file}: 'step' is {manifest['step']}; {RESTORE}")


def _state(path: Path) -> State:
    """What state.json and the arrays say together."""
    file = path / FILES[1]
    kept = read_json(file, LARGEST_STATE)
    values, kinds = field(kept, "values", dict, file), field(kept, "arrays", dict, file)
    try:
        tensors = load_file(path / FILES[0], "torch" in kinds.values())
    except (SafetensorError, *DAMAGE) as error:
        raise Damaged(f"{path / FILES[0]} cannot be read: {error}") from error
    absent = sorted(set(kinds) ^ set(tensors))
    if absent:
        raise Damaged(f"{path / FILES[0]} and state.json disagree about {', '.join(absent[:3])}")
    return State(values, {name: as_saved(kind, tensors[name]) for name, kind in kinds.items()})


def restore(trainer: Trainer, found: Checkpoint) -> None:
    """Have the trainer go on from a checkpoint; what lacks something that a trainer of its kind writes is damaged."""
    place = found.path / FILES[1]
    try:
        trainer.load_state(found.state)
    except UNFIT as error:
        raise Damaged(f"{place} does not fit this run ({line(error)}); {RESTORE}") from error
    except (ValueError, RuntimeError) as error:
        if type(error) not in (ValueError, RuntimeError):  # has its own words
            raise
        what = " ".join(str(error).split())
        raise ConfigError(f"{place}: {what}; go on with the policy and settings it was saved with") from error
    if trainer.steps_done != found.step:
        raise Damaged(f"{place} is of step {trainer.steps_done}, its manifest of step {found.step}; {RESTORE}")


def resume_point(
    folder: RunFolder, step: int | None = None, take: Callable[[Checkpoint], None] = lambda found: None
) -> Checkpoint | None:
    """The newest valid checkpoint, passing over damaged ones with an event; None where there is none.

    A `step` that was asked for is that one or an error. take: goes on from it, and may find that it is damaged.
    """
    if step is not None:
        path = folder.checkpoints / f"step-{step:08d}"
        if not path.is_dir():
            there = ", ".join(str(_step(path)) for path in steps(folder)) or "none"
            raise CheckpointError(f"{folder.path} has no checkpoint of step {step}; there: {there}")
        found = load(path)
        take(found)
        return found
    newest: Damaged | None = None
    for path in reversed(steps(folder)):
        try:
            found = load(path)
            take(found)
            return found
        except Damaged as error:
            newest = newest or error
            folder.event(_step(path), "checkpoint_damaged", f"{error}; falling back to the one before")
    if newest is not None:
        every = f"every checkpoint in {folder.checkpoints} is damaged, the newest: {newest}"
        raise CheckpointError(f"{every}. Nothing changed; events.jsonl says more")
    return None


def best(folder: RunFolder) -> Checkpoint | None:
    """The checkpoint with the highest score, the newest of equals; None where none has one."""
    scored = [(score, path) for path in steps(folder) if isinstance(score := _manifest(path).get("score"), int | float)]
    if not scored:
        return None
    return load(max(scored, key=lambda item: (item[0], item[1].name))[1])


def steps(folder: RunFolder) -> list[Path]:
    """Published checkpoints, oldest first, by step number."""
    found = [path for path in folder.checkpoints.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=_step)


def sweep(folder: RunFolder, after: int) -> None:
    """Finish what a killed save left; put aside checkpoints of steps that will be done again."""
    for path in folder.checkpoints.glob("tmp-*"):
        remove_inside(folder.path, f"checkpoints/{path.name}")
    for path in steps(folder):
        if _step(path) > after:
            aside = f"aside-{path.name}"
            rename_inside(folder.path, f"checkpoints/{path.name}", aside)
            folder.event(after, "checkpoint_set_aside", f"{path.name} is newer than step {after}, now {aside}")
    if found := steps(folder):
        point_to(folder, found[-1])


def point_to(folder: RunFolder, path: Path) -> None:
    """Make `latest` name this checkpoint."""
    write_inside(folder.path, "checkpoints/latest", path.name + "\n")


def expect_same_settings(
    manifest: Row,
    settings: Mapping[str, Any],
    harmless: frozenset[str] = HARMLESS,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Refuse to go on under other settings than the checkpoint's, naming the difference.

    `defaults`: what a setting was, in effect, before it was there; a checkpoint may be older than some.
    """
    now, known = json.loads(dumps(settings)), json.loads(dumps(defaults or {}))
    gone = [f"{name}={value!r}" for name, value in manifest["settings"].items() if name not in {*now, *harmless}]
    if gone:
        made = manifest["versions"].get("anygrpo", "unknown")
        raise CheckpointError(
            f"the run has settings that are no longer there ({', '.join(gone)}); go on with the version that made it "
            f"(anygrpo {made}), or start a new run"
        )
    before, now = _flat(known | manifest["settings"]), _flat(now)
    differ = [
        f"{name}: {before.get(name)!r} → {now.get(name)!r}"
        for name in sorted({*before, *now})
        if not same_but_hidden(before.get(name), now.get(name)) and name.partition(".")[0] not in harmless
    ]
    if differ:
        found = "; ".join(differ)
        raise CheckpointError(f"the run has other settings ({found}); go on with those, or start a new run")


def fingerprint(tree: Mapping[str, Any]) -> str:
    """A short name for a set of settings, or of anything JSON keeps."""
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def check(state: State) -> None:
    """Raise where a state would not come back as it went: found before the first step, not at the first save."""
    _expect_plain(state.values, "state")


# --- files ----------------------------------------------------------------------------------------------------------


def _expect_plain(tree: Any, place: str) -> None:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{place} has the key {key!r}: JSON keeps only text keys")
            _expect_plain(value, f"{place}.{key}")
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            _expect_plain(value, f"{place}.{i}")
    elif not (tree is None or isinstance(tree, str | bool | int | float)):
        raise CheckpointError(
            f"{place} is a {type(tree).__name__}, which JSON cannot keep; put arrays into State.arrays"
        )


def _write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """All arrays in one file."""
    try:
        save_file(dict(arrays), path)
    except SafetensorError as error:  # its writer reports a full disk in words only
        number = re.search(r"code: (\d+)", str(error))
        raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from error
    _sync(path)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _remove(folder: RunFolder, name: str) -> None:
    """Under a temporary name first: a removal that is cut must not leave a damaged checkpoint."""
    doomed = f"tmp-old-{name}"
    rename_inside(folder.path, f"checkpoints/{name}", doomed)
    remove_inside(folder.path, f"checkpoints/{doomed}")


def scores(folder: RunFolder) -> dict[int, float | None]:
    """Of the checkpoints that were planned, by their steps; older ones do not say whether they were."""
    found = {_step(path): _manifest(path) for path in steps(folder)}
    planned = {step: manifest.get("score") for step, manifest in found.items() if manifest.get("planned") is not False}
    return {step: score if isinstance(score, int | float) else None for step, score in planned.items()}


def retained(scores: Mapping[int, float | None], keep_last: int | None, keep_best: int) -> dict[int, float | None]:
    """Of steps and scores those that stay: the newest and the best."""
    newest = sorted(scores)[0 if keep_last is None else -max(keep_last, 1) :]
    ranked = sorted(((score, step) for step, score in scores.items() if score is not None), reverse=True)
    kept = {*newest, *(step for _, step in ranked[:keep_best])}
    return {step: score for step, score in scores.items() if step in kept}


def _retain(folder: RunFolder, keep_last: int | None, keep_best: int) -> None:
    """Of those that were planned, the newest and the best; of the others none but the newest of all."""
    kept = retained(scores(folder), keep_last, keep_best)
    for path in (path for path in steps(folder)[:-1] if _step(path) not in kept):
        _remove(folder, path.name)


def _manifest(path: Path) -> Row:
    """What the checkpoint says of itself; nothing where that cannot be read."""
    try:
        return read_json(path / "manifest.json")
    except FolderError:
        return {}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
