"""Episodes are filmed as they were, beside the samples, and the run is the same with and without."""

from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest

from grpo.config import ConfigError
from grpo.control import GRPOTrainer
from grpo.control.films import HEIGHT, _small
from grpo.run.folder import RunFolder
from grpo.run.loop import run


class Lamp(gym.Env):
    """Grey by its state, which actions raise: 3 steps. `forgets`: a seed is not enough to begin alike."""

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}
    made = 0

    def __init__(self, render_mode=None, forgets=False):
        self.observation_space = gym.spaces.Box(-1e6, 1e6, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.render_mode, self.forgets = render_mode, forgets

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Lamp.made += 1
        self.level, self.t = float(self.np_random.integers(100)) + (Lamp.made if self.forgets else 0), 0
        return self._see(), {}

    def step(self, action):
        self.level, self.t = self.level + 10 * float(action), self.t + 1
        return self._see(), self.level, self.t == 3, False, {}

    def render(self):
        return np.full((8, 8, 3), int(self.level), np.uint8)

    def _see(self):
        return np.array([self.level], np.float32)


def trained(folder, steps=2, env="CartPole-v1", resume=False, **settings):
    usual = {"group_size": 3, "groups_per_step": 2, "hidden": (8,), "max_episode_steps": 30, "video": False, "seed": 1}
    trainer = GRPOTrainer(env=env, **usual | settings)
    place = (
        RunFolder.open(folder) if resume else RunFolder.create(folder, task="control", config={}, created="", seed=1)
    )
    try:
        run(trainer, steps, place, resume=resume, sample_every=1, progress=None, curve=False, checkpoint_every=1)
    finally:
        trainer.source.close()
    return place


def films(folder):
    return sorted(path.name for path in (folder.path / "samples").glob("*.mp4"))


def frames(path):
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    width, height = next(reader)["size"]
    return [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]


def test_the_first_group_is_filmed_ever_more_seldom_and_its_rows_name_the_films(tmp_path):
    folder = trained(tmp_path / "run", 5)
    assert films(folder) == [f"step-0000000{step}-film-{i}.mp4" for step in (1, 4) for i in range(3)]
    rows, _ = folder.samples(4)
    named = {row["row"]: row["media"] for row in rows if "media" in row}
    assert [row["row"] for row in rows if row["group"] == 0] == list(named)
    assert [item["file"] for media in named.values() for item in media] == films(folder)[3:]
    assert all("media" not in row for row in folder.samples(2)[0])
    film = frames(folder.path / "samples" / films(folder)[3])
    assert len(film) == rows[0]["length"] + 1 and film[0].shape == (200, 300, 3)
    assert not np.array_equal(film[0], film[-1])


def test_metrics_and_samples_are_the_same_without_films(tmp_path):
    one, other = trained(tmp_path / "with"), trained(tmp_path / "without", films=False)
    assert films(one) and not films(other)
    assert (one.path / "metrics.jsonl").read_bytes() == (other.path / "metrics.jsonl").read_bytes()
    rows = [{key: x for key, x in row.items() if key != "media"} for row in one.samples(1)[0]]
    assert rows == other.samples(1)[0]


def test_a_resumed_run_has_the_films_of_an_uninterrupted_one(tmp_path):
    folder = trained(tmp_path / "run", 3)
    for step in (4, 5):  # what a killed process may leave
        (folder.path / "samples" / f"step-0000000{step}-film-0.mp4").write_bytes(b"half")
    (folder.path / "samples" / ".step-00000004-film-1.99.tmp.mp4").write_bytes(b"half")
    trained(tmp_path / "run", 5, resume=True)
    whole = trained(tmp_path / "whole", 5)
    names = [sorted(path.name for path in (place.path / "samples").iterdir()) for place in (folder, whole)]
    assert names[0] == names[1]
    assert (folder.path / "samples" / films(folder)[3]).read_bytes() == (
        whole.path / "samples" / films(whole)[3]
    ).read_bytes()


@pytest.mark.parametrize("vector", ["serial", "processes"])
def test_a_film_shows_what_was_done(tmp_path, vector):
    workers = {"workers": 1} if vector == "processes" else {}
    folder = trained(tmp_path / "run", 1, env=Lamp, vector=vector, max_episode_steps=None, **workers)
    row = folder.samples(1)[0][0]
    shown = [float(frame.mean()) for frame in frames(folder.path / "samples" / row["media"][0]["file"])]
    start = row["rewards"][0] - 10 * row["actions"][0]
    np.testing.assert_allclose(shown, [start, *row["rewards"]], atol=3)


@pytest.mark.parametrize(
    "settings",
    [{"action_repeat": 2}, {"group_by": "branch"}, {"group_by": "batch"}, {"action_chunk": 3}],
    ids=lambda settings: "-".join(map(str, *settings.items())),
)
def test_however_they_are_played_they_are_played_again(tmp_path, settings):
    folder = trained(tmp_path / "run", 1, **settings)
    assert len(films(folder)) >= 3 and folder.events() == []


@pytest.mark.parametrize(
    ("env", "why"),
    [
        (lambda: gym.make("CartPole-v1").unwrapped, "takes no render_mode"),
        (lambda render_mode=None: Lamp(render_mode, forgets=True), "does not repeat itself"),
    ],
    ids=["cannot be drawn", "forgets"],
)
@pytest.mark.filterwarnings("ignore:.*two resets with one seed")
def test_what_cannot_be_filmed_is_said_once_and_the_run_goes_on(tmp_path, env, why):
    folder = trained(tmp_path / "run", 5, env=env, vector="serial")
    assert [(row["event"], row["step"]) for row in folder.events()] == [("no_films", 1)]
    assert why in folder.events()[0]["message"] and films(folder) == []
    assert len(folder.metrics()) == 5 and len(folder.sample_steps()) == 5


def test_the_only_copy_is_left_alone(tmp_path):
    folder = trained(tmp_path / "run", 1, env=Lamp("rgb_array"), vector="serial", max_episode_steps=None)
    assert "the only copy" in folder.events()[0]["message"]


def test_windows_of_a_stream_have_no_films_and_asking_for_them_is_refused(tmp_path):
    streams = {"group_by": "steps", "advantage": "step"}
    folder = trained(tmp_path / "run", 1, **streams)
    assert films(folder) == [] and folder.events() == []
    with pytest.raises(ConfigError, match=r"films.*whole episodes"):
        GRPOTrainer(env="CartPole-v1", films=True, **streams)


def test_frames_are_made_small_by_the_mean_of_their_pixels():
    frame = np.zeros((2 * HEIGHT, 4, 3), np.uint8)
    frame[0, 0], frame[0, 1] = 200, 100
    small = _small(frame)
    assert small.shape == (HEIGHT, 2, 3) and small[0, 0].tolist() == [75, 75, 75]
