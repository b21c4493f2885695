"""Write the pages that are made from the code. Run by `make docs`; the result is committed."""

from pathlib import Path

from grpo.recipes import table_markdown

DOCS = Path(__file__).parent

RECIPES = """\
# Recipes

Every row is one published variant, written as a choice on each axis of the algorithm. The table is made from
`grpo/recipes.py` by `docs/make_pages.py`; `grpo presets --recipes` prints the same rows.

{table}
"""


def pages() -> dict[Path, str]:
    """Every generated page and its current text."""
    return {DOCS / "recipes.md": RECIPES.format(table=table_markdown().strip())}


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
