"""The Hugging Face hub: folders that are uploaded, and what is fetched back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from grpo.config import ConfigError

_ID = re.compile(r"[\w.-]+/[\w.-]+")
MARK = "run.json"
"""What a policy's folder has, and a language model's has not."""


def is_id(text: str) -> bool:
    """Whether this may be owner/name, and is no path that is here, nor a run that is not."""
    path = Path(text)
    return bool(_ID.fullmatch(text)) and not path.exists() and not _has_runs(path.parent)


def _has_runs(folder: Path) -> bool:
    """Whether runs lie in a folder, or would: a name that is mistyped there is not asked the hub for."""
    return folder.name == "runs" or any(folder.glob(f"*/{MARK}"))


def push(
    path: Path,
    repo: str,
    private: bool,
    what: str = "Model",
    message: str | None = None,
    revision: str | None = None,
    kept: bool = True,
) -> str:
    """Upload the folder; returns where it is. kept: it stays, and can be uploaded by hand."""
    hub = _hub("push_to_hub")
    try:
        made = hub.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            hub.create_branch(made.repo_id, branch=revision, exist_ok=True)
        how = {"commit_message": message or f"{what} trained with anygrpo"} | (
            {"revision": revision} if revision else {}
        )
        hub.upload_folder(repo_id=made.repo_id, folder_path=str(path), **how)
    except Exception as error:  # whatever the network and the hub may say: what was trained is safe on disk
        told = f"{path} was written, and" if kept else f"the {what.lower()}"
        again = "upload the folder" if kept else "try again"
        raise ConfigError(
            f"{told} could not be uploaded to {repo}: {_reason(error)}; log in with `hf auth login` and {again}"
        ) from None
    return str(made)


def policy(repo: str) -> Path | None:
    """The folder of a policy that was pushed, fetched or from the cache; None: it holds something else, a model say."""
    hub = _hub(f"loading {repo}")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        hub.hf_hub_download(repo, MARK)
        return Path(hub.snapshot_download(repo))
    except Exception as error:
        offline = isinstance(error, LocalEntryNotFoundError)
        if isinstance(error, EntryNotFoundError) and not offline:
            return None
        if offline and isinstance(try_to_load_from_cache(repo, "config.json"), str):
            return None
        raise ConfigError(
            f"{repo} is no folder here, and could not be fetched from the hub: {_reason(error)}; check the name, "
            "the network, and `hf auth login` if it is private"
        ) from None


def is_fetched(folder: Path) -> bool:
    """Whether a folder is one that the hub's library keeps, as links to its own store."""
    try:
        from huggingface_hub import constants
    except ModuleNotFoundError:
        return False
    return folder.parent.name == "snapshots" and folder.resolve().is_relative_to(Path(constants.HF_HUB_CACHE).resolve())


def _hub(why: str) -> Any:
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError:
        raise ConfigError(f"{why} needs huggingface_hub: pip install huggingface_hub") from None
    return HfApi()


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
