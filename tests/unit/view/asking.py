"""A client that speaks to the application directly: any path, any header, also what no browser would send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote_to_bytes

LOCAL = (("host", "127.0.0.1:6076"),)


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


def ask(
    app: Any,
    url: str,
    headers: Sequence[tuple[str, str]] = LOCAL,
    method: str = "GET",
    until: bytes | None = None,
    seconds: float = 60.0,
    meanwhile: Callable[[], object] | None = None,
) -> Answer:
    """One request. `until`: leave once this was received, for answers that never end; `meanwhile`: as it begins."""
    path, _, query = url.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": unquote_to_bytes(path).decode(errors="surrogateescape"), "raw_path": path.encode(), "root_path": "",
        "query_string": query.encode(), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 6076),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }  # fmt: skip
    answer, left, to_do = Answer(), asyncio.Event(), [meanwhile] if meanwhile else []
    asked = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            answer.body += message.get("body", b"")
            if answer.body and to_do:
                to_do.pop()()
            if until is not None and until in answer.body:
                left.set()

    async def whole() -> None:
        await asyncio.wait_for(app(scope, receive, send), seconds)

    asyncio.run(whole())
    return answer
