"""Films of episodes, with or without a screen: H.264 files for people.

    env = gym.make("CartPole-v1", render_mode="rgb_array")
    record(env, act=lambda observation: 1, episodes=2, seeds=[0, 1], path=Path("play.mp4"))

Without a display, windows are drawn in memory: pygame by its dummy driver, MuJoCo by EGL or OSMesa. What the user has
set in the environment (SDL_VIDEODRIVER, MUJOCO_GL) is left alone.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from grpo.envs.fleet import EnvError
from grpo.envs.serial import name_of
from grpo.errors import install, line
from grpo.run.limits import at_most
from grpo.run.signals import from_a_person

DEFAULT_FPS = 30
MAX_FRAMES = 20_000
"""Eleven minutes at 30 frames a second: an environment without a horizon must end somewhere."""
RENDER_TIMEOUT = 60.0
"""Seconds that an environment may take to draw itself once; the first time it loads its libraries."""
PROBE_TIMEOUT = 120.0
"""Seconds a fresh process may take to open an off-screen display."""


@dataclass(frozen=True)
class Recording:
    """A film, and what was played in it."""

    path: Path
    returns: tuple[float, ...]
    lengths: tuple[int, ...]
    cut: bool = False
    """Whether the last episode was left unfinished because the film had `max_frames`."""


def record(
    env: gym.Env[Any, Any],
    act: Callable[[Any], Any],
    episodes: int,
    seeds: Sequence[int],
    path: Path | str,
    fps: float | None = None,
    caption: str | None = None,
    max_frames: int = MAX_FRAMES,
) -> Recording:
    """Play whole episodes, one for each seed, and film every state from the first to the last."""
    if len(seeds) < episodes:
        raise EnvError(f"{name_of(env)}: {episodes} episodes need as many seeds, {len(seeds)} were given")
    returns, lengths, cut = list[float](), list[int](), False

    def played() -> Iterator[np.ndarray]:
        nonlocal cut
        count = 0
        for seed in seeds[:episodes]:
            observation, _ = env.reset(seed=int(seed))
            returns.append(0.0)
            lengths.append(0)
            over = False
            while True:
                for frame in frames_of(env):
                    yield frame if caption is None else _captioned(frame, caption)
                    count += 1
                if over:
                    break
                if count >= max_frames:
                    cut = True
                    return
                observation, reward, terminated, truncated, _ = env.step(act(observation))
                returns[-1] += float(reward)
                lengths[-1] += 1
                over = bool(terminated or truncated)

    rate = fps if fps is not None else env.metadata.get("render_fps") or DEFAULT_FPS
    made = write_video(played(), path, rate)
    return Recording(made, tuple(returns), tuple(lengths), cut)


def frames_of(env: gym.Env[Any, Any]) -> list[np.ndarray]:
    """What the environment looks like now: one frame (H, W, 3), or all since the last call if it keeps a list."""
    if env.render_mode not in ("rgb_array", "rgb_array_list"):
        modes = ", ".join(env.metadata.get("render_modes") or ()) or "none"
        remedy = "make it with render_mode='rgb_array'" if "rgb_array" in modes else "it cannot be filmed"
        raise EnvError(f"{name_of(env)} has render_mode {env.render_mode!r} of its modes {modes}; {remedy}")
    draw_off_screen(env)
    try:
        drawn: Any = at_most(RENDER_TIMEOUT, "render()", env.render)
    except BaseException as error:  # anything an environment may raise
        if from_a_person(error):
            raise
        raise EnvError(f"{name_of(env)} cannot be drawn ({line(error)})") from error
    return [np.asarray(frame) for frame in (drawn if isinstance(drawn, list | tuple) else [drawn])]


def write_video(frames: Iterable[np.ndarray], path: Path | str, fps: float) -> Path:
    """An H.264 file of frames (H, W, 3), uint8, all of one size; it has its name only once it is whole."""
    path, source = Path(path), iter(frames)
    first = next(source, None)
    if first is None or not 0 < fps < float("inf"):
        raise EnvError(f"{path}: no frames to write" if first is None else f"{path}: {fps} frames a second")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp.mp4")  # ffmpeg goes by the ending
    temporary.unlink(missing_ok=True)  # left by a process of the same number, or put there
    height, width, _ = _checked(first, first.shape, path).shape
    command = [_ffmpeg(), "-v", "error", "-y", "-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}"]
    command += ["-r", str(fps), "-i", "-", "-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p"]
    # Colours are kept for squares of four pixels, so sides must be even. The index comes first for browsers.
    command += ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-movflags", "+faststart", str(temporary)]
    with tempfile.TemporaryFile() as said:
        # A session of its own: Ctrl-C is for the training loop, which may want to finish its step and its film.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=said, start_new_session=True)
        pipe = process.stdin
        assert pipe is not None
        try:
            for frame in itertools.chain([first], source):
                data = _checked(frame, first.shape, path).tobytes()
                try:
                    pipe.write(data)
                except BrokenPipeError:
                    break  # it has left, and has said why
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
            if process.wait():
                said.seek(0)
                raise EnvError(
                    f"{path}: ffmpeg failed ({' '.join(said.read().decode(errors='replace').split())[:300]})"
                )
            os.replace(temporary, path)
        finally:
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
            process.wait()
            temporary.unlink(missing_ok=True)
    return path


def can_show() -> bool:
    """Whether render_mode="human" would find a display."""
    return _has_display() and os.environ.get("SDL_VIDEODRIVER") not in ("dummy", "offscreen")


def draw_off_screen(env: gym.Env[Any, Any]) -> None:
    """Where there is no display, choose drivers that draw in memory; call it before the first `render`."""
    if _has_display():
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    if "MUJOCO_GL" in os.environ or not hasattr(env.unwrapped, "mujoco_renderer"):
        return
    # Tried in a process of its own: a display that does not open can take the process down, and the choice is for good.
    for backend in ("egl", "osmesa"):
        code = f"from mujoco.{backend} import GLContext; GLContext(8, 8).make_current()"
        environment = os.environ | {"MUJOCO_GL": backend}
        try:
            tried = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, timeout=PROBE_TIMEOUT, check=False
            )
        except subprocess.TimeoutExpired:
            continue
        if tried.returncode == 0:
            os.environ["MUJOCO_GL"] = backend
            return
    raise EnvError(
        f"{name_of(env)}: no display for rendering: there is no DISPLAY, and neither EGL nor OSMesa opens; "
        "install libegl1 or libosmesa6, or set MUJOCO_GL"
    )


def _has_display() -> bool:
    return sys.platform in ("win32", "darwin") or any(os.environ.get(key) for key in ("DISPLAY", "WAYLAND_DISPLAY"))


def _ffmpeg() -> str:
    try:
        return str(importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except (ImportError, RuntimeError) as error:
        raise EnvError(f"videos need imageio-ffmpeg ({line(error)}); {install('control')}") from error


def _checked(frame: np.ndarray, shape: tuple[int, ...], path: Path) -> np.ndarray:
    if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or frame.shape != shape:
        raise EnvError(f"{path}: a frame is {frame.dtype} {frame.shape}; all must be uint8 {(*shape[:2], 3)}")
    return frame


def _captioned(frame: np.ndarray, caption: str) -> np.ndarray:
    from PIL import Image, ImageDraw

    image = Image.fromarray(frame)
    draw = ImageDraw.Draw(image)
    draw.text((8, 6), caption, fill="black", stroke_width=2, stroke_fill="white")
    return np.asarray(image)
