"""Whatever a file or a request holds: an answer or an error in words; no traceback, no hang, no write outside."""

import copy
import json
import shutil
from datetime import timedelta
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo.app.builders import configs
from grpo.app.files import parse_settings
from grpo.app.settings import flag_layer, layer, preset_layer, resolve
from grpo.config import ConfigError
from grpo.language.data.rows import read_rows
from grpo.run.files import FolderError
from grpo.run.folder import RunFolder
from grpo.view.library import Library
from grpo.view.server import make_app
from tests.faults.test_damaged_files import forge
from tests.faults.tiny import train
from tests.unit.view.asking import LOCAL, ask
from tests.unit.view.folders import end, make_run, two_groups

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**64, -(2**70), 10**400, 0, -1]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["../x", "/etc/passwd", "step-1", "nan", "1e400", "²", "\ud800", "x" * 5000]),
)
NAMES = st.text(max_size=8)
ANYTHING = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
SETTINGS = (
    "seed", "group_size", "groups_per_step", "learning_rate", "beta", "loss_type", "recipe", "run", "algorithm", "task",
    "dialect", "surrogate", "device", "epsilon", "steps", "env", "model", "dataset", "rewards", "layers", "arms",
    "max_steps", "num_train_epochs", "report_to", "logdir", "name", "env_args", "model_kwargs", "changed",
)  # fmt: skip
TASKS = ("bandit", "cartpole", "language", "dreamer")


def fuzzed(quick, *strategies):
    """A test of so many examples, the same ones every time, and of twenty times as many where it is asked for."""

    def made(check):
        @pytest.mark.parametrize("examples", [quick, pytest.param(20 * quick, marks=pytest.mark.slow, id="long")])
        def test(examples, tmp_path_factory):
            place = tmp_path_factory.mktemp("fuzz")
            (place / "outside").mkdir()
            (place / "outside" / "step-1").write_text("valuable")

            @settings(
                max_examples=examples,
                derandomize=True,
                database=None,
                deadline=timedelta(seconds=20),
                suppress_health_check=list(HealthCheck),
            )
            @given(st.tuples(*strategies))
            def tried(drawn):
                check(place, *drawn)

            tried()
            assert {path.name for path in place.iterdir()} <= {"outside", "inside"}
            assert [path.read_text() for path in (place / "outside").iterdir()] == ["valuable"]

        test.__doc__, test.__name__ = check.__doc__, check.__name__
        return test

    return made


@st.composite
def changed(draw, document):
    """A document with something in it deleted, or replaced by anything."""
    tree = copy.deepcopy(document)
    at, where = tree, None
    for _ in range(draw(st.integers(1, 5))):
        if not isinstance(at, dict | list) or not at:
            break
        where = at, draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        at = at[where[1]]
    if where is not None:
        if draw(st.booleans()) and isinstance(where[0], dict):
            del where[0][where[1]]
        else:
            where[0][where[1]] = draw(ANYTHING)
    return tree


def hurt(draw, text):
    """Bytes that were text: cut, with something in the middle, or anything at all."""
    data = text.encode()
    at = draw(st.integers(0, len(data)))
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return data[:at]
    if kind == 1:
        return draw(st.binary(max_size=40))
    inside = draw(
        st.sampled_from([b"\n", b"\xff", b"[" * 3000, b'{"a":' * 300, b"\0", b"1e999", b"NaN"]) | st.binary(max_size=9)
    )
    return data[:at] + inside + data[at + (len(inside) if kind == 3 else 0) :]


@fuzzed(
    60, st.sampled_from(TASKS), st.dictionaries(st.sampled_from(SETTINGS) | st.text(max_size=8), ANYTHING, max_size=4)
)
def test_settings_are_taken_or_refused_in_words(place, task, raw):
    try:
        resolve([preset_layer(task), layer(raw, "my.yaml")], configs())
    except ConfigError as error:
        assert str(error)


@fuzzed(60, st.sampled_from(TASKS), st.lists(st.tuples(st.sampled_from(SETTINGS), st.text(max_size=12)), max_size=3))
def test_flags_are_taken_or_refused_in_words(place, task, flags):
    try:
        resolve([preset_layer(task), flag_layer(flags)], configs())
    except ConfigError as error:
        assert str(error)


YAML = st.text("ab:- \n[]{}?!&*<>|'\"#%@,=.019~\t\\", max_size=60) | st.builds(
    "{}: {} {}".format,
    st.sampled_from("ab"),
    st.sampled_from(["!!int", "!!map", "!!timestamp", "!!set", "!x", "&a", ""]),
    ANYTHING,
)


@fuzzed(200, YAML)
def test_yaml_is_taken_or_refused_in_words(place, text):
    try:
        assert isinstance(parse_settings(text, "my.yaml"), dict)
    except ConfigError as error:
        assert str(error).startswith("my.yaml")


@fuzzed(100, st.data(), st.sampled_from(["rows.jsonl", "rows.json"]))
def test_rows_are_taken_or_refused_in_words(place, data, name):
    rows = [{"prompt": "2 + 2", "answer": data.draw(ANYTHING)}, {"prompt": data.draw(ANYTHING), "answer": "4"}]
    path = place / "inside" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(hurt(data.draw, "\n".join(json.dumps(row) for row in rows)))
    try:
        assert read_rows(path)
    except ConfigError as error:
        assert str(path) in str(error)


@pytest.fixture(scope="module", autouse=True)
def kept(tmp_path_factory):
    """A run of two checkpoints, and one with groups to look at."""
    folder = tmp_path_factory.mktemp("kept")
    train(folder / "trained", steps=4)
    shown = make_run(folder / "runs" / "run")
    two_groups(shown, 5)
    end(shown)
    KEPT["trained"], KEPT["runs"] = folder / "trained", folder / "runs"


KEPT = {}


def fresh(place, which):
    shutil.rmtree(place / "inside", ignore_errors=True)
    return shutil.copytree(KEPT[which], place / "inside")


@fuzzed(15, st.data(), st.sampled_from(["manifest", "state"]))
def test_a_checkpoint_is_gone_on_from_or_passed_over(place, data, file):
    path = fresh(place, "trained")
    newest = path / "checkpoints" / "step-00000004"
    document = json.loads((newest / f"{file}.json").read_text())
    document.pop("self", None)
    tree = data.draw(changed(document))
    forge(newest, **{file: lambda found: (found.clear(), found.update(tree))})
    try:
        assert train(path, steps=4)[0].step >= 4
    except (FolderError, ConfigError) as error:
        assert str(path) in str(error) or "settings" in str(error)


@fuzzed(40, st.data(), st.sampled_from(["run.json", "config.json", "metrics.jsonl", "timing.jsonl", "events.jsonl"]))
def test_a_run_s_files_are_read_or_refused_in_words(place, data, name):
    path = fresh(place, "trained")
    text = (path / name).read_text() if (path / name).exists() else '{"step": 1, "event": "note"}\n'
    (path / name).write_bytes(hurt(data.draw, text))
    try:
        folder = RunFolder.open(path)
        _ = folder.config, folder.metrics(), folder.timing(), folder.events(), folder.sample_steps()
    except FolderError as error:
        assert str(path / name) in str(error)


PAGES = (
    "/api/runs", "/api/runs/run", "/api/runs/run/metrics", "/api/runs/run/config", "/api/runs/run/events",
    "/api/runs/run/groups", "/api/runs/run/steps/5/groups", "/api/runs/run/steps/5/groups/0", "/api/compare?runs=run",
)  # fmt: skip


@fuzzed(
    15,
    st.data(),
    st.sampled_from(["run.json", "config.json", "metrics.jsonl", "status.json", "samples/step-00000005.jsonl"]),
)
def test_the_viewer_shows_a_damaged_run_or_says_what_is_wrong(place, data, name):
    root = fresh(place, "runs")
    file = root / "run" / name
    lines = file.read_text().splitlines()
    if name.endswith(".jsonl") and data.draw(st.booleans()):
        lines[0] = json.dumps(data.draw(changed(json.loads(lines[0]))))
        file.write_text("\n".join(lines) + "\n")
    elif data.draw(st.booleans()) and file.suffix == ".json":
        file.write_text(json.dumps(data.draw(changed(json.loads(file.read_text())))))
    else:
        file.write_bytes(hurt(data.draw, file.read_text()))
    app = make_app(Library(root))
    for page in PAGES:
        answer = ask(app, page)
        assert answer.status < 500 and json.loads(answer.body), page


WORDS = st.sampled_from([*"run/.~%", "..", "%2e%2e", "%00", "runs", "steps", "groups", "media", "²", "-1", "1" * 30])
QUERIES = st.sampled_from(["after", "points", "names", "q", "sort", "row", "runs", "groups", "limit"])
HEADERS = st.sampled_from(["range", "origin", "cookie", "accept", "if-none-match"])


@fuzzed(
    80,
    st.sampled_from(["/api/", "/api/runs/run/", "/media/run/", "/page/", "/export/", "/"]),
    st.lists(WORDS | st.text(max_size=5), max_size=5),
    st.dictionaries(QUERIES, NAMES, max_size=3),
    st.lists(st.tuples(HEADERS, st.text("abc=,-/*019 ", max_size=12)), max_size=2),
    st.sampled_from(["GET", "GET", "GET", "HEAD", "POST", "PUT", "X"]),
)
def test_a_request_is_answered_or_refused_in_words(place, start, parts, query, headers, method):
    app = make_app(Library(KEPT["runs"]))
    path = start + "/".join(quote(part, safe="%~") for part in parts)
    url = path + ("?" + urlencode(query) if query else "")
    if "/api/live" in url:
        return  # never ends
    answer = ask(app, url, [*LOCAL, *headers], method)
    assert answer.status < 500 and b"valuable" not in answer.body
    assert answer.status < 400 or method == "HEAD" or {"code", "message"} == {*answer.json["error"]}
