"""What a page must survive: hostile text, broken files, folders that vanish, and lists far longer than a screen."""

import json
import shutil

import numpy as np
import pytest

from grpo.run.folder import RunFolder
from tests.browser.conftest import serving

pytestmark = pytest.mark.browser

SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><style>body{display:none}</style>"
ANSI = "\x1b[31mred\x1b[0m \x1b]8;;http://example.com\x07link\x07 bell\x07"
TURNED = "begin \u202eetirw ot yaw a si siht\u202c end \u2066isolated\u2069 \u200b"
BROKEN = "half a \ud83d surrogate, \x00 nul, \ufffd lost"
MARKUP = """<think>First I add: $\\frac{1}{2} + \\frac{1}{2} = 1$.</think>
# Answer

The sum is **one**, so \\(\\boxed{1}\\). Run `print(1)`:

```python
print("<b>1</b>")
```

- a [link](javascript:alert(1)) stays text
- $\\undefined{x$ stays as written"""


def folder(root, name, groups, texts, tokens=None) -> RunFolder:
    """A run with one step of groups; `texts` are the tries of each group in turn."""
    made = RunFolder.create(
        root / name, task="language", config={"model": "none"}, created="2026-01-01T00:00:00+00:00", seed=0
    )
    for step in (1, 2, 3):
        made.append_metrics(step, {"reward": step / 3, "reward_std": 0.5})
    rows = [
        {"row": row, "group": group, "reward": float(place), "advantage": 1.0 - 2.0 * place, "status": "ok",
         "data_row": group, "prompt": f"prompt {group} {SCRIPT if groups < 9 else ''}", "completion": text,
         "stop": "eos", "rewards": {"r": float(place)}, "tokens": (tokens or list)(text)}
        for row, (group, place, text) in enumerate((g, p, text) for g in range(groups) for p, text in enumerate(texts))
    ]  # fmt: skip
    longest = max(len(row["tokens"]) for row in rows)
    mask = np.array([[t < len(row["tokens"]) for t in range(longest)] for row in rows])
    zeros = np.zeros(mask.shape, np.float16)
    advantage = np.array([row["advantage"] for row in rows], np.float16)[:, None] + zeros
    arrays = {"mask": mask, "gate": mask, "old_logp": zeros, "logp": zeros, "advantage": advantage}
    made.write_samples(1, rows, arrays)
    made.close()
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory, browser):
    path = tmp_path_factory.mktemp("hostile")
    folder(path, "hostile", 2, [SCRIPT, ANSI + TURNED, BROKEN, MARKUP])
    folder(path, "huge", 1, ["x " * 500_000, "short"], tokens=lambda text: [text])
    folder(path, "long", 1, ["word " * 6000, "word " * 1024], tokens=lambda text: ["word "] * (len(text) // 5))
    folder(path, "many", 4000, ["a", "b"])
    broken = folder(path, "broken", 2, ["one", "two"]).path
    (broken / "metrics.jsonl").write_text((broken / "metrics.jsonl").read_text() + '{"step": 4, "rew')
    npz = broken / "samples" / "step-00000001.npz"
    npz.write_bytes(npz.read_bytes()[:-200])
    (path / "unreadable").mkdir()
    (path / "unreadable" / "run.json").write_text("{")
    return path


@pytest.fixture(scope="module")
def address(root):
    with serving(root) as url:
        yield url


def test_hostile_completions_stay_text(page):
    for heat in ("", "?heat=text", "?heat=text&think=1&latex=1&markdown=1"):
        page.open(f"#/run/hostile/step/1/group/0{heat}")
        page.until(lambda: len(page.all(".sample")) == 4, "four tries")
        page.until(lambda: "window.hacked = 1" in page.body().replace("\n", ""), "the script, as text")
        assert page.script("return window.hacked") is None
        assert (
            page.script(
                "return document.querySelectorAll('.sample script, .sample img, .sample style, .sample a').length"
            )
            == 0
        )
        body = page.body()
        assert "\x1b" not in body and "\u202e" not in body and "\x00" not in body
        assert "␛" in body and "U+202E" in body


def test_the_toggles_lay_out_what_models_write(page):
    page.open("#/run/hostile/step/1/group/0?heat=text&think=1&latex=1&markdown=1")
    page.until(lambda: len(page.all(".sample")) == 4, "four tries")
    page.says("thinking", "details.think")
    assert page.script("return document.querySelectorAll('math mfrac').length") == 2
    boxed = page.script("return [...document.querySelectorAll('math')].map(e => e.textContent)")
    assert "1" in boxed and "\\boxed" not in page.body()
    assert page.texts(".sample .level-1") == ["Answer"] and page.texts(".sample .markdown strong") == ["one"]
    assert 'print("<b>1</b>")' in page.texts("pre.fence")[0]
    assert "javascript:alert(1)" in page.body() and "\\undefined" in page.body()


def test_a_megabyte_of_text_is_shown_piece_by_piece(page):
    page.open("#/run/huge/step/1/group/0?heat=text")
    page.says("of 1,000,000 characters", ".note")
    page.script("document.querySelector('.note button').click()")  # far down a box of its own
    page.says("400,000 of 1,000,000 characters", ".note")


def test_only_tokens_in_sight_become_elements(page):
    page.open("#/run/long/step/1/group/0")
    page.until(lambda: len(page.all(".tokens .t")) > 100, "tokens")
    assert page.script("return document.querySelectorAll('.tokens .t').length") < 2500
    assert page.script("return document.querySelector('.tokens').textContent.length") == 5 * 2048
    page.click("button.more")
    page.until(
        lambda: page.script("return document.querySelector('.tokens').textContent.length") == 5 * 4096, "more of them"
    )


def test_four_thousand_groups_are_a_screenful_of_rows(page):
    page.open("#/run/many/step/1")
    page.says("4,000 of 4,000 groups", "#count")
    assert page.script("return document.querySelectorAll('.group-row').length") < 80
    page.script("document.querySelector('.list').scrollTop = 1e9")
    page.until(lambda: page.all(".group-row[data-group='3999']"), "the last group")
    assert page.script("return document.querySelectorAll('.group-row').length") < 80
    page.one("#search").send_keys('"prompt 1234 "')
    page.until(lambda: len(page.all(".group-row")) == 1, "one match")


def test_broken_files_are_named_and_the_rest_is_shown(page):
    page.open()
    page.says("unreadable", ".state.unreadable")
    page.open("#/run/broken")
    page.until(lambda: page.all(".chart canvas"), "the steps that can be read")
    page.open("#/run/broken/step/1/group/0")
    page.until(lambda: len(page.all(".sample")) == 2, "the texts")
    page.says("step-00000001.npz", ".note")
    assert "one" in page.body()


def test_a_run_that_is_deleted_while_open_is_said_to_be_gone(page, root):
    folder(root, "fleeting", 2, ["one", "two"])
    page.open("#/run/fleeting")
    page.until(lambda: page.all(".chart canvas"), "curves")
    shutil.rmtree(root / "fleeting")
    page.says("no longer there", ".problem")


def test_the_difference_of_two_texts_gives_both_back(page):
    """The word diff, on made-up texts, in the browser itself."""
    page.open()
    code = """
      const done = arguments[arguments.length - 1];
      import("./page/diff.js").then(({ diff }) => {
        let state = 7;
        const random = (n) => (state = (state * 48271) % 2147483647) % n;
        const text = () => Array.from({ length: random(40) }, () => "ab, c\\n"[random(6)]).join("");
        const wrong = [];
        for (let i = 0; i < 500; i++) {
          const [a, b] = [text(), text()];
          const pieces = diff(a, b);
          const side = (kind) => pieces.filter(([k]) => k !== kind).map(([, t]) => t).join("");
          if (side("new") !== a || side("gone") !== b) wrong.push([a, b, pieces]);
        }
        done(JSON.stringify(wrong.slice(0, 3)));
      }, (error) => done(String(error)));"""
    assert json.loads(page.driver.execute_async_script(code)) == []
