"""What a user names becomes a fleet, or a line that says what to do instead."""

import importlib.util
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import FrameStackObservation, RescaleAction

from grpo.envs.classic import CLASSIC
from grpo.envs.envpool import EnvPoolFleet
from grpo.envs.fleet import EnvError
from grpo.envs.make import DEFAULT_HORIZON, EnvFactory, make_fleet
from grpo.envs.processes import ProcessFleet
from grpo.envs.serial import SerialFleet
from grpo.envs.vectors import GymVectorFleet
from tests.faults import envs

SOURCE = """
import gymnasium as gym
from neighbour import LENGTH
from tests.faults.envs import Walk

class Maze(Walk):
    def __init__(self, length=LENGTH):
        super().__init__(length)

def small():
    return Maze(2)

gym.register("{id}", Maze, max_episode_steps=5)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Somebody's folder, with a module that registers an environment; the registry as before afterwards."""
    (tmp_path / "neighbour.py").write_text("LENGTH = 7\n")
    (tmp_path / "mazes.py").write_text(SOURCE.format(id="Maze-v0"))
    (tmp_path / "mazeworld").mkdir()
    (tmp_path / "mazeworld" / "__init__.py").write_text(SOURCE.format(id="MazeWorld/Maze-v0"))
    known, loaded = dict(gym.registry), {*sys.modules}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    gym.registry.clear()
    gym.registry.update(known)
    for name in ({*sys.modules} - loaded) & {"mazes", "mazes_here", "mazeworld", "neighbour"}:
        del sys.modules[name]


@pytest.mark.parametrize(
    "env, name, length, horizon",
    [
        ("mazes:Maze-v0", "Maze-v0", 7, 5),
        ("mazes:Maze", "Maze", 7, DEFAULT_HORIZON),
        ("mazes:small", "small", 2, DEFAULT_HORIZON),
        ("mazes.py:Maze", "Maze", 7, DEFAULT_HORIZON),
        ("./mazes.py:Maze-v0", "Maze-v0", 7, 5),
        ("MazeWorld/Maze-v0", "MazeWorld/Maze-v0", 7, 5),
        (envs.Walk, "Walk", 10, DEFAULT_HORIZON),
    ],
)
def test_everything_a_user_may_name(env, name, length, horizon, folder):
    factory = EnvFactory(env)
    fleet = SerialFleet(factory, 1)
    assert factory.name == fleet.name == name
    assert (factory.make().unwrapped.length, fleet.horizon) == (length, horizon)


def test_a_folder_nobody_put_on_the_path_is_found(folder, monkeypatch):
    """As with an installed command, whose own folder is there instead."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(folder))])
    (folder / "mazes_here.py").write_text(SOURCE.format(id="Here-v0"))
    assert EnvFactory("mazes_here:Maze").make().unwrapped.length == 7


def test_kwargs_and_horizon_reach_the_environment(folder):
    for env in ("mazes:Maze-v0", "mazes:Maze", envs.Walk):
        factory = EnvFactory(env, {"length": 3}, horizon=4)
        assert factory.make().unwrapped.length == 3
        assert make_fleet(env, 1, kind="serial", kwargs={"length": 3}, horizon=4).horizon == 4
    assert make_fleet(factory, 1, kind="serial", kwargs={"length": 9})._spare is None
    assert make_fleet("CartPole-v1", 1, horizon=9).horizon == make_fleet("LunarLander-v3", 1, horizon=9).horizon == 9


@pytest.mark.parametrize(
    "env, message",
    [
        (
            "CartPole-v7",
            "no environment 'CartPole-v7' is registered; nearest: CartPole-v1.*--env your_module:YourEnv-v0",
        ),
        ("cartpole-v1", "nearest: CartPole-v1"),
        ("Qxqxqx", "no environment 'Qxqxqx' is registered; to use your own"),
        ("mazes:Labyrinth-v0", "mazes has no Labyrinth-v0, neither as a class"),
        ("mazes:Maz", "mazes has no Maz.*; nearest: Maze"),
        ("no_such_module:Maze", "no_such_module cannot be imported .*install it, or run where it lies"),
        ("nowhere.py:Maze", "there is no file nowhere.py"),
        ("mazes.py", "^mazes.py is a file; name what it holds, too: --env mazes.py:Maze$"),
        ("broken.py:Maze", "loading broken.py fails: ZeroDivisionError"),
        ("trains.py:Maze", "^trains.py trains when it is loaded: put that under `if __name__ == '__main__':`$"),
        ("broken:Maze", "broken:Maze: importing broken fails: ZeroDivisionError"),
        (
            "Hopper-v3",
            "Hopper-v3(: DependencyNotInstalled| cannot be made)",
        ),  # by who has registered it in this process
    ],
)
def test_a_name_that_leads_nowhere_is_answered_in_a_line(env, message, folder):
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "trains.py").write_text(
        "from grpo.control import GRPOTrainer\nGRPOTrainer(env='CartPole-v1').train(steps=1)\n"
    )
    with pytest.raises(EnvError, match=message) as found:
        EnvFactory(env).make()
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    "env, package",
    [
        ("ALE/Frogger-v9", r"'anygrpo\[atari\]'"),
        ("FetchReach-v9", "gymnasium-robotics"),
        ("MiniGrid-Nowhere-v9", "minigrid"),
    ],
)
def test_a_missing_package_is_named(env, package, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvError, match=f"{env} needs .*; pip install {package}"):
        EnvFactory(env).make()


def test_a_package_that_an_environment_of_ours_lacks_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ale_py", None)
    monkeypatch.delitem(sys.modules, "grpo.envs.atari", raising=False)
    with pytest.raises(EnvError, match=r"grpo\.envs\.atari:Atari needs ale-py; pip install 'anygrpo\[atari\]'"):
        EnvFactory("grpo.envs.atari:Atari", {"game": "pong"}).make()


def test_an_arm_that_this_mujoco_cannot_make_names_one_that_can():
    pytest.importorskip("gymnasium_robotics")
    mujoco = pytest.importorskip("mujoco")
    if np.int32(2) in (mujoco.mjtJoint.mjJNT_HINGE, mujoco.mjtJoint.mjJNT_SLIDE):
        pytest.skip("this MuJoCo can")
    with pytest.raises(EnvError, match=r"FetchReach-v4 cannot be made: .*; .*pip install .*'mujoco<3.12'"):
        EnvFactory("FetchReach-v4").make()


def test_a_missing_engine_is_in_our_extra(monkeypatch):
    def refuse(*_, **__):
        raise gym.error.DependencyNotInstalled('MuJoCo is not installed, run `pip install "gymnasium[mujoco]"`')

    monkeypatch.setattr(gym, "make", refuse)
    with pytest.raises(EnvError, match=r"Hopper-v5: .*MuJoCo is not installed.*; pip install 'anygrpo\[control\]'"):
        EnvFactory("Hopper-v5").make()


def test_pictures_are_asked_for_where_they_can_be_had():
    assert EnvFactory("CartPole-v1").make("rgb_array").render_mode == "rgb_array"
    assert EnvFactory(envs.Walk).make("rgb_array").render_mode == "rgb_array"
    with pytest.raises(EnvError, match="Brief cannot be seen: it takes no render_mode='rgb_array'"):
        EnvFactory(envs.Brief).make("rgb_array")


@pytest.mark.parametrize(
    "id, limit", [("MiniGrid-Empty-5x5-v0", 100), ("Blackjack-v1", DEFAULT_HORIZON), ("CartPole-v1", 500)]
)
def test_limits_are_read_before_they_are_made_up(id, limit):
    assert make_fleet(id, 1, kind="serial").horizon == limit


def test_auto_takes_the_fastest_that_serves():
    chosen = {
        "CartPole-v1": CLASSIC["CartPole-v1"].func,
        "Taxi-v4": SerialFleet,
        "Hopper-v5": SerialFleet,
        "MiniGrid-Empty-5x5-v0": SerialFleet,
    }
    assert {id: type(make_fleet(id, 2)) for id in chosen} == chosen
    assert type(make_fleet("CartPole-v1", 2, kwargs={"sutton_barto_reward": True})) is GymVectorFleet
    assert type(make_fleet("Pendulum-v1", 2, kwargs={"g": 9.0})) is SerialFleet


def test_a_batched_form_that_does_not_serve_is_passed_over(folder):
    def batched(num_envs, **_):
        raise RuntimeError("not today")

    gym.register("Batched-v0", gym.envs.registration.load_env_creator, vector_entry_point=batched)
    gym.registry["Batched-v0"].entry_point = "gymnasium.envs.toy_text.taxi:TaxiEnv"
    assert type(make_fleet("Batched-v0", 2)) is SerialFleet
    with pytest.raises(EnvError, match="not today"):
        make_fleet("Batched-v0", 2, kind="vector")


def test_ones_own_code_runs_in_processes_and_plays_the_same():
    fleet = make_fleet("tests.faults.envs:Walk", 3, workers=2)
    assert type(fleet) is ProcessFleet and len(fleet._workers) == 2
    serial = make_fleet(envs.Walk, 3, kind="serial")
    for one, other in (
        (fleet.reset([2, 0], [5, 6]), serial.reset([2, 0], [5, 6])),
        (fleet.step([0, 2], [1, 0]), serial.step([0, 2], [1, 0])),
        (fleet.step([0], [1]), serial.step([0], [1])),
    ):
        np.testing.assert_array_equal(one.observation, other.observation)
    assert fleet.step([1], [1]).errors == serial.step([1], [1]).errors
    assert (fleet.name, fleet.horizon, fleet.observation_space) == ("Walk", 1000, serial.observation_space)
    fleet.close()


def test_what_a_worker_remarks_is_heard_here():
    with pytest.warns(UserWarning, match="Forgetful: two resets with one seed began differently"):
        fleet = make_fleet(envs.Forgetful, 1)
    assert type(fleet) is ProcessFleet
    fleet.close()


def test_what_cannot_be_sent_runs_here_with_one_warning():
    with pytest.warns(UserWarning, match="lambda.*cannot run in other processes") as warned:
        fleet = make_fleet(lambda: envs.Walk(), 2)
    assert type(fleet) is SerialFleet and len(warned) == 1
    with pytest.raises(EnvError, match=r"cannot run in other processes.*use vector='serial'"):
        make_fleet(lambda: envs.Walk(), 2, kind="processes")


def test_an_instance_is_the_first_member_and_its_wrappers_are_kept():
    env = RescaleAction(FrameStackObservation(gym.make("Pendulum-v1", g=5.0), 3), -1, 1)
    fleet = make_fleet(env, 3)
    fleet.reset([0, 1, 2], [4, 4, 5])
    assert fleet._members[0].env is env
    assert fleet._members[1].env.unwrapped.g == 5.0
    stepped = fleet.step([0, 1, 2], np.full((3, 1), 0.5, np.float32))
    assert stepped.observation.shape == (3, 3, 3) and fleet.horizon == 200
    np.testing.assert_array_equal(stepped.observation[0], stepped.observation[1])


def test_an_instance_without_a_spec_stays_alone():
    env = envs.Walk()
    fleet = make_fleet(env, 1, horizon=4)
    assert fleet.horizon == 4 and fleet.name == "Walk"
    assert fleet.reset([0], [1]).observation.any()
    with pytest.raises(EnvError, match="Walk has no spec to make 2 more from; pass an id or a factory"):
        make_fleet(envs.Walk(), 3)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"env": "Taxi-v4", "kind": "classic"}, "Taxi-v4: vector='classic' is for CartPole-v0.*; use vector='serial'$"),
        ({"env": "CartPole-v1", "kind": "classic", "kwargs": {"a": 1}}, "takes no kwargs"),
        ({"env": "Taxi-v4", "kind": "vector"}, "not registered with a batched form"),
        (
            {"env": envs.Walk, "kind": "envpool"},
            "vector='envpool' needs a registered id, not Walk; use vector='serial' or 'processes'",
        ),
        ({"env": "Taxi-v4", "kind": "quick"}, "kind must be one of auto, classic"),
        ({"env": "Taxi-v4", "kind": "serial", "workers": 2}, "workers=2 means processes"),
        (
            {"env": envs.Walk(), "workers": 2},
            "an environment cannot move to vector='processes'; pass its id or a factory",
        ),
        ({"env": envs.Walk(), "kwargs": {"length": 2}}, "kwargs come too late"),
        ({"env": "Taxi-v4", "size": 0}, "at least one member"),
        ({"env": "Taxi-v4", "horizon": 0}, "a horizon at least one step"),
        ({"env": "Taxi-v4", "kwargs": {"colour": 1}}, "Taxi-v4 cannot be made with {'colour': 1}: TypeError"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(settings, message):
    with pytest.raises(EnvError, match=message):
        make_fleet(**{"size": 2, **settings})


def test_kinds_can_be_chosen():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert type(make_fleet("CartPole-v1", 2, kind="vector")) is GymVectorFleet
        assert type(make_fleet("CartPole-v1", 2, kind="serial")) is SerialFleet
        if importlib.util.find_spec("envpool"):
            assert type(make_fleet("CartPole-v1", 2, kind="envpool")) is EnvPoolFleet


@pytest.mark.parametrize("kind", ["serial", "processes"])
def test_dice_that_tries_from_one_start_share_are_told_of_once(kind, monkeypatch):
    monkeypatch.setattr("grpo.envs.make._TOLD", set())
    with pytest.warns(
        UserWarning, match="FrozenLake-v1 draws random numbers during an episode.*group_by=batch"
    ) as told:
        for _ in range(2):
            make_fleet("FrozenLake-v1", 2, kind=kind, alike=True).close()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_fleet("FrozenLake-v1", 2, kind="serial").close()  # nobody compares them
        make_fleet("FrozenLake-v1", 2, kind="serial", kwargs={"is_slippery": False}, alike=False).close()
        make_fleet("MountainCar-v0", 2, kind="serial", alike=True).close()  # chance at its start alone


class Twisted(envs.Walk):
    """Draws from a generator whose state is an array."""

    def reset(self, *, seed=None, options=None):
        self._np_random = np.random.Generator(np.random.MT19937(seed))
        return super().reset(options=options)


def test_dice_of_any_generator_are_told_of(monkeypatch):
    monkeypatch.setattr("grpo.envs.make._TOLD", set())
    with pytest.warns(UserWarning, match="Twisted.* draws random numbers during an episode"):
        make_fleet(Twisted, 2, kind="serial", alike=True).close()


def test_whoever_says_how_groups_are_made_is_told_nothing(monkeypatch):
    from grpo.control import GRPOTrainer

    monkeypatch.setattr("grpo.envs.make._TOLD", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for group_by in ("start", "batch"):
            GRPOTrainer("FrozenLake-v1", group_by=group_by)
    with pytest.warns(UserWarning, match="group_by=start says that this is meant"):
        GRPOTrainer("FrozenLake-v1")


class Old(gym.Env):
    observation_space, action_space = gym.spaces.Box(0, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self, size):
        self.size = size

    def reset(self):
        return np.zeros(2, np.float32)


def test_an_environment_of_the_old_kind_is_told_what_the_new_one_looks_like():
    here = r"test_make.py:\d+\)"
    with pytest.raises(EnvError, match=rf"missing 1 required .*{here}; give env_kwargs=\{{'size': …\}}"):
        make_fleet(Old, 1, kind="serial")
    with pytest.raises(
        EnvError, match=rf"unexpected keyword argument 'seed' .*{here}; Gymnasium's reset\(self, \*, seed"
    ):
        make_fleet(Old, 1, kind="serial", kwargs={"size": 3})
