"""An answer to every path of the API: what the server sends and what an export embeds are the same.

One lock: readers of the same run share caches. Questions are short, or answer in part and go on when asked again.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo import __version__
from grpo.run.folder import FolderError, Row
from grpo.run.inside import Gone
from grpo.view import group as one
from grpo.view.about import entries
from grpo.view.groups import SORTS, Groups, Query
from grpo.view.index import BADGES, MOST
from grpo.view.patience import Patience
from grpo.view.runs import Run
from grpo.view.shelf import Shelf, compare

LOG = logging.getLogger(__name__)


class BadRequest(ValueError):
    """A question that makes no sense, in one line."""


class Library:
    """The runs below a folder, or one of them."""

    def __init__(self, root: str | Path, only: str | None = None) -> None:
        self.root = Path(root).resolve()
        self.shelf = Shelf(self.root, only)
        self.lock = threading.RLock()
        self._groups: OrderedDict[str, Groups] = OrderedDict()
        self._routes: list[tuple[re.Pattern[str], Callable[..., Row]]] = [
            (re.compile(f"/api/{pattern}"), answer)
            for pattern, answer in (
                (r"runs", self._runs),
                (r"docs", self._docs),
                (r"compare", self._compare),
                (r"prompts/(?P<key>[^/]+)", self._prompt),
                (r"runs/(?P<run>[^/]+)", self._run),
                (r"runs/(?P<run>[^/]+)/(?P<series>metrics|timing)", self._series),
                (r"runs/(?P<run>[^/]+)/config", self._config),
                (r"runs/(?P<run>[^/]+)/events", self._events),
                (r"runs/(?P<run>[^/]+)/groups", self._list),
                (r"runs/(?P<run>[^/]+)/steps/(?P<step>[^/]+)/groups", self._list),
                (r"runs/(?P<run>[^/]+)/steps/(?P<step>[^/]+)/groups/(?P<group>[^/]+)", self._group),
                (r"runs/(?P<run>[^/]+)/steps/(?P<step>[^/]+)/groups/(?P<group>[^/]+)/tokens", self._tokens),
                (r"runs/(?P<run>[^/]+)/steps/(?P<step>[^/]+)/groups/(?P<group>[^/]+)/text", self._text),
            )
        ]

    def answer(self, path: str, query: Mapping[str, str] | None = None) -> Row:
        """`path` as in the URL. LookupError: no such thing; Gone: no longer; FolderError: damaged; BadRequest."""
        for pattern, answer in self._routes:
            found = pattern.fullmatch(path)
            if found is not None:
                with self.lock:
                    return answer(query or {}, **found.groupdict())
        raise LookupError(f"there is no route {path!r:.200}")

    def run(self, run: str) -> Run:
        """A run with what is new of it."""
        found = self.shelf.run(run)
        try:
            found.refresh()
        except Gone:
            self.shelf.forget(run)
            self._groups.pop(run, None)
            raise
        return found

    def groups(self, run: str) -> Groups:
        """The groups of a run."""
        found = self.run(run)
        if run not in self._groups or self._groups[run].run is not found:
            self._groups[run] = Groups(found)
            while len(self._groups) > 4:
                self._groups.popitem(last=False)
        self._groups.move_to_end(run)
        return self._groups[run]

    def lines(self, run: str, groups: Iterable[tuple[int, int]]) -> list[Row]:
        """What a list shows of these groups, by step and number."""
        with self.lock:
            mine = self.groups(run)
            return mine.lines([(step, mine.rows(step, group)[1]) for step, group in groups])

    # --- runs -------------------------------------------------------------------------------------------------------

    def _runs(self, query: Mapping[str, str]) -> Row:
        found, notes = self.shelf.find()
        lines, patience = [], Patience()
        for run, path in found.items():
            try:
                lines.append(self.shelf.line(run, path, patience))
            except (Gone, LookupError):  # deleted meanwhile
                self.shelf.forget(run)
        lines.sort(key=lambda line: (line["created"] or "", line["updated"] or 0.0, line["name"]), reverse=True)
        return {"root": self.root.name, "version": __version__, "export": False, "runs": lines, "notes": notes}

    def _docs(self, query: Mapping[str, str]) -> Row:
        return {"metrics": entries(), "url": None}

    def _run(self, query: Mapping[str, str], run: str) -> Row:
        return self.run(run).detail()

    def _series(self, query: Mapping[str, str], run: str, series: str) -> Row:
        found = self.run(run)
        after = _integer(query, "after", None, -1)
        names = [name for name in query["names"].split(",") if name] if query.get("names") else None
        chosen = found.metrics if series == "metrics" else found.timing
        return found.table(chosen, after, _integer(query, "points", 2000, 10, 100_000) or 2000, names)

    def _config(self, query: Mapping[str, str], run: str) -> Row:
        found = self.run(run)
        given = {key: value for key, value in found.object("config.json").items() if key not in ("resolved", "run")}
        return {"settings": found.settings(), "given": given}

    def _events(self, query: Mapping[str, str], run: str) -> Row:
        events = self.run(run).events
        offset, limit = _integer(query, "offset", 0) or 0, _integer(query, "limit", 100, 0, 1000) or 0
        return {"events": events[offset : offset + limit], "total": len(events)}

    def _compare(self, query: Mapping[str, str]) -> Row:
        ids = list(dict.fromkeys(run for run in query.get("runs", "").split(",") if run))
        if not 1 <= len(ids) <= 50:
            raise BadRequest("runs: name 1 to 50 runs, separated by commas")
        runs = [self.run(run) for run in ids]
        return {"runs": [run.summary() for run in runs], **compare(runs)}

    # --- groups -----------------------------------------------------------------------------------------------------

    def _list(self, query: Mapping[str, str], run: str, step: str | None = None) -> Row:
        at = None if step is None else _whole(step, "step")
        asked = Query(
            words=Query.words_of(query.get("q", "")[:1000]),
            badges=tuple(badge for badge in query.get("badge", "").split(",") if badge),
            low=_real(query, "min_mean"),
            high=_real(query, "max_mean"),
            sort=query.get("sort") or ("step" if step is None else "group"),
            descending=(query.get("order") or ("desc" if step is None and "sort" not in query else "asc")) == "desc",
            offset=_integer(query, "offset", 0) or 0,
            limit=_integer(query, "limit", 100, 1, 500) or 100,
        )
        if asked.sort not in SORTS:
            raise BadRequest(f"sort is one of {', '.join(SORTS)}")
        if unknown := [badge for badge in asked.badges if badge.removeprefix("-") not in BADGES]:
            raise BadRequest(f"badge {unknown[0]!r:.50} is not one of {', '.join(BADGES)}")
        if query.get("order") not in (None, "", "asc", "desc"):
            raise BadRequest("order is asc or desc")
        return self.groups(run).page(asked, at)

    def _group(self, query: Mapping[str, str], run: str, step: str, group: str) -> Row:
        return one.detail(self.groups(run), _whole(step, "step"), _whole(group, "group"))

    def _tokens(self, query: Mapping[str, str], run: str, step: str, group: str) -> Row:
        rows = [_whole(row, "rows") for row in query["rows"].split(",") if row] if query.get("rows") else None
        begin = _integer(query, "from", 0) or 0
        end = _integer(query, "to", begin + 2048)
        return one.tokens(self.groups(run), _whole(step, "step"), _whole(group, "group"), rows, begin, end or 0)

    def _text(self, query: Mapping[str, str], run: str, step: str, group: str) -> Row:
        begin = _integer(query, "from", 0) or 0
        end = _integer(query, "to", begin + one.LONGEST) or 0
        row = _integer(query, "row", None)
        if row is None:
            raise BadRequest("row: say which try")
        return one.text(self.groups(run), _whole(step, "step"), _whole(group, "group"), row, begin, end)

    def _prompt(self, query: Mapping[str, str], key: str) -> Row:
        if not re.fullmatch(r"[0-9a-f]{16}", key):
            raise BadRequest("a prompt's key is 16 hexadecimal digits")
        named = [query.get("run", ""), *query.get("runs", "").split(",")]
        ids = list(dict.fromkeys(run for run in named if run))
        if not 1 <= len(ids) <= 4:
            raise BadRequest("run and runs: name 1 to 4 runs to look in")
        limit = _integer(query, "limit", 200, 1, 1000) or 200
        found = one.through_time([self.groups(run) for run in ids], int(key, 16), limit)
        if found["complete"] and not found["entries"]:
            raise LookupError("no group of these runs has this prompt")
        return found


def error_of(error: Exception) -> tuple[int, str, str]:
    """Status, code and message of what `answer` raises. What nobody foresaw is logged, and said in words too."""
    if isinstance(error, BadRequest):
        return 400, "bad_request", str(error)
    if isinstance(error, Gone | FileNotFoundError):
        return 410, "gone", str(error)
    if isinstance(error, LookupError) and not isinstance(error, KeyError | IndexError):
        return 404, "not_found", str(error)
    if isinstance(error, RecursionError):
        return 422, "unreadable", "a file of this run is nested too deep to be shown"
    if isinstance(error, FolderError | OSError):
        return 422, "unreadable", str(error)
    LOG.error("a question could not be answered", exc_info=error)
    return 422, "unreadable", f"a file of this run cannot be shown ({type(error).__name__}: {error!s:.200})"


def _whole(text: str, name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) > MOST:
        raise LookupError(f"there is no {name} {text!r:.40}")
    return int(text)


def _integer(query: Mapping[str, Any], name: str, default: int | None, low: int = 0, high: int = MOST) -> int | None:
    text = query.get(name)
    if text is None or text == "":
        return default
    if not re.fullmatch(r"-?[0-9]{1,12}", text) or not low <= int(text) <= high:
        raise BadRequest(f"{name} is a whole number from {low} to {high}")
    return int(text)


def _real(query: Mapping[str, str], name: str) -> float | None:
    text = query.get(name)
    if text is None or text == "":
        return None
    if not re.fullmatch(r"-?[0-9]{1,15}(\.[0-9]{1,15})?(e-?[0-9]{1,2})?", text):
        raise BadRequest(f"{name} is a number")
    return float(text)
