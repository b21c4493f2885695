"""Nothing in the documentation, and no message of the package, leads to a page or a heading that is not there."""

import json
import re
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]


def own(path: Path) -> bool:
    """Not built, and not a link to another page."""
    return "_build" not in path.parts and not path.is_symlink()


FOLDERS = ("docs", "grpo", "bench", "examples", "tests")
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.md")) if own(path)),
    *sorted((ROOT / "docs").rglob("*.ipynb")),
]
SOURCES = {".py", ".js", ".yaml", ".toml", ".sh", ".yml"}
"""Files whose comments and messages name pages as docs/x.md."""


def text(path: Path) -> str:
    """A page's Markdown; of a notebook that of its cells."""
    told = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return told
    cells = (cell for cell in json.loads(told)["cells"] if cell["cell_type"] == "markdown")
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def links(told: str) -> list[str]:
    """Where the links and pictures of a text lead, those inside of directives too."""
    found = []
    for token in MarkdownIt("commonmark").enable("table").parse(told):
        if token.type == "fence" and token.info.startswith("{container}"):
            found += links(token.content)
        inside = (child for child in token.children or () if child.type in ("link_open", "image"))
        found += [str(child.attrGet("href") or child.attrGet("src")) for child in inside]
    return [unquote(target) for target in found]


def anchors(path: Path) -> set[str]:
    """What a page's headings are called in an address, as GitHub and MyST have it."""
    tokens = MarkdownIt("commonmark").parse(text(path))
    inline = [after for before, after in pairwise(tokens) if before.type == "heading_open"]
    heads = (
        "".join(child.content for child in token.children if child.type in ("text", "code_inline")) for token in inline
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def dead(path: Path, target: str) -> bool:
    """Whether a link of this page leads nowhere; what is on the web is not asked."""
    if re.match(r"[a-z]+:", target):
        return False
    place, _, heading = target.partition("#")
    page = (path.parent / place).resolve() if place else path
    if not page.exists():
        return True
    return bool(heading) and page.suffix in (".md", ".ipynb") and heading not in anchors(page)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert [target for target in links(text(path)) if dead(path, target)] == []


def test_pages_that_code_and_messages_name_are_there():
    named = [
        (path.relative_to(ROOT), page)
        for folder in ("grpo", "bench", "scripts", "examples", "docs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SOURCES and "_build" not in path.parts and "vendor" not in path.parts
        for page in re.findall(r"\bdocs/[\w/]+\.md", path.read_text(encoding="utf-8"))
    ]
    assert [(str(path), page) for path, page in named if not (ROOT / page).exists()] == []
    assert named, "messages name pages"


def test_every_page_is_in_a_table_of_contents():
    docs = ROOT / "docs"
    listed = {"index"}
    for path in sorted(docs.rglob("*.md")):
        for block in re.findall(r"```\{toctree\}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL):
            names = [line.strip() for line in block.splitlines() if line.strip() and not line.startswith(":")]
            listed |= {
                (path.parent / re.sub(r".*<(.*)>", r"\1", name)).resolve().relative_to(docs).as_posix()
                for name in names
            }
    pages = {path.relative_to(docs).with_suffix("").as_posix() for path in PAGES if path.is_relative_to(docs)}
    assert pages - listed == set()


@pytest.mark.parametrize("target", ["nowhere.md", "#no-such-heading", "control.md#no-such-heading"])
def test_a_dead_link_is_found(target):
    assert dead(ROOT / "docs" / "index.md", target)
