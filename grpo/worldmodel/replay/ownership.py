"""Whose a folder is that was named for a replay: files of two runs have the same names, and a run deletes its old ones.

`run.txt` says it: where the run is, and from its first state on the id that its states carry. Without an id nothing was
saved that needs the files, and the run may begin again there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.config import ConfigError
from grpo.errors import line
from grpo.run.files import UNFIT, FolderError, write_atomic
from grpo.worldmodel.replay.chunks import CHUNK_FILE, REMEDY

OWNER = "run.txt"


@dataclass(frozen=True)
class Kept:
    """What a state says of the folder that it was saved with."""

    id: str | None
    folder: str | None
    names: frozenset[str]
    """Files that it needs."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Kept:
        """The state of a replay; older ones, and those of replays in the run's own folder, have no id."""
        try:
            names = frozenset(str(name) for row in values["chunks"] for name in (row[2], row[4]) if name is not None)
            return cls(values.get("owner"), values.get("folder"), names)
        except UNFIT as error:
            raise FolderError(f"the checkpoint's replay is damaged ({line(error)}); {REMEDY}") from error


def claimed(path: Path, run: Path, kept: Kept | None) -> str | None:
    """Make a folder that of this run alone, or refuse it before anything is written; the id that it has already.

    kept: what the state says that is gone on from; run and folder may have been moved since.
    """
    try:
        told = _told(path)
        names = {found.name for found in path.iterdir()} if path.exists() else set()
        _expect_free(path, run.resolve(), kept, told, {name for name in names if name[0] != "." and name != OWNER})
        id = (kept.id if kept else None) or (told[1] if told else None)
        path.mkdir(parents=True, exist_ok=True)
        if told is None:
            (path / OWNER).touch(exist_ok=False)  # two runs that begin at once: one of them has it
        sign(path, run, id)
    except FileExistsError:
        raise ConfigError(f"replay_folder={path} has just been taken by another run; name another one") from None
    except OSError as error:
        raise FolderError(f"cannot write to {path} ({error.strerror}); choose a folder you may write to") from error
    return id


def sign(path: Path, run: Path, id: str | None) -> None:
    """Write down whose the folder is."""
    write_atomic(path / OWNER, "\n".join([str(run.resolve()), *([id] if id else [])]) + "\n")


def _told(path: Path) -> tuple[str, str | None] | None:
    """The run that a folder is of, and its id."""
    if not (path / OWNER).exists():
        return None
    lines = [*(path / OWNER).read_text(encoding="utf-8", errors="replace").splitlines(), "", ""]
    return lines[0].strip(), lines[1].strip() or None


def _expect_free(
    path: Path, run: Path, kept: Kept | None, told: tuple[str, str | None] | None, names: set[str]
) -> None:
    """Refuse the folder of another run, that of anything else, and one without what is needed."""
    within = path.resolve().parent
    if within != run and (within / "run.json").exists():
        raise ConfigError(f"replay_folder={path} lies in another run, {within}; name a folder of its own")
    if told is None:
        _expect_no_other_files(path, kept, names)
    else:
        _expect_own(path, run, kept, *told)
    if kept is not None and kept.names and not kept.names & names:
        where = f"; they were in {kept.folder}" if kept.folder else ""
        raise ConfigError(
            f"replay_folder={path} has none of the {len(kept.names)} files that the checkpoint needs{where}: name the "
            "folder that they are in"
        )


def _expect_no_other_files(path: Path, kept: Kept | None, names: set[str]) -> None:
    """Files that nobody has signed for are the state's own, brought here by hand, or none of ours."""
    other = sorted(name for name in names if not CHUNK_FILE.fullmatch(name))
    if other or (names and (kept is None or not kept.names or not kept.names <= names)):
        raise ConfigError(
            f"replay_folder={path} is not empty ({(other or sorted(names))[0]}), and no run's replay is in it; name a "
            f"folder for the replay alone, {path / 'replay'} say"
        )


def _expect_own(path: Path, run: Path, kept: Kept | None, other: str, id: str | None) -> None:
    here = other == str(run)
    if kept is None:
        if id is not None or not here:
            raise ConfigError(f"replay_folder={path} is that of {other}; name another one, or delete it with its files")
    elif id != kept.id and not (here and None in (id, kept.id)):
        own = f", {kept.folder}" if kept.folder and kept.folder != str(path) else ""
        raise ConfigError(f"replay_folder={path} is that of {other}, another run; name this one's own{own}")
    elif not here and (Path(other) / "run.json").exists():
        raise ConfigError(
            f"replay_folder={path} is that of {other}, which is still there, and two runs cannot share it; copy the "
            f"folder without its {OWNER}, and name the copy"
        )
