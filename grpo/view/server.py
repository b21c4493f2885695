"""HTTP: the page, the API, live events, and who may ask.

Completions are hostile text and a browser runs other people's pages beside this one. So: only names of this machine as
Host (a foreign name that resolves here is DNS rebinding), no foreign Origin, no scripts but the page's own, no frames,
GET only; on other interfaces a token besides.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import mimetypes
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, MutableMapping
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from grpo.run.folder import FolderError
from grpo.run.inside import open_inside
from grpo.view.export import export_html, wanted
from grpo.view.files import CHUNK, to_text
from grpo.view.library import Library, error_of
from grpo.view.live import Watch
from grpo.view.runs import MEDIA

PAGE = Path(__file__).with_name("page")
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".md": "text/plain",
}
LOCAL = frozenset(("localhost", "127.0.0.1", "::1"))
MOST_WATCHERS = 64
POLL = 1.0
"""Seconds between looks at the files for live events."""
ALIVE = 15.0
"""Seconds between comments that keep a silent stream open."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def make_app(library: Library, host: str = "127.0.0.1", token: str | None = None) -> App:
    """The whole server as an ASGI application. A host that others can reach needs a token."""
    if not is_loopback(host) and not token:
        raise ValueError(f"--host {host} lets others in: it needs a token")
    routes = Routes(library)
    app = Starlette(
        routes=[
            Route("/", routes.page),
            Route("/page/{path:path}", routes.page),
            Route("/media/{run}/{path:path}", routes.media),
            Route("/api/live", routes.live),
            Route("/export/{run}", routes.export),
            Route("/{path:path}", routes.api),
        ],
        exception_handlers={HTTPException: unrouted},
    )
    app.router.redirect_slashes = False
    return Guard(app, host, token)


def to_json(tree: Any) -> bytes:
    """The body of an answer."""
    return to_text(tree).encode()


def failure(status: int, code: str, message: str) -> Response:
    """The one shape of every error."""
    body = to_json({"error": {"code": code, "message": message}})
    return Response(body, status, headers=HEADERS, media_type="application/json")


def unrouted(request: Request, error: Exception) -> Response:
    """A path that no route takes: one with a line break in it, say."""
    status = error.status_code if isinstance(error, HTTPException) else 404
    return failure(status, "not_found", "there is no such route")


class Guard:
    """Turns away whoever may not ask, before anything is read."""

    def __init__(self, app: App, host: str, token: str | None) -> None:
        self._app, self._host, self._token = app, host, token
        self._names = LOCAL | {host.lower()}
        self._any_name = not is_loopback(host)  # reached by whatever name the network gives it: the token protects
        # Cookies know no port: two viewers on one machine must not log each other out.
        self._cookie = f"grpo_view_{hashlib.sha256((token or '').encode()).hexdigest()[:8]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            answer = self._judged(scope)
            await (answer or self._app)(scope, receive, send)
        # Nothing here speaks WebSocket: the connection is dropped.

    def _judged(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return failure(405, "bad_request", "the viewer only reads: GET")
        headers: dict[str, str] = {}
        for raw, value in scope["headers"]:
            name = raw.decode("latin-1").lower()
            if name in headers and name in ("host", "origin"):
                return failure(400, "bad_request", "more than one Host or Origin")
            headers[name] = value.decode("latin-1")
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._any_name and _name(host) not in self._names:
            return failure(
                403, "forbidden", f"this viewer answers to localhost only, not to {host!r:.100}; see grpo view --host"
            )
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return failure(403, "forbidden", "asked by another site")
        if headers.get("sec-fetch-site", "none") in ("cross-site", "same-site") and not _opened_by_a_link(headers):
            return failure(403, "forbidden", "asked by another site")
        return self._admitted(scope, headers) if self._token else None

    def _admitted(self, scope: Scope, headers: dict[str, str]) -> Response | None:
        """With a token: only who has shown it."""
        token = self._token or ""
        if scope["path"] == "/login":
            given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
            if not _same(given, token):
                return failure(401, "unauthorised", "this token is not the one that `grpo view` printed")
            answer = RedirectResponse("/", 303, headers=HEADERS)
            answer.set_cookie(self._cookie, token, httponly=True, samesite="lax", path="/")
            return answer
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except Exception:  # whatever a broken header makes of the parser
            cookie = None
        if cookie is None or not _same(cookie.value, token):
            return failure(401, "unauthorised", "open the link that `grpo view` printed")
        return None


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def _name(host: str) -> str:
    """The name in a Host header, without its port: a tunnel may come in by another one."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\s/@\\]+)(:\d{1,5})?", host)
    return found[1].strip("[]").lower() if found else ""


def _opened_by_a_link(headers: dict[str, str]) -> bool:
    """A person followed a link in a document: the page opens by itself, nobody else sees the answer."""
    return headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"


class Routes:
    """What each path answers."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._watchers = 0

    def page(self, request: Request) -> Response:
        """A file of the page itself."""
        name = request.path_params.get("path", "index.html")
        kind = TYPES.get(Path(name).suffix.lower())
        if kind is None:
            return failure(404, "not_found", "the page has no such file")
        try:
            with open_inside(PAGE, name) as file:
                return Response(file.read(), headers=HEADERS, media_type=f"{kind}; charset=utf-8")
        except FolderError:
            return failure(404, "not_found", "the page has no such file")

    def api(self, request: Request) -> Response:
        """An answer of the library, or why there is none."""
        try:
            found = to_json(self._library.answer(request.scope["path"], dict(request.query_params)))
        except Exception as error:
            return failure(*error_of(error))
        return Response(found, headers=HEADERS, media_type="application/json")

    def media(self, request: Request) -> Response:
        """A video or picture of a run, whole or a range of it."""
        run, path = request.path_params["run"], request.path_params["path"]
        suffix = Path(path).suffix.lower()
        try:
            if suffix not in MEDIA or not re.fullmatch(r"(samples/)?[^/]+", path):
                raise LookupError("only videos and pictures are served")
            with self._library.lock:
                found = self._library.run(run)
            file = open_inside(found.root, f"{found.path}/{_unquoted(path)}")
        except Exception as error:
            return failure(*error_of(error))
        size = file.seek(0, 2)
        begin, end, status = _range(request.headers.get("range"), size)
        headers = {**HEADERS, "accept-ranges": "bytes", "content-length": str(end - begin)}
        if status == 206:
            headers["content-range"] = f"bytes {begin}-{end - 1}/{size}"
        kind = mimetypes.types_map.get(suffix, "application/octet-stream")
        if status == 416 or request.method == "HEAD":
            file.close()
            told = {**HEADERS, "content-range": f"bytes */{size}"} if status == 416 else headers
            return Response(b"", status, headers=told, media_type=kind)
        return StreamingResponse(_pieces(file, begin, end), status, headers=headers, media_type=kind)

    def export(self, request: Request) -> Response:
        """The run as one file, to be kept."""
        run = request.path_params["run"]
        try:
            groups = wanted(request.query_params.get("groups", "12"))
            self._library.answer(f"/api/runs/{run}")  # no such run: said before anything is put together
            html = export_html(self._library, run, groups)
        except ValueError as error:
            return failure(400, "bad_request", str(error))
        except Exception as error:
            return failure(*error_of(error))
        name = re.sub(r"[^A-Za-z0-9._+=-]", "_", run)
        headers = {**HEADERS, "content-disposition": f'attachment; filename="{name}.html"'}
        return Response(html.encode(), headers=headers, media_type="text/html; charset=utf-8")

    async def live(self, request: Request) -> Response:
        """Server-sent events of one run, or of the list."""
        if request.method == "HEAD":
            return Response(b"", headers=HEADERS, media_type="text/event-stream")
        if self._watchers >= MOST_WATCHERS:
            return failure(503, "busy", f"{MOST_WATCHERS} pages are watching already; close some")
        self._watchers += 1  # before anything is waited for: many may ask at once
        try:
            watch = Watch(self._library, request.query_params.get("run"))
            first = await run_in_threadpool(watch.hello)
        except BaseException as error:
            self._left()
            if not isinstance(error, Exception):
                raise
            return failure(*error_of(error))
        return Watched(self._events(watch, first), self._left)

    def _left(self) -> None:
        self._watchers -= 1

    async def _events(self, watch: Watch, first: list[tuple[str, Any]]) -> AsyncIterator[bytes]:
        silent, events = 0.0, first
        while True:
            for name, data in events:
                yield f"event: {name}\ndata: ".encode() + to_json(data) + b"\n\n"
            silent = 0.0 if events else silent + POLL
            if silent >= ALIVE:
                silent = 0.0
                yield b": alive\n\n"
            if watch.over:
                return
            await asyncio.sleep(POLL)
            events = await run_in_threadpool(watch.poll)


class Watched(StreamingResponse):
    """Events that say when nobody listens any more, also where nobody ever began to."""

    def __init__(self, events: AsyncIterator[bytes], left: Callable[[], None]) -> None:
        super().__init__(events, headers=HEADERS, media_type="text/event-stream")
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The whole stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()


def _unquoted(path: str) -> str:
    """~XX as in the ids of runs."""
    raw = re.sub(rb"~([0-9A-F]{2})", lambda found: bytes([int(found[1], 16)]), path.encode(errors="surrogateescape"))
    return raw.decode(errors="surrogateescape")


def _range(header: str | None, size: int) -> tuple[int, int, int]:
    """(begin, end, status) for a Range header; what is not understood is the whole file."""
    found = re.fullmatch(r"bytes=(\d{0,15})-(\d{0,15})", header or "")
    if found is None or not (found[1] or found[2]):
        return 0, size, 200
    if not found[1]:
        begin, end = max(size - int(found[2]), 0), size
    else:
        begin, end = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
    return (begin, end, 206) if begin < end else (0, 0, 416)


def _pieces(file: Any, begin: int, end: int) -> Iterator[bytes]:
    with file:
        file.seek(begin)
        while begin < end and (piece := file.read(min(CHUNK, end - begin))):
            begin += len(piece)
            yield piece
