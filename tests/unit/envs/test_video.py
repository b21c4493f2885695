"""Films have every frame, in the right size, and their name only when they are whole."""

from __future__ import annotations

import io
import os

import gymnasium as gym
import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from grpo.envs import video
from grpo.envs.fleet import EnvError
from grpo.envs.video import can_show, draw_off_screen, frames_of, record, write_video
from grpo.run.trackers import moving_picture


@pytest.fixture
def cartpole():
    env = gym.make("CartPole-v1", render_mode="rgb_array")
    yield env
    env.close()


def read(path):
    """Frames, size and rate of a film."""
    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    return np.array([np.frombuffer(raw, np.uint8).reshape(height, width, 3) for raw in reader]), about


def colours(count, height, width):
    """Frames of one colour each, ever brighter."""
    return [np.full((height, width, 3), 20 * i, np.uint8) for i in range(count)]


def test_every_state_of_every_episode_is_one_frame(cartpole, tmp_path):
    made = record(cartpole, lambda seen: int(seen[2] > 0), 2, [3, 4, 5], tmp_path / "new" / "play.mp4")
    frames, about = read(made.path)
    assert made.path == tmp_path / "new" / "play.mp4" and not made.cut
    assert made.returns == tuple(map(float, made.lengths)) and len(made.lengths) == 2
    assert len(frames) == sum(made.lengths) + 2
    assert frames.shape[1:] == cartpole.render().shape == (400, 600, 3)
    assert about["fps"] == 50 and about["codec"] == "h264" and "yuv420p" in about["pix_fmt"]


def test_the_same_seed_and_player_give_the_same_returns_and_other_seeds_others(cartpole, tmp_path):
    lengths = record(cartpole, lambda seen: 1, 3, [3, 3, 8], tmp_path / "a.mp4", fps=10).lengths
    assert lengths[0] == lengths[1] != lengths[2]
    assert read(tmp_path / "a.mp4")[1]["fps"] == 10


def test_a_film_that_gets_too_long_is_cut_and_says_so(cartpole, tmp_path):
    made = record(cartpole, lambda seen: int(seen[2] > 0), 5, range(5), tmp_path / "a.mp4", max_frames=12)
    assert made.cut and len(read(made.path)[0]) == 12 and made.lengths == (11,)


def test_a_caption_is_drawn_in_the_corner_and_nowhere_else(cartpole, tmp_path):
    plain = read(record(cartpole, lambda seen: 1, 1, [0], tmp_path / "a.mp4").path)[0]
    named = read(record(cartpole, lambda seen: 1, 1, [0], tmp_path / "b.mp4", caption="step 20").path)[0]
    changed = np.abs(plain[0].astype(int) - named[0]).max(-1) > 64
    assert changed[:40, :120].any() and not changed[100:].any()


@pytest.mark.parametrize(("height", "width"), [(31, 45), (32, 45), (16, 16)])
def test_odd_sides_are_padded_by_one(tmp_path, height, width):
    frames, about = read(write_video(colours(5, height, width), tmp_path / "a.mp4", 5))
    assert about["size"] == (width + width % 2, height + height % 2) and len(frames) == 5
    shown = frames[:, : height - 1, : width - 1].mean((1, 2, 3))
    np.testing.assert_allclose(shown, [0, 20, 40, 60, 80], atol=6)


def broken():
    yield from colours(3, 8, 8)
    raise BrokenPipeError("the fourth")  # not ffmpeg's pipe


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        (broken, pytest.raises(BrokenPipeError, match="the fourth")),
        (lambda: [*colours(3, 8, 8), np.zeros((8, 9, 3), np.uint8)], pytest.raises(EnvError, match=r"\(8, 9, 3\)")),
        (lambda: [np.zeros((8, 8, 3))], pytest.raises(EnvError, match="float64")),
        (lambda: [], pytest.raises(EnvError, match="no frames")),
    ],
)
def test_a_film_that_fails_leaves_nothing_and_keeps_what_was_there(tmp_path, frames, problem):
    (tmp_path / "a.mp4").write_text("an older film")
    with problem:
        write_video(frames(), tmp_path / "a.mp4", 30)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_text() == "an older film"


def test_what_ffmpeg_says_is_passed_on(tmp_path):
    (tmp_path / "a.mp4").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_video(colours(2, 8, 8), tmp_path / "a.mp4", 30)
    with pytest.raises(EnvError, match=r"b.mp4: ffmpeg failed .*8x0"):
        write_video(colours(2, 0, 8), tmp_path / "b.mp4", 30)
    with pytest.raises(EnvError, match="0 frames a second"):
        write_video(colours(2, 8, 8), tmp_path / "b.mp4", 0)


def test_an_environment_that_cannot_be_drawn_is_told_how_it_could():
    with pytest.raises(EnvError, match=r"CartPole-v1.*None.*human, rgb_array; make it with render_mode='rgb_array'"):
        frames_of(gym.make("CartPole-v1"))
    with pytest.raises(EnvError, match=r"cannot be filmed"):
        frames_of(Dark())


class Dark(gym.Env):
    """Nothing to see."""


def test_frames_kept_in_a_list_are_all_given():
    env = gym.make("CartPole-v1", render_mode="rgb_array_list")
    env.reset(seed=0)
    env.step(0)
    assert len(frames_of(env)) == 2


def test_a_gif_of_a_film_has_every_frame_and_its_rate(tmp_path):
    film = write_video(colours(4, 10, 12), tmp_path / "a.mp4", fps=20)
    image = Image.open(io.BytesIO(moving_picture(film)))
    assert image.n_frames == 4 and image.size == (12, 10) and image.info["duration"] == 50


def forget_displays(monkeypatch):
    monkeypatch.setattr(video.sys, "platform", "linux")
    for key in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "MUJOCO_GL"):
        monkeypatch.setenv(key, "")  # so that whatever is set below is undone
        monkeypatch.delenv(key)


def test_a_display_is_seen_by_its_variables(monkeypatch):
    forget_displays(monkeypatch)
    assert not can_show()
    monkeypatch.setenv("DISPLAY", ":0")
    assert can_show()
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    assert not can_show()


class Physics(gym.Env):
    """Looks to us as if MuJoCo drew it."""

    mujoco_renderer = None


def test_without_a_display_mujoco_gets_a_driver_that_works_or_a_clear_error(monkeypatch):
    forget_displays(monkeypatch)
    tried = []

    def run(command, env, **kwargs):
        tried.append(env["MUJOCO_GL"])
        return video.subprocess.CompletedProcess(command, int(env["MUJOCO_GL"] not in works))

    monkeypatch.setattr(video.subprocess, "run", run)
    works = ()
    with pytest.raises(EnvError, match="Physics: no display for rendering"):
        draw_off_screen(Physics())
    assert tried == ["egl", "osmesa"] and "MUJOCO_GL" not in os.environ
    assert os.environ["SDL_VIDEODRIVER"] == "dummy"
    works = ("osmesa",)
    draw_off_screen(Physics())
    assert os.environ["MUJOCO_GL"] == "osmesa"
    monkeypatch.setenv("MUJOCO_GL", "egl")
    draw_off_screen(Physics())
    assert os.environ["MUJOCO_GL"] == "egl" and len(tried) == 4  # what is set is not tried
