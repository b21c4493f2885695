"""A command's libraries stay out of searches for garbage; what its run leaves behind does not."""

import gc
import subprocess
import sys

from grpo.app.loading import loading

SCRIPT = """
import gc, sys
from grpo.app.loading import loading
try:
    with loading():
        assert not gc.isenabled(), "it searches while libraries are loaded"
        {loads}
finally:
    print(gc.isenabled(), gc.get_freeze_count() > {least})
"""


def told(loads: str, least: int) -> str:
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(loads=loads, least=least)], capture_output=True)
    return ended.stdout.decode().strip()


def test_what_was_loaded_is_left_alone_and_searching_goes_on() -> None:
    assert told("import pydantic", 1000) == "True True"


def test_searching_goes_on_where_a_library_is_missing() -> None:
    assert told("import no_such_library", -1) == "True True"


def test_a_process_that_had_its_libraries_already_keeps_its_garbage_in_sight() -> None:
    """A notebook's or a test's: what is alive there may become garbage later."""
    import torch  # noqa: F401

    before = gc.get_freeze_count()
    with loading():
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
