"""Seven things a user can do, done by clicking and typing in Chromium over runs that were really trained."""

import json
import shutil

import numpy as np
import pytest
from selenium.webdriver.common.keys import Keys

import grpo
from grpo.cli import main
from grpo.run.folder import RunFolder
from grpo.run.lock import locked
from tests.browser.chromium import DESK, PHONE

pytestmark = pytest.mark.browser


def number(text: str) -> float:
    """A number as the page writes it."""
    return float(text.replace("−", "-").replace("+", "").replace(",", ""))


# --- runs -----------------------------------------------------------------------------------------------------------


def test_all_runs_are_listed_with_their_state_and_found_by_name(page):
    page.open()
    page.until(lambda: len(page.all(".run-row")) == 6, "six runs")
    assert set(page.texts(".run-name a")) == {"sums", "cartpole-0", "cartpole-1", "bandit", "dream", "films"}
    assert "finished" in page.one(".run-row", "sums").text
    assert "finished: reached reward 25" in page.one(".run-row", "films").text
    page.picture("runs")
    page.one("input[type=search]").send_keys("bandit")
    page.until(lambda: len(page.all(".run-row")) == 1, "the one that matches")
    assert "q=bandit" in page.address


def test_runs_are_compared_with_the_spread_over_seeds_and_what_was_set_differently(page):
    page.open()
    for name in ("cartpole-0", "cartpole-1", "dream"):
        page.click(f"input[aria-label='compare {name}']")
    page.click("#compare")
    page.says("2 seeds: mean, lowest to highest")
    page.until(lambda: len(page.all(".panel canvas")) >= 2, "curves")
    assert "task.seed" not in page.texts(".plain td:first-child") or "algorithm" in page.body()
    page.picture("compare")
    page.click(".toggle", "spread over seeds")
    page.until(lambda: "2 seeds" not in page.body(), "a line a run")


# --- curves ---------------------------------------------------------------------------------------------------------


def test_a_click_on_a_curve_opens_the_groups_of_that_step_and_leads_back(page):
    page.open("#/run/sums")
    page.until(lambda: len(page.all(".chart canvas")) > 3, "curves")
    page.picture("curves")
    page.click(".panel .u-over")  # the middle of 40 steps; groups were kept at 10, 20, 30, 40
    page.until(lambda: "/step/20" in page.address, "step 20")
    page.until(lambda: len(page.all(".group-row")) == 4, "its four groups")
    page.click("a", "on the curves")
    page.until(lambda: "at=20" in page.address, "the curves with the step marked")
    page.driver.back()
    page.says("step 20", "#step")


def test_every_metric_is_on_the_curves_and_leads_to_its_entry(page, runs):
    page.open("#/run/sums")
    told = {name for row in RunFolder.open(runs / "sums").metrics() for name in row if row[name] is not None} - {"step"}
    page.until(lambda: told <= set(page.texts(".metric")), "all of them")
    page.until(lambda: len(page.all("a.metric")) > 10, "names that are links")
    assert page.texts("span.metric") == [], "undocumented"
    page.click("a.metric", "frac_reward_zero_std")
    page.says("share of groups whose rewards are all equal", "tr.chosen")


@pytest.mark.parametrize("run", ["cartpole-0", "bandit", "dream"])
def test_every_metric_of_the_other_rooms_is_documented(page, run):
    page.open(f"#/run/{run}")
    page.until(lambda: len(page.all("a.metric")) > 5, "names that are links")
    assert page.texts("span.metric") == []


# --- groups ---------------------------------------------------------------------------------------------------------


def test_groups_are_filtered_sorted_and_searched_and_a_reload_shows_the_same(page):
    page.open("#/run/sums/groups")
    page.until(lambda: len(page.all(".group-row")) == 16, "four steps of four groups")
    page.one("#search").send_keys('"7 + 1"')
    page.until(lambda: len(page.all(".group-row")) == 4, "the prompt at four steps")
    page.choose("#sort", "mean")
    page.click("button[aria-label=order]")
    page.until(lambda: "order=desc" in page.address, "the order")
    means = lambda: [number(text.split()[0]) for text in page.texts(".group-mean")]  # noqa: E731
    page.until(lambda: len(means()) == 4 and means() == sorted(means(), reverse=True), "falling means")
    seen = page.texts(".group-row")
    page.driver.refresh()
    page.until(lambda: page.texts(".group-row") == seen, "the same rows")
    assert page.one("#search").get_attribute("value") == '"7 + 1"'


def test_a_badge_filters_and_its_opposite_gives_the_rest(page):
    page.open("#/run/sums/groups")
    page.until(lambda: len(page.all(".group-row")) == 16, "all groups")
    badge = page.one(".filters .badge")
    name, count = badge.get_attribute("data-badge"), int(badge.text.split()[-1])
    badge.click()
    page.until(lambda: len(page.all(".group-row")) == count, "those with the badge")
    page.click(f".filters [data-badge={name}]")
    page.until(lambda: len(page.all(".group-row")) == 16 - count, "those without")
    assert f"badge=-{name}" in page.address


def test_the_keyboard_walks_groups_and_steps(page):
    page.open("#/run/sums/step/20")
    page.until(lambda: len(page.all(".group-row")) == 4, "groups")
    page.press("j", "j", "k", "j")
    page.until(lambda: "chosen" in page.all(".group-row")[1].get_attribute("class"), "the second row")
    page.picture("groups")
    page.press(Keys.ARROW_RIGHT)
    page.says("step 30", "#step")
    page.press(Keys.ARROW_LEFT)
    page.says("step 20", "#step")
    page.until(lambda: len(page.all(".group-row")) == 4, "groups")
    page.press("j", Keys.ENTER)
    page.says("step 20, group 0", "#group")
    page.press(Keys.ARROW_RIGHT)
    page.says("step 20, group 1", "#group")
    page.press("u")
    page.says("step 20", "#step")


# --- a group --------------------------------------------------------------------------------------------------------


def test_a_group_shows_the_numbers_that_made_the_gradient(page, runs):
    page.open("#/run/sums/step/20/group/1")
    page.until(lambda: len(page.all(".sample[data-row]")) == 6, "six tries")
    rows, _ = RunFolder.open(runs / "sums").samples(20)
    advantage = {row["row"]: row["advantage"] for row in rows if row["group"] == 1}
    order = [int(sample.get_attribute("data-row")) for sample in page.all(".sample[data-row]")]
    shown = [number(text) for text in page.texts(".sums tr:last-child strong")]
    assert sorted(order) == sorted(advantage) and shown == sorted(shown, reverse=True)
    np.testing.assert_allclose(shown, [advantage[row] for row in order], rtol=5e-3)
    first = page.texts(".reference + .sample .sums tr")
    assert first[0].startswith("right") and "× 1" in first[0] and first[1].startswith("thought")


def test_a_token_explains_itself_with_its_own_numbers_and_a_link_to_it_survives_a_reload(page, runs):
    page.open("#/run/sums/step/20/group/1")
    page.until(lambda: len(page.all(".tokens .t")) > 50, "tokens")
    row, t = int(page.one(".sample[data-row]").get_attribute("data-row")), 3
    token = page.all(".reference + .sample .tokens .t")[t]
    page.hover(token)
    page.says("clip(r, 0.8, 1.2)", ".explained")
    page.click(f".reference + .sample .tokens [data-t='{t}']")
    page.until(lambda: f"token={row}.{t}" in page.address, "the token in the address")
    page.one(".explained.pinned")
    page.picture("group")

    _, arrays = RunFolder.open(runs / "sums").samples(20)
    logp, old, advantage = (float(arrays[name][row, t]) for name in ("logp", "old_logp", "advantage"))
    ratio = np.exp(logp - old)
    told = dict(zip(page.texts(".explained dt"), page.texts(".explained .numbers"), strict=True))
    assert number(told["ratio r"].split()[-1]) == pytest.approx(ratio, rel=5e-3)
    value = -min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    assert number(told["minimised"].split("= ")[-1]) == pytest.approx(value, rel=2e-2, abs=2e-3)

    page.driver.refresh()
    page.says("decision 3", ".explained.pinned")
    assert page.one(".t.chosen").get_attribute("data-t") == str(t)


def test_the_heat_map_has_every_number_and_clipped_tokens_are_underlined(page, runs):
    page.resize((2400, 900))  # a token is an element once its piece was in sight: here all tries are
    page.open("#/run/sums/step/20/group/0")
    page.until(lambda: len(page.all(".tokens .t")) >= 60, "tokens")
    options = page.script("return [...document.querySelectorAll('#heat option')].map(o => o.value)")
    assert {"term", "ratio", "logp", "old_logp", "entropy", "kl", "text"} <= set(options)
    grounds = (
        "return [...document.querySelectorAll('.tokens .t')].slice(0, 60).map(e => e.style.backgroundColor).join()"
    )
    seen = set()
    for option in options[:-1]:
        page.choose("#heat", option)
        page.until(lambda option=option: f"heat={option}" in page.address, option)
        page.until(lambda: page.script(grounds) not in seen, "another picture")
        seen.add(page.script(grounds))

    rows, arrays = RunFolder.open(runs / "sums").samples(20)
    mine = [row["row"] for row in rows if row["group"] == 0]
    ratio = np.exp(arrays["log_ratio"][mine].astype(float))
    advantage, mask = arrays["advantage"][mine], arrays["mask"][mine]
    high, low = ((ratio > 1.2) & (advantage > 0) & mask).sum(), ((ratio < 0.8) & (advantage < 0) & mask).sum()
    page.until(lambda: len(page.all(".t.clip-high[data-t]")) == high, f"{high} clipped high")
    page.until(lambda: len(page.all(".t.clip-low[data-t]")) == low, f"{low} clipped low")


def test_thinking_folds_and_markdown_is_laid_out(page):
    page.open("#/run/sums/step/10/group/0")
    page.until(lambda: len(page.all(".tokens .t")) > 50, "tokens")
    page.click(".toggle", "think")
    page.until(lambda: page.all("details.think"), "folded thoughts")
    page.click(".toggle", "markdown")
    page.until(lambda: page.all(".markdown"), "laid out")
    assert "think=1" in page.address and "markdown=1" in page.address


def test_one_prompt_is_followed_through_the_steps_with_what_changed(page):
    page.open("#/run/sums/step/20/group/0")
    page.click("a", "this prompt through time")
    page.until(lambda: len(page.all(".moment")) == 4, "four steps")
    page.until(lambda: len(page.all(".sample")) == 3, "first, middle, last")
    assert page.all("ins") or page.all("del")
    page.picture("prompt")
    page.click(".moment:nth-child(3)")
    page.until(lambda: len(page.all(".sample")) == 4, "one more")
    page.click(".toggle", "differences")
    page.until(lambda: not page.all(".sample ins, .sample del"), "no marks")


# --- other rooms ----------------------------------------------------------------------------------------------------


def test_episodes_share_one_scrubber(page):
    page.open("#/run/cartpole-0/step/4/group/0")
    page.until(lambda: len(page.all(".episode")) == 4, "four episodes")
    assert len(page.all(".episode .return-bar")) == 4
    assert {"actions", "rewards", "observations"} <= set(page.texts(".lane-name"))
    page.script(
        "const e = document.querySelector('#scrub'); e.value = 7; e.dispatchEvent(new Event('input', {bubbles: true}));"
        "e.dispatchEvent(new Event('change', {bubbles: true}))"
    )
    page.says("t = 7", "#at")
    page.until(lambda: "t=7" in page.address, "the time in the address")
    places = "return [...document.querySelectorAll('.lane .cursor')].map(e => e.style.getPropertyValue('--at'))"
    assert len(set(page.script(places))) == 1
    page.picture("episodes")
    page.click("#play")
    page.until(lambda: int(page.one("#at").text.split()[2]) > 7, "time going on")


def test_films_run_together_above_strips_of_what_was_real_and_imagined(page):
    page.open("#/run/films/step/1/group/0")
    page.until(lambda: len(page.all("video")) == 3, "three films")
    ready = "return [...document.querySelectorAll('video')].every(v => v.readyState >= 1 && v.duration > 0)"
    page.until(lambda: page.script(ready), "films that load")
    page.script(
        "const e = document.querySelector('#scrub'); e.value = 9; e.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    shares = "return [...document.querySelectorAll('video')].map(v => v.currentTime / v.duration)"
    page.until(lambda: np.allclose(page.script(shares), [9 / 29, 9 / 19, 1], atol=0.02), "each at its share of the way")
    assert page.texts(".strip figcaption")[:3] == ["real", "imagined", "error"]
    page.script(
        "const e = document.querySelector('#scrub'); e.value = 15; e.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    page.until(lambda: len(page.all(".film.over")) == 1, "the first is over")


def test_the_episodes_of_a_real_group_are_filmed_and_play_in_step(page, runs):
    rows, _ = RunFolder.open(runs / "cartpole-0").samples(4)
    assert all(row["media"] for row in rows if row["group"] == 0)
    page.open("#/run/cartpole-0/step/4/group/0")
    lengths = {row["row"]: row["length"] for row in rows if row["group"] == 0}
    page.until(lambda: len(page.all("video")) == len(lengths), "a film an episode")
    order = [int(one.get_attribute("data-row")) for one in page.all(".episode")]
    ready = "return [...document.querySelectorAll('video')].every(v => v.readyState >= 2 && v.duration > 0)"
    page.until(lambda: page.script(ready), "films that load")
    page.script(
        "const e = document.querySelector('#scrub'); e.value = 9; e.dispatchEvent(new Event('input', {bubbles: true}))"
    )
    shares = "return [...document.querySelectorAll('video')].map(v => v.currentTime / v.duration)"

    def in_step() -> bool:
        at = int(page.one("#at").text.split()[2])
        due = [min(at / (lengths[row] - 1), 1.0) for row in order]
        return np.allclose(page.script(shares), due, atol=0.05)

    page.until(in_step, "each at its share of the way")
    page.picture("films")
    page.click("#play")
    page.until(lambda: int(page.one("#at").text.split()[2]) > 15, "time going on")
    page.click("#play")
    page.until(in_step, "still in step")


def test_an_action_explains_itself(page):
    page.open("#/run/cartpole-0/step/4/group/0")
    canvas = page.one(".heat-lane canvas")
    page.hover(canvas)
    page.says("ratio r", ".explained")


def test_a_world_model_run_shows_imagined_futures_and_what_was_real(page):
    page.open("#/run/dream")
    page.until(
        lambda: [e for e in page.all(".films-of-run img") if "forecast" in e.get_attribute("src")], "the forecast"
    )
    wide = "return [...document.querySelectorAll('.films-of-run img')].every(e => e.complete && e.naturalWidth > 0)"
    page.script("document.querySelector('.films-of-run').scrollIntoView()")  # a picture out of sight may wait
    page.until(lambda: page.script(wide), "pictures that load")
    page.picture("dream")
    page.open("#/run/dream/step/2/group/0")
    page.until(lambda: len(page.all(".episode")) >= 2, "futures")
    assert {"actions", "rewards"} <= set(page.texts(".lane-name"))
    page.open("#/run/dream/step/1/group/0")
    page.until(lambda: page.texts(".strip figcaption") == ["forecast"], "the forecast of that step")
    loads = (
        "const e = document.querySelector('.strip img'); e.scrollIntoView(); return e.complete && e.naturalWidth > 0"
    )
    page.until(lambda: page.script(loads), "its picture")
    assert page.all(".strip .cursor") == []  # its time is not that of the futures


def test_the_bandits_arms_are_seen_over_time(page):
    page.open("#/run/bandit")
    page.says("arm probabilities", ".panel.double")
    page.picture("arms")
    page.open("#/run/bandit/step/30/group/0")
    page.until(lambda: len(page.all(".arms .dot")) == 32, "32 pulls")


# --- live -----------------------------------------------------------------------------------------------------------


def test_curves_and_newest_groups_follow_a_run_that_is_training(page, runs):
    """Written here as a run writes it, with the lock that says that its process is alive."""

    def goes_on(steps: range) -> None:
        for step in steps:
            live.append_metrics(step, {"reward": step / 100, "reward_std": 0.5, "frac_reward_zero_std": 0.6})
            live.append_timing(step, {"collect": 0.2}, 0.3)
        rows = [{"row": i, "group": 0, "reward": float(i), "advantage": i - 0.5, "arm": i} for i in range(2)]
        live.write_samples(steps[-1], rows, {"mask": np.ones((2, 1), bool), "gate": np.ones((2, 1), bool)})

    page.open()
    page.until(lambda: len(page.all(".run-row")) == 6, "those that are there")
    live = RunFolder.create(
        runs / "live",
        task="bandit",
        config={"resolved": {"run.steps": 400}},
        created="2026-01-01T00:00:00+00:00",
        seed=0,
    )
    with locked(live.path):
        goes_on(range(1, 21))
        page.click(".run-name a", "live")  # it appears by itself
        page.says("running", ".state")
        page.says("20", "#vital-step")
        page.says("Learning", ".verdict.up")
        page.says("60 % of the groups have no signal", ".warnings")
        page.until(lambda: page.all(".newest .group-row"), "the newest group")
        goes_on(range(21, 41))
        page.says("40", "#vital-step")
        page.says("step 40", ".newest h2 a")
        page.picture("live")
    live.write_status({"steps": 400, "recipe": {}, "reason": "stopped"})
    page.says("stopped", ".state")
    live.close()
    shutil.rmtree(live.path)


# --- export, screens, states ----------------------------------------------------------------------------------------


def test_an_export_opens_without_a_server(page, runs, tmp_path):
    file = tmp_path / "report.html"
    assert main(["view", str(runs / "sums"), "--export", str(file)]) == 0
    page.open("", url=file.as_uri())
    page.says("exported", ".pill")
    page.until(lambda: len(page.all(".chart canvas")) > 3, "curves")
    page.click("nav.tabs a", "all groups")
    page.until(lambda: page.all(".group-row"), "groups")
    page.click(".group-row")
    page.until(lambda: len(page.all(".tokens .t")) > 20, "tokens")
    page.click(".tokens .t")
    page.says("minimised", ".explained.pinned")
    asked = page.script(
        "return performance.getEntriesByType('resource').map(e => e.name).filter(n => n.startsWith('http'))"
    )
    assert asked == []


def test_a_notebook_holds_the_same_page(page, runs, tmp_path):
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><p>above</p>{grpo.show(runs / 'sums')._repr_html_()}", encoding="utf-8")
    page.open("", url=file.as_uri())
    page.driver.switch_to.frame(page.one("iframe"))
    page.until(lambda: len(page.all(".chart canvas")) > 3, "curves")
    page.click("nav.tabs a", "all groups")
    page.one("#search").send_keys("7")
    page.until(lambda: 0 < len(page.all(".group-row")) < 12, "what matches")
    page.click(".group-row")
    page.until(lambda: len(page.all(".tokens .t")) > 20, "tokens")
    page.driver.switch_to.default_content()
    page.says("above")


@pytest.mark.parametrize(
    "view", ["", "/run/sums", "/run/sums/step/20", "/run/sums/step/20/group/0", "/run/cartpole-0/step/4/group/0"]
)
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_nothing_sticks_out_of_the_screen(page, view, size):
    page.resize(size)
    page.open(f"#{view}")
    page.until(lambda: page.all(".run-row, .chart canvas, .group-row, .sample, .episode"), "content")
    page.until(
        lambda: page.script("return document.documentElement.scrollWidth <= innerWidth + 1"), "all in the screen"
    )
    if size == PHONE and view == "/run/sums":
        page.picture("phone")


def test_dark_by_the_system_and_by_choice(page):
    page.resize(DESK, dark=True)
    page.open("#/run/sums/step/20/group/1")
    ground = "return getComputedStyle(document.body).backgroundColor"
    dark = page.script(ground)
    page.until(lambda: len(page.all(".tokens .t")) > 50, "tokens")
    page.picture("dark")
    page.click("#theme")
    page.until(lambda: page.script(ground) != dark, "light")
    page.driver.refresh()
    page.until(lambda: page.script(ground) != dark, "still light")
    page.script("localStorage.clear()")


def test_what_is_not_there_is_said_plainly(page):
    for address in ("#/run/nowhere", "#/run/sums/step/5", "#/run/sums/step/20/group/999", "#/nonsense"):
        page.open(address)
        page.until(lambda: page.all(".problem, .empty"), f"a plain word at {address}")


def test_settings_and_events_are_there(page, runs):
    page.open("#/run/sums/settings")
    page.says("task.max_completion_length", ".settings")
    settings = json.loads((runs / "sums" / "config.json").read_text())
    assert settings["max_completion_length"] == 40
    page.open("#/run/sums/events")
    page.until(lambda: page.all(".events tr, .empty"), "events or none")
