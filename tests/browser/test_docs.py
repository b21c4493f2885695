"""The docs in a browser: search puts the page that helps first, and formulas are drawn without another server."""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]


@pytest.fixture
def site(tmp_path):
    """The scripts of the docs on a page of their own."""
    for file in (ROOT / "docs/_static/math.js", ROOT / "grpo/view/page/vendor/temml/temml.js"):
        shutil.copy(file, tmp_path)
    formulas = r'<span class="math">\(r_i\)</span><div class="math">\[\frac{a}{b}\]</div>'
    (tmp_path / "index.html").write_text(f'<!doctype html>{formulas}<script type="module" src="math.js"></script>')
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_formulas_are_drawn_by_the_file_that_comes_with_the_package(page, site):
    page.open("", url=site)
    page.until(lambda: len(page.all("math")) == 2, "two formulas")
    assert len(page.all("div.math math mfrac")) == 1 and "\\" not in page.body()


def test_search_puts_how_tos_first_and_lists_of_everything_last(page, site):
    page.open("?q=own+reward", url=site)
    results = [["decisions", "Decisions"], ["howto/compare", "Compare runs"], ["howto/reward", "Your own reward"]]
    results += [["control", "Control"], ["reference/api/control", "Control"]]
    order = """const said = arguments[0].map(([docname, title]) => [docname, title, "", null, 10]);
        return said.sort((a, b) => Scorer.score(b) - Scorer.score(a)).map(([docname]) => docname)"""
    found = page.script((ROOT / "docs/scorer.js").read_text() + order, results)
    assert found[:3] == ["howto/reward", "howto/compare", "control"]
