"""The page to choose a recipe from has something to say of every one."""

import runpy
from pathlib import Path

from grpo.recipes import RECIPES


def test_every_recipe_says_when_it_helps_and_what_it_costs():
    told = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "recipes_page.py"))["CHOOSE"]
    assert [*told] == [*RECIPES]
    assert all(len(row) == 3 and all(row) for row in told.values())
