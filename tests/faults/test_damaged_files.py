"""Files that were cut, edited or made to do harm: one line that names the file, never a traceback, never a hang."""

import hashlib
import json
import os
import shutil
import socket

import pytest

from grpo.app.files import parse_settings, read_settings
from grpo.app.settings import data_layer
from grpo.cli import main
from grpo.config import ConfigError
from grpo.language.data.rows import read_rows
from grpo.run import checkpoint
from grpo.run.checkpoint import CheckpointError
from grpo.run.files import DEEPEST, FolderError, parse_json
from grpo.run.folder import RunFolder
from tests.faults.tiny import fingerprint, train

DEEP = "[" * 100_000
NESTED = '{"a": ' * 500 + "1" + "}" * 500
"""Parses, but whatever walks through it by calling itself does not come back."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of steps 9 and 12, and what they lead to."""
    path = tmp_path_factory.mktemp("trained") / "run"
    train(path)
    return path, fingerprint(path)


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    return tmp_path / "run"


def forge(path, manifest=None, state=None):
    """Change what a checkpoint says and sign it again, as whoever means harm would: hashes do not help."""
    file = path / "state.json"
    if state is not None:
        found = json.loads(file.read_text())
        state(found)
        file.write_text(json.dumps(found))
    found = json.loads((path / "manifest.json").read_text())
    del found["self"]
    found["sha256"]["state.json"] = hashlib.sha256(file.read_bytes()).hexdigest()
    if manifest is not None:
        manifest(found)
    signed = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]
    (path / "manifest.json").write_text(json.dumps(found | {"self": signed}))


def put(*keys, value="gone"):
    """Set a value, deep inside; without one, delete it."""

    def change(tree):
        for key in keys[:-1]:
            tree = tree[key]
        if value == "gone":
            del tree[keys[-1]]
        else:
            tree[keys[-1]] = value

    return change


MANIFEST = [("schema",), ("sha256",), ("settings",), ("versions",), ("step",), ("sha256", "state.json")]
STATE = [
    ("values",), ("arrays",), ("values", "source"), ("values", "version"), ("values", "steps_done"),
    ("values", "nonfinite_in_a_row"), ("values", "optimizer"), ("values", "optimizer", "param_groups"),
]  # fmt: skip


def test_a_checkpoint_without_a_field_is_passed_over(trained, tmp_path):
    """Missing, null, of another type: the one before is taken, and the run ends as it would have."""
    cases = [("manifest", keys, value) for keys in MANIFEST for value in ("gone", None, "text", [1])]
    cases += [("manifest", ("step",), -1), ("manifest", ("step",), 13)]
    cases += [("state", keys, value) for keys in STATE for value in ("gone", None, "text", [1])]
    for number, (file, keys, value) in enumerate(cases):
        path = tmp_path / str(number)
        shutil.copytree(trained[0], path)
        if file == "manifest" and keys == ("sha256", "state.json") and value == "text":
            continue  # that is damage of the old kind
        forge(path / "checkpoints" / "step-00000012", **{file: put(*keys, value=value)})
        try:
            summary, _ = train(path)
        except (FolderError, ConfigError) as error:  # what differs on purpose is not passed over, but told
            assert str(path) in str(error), (file, keys, value)
            assert keys in (("values", "optimizer"), ("values", "optimizer", "param_groups"), ("schema",))
        else:
            assert summary.events.get("checkpoint_damaged") == 1, (file, keys, value)
            assert fingerprint(path) == trained[1]
        shutil.rmtree(path)


def test_where_no_checkpoint_is_whole_the_newest_says_why(run):
    for path in checkpoint.steps(RunFolder.open(run)):
        forge(path, state=put("values", "source"))
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"step-00000012/state.json does not fit this run \(KeyError: 'source'\)"):
        train(run)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("text", [DEEP, NESTED, "[1]", "null", "", '{"a": ', '"\\ud800', "\xff", "9" * 5000, "{" * 99])
@pytest.mark.parametrize("name", ["run.json", "config.json", "metrics.jsonl", "timing.jsonl", "events.jsonl"])
def test_what_a_file_of_a_run_holds_instead_is_told(name, text, run):
    (run / name).write_bytes(text.encode("latin-1") + b"\n")
    with pytest.raises(FolderError, match=rf"{name}.*(restore it|UTF-8)"):
        folder = RunFolder.open(run)
        _ = folder.config, folder.metrics(), folder.timing(), folder.events()


@pytest.mark.parametrize(
    "line",
    ['{"reward": 1}', '{"step": null}', '{"step": "1"}', '{"step": 1, "reward": "x"}', '{"step": 1, "x": [1]}', "7"],
)
def test_a_line_of_the_metrics_that_is_none_is_told_before_anything_changes(line, run):
    (run / "metrics.jsonl").write_text(line + "\n")
    forge(run / "checkpoints" / "step-00000012", manifest=put("settings"))
    with pytest.raises(FolderError, match=r"metrics.jsonl:1.*(restore|delete)"):
        train(run)
    assert not list((run / "checkpoints").glob("aside-*")) and (run / "metrics.jsonl").read_text() == line + "\n"


def test_files_of_samples_with_other_names_are_left_alone(run, trained):
    for name in ("step-abc.jsonl", "step-.npz", "step-1-film", "notes.txt", f"step-{'9' * 30}.jsonl"):
        (run / "samples" / name).write_text("?")
    folder = RunFolder.open(run)
    assert folder.sample_steps() == [1, 5, 10, 12] and folder.film_steps() == set()
    assert train(run, steps=13)[0].step == 13 and (run / "samples" / "step-abc.jsonl").exists()
    (run / "samples" / "step-00000005.npz").write_bytes(b"PK\3\4 no archive")
    with pytest.raises(FolderError, match=r"step-00000005.npz is damaged"):
        folder.samples(5)


def test_the_commands_end_with_one_line(run, capsys, tmp_path):
    """Through the front door: exit code 2, a line that names the file."""
    for name, text in (("run.json", DEEP), ("config.json", "[]"), ("config.json", NESTED)):
        kept = (run / name).read_text()
        (run / name).write_text(text)
        for words in (["train", "--resume"], ["eval"], ["export"]):
            assert main([*words, str(run)]) == 2
            said = capsys.readouterr().err
            assert said.startswith("grpo: ") and name in said and said.count("\n") == 1
        (run / name).write_text(kept)


# --- settings and data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"a: {DEEP}", f"nested deeper than {DEEPEST}"),
        ("a: " + "{b: " * 2000, f"nested deeper than {DEEPEST}"),
        ("- " * 2000 + "x", f"nested deeper than {DEEPEST}"),
        ("? [a, b]\n: 1", "a setting's name is a word"),
        ("? {a: 1}\n: 1", "a setting's name is a word"),
        ("a: !!timestamp x", "timestamp is not allowed"),
        ("a: !!bool foo", "foo is no bool"),
        ("a: !!int foo", "foo is no int"),
        ("a: !!float foo", "foo is no float"),
        ("a: !!map [1]", "expected a mapping node"),
        ("a: !!str [1]", "expected a scalar node"),
        ("a: !!set {1, 2}", "set is not allowed"),
        ("a: !!binary '!'", "binary is not allowed"),
        ("a: " + "9" * 5000, "is no int"),
        ("a: &x [1]\nb: [*x, *x]", "aliases are not allowed"),
        ("<<: 1", "expected a mapping"),
        ("a: \x01", "special characters are not allowed"),
        ("---\na: 1\n---\nb: 1", "another document"),
    ],
)
def test_yaml_that_is_odd_is_told_with_its_place(text, told):
    with pytest.raises(ConfigError, match=told) as caught:
        parse_settings(text, "my.yaml")
    assert str(caught.value).startswith("my.yaml:") and "\n" not in str(caught.value)


def test_a_date_is_text():
    assert parse_settings("a: 2026-13-45\nb: 2026-11-15", "my.yaml") == {"a": "2026-13-45", "b": "2026-11-15"}


@pytest.mark.parametrize("row", [DEEP, NESTED, '{"prompt": ' + "[" * 900 + "]" * 900 + "}"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_row_that_is_nested_too_deeply_is_named(row, name, tmp_path):
    (tmp_path / name).write_text(row + "\n")
    with pytest.raises(ConfigError, match=rf"{name}:.*nested deeper than"):
        read_rows(tmp_path / name)


def test_depth_counts_what_is_open_at_once():
    assert parse_json("[" + "[1]," * 500 + "[]]") and parse_json("[" * DEEPEST + "]" * DEEPEST)
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * (DEEPEST + 2) + "]" * (DEEPEST + 2))


def made(kind, path):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(path))


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket"])
def test_only_regular_files_are_read(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # a socket's name is short
    for name, read in (
        ("a.yaml", read_settings),
        ("a.jsonl", read_rows),
        ("b.jsonl", data_layer),
        ("a.csv", read_rows),
    ):
        path = type(tmp_path)(name)
        made(kind, path)
        with pytest.raises(ConfigError, match=rf"{name}.*(regular file|No such device)"):
            read(path)
    assert main(["config", "bandit", "a.yaml"]) == 2
    assert "a.yaml" in capsys.readouterr().err


# --- numbers that are too large ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--group-size 999999999999", "command line: group_size: input should be at most 1,000,000"),
        ("--groups-per-step 1e30", "command line: groups_per_step: input should be at most 1,000,000"),
        ("--seed 18446744073709551616", "command line: seed: input should be at most 18,446,744,073,709,551,615"),
        ("--seed -1", "command line: seed: input should be greater than or equal to 0"),
        ("--run.steps 99999999999999999999", "run.steps: input should be at most 9,007,199,254,740,992"),
        ("--run.steps five", "run.steps: input should be a valid integer"),
        ("--run.name 2026-13-45 --run.steps 2026-13-45", "run.steps: input should be a valid integer"),
        (f"--seed {'9' * 5000}", "seed"),
    ],
)
def test_numbers_beyond_reason_are_refused_by_name(words, told, capsys, tmp_path):
    assert main(["train", "bandit", *words.split(), "--logdir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1 and not (tmp_path / "run").exists()


def test_a_step_that_does_not_fit_into_memory_is_one_line(capsys, tmp_path, monkeypatch):
    def collect(self, request):
        raise MemoryError("Unable to allocate 7.28 TiB")

    monkeypatch.setattr("grpo.bandit.BanditSource.collect", collect)
    assert main(["train", "bandit", "--logdir", str(tmp_path / "run")]) == 1
    assert "grpo: there is not enough memory (Unable to allocate 7.28 TiB); lower" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["eval {} --seed -1", "eval {} --seed x", "eval {} --episodes ²", "view {} --port ²"])
def test_numbers_of_the_other_commands_are_refused_by_name(words, run, capsys):
    with pytest.raises(SystemExit) as left:
        main(words.format(run).split())
    assert left.value.code == 2 and f"argument --{words.split('--')[1].split()[0]}: " in capsys.readouterr().err


def test_a_checkpoint_s_number_is_one(run, capsys):
    for which in ("²", "9" * 5000, "-1"):
        assert main(["eval", str(run), f"--checkpoint={which}"]) == 2
        assert "give best, last or the number of a step" in capsys.readouterr().err
