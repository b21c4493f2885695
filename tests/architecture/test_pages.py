"""The generated pages that are committed say what the code says."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_generated_pages_are_current():
    pages = runpy.run_path(str(ROOT / "docs" / "make_pages.py"))["pages"]()
    stale = [path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run `make docs` and commit the pages"
