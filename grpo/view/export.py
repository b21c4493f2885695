"""The page and its answers as one file: for an issue, a paper, a notebook. Opens without a server.

Modules become data: URLs behind an import map, so that the page's sources need no build step. Everything that came out
of a run is JSON inside a `<script type="application/json">`, where no `<` is left; the nonce is drawn after the runs
were written, so nothing in them can know it.
"""

from __future__ import annotations

import base64
import mimetypes
import posixpath
import re
import secrets
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from grpo.run.folder import FolderError, Row
from grpo.run.inside import open_inside
from grpo.view.files import to_text
from grpo.view.library import Library

PAGE = Path(__file__).with_name("page")
MOST_RUNS = 20
MOST_MEDIA = 8 << 20
"""Bytes of videos and pictures that are embedded, in sum."""
MOST_TEXT = 128 << 20
"""Characters of the groups in it, in sum; a browser has to read them all before it shows one."""
Wanted = int | Sequence[tuple[int, int]]
"""How many groups of a run, or which, by step and number."""
_IMPORT = re.compile(
    r"""((?:^|[;}\s])(?:import|export)\b[^"';]*?\bfrom\s*|(?:^|[;}\s])import\s*)(["'])(\.{1,2}/[^"']+)\2""", re.M
)


def write_export(library: Library, target: Path, run: str | None, groups: Wanted = 12) -> Path:
    """Write the file, whole or not at all."""
    html = export_html(library, run, groups)
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:  # x: through no link that someone has put there
            file.write(html)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ValueError(f"cannot write {target}: {error.strerror}; name another file") from error
    return target


def export_html(library: Library, run: str | None, groups: Wanted = 12) -> str:
    """The page with the answers that it needs to show one run, or all of a folder."""
    responses, media = answers(library, run, groups)
    start = f"#/run/{run}" if run else "#/"
    return assembled({"export": True, "start": start, "responses": responses, "media": media})


def wanted(text: str) -> Wanted:
    """`12`: so many; `10/0,20/3`: these, by step and number."""
    if re.fullmatch(r"[1-9]\d{0,3}", text):
        return int(text)
    if re.fullmatch(r"\d{1,9}/\d{1,9}(,\d{1,9}/\d{1,9}){0,999}", text):
        return [(int(step), int(group)) for step, group in (pair.split("/") for pair in text.split(","))]
    raise ValueError(f"groups are a number (12), or STEP/GROUP,… (10/0,20/3), not {text!r:.60}")


# --- what is in it --------------------------------------------------------------------------------------------------


def answers(library: Library, run: str | None, groups: Wanted) -> tuple[dict[str, Row], dict[str, str]]:
    """Path → answer of everything the file holds, and its media."""
    found: dict[str, Row] = {"/api/docs": library.answer("/api/docs")}
    listed = library.answer("/api/runs")
    listed["runs"] = [line for line in listed["runs"] if run in (None, line["run"])][:MOST_RUNS]
    readable = [line["run"] for line in listed["runs"] if line["state"] != "unreadable"]
    media: dict[str, str] = {}
    if run is None and isinstance(groups, int):
        groups = max(groups // max(len(readable), 1), 1)
    for name in readable:
        mine = _run_answers(library, name, groups)
        for path in [path for path in mine if path.startswith("/api/prompts/") and path in found]:
            both = found[path]["entries"] + mine[path]["entries"]
            mine[path] = mine[path] | {"entries": sorted(both, key=lambda entry: (entry["run"], entry["step"]))}
        found |= mine
        media |= _media(library, name, found, MOST_MEDIA - sum(map(len, media.values())))
    alone = [path for path in found if path.startswith("/api/prompts/") and len(found[path]["entries"]) < 2]
    for path in alone:
        del found[path]
    for at, line in enumerate(listed["runs"]):
        whole = found.setdefault(f"/api/runs/{line['run']}", line)
        listed["runs"][at] = {name: whole[name] for name in line}  # the list itself may be half read
    found["/api/runs"] = listed | {"export": True}
    if len(readable) > 1:
        found["/api/compare"] = library.answer("/api/compare", {"runs": ",".join(readable)})
    return found, media


def _run_answers(library: Library, run: str, groups: Wanted) -> dict[str, Row]:
    base = f"/api/runs/{run}"
    found = {path: library.answer(path) for path in (base, f"{base}/metrics", f"{base}/timing", f"{base}/config")}
    found[f"{base}/events"] = library.answer(f"{base}/events", {"limit": "200"})
    places = (
        groups if not isinstance(groups, int) else _telling(library, run, found[base]["sample_steps"]["list"], groups)
    )
    lines, size = library.lines(run, places), 0
    for at, line in enumerate(lines):
        path = f"{base}/steps/{line['step']}/groups/{line['group']}"
        found[path] = library.answer(path) | _beside(lines, at, ("step", "group"))
        found[f"{path}/tokens"] = library.answer(f"{path}/tokens")
        key = line["prompt_key"]
        if key and f"/api/prompts/{key}" not in found:
            history = found[f"/api/prompts/{key}"] = _finished(
                library, f"/api/prompts/{key}", {"run": run, "limit": "50"}
            )
            size += len(to_text(history))
        size += len(to_text(found[path])) + len(to_text(found[f"{path}/tokens"]))
        if size > MOST_TEXT:
            raise ValueError(f"{len(lines)} groups are more than {MOST_TEXT >> 20} MiB in one file; choose fewer")
    steps = [{"step": step} for step in sorted({line["step"] for line in lines})]
    for at, step in enumerate(steps):
        mine = [line for line in lines if line["step"] == step["step"]]
        beside = {name: other and other["step"] for name, other in _beside(steps, at, ("step",)).items()}
        found[f"{base}/steps/{step['step']}/groups"] = _listed(mine, **step, **beside)
    found[f"{base}/groups"] = _listed(lines, step=None)
    numbers = [step["step"] for step in steps]
    ends = {"first": numbers[0] if numbers else None, "last": numbers[-1] if numbers else None}
    found[base]["sample_steps"] = {"count": len(numbers), **ends, "list": numbers}
    return found


def _listed(lines: Sequence[Row], **more: Any) -> Row:
    """A list as the API has it, all on one page."""
    counts = Counter(badge for line in lines for badge in line["badges"])
    whole = {"total": len(lines), "all": len(lines), "complete": True, "scanned": 1, "of": 1, "notes": []}
    return {**more, "groups": list(lines), "badges": dict(counts), **whole}


def _beside(rows: Sequence[Row], at: int, names: Sequence[str]) -> dict[str, Row | None]:
    """What comes before and after in the file."""
    others = {"previous": rows[at - 1] if at else None, "next": rows[at + 1] if at + 1 < len(rows) else None}
    return {side: {name: row[name] for name in names} if row else None for side, row in others.items()}


def _finished(library: Library, path: str, query: dict[str, str]) -> Row:
    """Ask until everything was read."""
    while not (found := library.answer(path, query))["complete"]:
        pass
    return found


def _telling(library: Library, run: str, steps: Sequence[int], count: int) -> list[tuple[int, int]]:
    """From up to four steps, evenly spread with first and last, the groups whose tries differ most."""
    spread = min(len(steps), 4, count)
    places = [round(k * (len(steps) - 1) / (spread - 1)) for k in range(spread)] if spread > 1 else [-1][:spread]
    found: list[tuple[int, int]] = []
    for number, place in enumerate(places):
        share = count // spread + (number < count % spread)
        query = {"sort": "std", "order": "desc", "limit": str(min(share, 500))}
        try:
            listed = library.answer(f"/api/runs/{run}/steps/{steps[place]}/groups", query)
        except (FolderError, LookupError):
            continue
        found += sorted((steps[place], line["group"]) for line in listed["groups"])
    return found


def _media(library: Library, run: str, answers: dict[str, Row], room: int) -> dict[str, str]:
    """The run's own video and pictures, then the films of its groups, as far as there is room."""
    base = f"/api/runs/{run}"
    files = {item["url"]: item["name"] for item in answers[base].get("files", ())}
    for path, answer in answers.items():
        if path.startswith(f"{base}/steps/") and "samples" in answer:
            urls = [item["url"] for sample in answer["samples"] for item in sample["media"]]
            files |= {url: f"samples/{posixpath.basename(url)}" for url in urls}
    with library.lock:
        folder = library.shelf.run(run)
    found = {}
    for url, name in files.items():
        try:
            with open_inside(folder.root, f"{folder.path}/{name}") as file:
                data = file.read(room // 2 + 1)
        except FolderError:  # a row may name what is not there
            continue
        if len(data) <= room // 2:
            kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
            found[url] = f"data:{kind};base64,{base64.b64encode(data).decode()}"
            room -= len(found[url])
    return found


# --- one file -------------------------------------------------------------------------------------------------------


def assembled(content: Row) -> str:
    """index.html with style, modules and content in it."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    nonce = secrets.token_urlsafe(18)
    modules = _modules()
    table = {
        f"page:{name}": f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"
        for name, text in modules.items()
    }
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:; media-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = [
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy, quote=True)}">',
        *(f'<style nonce="{nonce}">\n{_style(name)}\n</style>' for name in _styles(html)),
        f'<script type="importmap" nonce="{nonce}">{embedded({"imports": table})}</script>',
    ]
    data = f'<script type="application/json" id="grpo-export">{embedded(content)}</script>'
    boot = f'<script type="module" nonce="{nonce}">import "page:{_entry(html)}";</script>'
    bare = re.sub(r'\s*<link\b[^>]*rel="stylesheet"[^>]*>|\s*<script\b[^>]*></script>', "", html)
    at = re.search(r"<head[^>]*>", bare)
    if at is None or "</body>" not in bare:
        raise ValueError("page/index.html needs <head> and </body>")
    # The policy first: it holds for what comes after it.
    charset = '<meta charset="utf-8">'
    bare = bare[: at.end()] + "\n" + "\n".join([charset, *head]) + bare[at.end() :]
    before, _, after = bare.rpartition("</body>")
    return f"{before}{data}\n{boot}\n</body>{after}"


def embedded(tree: Any) -> str:
    """JSON that no HTML parser can mistake for markup."""
    return to_text(tree).replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _modules() -> dict[str, str]:
    """Every module of the page, its imports by name instead of by place."""
    found = {}
    for path in sorted(PAGE.rglob("*.js")):
        name = path.relative_to(PAGE).as_posix()

        def named(match: re.Match[str], name: str = name) -> str:
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), match[3]))
            return f'{match[1]}"page:{target}"'

        found[name] = _IMPORT.sub(named, path.read_text(encoding="utf-8"))
    return found


def _entry(html: str) -> str:
    found = re.search(r'<script\b[^>]*src="page/([^"]+)"', html)
    if found is None:
        raise ValueError('page/index.html needs <script type="module" src="page/…">')
    return found[1]


def _styles(html: str) -> list[str]:
    return re.findall(r'<link\b[^>]*rel="stylesheet"[^>]*href="page/([^"]+)"', html)


def _style(name: str) -> str:
    text = (PAGE / name).read_text(encoding="utf-8")
    if "</style" in text.lower():
        raise ValueError(f"page/{name} holds </style")
    return text
