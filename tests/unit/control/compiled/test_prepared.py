"""A command whose start was kept: what it does without, that it leaves the same, and when it is not relied on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

import grpo

pytest.importorskip("jax")

from grpo.app import arguments
from grpo.cli import main
from grpo.control.compiled import loaded, starts
from grpo.control.compiled.prepared import Prepared, prepared

TOLD = """
import sys
from grpo.cli import main

HEAVY = "torch", "gymnasium", "jax", "scipy.linalg", "matplotlib"

class Told:
    def __init__(self, out): self.out = out
    def __getattr__(self, name): return getattr(self.out, name)
    def write(self, text):
        if text.startswith("step=4/4 "):
            loaded = [name for name in HEAVY if name in sys.modules]
            self.out.write(f"loaded={','.join(loaded)}\\n")
        return self.out.write(text)

sys.stdout = Told(sys.stdout)
sys.exit(main(sys.argv[1:]))
"""
POLE = {"env": "CartPole-v1", "group_size": "4", "groups_per_step": "2", "hidden": "[8]", "num_iterations": "3"}
POLE |= {"gamma": "0.99", "decisions_per_minibatch": "4096", "max_episode_steps": "24", "target_kl": "null"}
SWING = {"env": "Pendulum-v1", "scale_observations": "true", "clip_rewards": "10", "group_size": "2", "hidden": "[8]"}
SWING |= {"groups_per_step": "2", "max_episode_steps": "20", "report_entropy": "true"}
CACHED = {"JAX_ENABLE_COMPILATION_CACHE": "true"}
"""Other tests leave nothing in a cache."""
PLAN = {"run.steps": "4", "run.evaluate_every": "2", "run.checkpoint_every": "2", "run.keep_last": "null"}


def words(task: dict[str, str], **more: str) -> list[str]:
    settings = {**task, "compiled": "true", "eval_episodes": "4", **PLAN, **more}
    return [f"--{name}={value}" for name, value in settings.items()]


def config(task: dict[str, str]):
    given = {**task, "compiled": "true", "eval_episodes": "4"}
    return arguments.resolved([], [*given.items()]).config


def trained(cache: Path, folder: Path, task: dict[str, str], **more: str) -> str:
    return run(cache, *words(task, **more), f"--logdir={folder}")


def run(cache: Path, *given: str) -> str:
    command = [sys.executable, "-c", TOLD, "train", *given]
    own = os.environ | {"XDG_CACHE_HOME": str(cache), **CACHED}
    ended = subprocess.run(command, capture_output=True, text=True, env=own, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(scope="module", params=[POLE, SWING], ids=["choices", "numbers"])
def left(request, tmp_path_factory) -> tuple[Path, Path, dict[str, str], list[str]]:
    """The cache, the runs first and second, and what was told of each."""
    place = tmp_path_factory.mktemp("kept")
    told = [trained(place / "cache", place / name, request.param) for name in ("first", "second")]
    return place / "cache", place, request.param, told


@pytest.fixture
def kept(left, monkeypatch) -> Iterator[Prepared]:
    for name, value in {"XDG_CACHE_HOME": str(left[0]), **CACHED}.items():
        monkeypatch.setenv(name, value)
    starts.here.cache_clear()
    found = prepared(config(left[2]))
    assert found is not None
    yield found
    starts.here.cache_clear()


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_its_last_step_is_told_before_pytorch_gymnasium_jax_and_matplotlib_are_loaded(left) -> None:
    first, second = (next(line for line in told.splitlines() if line.startswith("loaded=")) for told in left[3])
    assert (first.startswith("loaded=torch,gymnasium,jax"), second) == (True, "loaded=")


def test_it_leaves_what_the_run_left_that_made_the_start(left) -> None:
    _, place, _, told = left
    first, second = place / "first", place / "second"
    assert names(first) == names(second)
    assert (first / "metrics.jsonl").read_bytes() == (second / "metrics.jsonl").read_bytes()
    for path in sorted(first.glob("checkpoints/step-*/arrays.safetensors")):
        mine, theirs = load_file(second / path.relative_to(first)), load_file(path)
        assert mine.keys() == theirs.keys()
        for name, x in theirs.items():
            np.testing.assert_array_equal(mine[name], x, err_msg=name)
        values = [json.loads((folder / path.relative_to(first)).with_name("state.json").read_text())["values"]
                  for folder in (first, second)]  # fmt: skip
        assert values[0] == values[1]
    for path in sorted(first.glob("samples/*.npz")):
        mine, theirs = np.load(second / path.relative_to(first)), np.load(path)
        assert set(mine) == set(theirs)
        for name in theirs:
            np.testing.assert_allclose(mine[name].astype(float), theirs[name].astype(float), rtol=1e-2, atol=1e-3)
    shown = [[json.loads(line)["actions"] for line in (folder / "samples/step-00000004.jsonl").open()]
             for folder in (first, second)]  # fmt: skip
    assert shown[0] == shown[1]
    ends = [[line for line in text.splitlines() if line.startswith(("next=", "return=", "eval/"))] for text in told]
    assert [line.replace("second", "first") for line in ends[1]] == ends[0]


def test_it_is_gone_on_with_exactly_and_evaluated_and_loaded_as_any_run(left, tmp_path, capsys) -> None:
    cache, place, task, _ = left
    assert "loaded=" not in trained(cache, tmp_path / "cut", task, **{"run.steps": "2"})
    assert "loaded=torch" in run(cache, f"--resume={tmp_path / 'cut'}", "--run.steps=4")
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (place / "second/metrics.jsonl").read_bytes()
    capsys.readouterr()
    shown = []
    for folder in ("first", "second"):
        assert main(["eval", str(place / folder), "--episodes=3", "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out.replace(folder, "run")))
    assert shown[0] == shown[1]
    assert grpo.load(place / "second") is not None


def test_its_state_comes_back(kept) -> None:
    kept.step()
    state, report = kept.state(), kept.step()
    after = kept.state()
    kept.load_state(state)
    assert kept.step().metrics == report.metrics
    again = kept.state()
    assert again.values == after.values
    for name, x in after.arrays.items():
        np.testing.assert_array_equal(again.arrays[name], x)


def test_it_can_be_exported(kept, tmp_path) -> None:
    pytest.importorskip("onnx")
    kept.step()
    assert kept.export(tmp_path / "policy.onnx").stat().st_size


@pytest.mark.parametrize("what", ["start", "step", "judged"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "anybody's"])
def test_a_damaged_file_is_as_good_as_none(what, damage, left, kept) -> None:
    key = starts.key(config(left[2]))
    start = starts.read(key)
    assert start is not None
    place = left[0] / "anygrpo"
    path = (
        place / f"starts/{key}.safetensors" if what == "start" else place / "jax" / start.values["files"][what]["file"]
    )
    data, mode = path.read_bytes(), path.stat().st_mode
    try:
        if damage == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif damage == "changed":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        elif damage == "gone":
            path.unlink()
        else:
            path.chmod(0o666)
        assert prepared(config(left[2])) is None
    finally:
        path.write_bytes(data)
        path.chmod(mode)
    assert prepared(config(left[2])) is not None


def test_a_damaged_program_is_compiled_anew_and_nothing_is_lost(left, tmp_path) -> None:
    kept, place, task, _ = left
    cache = tmp_path / "cache"
    shutil.copytree(kept, cache)
    for path in (cache / "anygrpo/jax").glob("*-cache"):
        path.write_bytes(path.read_bytes()[:100])
    told = trained(cache, tmp_path / "again", task)
    assert "loaded=torch" in told
    assert (tmp_path / "again/metrics.jsonl").read_bytes() == (place / "first/metrics.jsonl").read_bytes()


def test_other_calls_of_jaxlib_are_met_before_the_first_step(left, kept, monkeypatch) -> None:
    def other(*given, **named):
        raise TypeError("incompatible function arguments")

    monkeypatch.setattr(loaded.xla_client, "batched_device_put", other)
    assert prepared(config(left[2])) is None


def test_lapack_comes_with_all_of_scipy_where_it_does_not_come_alone(monkeypatch) -> None:
    def fails(name):
        raise ImportError(name)

    monkeypatch.setattr(loaded, "_import_alone", fails)
    loaded.expect_solvers()


def test_jax_solves_equations_after_it() -> None:
    source = "from grpo.control.compiled.loaded import expect_solvers\nexpect_solvers()\n"
    source += "import jax.numpy as jnp, scipy.linalg\n"
    source += "assert jnp.linalg.solve(2 * jnp.eye(3), jnp.ones(3)).tolist() == [0.5] * 3\n"
    source += "assert scipy.linalg.solve([[2.0]], [1.0]).tolist() == [0.5]\n"
    subprocess.run([sys.executable, "-c", source], check=True)


def test_programs_packed_with_zstandard_are_unpacked_with_it(monkeypatch) -> None:
    packed = b"\x28\xb5\x2f\xfd rest"
    monkeypatch.setitem(sys.modules, loaded.ZSTANDARD, SimpleNamespace(decompress={packed: b"a program"}.__getitem__))
    assert loaded._unpacked(packed) == b"a program"


@pytest.mark.parametrize("other", [{"learning_rate": "0.01"}, {"seed": "1"}, {"eval_episodes": "5"}])
def test_another_setting_is_another_start(other, left, kept) -> None:
    given = {**left[2], "compiled": "true", "eval_episodes": "4", **other}
    assert prepared(arguments.resolved([], [*given.items()]).config) is None


def test_other_code_libraries_flags_or_processors_are_another_start(left, kept, monkeypatch) -> None:
    before = starts.key(config(left[2]))
    for name, value in (("_code", "other"), ("_processor", "other")):
        with monkeypatch.context() as other:
            other.setattr(starts, name, lambda value=value: value)
            starts.here.cache_clear()
            assert starts.key(config(left[2])) != before
    with monkeypatch.context() as other:
        other.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        starts.here.cache_clear()
        assert starts.key(config(left[2])) != before
    with monkeypatch.context() as other:
        other.setattr(starts.metadata, "version", lambda name: "0")
        starts.here.cache_clear()
        assert starts.key(config(left[2])) != before
    starts.here.cache_clear()
    assert starts.key(config(left[2])) == before


def test_only_so_many_starts_are_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(starts, "MOST", 2)
    for i in range(3):
        starts.write(f"start{i}", starts.Start({"number": i}, {"x": np.arange(i)}))
        os.utime(tmp_path / f"anygrpo/starts/start{i}.safetensors", (i, i))
    assert starts.read("start0") is None
    found = starts.read("start2")
    assert found is not None and found.values == {"number": 2} and found.arrays["x"].tolist() == [0, 1]
