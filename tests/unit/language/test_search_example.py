"""The library of `examples/search.py`: what is searched is found, what is answered is judged, nothing leaks."""

import asyncio
import runpy
from pathlib import Path

from grpo.language.turns.loops import asynchronous

EXAMPLE = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "search.py"))


def test_a_search_finds_the_line_and_an_answer_ends_the_conversation(tmp_path):
    train, held_out = EXAMPLE["write_library"](tmp_path, seed=3)
    assert len(held_out) == EXAMPLE["HELD_OUT"] and len(train) == 1040 - len(held_out)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    row, library = held_out[0], EXAMPLE["Library"]()
    assert asynchronous(library, "reset", "step")
    library.reset(row)
    key = row["prompt"][:-1]
    assert asyncio.run(library.step(f"find {key}")) == (f"{key} is {row['answer']}", -0.05, False)
    assert asyncio.run(library.step("find zz"))[0] == asyncio.run(library.step("find k"))[0] == "-"
    assert len(asyncio.run(library.step("find is"))[0].splitlines()) == EXAMPLE["LINES"]
    assert asyncio.run(library.step(row["answer"])) == (None, 1.0, True)
    assert asyncio.run(library.step("find" + row["answer"])) == (None, 0.0, True)
