"""The DeepMind Control Suite: beside any MuJoCo, and named with its extra where it is missing."""

import importlib.util
import sys
import types

import pytest

from grpo.envs.fleet import EnvError
from grpo.envs.make import EnvFactory

needs_dm_control = pytest.mark.skipif(
    importlib.util.find_spec("dm_control") is None or importlib.util.find_spec("shimmy") is None,
    reason="make test EXTRAS=dev,dm-control",
)


def table(monkeypatch, **tables):
    """dm_control as far as it is asked for, with this table of arrays."""
    sizes = types.SimpleNamespace(array_sizes=tables)
    for name in ("dm_control", "dm_control.mujoco", "dm_control.mujoco.wrapper"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    bindings = types.ModuleType("dm_control.mujoco.wrapper.mjbindings")
    bindings.sizes = sizes
    monkeypatch.setitem(sys.modules, bindings.__name__, bindings)
    monkeypatch.delitem(sys.modules, "grpo.envs.dm_control", raising=False)
    return sizes.array_sizes


def test_only_what_this_mujoco_does_not_have_is_struck(monkeypatch):
    before = sys.modules.get("grpo.envs.dm_control")
    kept = table(monkeypatch, mjmodel={"body_mass": (), "gone_from_models": ()}, mjdata={"gone": (), "qpos": ()})
    module = importlib.import_module("grpo.envs.dm_control")
    assert module.fit_to_mujoco() == ["gone_from_models", "gone"]
    assert [*kept["mjmodel"]] == ["body_mass"] and [*kept["mjdata"]] == ["qpos"]
    assert module.fit_to_mujoco() == []
    monkeypatch.undo()
    sys.modules.pop("grpo.envs.dm_control", None)
    if before is not None:
        sys.modules["grpo.envs.dm_control"] = before


@pytest.mark.parametrize("missing", ["shimmy", "dm_control"])
def test_the_extra_is_named_where_a_part_of_it_is_missing(missing, monkeypatch):
    there = importlib.util.find_spec

    def found(name, *rest):
        if name in ("shimmy", "dm_control"):
            return None if name == missing else object()
        return there(name, *rest)

    monkeypatch.setattr("importlib.util.find_spec", found)
    said = rf"dm_control/reacher-none-v0 needs {missing.replace('_', '-')}; pip install 'anygrpo\[dm-control\]'"
    with pytest.raises(EnvError, match=said):
        EnvFactory("dm_control/reacher-none-v0").resolve()


@needs_dm_control
@pytest.mark.parametrize("task", ["reacher-easy", "ball_in_cup-catch", "cartpole-swingup"])
def test_tasks_are_made_and_begin_where_their_seed_says(task):
    env = EnvFactory(f"dm_control/{task}-v0")()
    first, again = (env.reset(seed=3)[0] for _ in range(2))
    assert all((first[name] == again[name]).all() for name in first)
    env.action_space.seed(0)
    assert 0 <= env.step(env.action_space.sample())[1] <= 1
    env.close()
