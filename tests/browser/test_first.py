"""The first screen of a run, what broke, other axes, help, and the answer beside the tries."""

import shutil

import pytest
from selenium.webdriver.common.keys import Keys

from grpo.run.folder import RunFolder
from tests.browser.chromium import DESK, PHONE

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_first_screen_says_whether_it_learns_and_whether_something_is_wrong(page, size, dark):
    page.resize(size, dark)
    page.open("#/run/sums")
    page.says("It learned", ".verdict.up")
    page.says("Nothing looks wrong", ".wrong")
    page.until(lambda: page.all(".learning .chart canvas"), "its curve")
    assert {"signal", "distance", "gradient", "endings", "tries"} <= set(page.texts(".checks .metric"))
    if size == DESK:  # both questions are answered before anything is scrolled
        bottom = "return document.querySelector('.first').getBoundingClientRect().bottom"
        page.until(lambda: page.script(bottom) < size[1], "both on the first screen")
    wide = "return document.documentElement.scrollWidth <= innerWidth + 1"
    page.until(lambda: page.script(wide), "all in the screen")


def test_a_run_that_broke_says_why_and_offers_only_what_is_there(page, runs):
    broken = RunFolder.create(runs / "broken", task="control", config={}, created="2026-01-01T00:00:00+00:00", seed=0)
    broken.write_status(
        {"steps": 9, "recipe": {}, "reason": "KeyError", "error": "KeyError: 'answer' (own.py, line 3)"}
    )
    broken.close()
    page.open("#/run/broken")
    page.says("KeyError: 'answer' (own.py, line 3)", ".warnings .bad")
    page.says("no checkpoint", ".warnings .bad")
    assert page.texts("nav.tabs a") == ["curves", "settings"] and not page.all("#csv, .chart")
    shutil.rmtree(broken.path)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_list_says_of_each_run_whether_it_learned(page, runs, size):
    stuck = RunFolder.create(runs / "stuck", task="language", config={}, created="2026-01-01T00:00:00+00:00", seed=0)
    for step in range(1, 13):
        stuck.append_metrics(step, {"reward": 1.0, "reward_std": 0.0})
    stuck.write_status({"steps": 12, "recipe": {}, "reason": "done"})
    stuck.close()
    page.resize(size)
    page.open()
    page.says("It learned", ".run-row .way.up")
    text = page.one(".run-row", "stuck").text
    assert "It did not learn" in text and "▲ 1 warning" in text
    assert "warning" not in page.one(".run-row", "sums").text
    shutil.rmtree(stuck.path)


@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_the_badges_and_dots_of_a_group_are_all_in_sight(page, size):
    page.resize(size)
    for view in ("#/run/sums/groups", "#/run/bandit/step/60"):
        page.open(view)
        page.until(lambda: page.all(".group-row .dot"), "groups")
        cut = """return [...document.querySelectorAll('.group-row .badges, .group-row .dots, .group-mean')].filter(e =>
            e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 3).length"""
        page.until(lambda cut=cut: page.script(cut) == 0, "nothing cut off")


def test_the_headline_fills_its_card_and_its_axis_has_room_for_its_numbers(page, runs):
    small = RunFolder.create(runs / "small", task="language", config={}, created="2026-01-01T00:00:00+00:00", seed=0)
    for step in range(1, 13):
        small.append_metrics(step, {"reward": 1e-7 * (-1) ** step, "frac_reward_zero_std": 1.0, "failed": 1.0})
    small.write_status({"steps": 12, "recipe": {}, "reason": "done"})
    small.close()
    page.open("#/run/small")
    page.until(lambda: len(page.all(".warnings li")) > 1, "warnings that make the other card tall")
    empty = """const card = document.querySelector('.learning').getBoundingClientRect();
        const chart = document.querySelector('.headline canvas')?.getBoundingClientRect();
        return chart ? card.bottom - chart.bottom : null"""
    page.until(lambda: (left := page.script(empty)) is not None and left < 20, "a curve as tall as its card")
    axis = "const a = document.querySelectorAll('.headline .u-axis')[1]; return a.getBoundingClientRect().width"
    page.until(lambda: page.script(axis) > 60, "room for −1.00e−7")
    shutil.rmtree(small.path)


def test_curves_over_steps_environment_steps_and_time(page, runs):
    page.open("#/run/cartpole-0")
    page.until(lambda: len(page.all(".chart canvas")) > 3, "curves")
    labels = "return [...document.querySelectorAll('#axis option')].map(o => o.value)"
    assert page.script(labels) == ["step", "env_steps", "time"]
    page.choose("#axis", "time")
    page.until(lambda: "x=time" in page.address, "time in the address")
    over = page.one(".panel .u-over")
    page.hover(over)
    page.until(lambda: any(" s" in text and "step" in text for text in page.texts(".step-at")), "a time at the cursor")
    page.click(".panel .u-over")
    page.until(lambda: "/step/" in page.address, "the groups of a step")
    page.open("#/compare?runs=cartpole-0,cartpole-1&x=env_steps")
    page.until(lambda: page.all(".panel canvas"), "curves over environment steps")


def test_help_is_a_key_away_and_escape_closes_it(page):
    page.open("#/run/sums")
    page.says("It learned", ".verdict.up")
    page.press("?")
    page.says("What you can do here", ".help")
    page.press(Keys.ESCAPE)
    page.until(lambda: not page.all(".help"), "no card")
    page.click("#help")
    page.one(".help")
    page.press("?")
    page.until(lambda: not page.all(".help"), "no card")


def test_the_reference_answer_stands_beside_the_tries(page):
    page.open("#/run/sums/step/20/group/1")
    page.says("and", ".prompt, .reference")
    text = page.one(".reference").text
    assert "reference answer" in text and "It is" in text
    page.says("KL", ".formula")
