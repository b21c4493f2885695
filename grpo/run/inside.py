"""Inside a folder and nowhere else: files are opened, written, renamed and removed through no link below it.

The folder itself, the root, may be a link: whoever names it knows. What lies inside may have come with a download.
A path below the root is given as text: `samples/step-00000010.jsonl`.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from grpo.errors import Refused

FOLDERS = ("samples", "checkpoints", "replay", "model", "architecture", "tensorboard", "additional_chat_templates")
"""What a run folder or a model's has below it that is ours."""
NAMES = ("lock", "wandb")
"""What else must be no link; what a tracker links inside of its own folder is its own affair."""
WRITTEN = (
    ".json", ".jsonl", ".png", ".mp4", ".onnx", ".html",
    ".safetensors", ".bin", ".jinja", ".md", ".txt", ".model", ".py",
)  # fmt: skip
"""Endings of the files that are written: of a run, and of a saved model."""
_NOT_OURS = (errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.EISDIR)
"""What opening a link, or something that is no regular file, ends with."""


class FolderError(Refused, RuntimeError):
    """A run folder that cannot be used, in one line that says what to do."""


class Gone(FolderError):
    """Something that is not there, or no longer: a run deleted while it was open."""


def expect_no_links(root: Path) -> None:
    """Refuse a folder that is about to be written to where a name that may be written is a link; nothing is changed.

    Links of other names (a user's `best`, what a tracker or a virtual environment keeps) are nobody's concern.
    """
    waiting = [root]
    while waiting:
        within = waiting.pop()
        with os.scandir(within) as entries:
            for entry in entries:
                ours = within != root or entry.name in FOLDERS
                if entry.is_symlink() and (ours or entry.name in NAMES or entry.name.endswith(WRITTEN)):
                    raise FolderError(
                        f"{entry.path} is a link to {os.readlink(entry.path)}, and what is written through it would "
                        "change that place; put the file or folder itself there (only the whole folder may be a link)"
                    )
                if ours and entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))


# --- opening --------------------------------------------------------------------------------------------------------


def open_inside(root: Path, path: str) -> BinaryIO:
    """A regular file below `root`, opened for reading; links and devices are refused, also in between."""
    try:
        return os.fdopen(descriptor_inside(root, path, os.O_RDONLY), "rb")
    except FileNotFoundError as error:
        raise Gone(f"{path} is not there (any more)") from error
    except OSError as error:
        raise FolderError(f"{path} cannot be opened: {error.strerror}") from error


def open_regular(path: Path) -> BinaryIO:
    """A regular file that somebody named, opened for reading, through a link too; a pipe is not waited for."""
    try:
        found = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise Gone(f"{path}: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise FolderError(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from error
    _expect_regular(found, str(path))
    return os.fdopen(found, "rb")


def descriptor_inside(root: Path, path: str, flags: int, mode: int = 0o666) -> int:
    """A regular file below `root` as a descriptor; OSError where the system refuses, FolderError where we do."""
    with _home(root, path) as (at, name):
        # O_NONBLOCK: opening a pipe must not wait for whoever is at its other end.
        found = _opened(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, at, path, mode)
    _expect_regular(found, path)
    return found


def names_inside(root: Path, path: str) -> list[str]:
    """Names in a folder below `root`; none where it is missing or a link."""
    try:
        with _home(root, f"{path}/.") as (at, _):
            return os.listdir(at)
    except (OSError, FolderError):
        return []


# --- writing --------------------------------------------------------------------------------------------------------


def write_inside(root: Path, path: str, content: Any) -> None:
    """Temporary file → fsync → rename → fsync of the folder. `content`: text, or a function that writes to the file."""
    with _home(root, path) as (at, name):
        temporary = f".{name}.{os.getpid()}.tmp"
        _unlink(temporary, at)  # left by a process of the same number, or put there
        try:
            made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=at)
            with os.fdopen(made, "wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content.encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=at, dst_dir_fd=at)
        except BaseException:
            _unlink(temporary, at)
            raise
        os.fsync(at)


def make_folder_inside(root: Path, path: str) -> None:
    """A new folder below `root`; FileExistsError where something has its name."""
    with _home(root, path) as (at, name):
        os.mkdir(name, dir_fd=at)


def rename_inside(root: Path, path: str, name: str) -> None:
    """Another name in the same folder; whatever had it before is removed."""
    remove_inside(root, "/".join([*path.split("/")[:-1], name]))
    with _home(root, path) as (at, before):
        os.rename(before, name, src_dir_fd=at, dst_dir_fd=at)


def remove_inside(root: Path, path: str) -> None:
    """Remove a file, a folder with all it holds, or a link and not what it points to; nothing where nothing is."""
    with _home(root, path) as (at, name):
        try:
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(name, dir_fd=at)
        else:
            _unlink(name, at)


# --- on the way there -----------------------------------------------------------------------------------------------


@contextmanager
def _home(root: Path, path: str) -> Iterator[tuple[int, str]]:
    """The folder that holds `path`, reached from `root` through no link, and the last name; `x/.` is x itself."""
    *folders, name = path.split("/")
    if not all(folders) or not name or {".", ".."} & {*folders} or name == ".." or "\0" in path:
        raise FolderError(f"{path!r:.200} is no file inside {root}")
    at = _opened(str(root), os.O_RDONLY | os.O_DIRECTORY, None, str(root))
    try:
        for folder in folders:
            inner = _opened(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, at, path)
            os.close(at)
            at = inner
        yield at, name
    finally:
        os.close(at)


def _opened(name: str, flags: int, at: int | None, path: str, mode: int = 0o666) -> int:
    try:
        return os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=at)
    except ValueError as error:
        raise FolderError(f"{path!r:.200} cannot be opened: {error}") from error
    except OSError as error:
        if error.errno in _NOT_OURS and at is not None:
            raise FolderError(
                f"{path} cannot be opened: {error.strerror}; links are not followed, and only regular files are read "
                "and written: put the file itself there"
            ) from error
        raise


def _expect_regular(descriptor: int, path: str) -> None:
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise FolderError(f"{path} is no regular file but {kinds.get(stat.S_IFMT(mode), 'a device')}; give a file")


def _unlink(name: str, at: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=at)
