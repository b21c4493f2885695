"""`kill -9` of a learner whose answers come from a server, which lives on: nothing is lost, nothing comes twice."""

import json
import signal

import pytest

from grpo.run.checkpoint import POINTS
from tests.faults.tiny_language import save_model
from tests.unit.language.vllm_double import Double, serving

KILL = signal.SIGKILL.value
STEPS = 3
SERVER = [f"{when} {path}" for path in ("/collective_rpc", "/v1/completions") for when in ("before", "after")]
STANDING = ["before /pause", "after /pause", "before /resume", "after /resume"]
"""Rows that are under way stand still while weights travel."""
ALWAYS = {"update", "after /pause", "before /resume", "rename"}


def points(*names):
    return [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    save_model(place)
    return str(place)


@pytest.fixture
def life(forge, model):
    """Runs on one server until it ends, or is killed; it is slow enough for rows to be under way at each push."""
    with serving(Double(token_seconds=0.02)) as url:

        def run(path, staleness, **job):
            options = {"engine": "vllm", "servers": [url], "staleness": staleness, "engine_kwargs": {"deadline": 20}}
            return forge(path, STEPS, model=model, options=options, **job)["code"]

        yield run


@pytest.fixture(scope="module")
def whole(forge, model, tmp_path_factory):
    """The run at staleness 0 that nothing happened to."""
    path = tmp_path_factory.mktemp("whole") / "run"
    with serving(Double()) as url:
        options = {"engine": "vllm", "servers": [url]}
        assert forge(path, STEPS, model=model, options=options)["code"] == 0
    return path


def nth(point):
    """Behind the first step, whose weights are proven with completions of their own."""
    return 20 if "completions" in point else 1 if point in STANDING else 2


def learned(path):
    """Rows and tokens of each step; of a step that was cut and done again, what it was the last time."""
    lines = path.with_suffix(".learned").read_text().splitlines()
    return {step: (rows, tokens) for step, rows, tokens in map(json.loads, lines)}


@pytest.mark.parametrize("point", points("reward", "update", "told", *SERVER, *POINTS))
def test_at_staleness_0_the_run_is_the_same_byte_for_byte(point, life, whole, tmp_path):
    path = tmp_path / "run"
    assert life(path, 0.0, hurt=[[point, nth(point), KILL]]) == -KILL
    assert life(path, 0.0) == 0
    for name in ("metrics.jsonl", "checkpoints/step-00000003/arrays.safetensors"):
        assert (path / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize("point", points("reward", "update", "told", *SERVER, *STANDING, *POINTS))
def test_ahead_the_counters_are_right(point, life, whole, tmp_path):
    path = tmp_path / "run"
    assert life(path, 1.0, hurt=[[point, nth(point), KILL]]) == -KILL
    assert life(path, 1.0) == 0
    found = learned(path)
    assert [found[step][0] for step in sorted(found)] == [rows for rows, _ in learned(whole).values()]
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["num_tokens"] == sum(tokens for _, tokens in found.values())
    assert all(line["staleness/max"] <= 1 for line in lines)
