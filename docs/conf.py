"""Sphinx settings; `make docs` builds the pages."""

import re
import sys
from pathlib import Path

import grpo

sys.path.insert(0, str(Path(__file__).parent))  # notebooks.py, which reads the tutorials

project = "anygrpo"
author = "The anygrpo authors"
copyright = author
release = version = grpo.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "notebooks"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
suppress_warnings = ["ref.python"]  # two rooms have a class of one name: a signature that says it is no link

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
add_module_names = False

html_theme = "furo"
html_static_path = ["_static", "../grpo/view/page/vendor/temml"]
html_css_files = ["site.css", "temml.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))
mathjax_path, mathjax_options = "math.js", {"type": "module"}
html_title = f"anygrpo {release}"


def plain_text(app, what, name, obj, options, lines):
    """Our docstrings are text with `code` in backticks, not reStructuredText: |A| is an absolute value."""
    if any(line.startswith(" ") for line in lines):  # drawn or laid out by hand: as it stands
        lines[:] = ["::", "", *(f"    {line}" for line in lines), ""]
        return
    text = re.sub(
        r"``?([^`]+)``?|([\\|*_])",
        lambda found: rf"\ ``{found[1]}``\ " if found[1] else rf"\{found[2]}",
        "\n".join(lines),
    )
    lines[:] = text.split("\n")


def setup(app):
    app.connect("autodoc-process-docstring", plain_text)
