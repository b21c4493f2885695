"""Tables of figures in pages of docs/: each stands between two marks, and whoever made it writes it anew."""

from __future__ import annotations

from pathlib import Path

END = "<!-- until here -->"


def begins(script: str) -> str:
    """The mark before what a script writes."""
    return f"<!-- made by bench/{script} -->"


def put_into(page: Path, script: str, text: str) -> None:
    """Between the marks of that script."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begins(script))
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} has no lines {begins(script)} and {END} to write between")
    page.write_text(f"{before}{begins(script)}\n\n{text}\n{END}{after}", encoding="utf-8")
