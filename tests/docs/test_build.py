"""The pages build without a warning, and the search knows what is in them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_docs_build_without_warnings(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "searchindex.js").read_text(encoding="utf-8")
    assert all(word in index for word in ("howto/reward", "tutorials/control", "staleness", "lora"))
