"""The command `grpo view`, and `grpo.show` for notebooks."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import webbrowser
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

from grpo.run.folder import RunFolder, nearest_run
from grpo.view import others
from grpo.view.library import Library

LOCAL = ("127.0.0.1", "localhost", "::1")
PORT = 6076
"""Where the search for a free port begins."""


DEMO = Path(__file__).with_name("demo")
"""Small real runs to look at before there are own ones; `make demo` trains them anew."""


class Bad(ValueError):
    """Something asked for that cannot be, in one line."""


def chosen(folder: Path | None, demo: bool) -> Path:
    """The folder that was named, that of the demo, or runs/."""
    if demo and folder is not None:
        raise Bad(f"--demo shows the runs that come with the package; leave out either it or {folder}")
    return DEMO if demo else folder or Path("runs")


def library_of(path: Path) -> tuple[Library, str | None]:
    """What a path stands for: a folder of runs, or one run; with its id in the second case."""
    if not path.is_dir():
        hint = (
            "train something first, name a folder, or look at grpo view --demo"
            if path == Path("runs")
            else "name a run folder, or a folder of runs"
        )
        raise Bad(f"{path} is not there; {hint}{nearest_run(path)}")
    if not os.path.exists(path / "run.json"):
        return Library(path), None
    whole = path.resolve()
    library = Library(whole.parent, only=whole.name)
    return library, next(iter(library.shelf.find()[0]))


def view(
    path: Path,
    host: str = "127.0.0.1",
    port: int | None = None,
    browser: bool = True,
    export: Path | None = None,
    groups: str = "12",
    asks: bool | None = None,
) -> int:
    """Serve the page until Ctrl-C, or write it to one file; asks: for a token; None: where others could come in."""
    library, run = library_of(path)
    if export is not None:
        from grpo.view.export import wanted, write_export

        try:
            print(f"wrote {write_export(library, export, run, wanted(groups))}")
        except LookupError as error:  # a group that is not there
            raise Bad(str(error)) from error
        return 0
    try:
        import uvicorn

        from grpo.view.server import is_loopback, make_app
    except ImportError as error:
        raise Bad(f"grpo view needs {error.name}, which the extra view brings; grpo doctor says how") from error
    if asks is False and not is_loopback(host):
        raise Bad(f"--host {host} lets other machines in, and without a token everybody; leave --no-token out")
    wanted_by = others.present() if asks is None else []
    token = secrets.token_urlsafe(24) if asks or wanted_by or not is_loopback(host) else None
    listening = _listen(host, port)
    app = make_app(library, host, token)
    url = _url(host, listening.getsockname()[1], token) + (f"#/run/{run}" if run else "")
    print(_words(url, listening.getsockname()[1], token, headless := _headless(), wanted_by), flush=True)
    if browser and not headless:
        webbrowser.open(url)
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=1, ws="none"
    )
    with suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
        uvicorn.Server(settings).run(sockets=[listening])
    return 0


def _listen(host: str, port: int | None) -> socket.socket:
    """The port asked for, or the first free one from PORT on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in [port] if port is not None else [*range(PORT, PORT + 50), 0]:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, number))
            made.listen(128)
            return made
        except OSError as error:
            made.close()
            if port is not None or isinstance(error, socket.gaierror):
                raise Bad(
                    f"cannot listen on {host}:{number}: {error.strerror}; choose another --host or --port"
                ) from error
    raise Bad(f"no free port on {host}; choose one with --port")


def _url(host: str, port: int, token: str | None) -> str:
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/" + (f"login?token={token}" if token else "")


def _words(url: str, port: int, token: str | None, headless: bool, wanted_by: list[str]) -> str:
    lines = [f"grpo view: {url}   (Ctrl-C ends it)"]
    if wanted_by:
        lines.append(f"Others share this machine ({_some(wanted_by)}): the link has a token. --no-token leaves it out.")
    if token:
        lines.append("Whoever has this link can read your runs. It is printed once; a new start makes a new one.")
    elif there := others.allowed():
        lines.append(f"Other users of this machine ({_some(there)}) can read along; --token keeps them out.")
    if headless and urlsplit(url).hostname in LOCAL:
        lines += [
            "From your own machine:",
            f"  ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}",
            f"and open {url} there.",
        ]
    return "\n".join(lines)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _headless() -> bool:
    """No screen to open a browser on: over ssh, or without a display."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" in os.environ
    return "SSH_CONNECTION" in os.environ or not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


# --- notebooks ------------------------------------------------------------------------------------------------------


class Shown:
    """The page with its answers, as a notebook's output: no server, it stays in the saved notebook."""

    def __init__(self, html: str, height: int) -> None:
        self.html, self._height = html, height

    def _repr_html_(self) -> str:
        """A frame that may run the page's own scripts and reaches nothing else."""
        frame = 'sandbox="allow-scripts" style="width:100%;border:0" loading="lazy"'
        return f'<iframe srcdoc="{escape(self.html, quote=True)}" height="{self._height}" {frame}></iframe>'

    def __repr__(self) -> str:
        return f"the viewer's page, {len(self.html) / 2**20:.1f} MiB; in a notebook it shows itself"


@runtime_checkable
class HasFolder(Protocol):
    """The summary of a run, say."""

    folder: Any


@runtime_checkable
class HasRunFolder(Protocol):
    """A trainer that has trained into a folder."""

    run_folder: Any


def show(what: Any, groups: int = 12, height: int = 720) -> Shown:
    """A run in a notebook: `what` is a run folder, a folder of runs, or a trainer or summary that has one."""
    from grpo.view.export import export_html

    library, run = library_of(folder_of(what))
    return Shown(export_html(library, run, groups), height)


def folder_of(what: Any) -> Path:
    """Where the run of this object is."""
    if isinstance(what, str | os.PathLike):
        return Path(what)
    found = what.folder if isinstance(what, HasFolder) else what
    found = found.run_folder if isinstance(found, HasRunFolder) else found
    found = found.path if isinstance(found, RunFolder) else found
    if isinstance(found, str | os.PathLike) and Path(found).is_dir():
        return Path(found)
    if isinstance(what, HasRunFolder) and what.run_folder is None:
        raise Bad("this trainer has not trained into a folder yet: trainer.train(…, folder='runs/mine'), then show it")
    raise Bad(f"show() takes a run folder, or a trainer that has trained into one, not {type(what).__name__}")
