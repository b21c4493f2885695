"""What the page makes of numbers and of its reader's hands: sums in words, zoom, keys, and parts of long answers."""

import json

import numpy as np
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from grpo.cli import main
from grpo.run.folder import RunFolder
from tests.browser.conftest import serving

pytestmark = pytest.mark.browser

LENGTH = 3000
"""Tokens a try; the page asks for 2,048 at first."""


def folder(root, name: str, seed: int = 0) -> RunFolder:
    """A run of two steps with one group of long tries each, the tokens named by step and place."""
    run = RunFolder.create(root / name, task="language", config={}, created="2026-01-01T00:00:00+00:00", seed=seed)
    for step in range(1, 50):
        run.append_metrics(step, {"reward": step / 7, "reward_std": 0.5})
        run.append_timing(step, {"collect": 11.0, "update": 0.5, "learner_waits": 0.25}, 12.0 + step % 3)
    for step in (1, 2):
        rows = [
            {"row": row, "group": 0, "reward": float(row), "advantage": 1.0 - 2.0 * row, "decisions": LENGTH,
             "prompt": "one", "completion": "c", "tokens": [f"{step}:{t} " for t in range(LENGTH)]}
            for row in range(2)
        ]  # fmt: skip
        zeros = np.zeros((2, LENGTH), np.float16)
        arrays = {"mask": zeros == 0, "gate": zeros == 0, "old_logp": zeros, "logp": zeros, "advantage": zeros + 1}
        run.write_samples(step, rows, arrays)
    run.close()
    return run


@pytest.fixture(scope="module")
def root(tmp_path_factory, browser):
    path = tmp_path_factory.mktemp("numbers")
    for seed, name in enumerate(("one", "two", "three", "four", "five")):
        folder(path, name, seed)
    return path


@pytest.fixture(scope="module")
def address(root):
    with serving(root) as url:
        yield url


def asked(page, module: str, code: str):
    """What a function of one of the page's modules gives; `code` sees the module as m."""
    if "compare" not in page.address:
        page.open("#/compare")  # the lightest of its views
    script = """const [module, done] = arguments;
      const told = (result) => done(JSON.stringify(result ?? null));
      import(`./page/${module}.js`).then((m) => { CODE }).then(told, (error) => told(String(error)));"""
    return json.loads(page.driver.execute_async_script(script.replace("CODE", code), module))


# --- sums -----------------------------------------------------------------------------------------------------------


ROW = {"mask": [1], "ratio": [1.5], "advantage": [2.0], "logp": [-1.0], "old_logp": [-1.4], "term": [-2.4]}
OBJECTIVE = {
    "surrogate": "clip", "ratio": "token", "formula": "−min(r·A, clip(r, 0.8, 1.2)·A)", "beta": 0.1, "kl_to": "old",
    "kl_in": "loss", "kl_direction": "other_current", "kl_estimator": "k1", "kl_formula": "p − q",
}  # fmt: skip


def told(page, row: dict, objective: dict) -> dict[str, list[str]]:
    """The lines of a decision by their names."""
    code = f"return m.explain({json.dumps(ROW | row)}, 0, {json.dumps(OBJECTIVE | objective)})"
    return {name: rest for name, *rest in asked(page, "objective", code)}


def test_the_term_is_followed_into_the_loss_with_its_factors(page):
    lines = told(page, {"mismatch": [0.5], "weight": [0.25]}, {})
    assert lines["in the loss"] == ["minimised × mismatch × weight", "(−2.4) × 0.5 × 0.25 = −0.3"]
    assert told(page, {"weight": [0.5], "gate": [0]}, {})["in the loss"][1] == "(−2.4) × 0 × 0.5 = 0"
    assert "in the loss" not in told(page, {"mismatch": None, "weight": None}, {})
    of_all = told(page, {"weight": [0.5]}, {"ratio": "trajectory", "formula": "−A·log π"})
    assert of_all["in the loss"] == [
        "minimised × weight; once for all decisions that are one here",
        "(−2.4) × 0.5 = −1.2",
    ]
    assert "−2·log π" in of_all["minimised"][1]


def test_the_kl_is_named_by_its_policies_and_weighed_as_the_loss_does(page):
    name, (formula, numbers) = next(item for item in told(page, {"kl": [0.2]}, {}).items() if item[0].startswith("KL"))
    assert (name, formula) == ("KL(π_old‖π)", "p − q, p = log π_old, q = log π")
    assert numbers == "+0.2 → β·KL = 0.1 × 0.2 = +0.02"
    weighed = told(page, {"kl": [0.2]}, {"kl_importance": True, "kl_to": "reference", "kl_direction": "current_other"})
    assert weighed["KL(π‖π_ref)"][1] == "+0.2 → β·r·KL = 0.1 × 1.5 × 0.2 = +0.03"
    assert "off the reward" in told(page, {"kl": [0.2]}, {"kl_in": "reward"})["KL(π_old‖π_ref)"][1]


@pytest.mark.parametrize(
    ("changes", "worked"),
    [
        ({}, "(1 − 0.5) / 0.5"),
        ({"scale": "none"}, None),  # 0.5 is not the advantage that is on record
        ({"whiten": "rows"}, None),
        ({"credit": "per_reward"}, None),
        ({"beta": 0.1, "kl_in": "reward"}, None),
        ({"baseline": "leave_one_out"}, None),
    ],
)
def test_a_sum_is_worked_only_where_it_gives_the_advantage(page, changes, worked):
    recipe = {"credit": "trajectory", "whiten": "none", "baseline": "group_mean", "scale": "group_std", "beta": 0}
    data = {"mean": 0.5, "std": 0.5, "objective": recipe | changes}
    sample = {"reward": 1.0, "advantage": 0.999}
    assert asked(page, "group", f"return m.workedSum({json.dumps(sample)}, {json.dumps(data)})") == worked


def test_runs_that_tell_at_other_steps_are_compared_at_the_same_ones(page):
    found = asked(page, "compare", "return m.along([1, 2, 3, 4, 5, 6], [2, 3, 5], [10, null, 40])")
    assert found == [None, 10, 20, 30, 40, None]


def test_a_point_is_drawn_only_where_a_run_measured(page):
    """Lines are straight between two values; what lies between was not measured."""
    runs = {
        "a": {"step": [1, 2, 3, 4], "columns": {"eval": [None, 5, None, 7]}},
        "b": {"step": [1, 2, 3], "columns": {"eval": [1, None, 3]}},
    }
    code = f"""const byId = new Map([["a", {{name: "a"}}], ["b", {{name: "b"}}]]);
        return m.overlaid("eval", [["a"], ["b"]], {json.dumps(runs)}, 0, byId, "step")"""
    found = asked(page, "compare", code)
    assert [line["values"] for line in found["series"]] == [[None, 5, 6, 7], [1, 2, 3, None]]
    assert [line["measured"] for line in found["series"]] == [[1, 3], [0, 2]]


def test_curves_of_one_size_share_an_axis_and_others_have_their_own(page):
    data = {"columns": {"big": [100, 400], "small": [0.1, None], "alike": [90, 50], "none": [0, 0]}}
    found = asked(page, "curves", f"return m.charts('t', Object.keys({json.dumps(data)}.columns), {json.dumps(data)})")
    assert found == [["t", ["big", "alike", "none"]], ["t", ["small"]]]


def test_a_step_has_its_place_on_another_axis_and_none_beyond_its_ends(page):
    table = {"step": [1, 2, 4], "clock": [10, 20, 60], "columns": {"env_steps": [5, 5, 9]}}
    code = f"const at = m.scaleOf({json.dumps(table)}, KEY); return [0, 1, 2, 3, 4, 5].map(at)"
    assert asked(page, "axis", code.replace("KEY", "'time'")) == [None, 10, 20, 40, 60, None]
    laid = asked(page, "axis", f"return m.laid({json.dumps(table)}, 'env_steps')")
    assert laid["step"][0] == 1 and laid["x"][-1] == 9 and laid["x"] == sorted(set(laid["x"]))


def test_a_table_for_a_spreadsheet_holds_numbers_and_no_formula(page):
    table = {"step": [1, 2], "clock": [0.5, 1], "columns": {"reward": [0.25, None], '=cmd("a"),b': [1, 2]}}
    told = asked(page, "csv", f"return m.csv({json.dumps(table)})")
    assert told.splitlines() == ['step,seconds,reward,"\'=cmd(""a""),b"', "1,0.5,0.25,1", "2,1,,2"]


def test_the_formula_has_every_part_of_the_loss(page):
    recipe = {"beta": 0.1, "kl_in": "loss", "entropy_coef": 0.01, "teacher_coef": 0.5, "teacher_in": "loss"}
    assert (
        asked(page, "group", f"return m.penalty({json.dumps(recipe)})")
        == " + 0.1·KL + 0.5·KL to the teacher − 0.01·entropy"
    )


# --- hands ----------------------------------------------------------------------------------------------------------


def test_what_has_the_focus_is_pressed_by_enter(page):
    page.open("#/run/one/step/2?at=0")
    page.until(lambda: page.all(".group-row.chosen"), "a group that Enter would open")
    page.one("nav.tabs a", "settings").send_keys(Keys.ENTER)
    page.until(lambda: page.address == "#/run/one/settings", "the settings")


def drawn(page, chart: int) -> list:
    """The ends of the axes of a chart, as their ticks are drawn: the picture itself."""
    return page.script("return document.querySelectorAll('.chart canvas')[arguments[0]].toDataURL()", chart)


def test_a_zoom_outlives_the_pointer_and_new_rows(page, root):
    page.open("#/run/one")
    page.until(lambda: "seconds of a step" in page.body(), "the time")
    assert "learner waits 25 %" in " ".join(page.body().split())
    charts = page.all(".chart")
    time = next(i for i, c in enumerate(charts) if c.get_attribute("aria-label") == "seconds of a step")
    over = charts[time].find_element("css selector", ".u-over")
    page.hover(over)
    whole = drawn(page, time)
    width = over.size["width"]
    actions = ActionChains(page.driver).move_to_element_with_offset(over, -width // 4, 0).click_and_hold()
    actions.move_by_offset(width // 8, 0).move_by_offset(width // 8, 0).release().perform()
    page.until(lambda: drawn(page, time) != whole, "a part of it")
    zoomed = drawn(page, time)
    ActionChains(page.driver).move_by_offset(15, 3).perform()
    page.says("step", "figure:last-of-type .step-at")
    assert drawn(page, time) == zoomed
    with (root / "one" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "reward": 7.1, "reward_std": 0.5}\n')
    page.says("50", "#vital-step")
    ActionChains(page.driver).move_by_offset(-10, 0).perform()
    page.until(lambda: drawn(page, time) == zoomed, "the same part")


def test_a_tab_out_of_sight_does_not_listen(page):
    page.open("#/run/two")
    page.until(lambda: page.all(".chart canvas"), "curves")
    page.script(
        """const Real = EventSource; window.open_ = 0; window.EventSource = class extends Real {
             constructor(url) { super(url); window.open_ += 1; } close() { super.close(); window.open_ -= 1; } };
           window.hide = (is) => { Object.defineProperty(document, "hidden", { value: is, configurable: true });
             document.dispatchEvent(new Event("visibilitychange")); }"""
    )
    page.script("hide(true); hide(false)")
    assert page.script("return open_") == 1
    page.script("hide(true)")
    assert page.script("return open_") == 0
    page.script("hide(false); hide(false)")
    assert page.script("return open_") == 1


def test_another_group_does_not_show_the_tokens_of_the_one_before(page):
    page.open("#/run/one/step/1/group/0")
    page.says("1:0", ".tokens")
    page.script(
        "const real = fetch; window.fetch = (url, o) => url.includes('/tokens') ? new Promise(() => {}) : real(url, o);"
        "location.hash = '#/run/one/step/2/group/0'"
    )
    page.says("step 2, group 0", "#group")
    assert "1:0" not in page.body()


def test_a_prompt_is_looked_for_in_as_many_runs_as_the_server_takes(page):
    page.open("#/run/one/step/1/group/0")
    page.click("a", "this prompt through time")
    page.click(".others summary")
    for name in ("two", "three", "four"):
        page.click(".others label", name)
        page.until(lambda name=name: name in page.address.split("runs=")[-1], name)
    page.until(lambda: page.one(".others label", "five").find_element("css selector", "input").get_property("disabled"),
               "no more than that")  # fmt: skip
    page.open(page.address + ",gone")
    page.one(".problem")
    page.click(".others label", "gone")
    page.until(lambda: not page.all(".problem") and page.all(".moment"), "the way back")


def test_an_export_ends_with_the_tokens_that_it_has(page, root, tmp_path):
    file = tmp_path / "report.html"
    assert main(["view", str(root / "two"), "--export", str(file)]) == 0
    page.open("#/run/two/step/2/group/0", url=file.as_uri())
    page.says("The exported file holds the first 2,048 tokens of each try.", ".note")
    assert page.all("button.more") == []
    assert page.script("return document.querySelector('.tokens').textContent.trim().split(' ').at(-1)") == "2:2047"


def test_more_tokens_go_on_where_the_answer_ended(page):
    page.open("#/run/two/step/2/group/0")
    page.one("button.more")
    page.script(
        """const real = fetch; window.fetch = (url, o) => {
             const [path, query] = url.split("?"); const asked = new URLSearchParams(query);
             if (path.endsWith("/tokens")) asked.set("to", Math.min(asked.get("to"), Number(asked.get("from")) + 700));
             return real(query ? `${path}?${asked}` : url, o); };
           document.querySelector("button.more").click()"""
    )
    page.until(lambda: not page.all("button.more"), "all of them")
    words = page.script("return document.querySelector('.tokens').textContent.trim().split(' ')")
    assert words == [f"2:{t}" for t in range(LENGTH)]


def test_a_metric_leads_to_its_entry_where_it_is_chosen_too(page):
    page.open("#/compare?runs=one,two")
    page.click(".chooser summary")
    page.until(lambda: set(page.texts(".chooser a.metric")) == {"reward", "reward_std"}, "links")
    page.click("input[aria-label='show reward_std']")
    page.until(lambda: page.texts(".panel .metric") == ["reward"], "one curve less")
