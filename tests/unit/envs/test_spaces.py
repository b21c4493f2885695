"""Trees of observations and what a network reads of them, for every kind of space."""

import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces as gs

from grpo.envs import spaces
from grpo.envs.fleet import EnvError

NESTED = gs.Dict(
    {
        "body": gs.Dict({"speed": gs.Box(-1, 1, (2,), np.float64), "name": gs.Text(5)}),
        "cards": gs.Tuple((gs.Discrete(3, start=1), gs.Text(4), gs.MultiBinary(2))),
        "mission": gs.Text(10),
    }
)


def test_numeric_drops_text_at_every_depth_and_reads_tuples_as_dicts():
    found = spaces.numeric(NESTED)
    assert set(found.keys()) == {"body", "cards"}
    assert set(found["body"].keys()) == {"speed"} and set(found["cards"].keys()) == {"0", "2"}
    assert spaces.numeric(gs.Dict({"a": gs.Text(3), "b": gs.Dict({"c": gs.Text(3)})})) is None
    assert spaces.numeric(gs.Graph(gs.Box(-1, 1, (2,)), None)) is None


def test_numeric_drops_minigrids_mission():
    pytest.importorskip("minigrid")
    from minigrid.core.mission import MissionSpace

    space = gs.Dict({"image": gs.Box(0, 255, (7, 7, 3), np.uint8), "mission": MissionSpace(lambda: "go")})
    assert set(spaces.numeric(space).keys()) == {"image"}


def test_a_tree_of_samples_has_a_row_each_in_the_spaces_dtypes():
    NESTED.seed(0)
    samples = [NESTED.sample() for _ in range(4)]
    tree = spaces.stack(samples, NESTED)
    assert set(tree) == {"body", "cards"} and set(tree["cards"]) == {"0", "2"}
    assert tree["body"]["speed"].dtype == np.float64 and tree["body"]["speed"].shape == (4, 2)
    assert tree["cards"]["0"].tolist() == [int(one["cards"][0]) for one in samples]
    again = spaces.stack(samples, spaces.numeric(NESTED))
    assert (again["cards"]["2"] == tree["cards"]["2"]).all()
    empty = spaces.zeros(NESTED, 4)
    assert empty["cards"]["2"].shape == (4, 2) and empty["cards"]["2"].dtype == np.int8
    spaces.put(empty, [3, 1], spaces.take(tree, [0, 2]))
    assert (spaces.take(empty, [3, 1])["body"]["speed"] == tree["body"]["speed"][[0, 2]]).all()
    assert not empty["body"]["speed"][[0, 2]].any()


def test_stacking_nothing_gives_no_rows():
    assert spaces.stack([], gs.Box(-1, 1, (3,))).shape == (0, 3)
    assert spaces.flatten(np.zeros((0, 3), np.float32), spaces.layout(gs.Box(-1, 1, (3,)))).shape == (0, 3)


def test_an_observation_of_another_shape_names_the_space_and_the_shape():
    with pytest.raises(EnvError, match=r"\(5,\).*Box\(-1.0, 1.0, \(4,\)"):
        spaces.stack([np.zeros(5)], gs.Box(-1, 1, (4,)))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((84, 84, 3), (3, 84, 84)),
        ((3, 64, 96), (3, 64, 96)),
        ((7, 7, 3), (3, 7, 7)),
        ((6, 9, 9), (6, 9, 9)),
        ((4, 84, 84), (4, 84, 84)),  # grey frames
        ((4, 84, 84, 3), (12, 84, 84)),  # coloured frames
        ((4, 3, 84, 84), (12, 84, 84)),
        ((84, 84), (1, 84, 84)),
        ((10, 12, 7), (7, 10, 12)),
    ],
)
def test_pictures_are_recognised_with_their_channels(shape, size):
    box = gs.Box(0, 255, shape, np.uint8)
    assert spaces.is_image(box)
    (picture,) = spaces.layout(box).pictures
    assert picture.size == size and picture.high == 255


@pytest.mark.parametrize(
    "box",
    [
        gs.Box(0, 255, (128,), np.uint8),
        gs.Box(0, 255, (9, 9), np.uint8),
        gs.Box(0, 255, (4, 4, 3), np.uint8),
        gs.Box(0, 1, (84, 84, 3), np.float32),
        gs.Box(0, 255, (20, 20, 20), np.uint8),
    ],
)
def test_tables_and_floats_are_no_pictures(box):
    assert not spaces.is_image(box)
    assert spaces.layout(box).size == np.prod(box.shape)


def test_the_vector_is_laid_out_with_codes_one_hot_from_their_start():
    space = gs.Dict(
        {
            "a": gs.Box(-1, 1, (1, 2), np.float64),
            "b": gs.Discrete(3, start=-1),
            "c": gs.MultiDiscrete([2, 3], start=[0, 5]),
            "d": gs.MultiBinary(2),
        }
    )
    observation = {"a": np.array([[0.5, -0.5]]), "b": np.int64(0), "c": np.array([1, 7]), "d": np.array([0, 1])}
    of = spaces.layout(space)
    flat = spaces.flatten(spaces.stack([observation], space), of)
    assert flat.dtype == np.float32 and of.size == 12
    assert flat.tolist() == [[0.5, -0.5, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1]]


def test_a_plain_vector_is_not_copied():
    x = np.ones((3, 4), np.float32)
    assert np.shares_memory(spaces.flatten(x, spaces.layout(gs.Box(-1, 1, (4,)))), x)


def test_a_space_without_numbers_is_refused_by_name():
    with pytest.raises(EnvError, match=r"Text\(.*no network can read"):
        spaces.layout(gs.Text(7))


def test_reading_spaces_loads_no_neural_library():
    code = "import sys, grpo.envs.spaces; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
