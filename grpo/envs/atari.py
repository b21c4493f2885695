"""Atari games the way they are usually played, in one environment.

    env: grpo.envs.atari:Atari
    env_kwargs: {game: pong}

    reset   up to 30 times nothing, FIRE where the game waits for it ─► step: 4 frames with one action, rewards added up
    seen    the brighter of the last two frames, grey, 84 × 84 ─► the last 4 of these, oldest first: (4, 84, 84) bytes

Rewards are the game's own; `clip_rewards` of the settings is for what is learned. Equal seeds, equal starts: a seed
says how long nothing is done. `get_state` and `set_state` give a moment back exactly, frames included, so that groups
can branch. The game ids of ale-py are its environments as they are, without any of this.
"""

from __future__ import annotations

import difflib
import functools
from pathlib import Path
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
from ale_py import roms

from grpo.envs.fleet import EnvError
from grpo.envs.pictures import pushed, smaller

FRAMES_A_SECOND = 60
MOST_FRAMES = 108_000
"""Half an hour, after which a game is cut."""
PRESSED = 4
"""Frames that FIRE is held where one of them may repeat the last action instead."""

LOOKED_AT, APART = 128, 12
"""Pictures that tell what is background, and frames between them."""

ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # else every copy greets


class Atari(gym.Env[np.ndarray, Any]):
    """One game.

    game: as ale-py spells it, such as pong or space_invaders. repeat_action_probability: that a frame repeats the last
    action (0.25 is Machado et al.'s); a reset then takes a tenth of a second. episodic_life: an episode is one life,
    also in evaluation. fire_reset: press FIRE at the start of a game that has it. full_action_space: all 18 actions.
    erase_background: a pixel is its distance from what stands there most of the time in random play.
    """

    def __init__(
        self,
        game: str,
        frame_skip: int = 4,
        stack: int = 4,
        size: int = 84,
        noop_max: int = 30,
        episodic_life: bool = False,
        fire_reset: bool = True,
        repeat_action_probability: float = 0.0,
        full_action_space: bool = False,
        erase_background: bool = False,
        render_mode: str | None = None,
    ) -> None:
        known = sorted(roms.get_all_rom_ids())
        rom = roms.get_rom_path(game) if game in known else None
        if rom is None:
            near = difflib.get_close_matches(game.lower(), known) or known
            raise EnvError(f"ale-py has no game {game!r}; try {', '.join(near)}")
        if min(frame_skip, stack, size) < 1 or noop_max < 0:
            given = f"{frame_skip}, {stack}, {size} and {noop_max}"
            raise EnvError(f"{game}: frame_skip, stack and size must be above 0, noop_max not below; got {given}")
        if not 0.0 <= repeat_action_probability < 1.0:
            raise EnvError(f"{game}: repeat_action_probability must be in [0, 1); got {repeat_action_probability}")
        self.metadata = {"render_modes": ["rgb_array", "human"], "render_fps": FRAMES_A_SECOND / frame_skip}
        self.render_mode = render_mode
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", repeat_action_probability)
        self.ale.setBool("display_screen", render_mode == "human")
        self._rom, self._sticky = rom, repeat_action_probability > 0.0
        self._load(0)
        self._begin = self.ale.cloneSystemState()
        self._skip, self._size, self._noops, self._one_life = frame_skip, size, noop_max, episodic_life
        self._actions = self.ale.getLegalActionSet() if full_action_space else self.ale.getMinimalActionSet()
        self._fires = fire_reset and ale_py.Action.FIRE in self._actions
        self._screens = np.zeros((2, *self.ale.getScreenDims()), np.uint8)
        self._frames = np.zeros((stack, size, size), np.uint8)
        self._lives = 0
        self._background: np.ndarray | None = None
        if erase_background:
            self._background = _usual(rom, size, tuple(self._actions))
        self.max_episode_steps = MOST_FRAMES // frame_skip
        self.action_space = gym.spaces.Discrete(len(self._actions))
        self.observation_space = gym.spaces.Box(0, 255, self._frames.shape, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, Any]:
        """A new game, after doing nothing for a while."""
        super().reset(seed=seed)
        if self._sticky:  # its generator is seeded only as the game is loaded
            self._load(int(self.np_random.integers(2**31)))
        else:
            self.ale.restoreSystemState(self._begin)
        idle = int(self.np_random.integers(1, self._noops + 1)) if self._noops else 0
        fires = (PRESSED if self._sticky else 1) if self._fires else 0
        for action in [ale_py.Action.NOOP] * idle + [ale_py.Action.FIRE] * fires:
            self.ale.act(action)
        self._lives = self.ale.lives()
        self.ale.getScreenGrayscale(self._screens[0])
        frame = self._picture(self._screens[0])
        self._frames = np.repeat(frame[None], len(self._frames), 0)
        return self._frames, {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """So many frames with one action."""
        chosen, reward, over = self._actions[int(action)], 0.0, False
        self._screens[:] = 0
        for left in reversed(range(self._skip)):
            reward += self.ale.act(chosen)
            over = self._over()
            if left < 2 or over:
                self.ale.getScreenGrayscale(self._screens[left % 2])
            if over:
                break
        self._frames = pushed(self._frames, self._picture(self._screens.max(0)))
        return self._frames, reward, over, False, {"lives": self._lives}

    def render(self) -> Any:
        """The screen in colours; a window shows itself."""
        return self.ale.getScreenRGB() if self.render_mode == "rgb_array" else None

    def get_state(self) -> dict[str, np.ndarray]:
        """All that the future depends on."""
        system = np.frombuffer(self.ale.cloneSystemState().serialize(), np.uint8)
        return {"system": system, "frames": self._frames.copy(), "lives": np.array(self._lives)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.ale.restoreSystemState(ale_py.ALEState(np.asarray(state["system"], np.uint8).tobytes()))
        self._frames, self._lives = np.array(state["frames"]), int(state["lives"])

    def _picture(self, screen: np.ndarray) -> np.ndarray:
        """One screen as it is seen."""
        seen, usual = smaller(screen, self._size, self._size), self._background
        return seen if usual is None else np.maximum(seen, usual) - np.minimum(seen, usual)

    def _over(self) -> bool:
        """Whether the game has ended, or a life where that is an episode."""
        before, self._lives = self._lives, self.ale.lives()
        return bool(self.ale.game_over()) or (self._one_life and self._lives < before)

    def _load(self, seed: int) -> None:
        self.ale.setInt("random_seed", seed)
        self.ale.loadROM(self._rom)
        self.ale.reset_game()


@functools.cache
def _usual(rom: Path, size: int, actions: tuple[Any, ...]) -> np.ndarray:
    """The median picture of some random play, out of sight: the same for every copy of a game."""
    ale, random, pictures = ale_py.ALEInterface(), np.random.default_rng(0), []
    ale.setFloat("repeat_action_probability", 0.0)
    ale.setInt("random_seed", 0)
    ale.loadROM(rom)
    ale.reset_game()
    for _ in range(LOOKED_AT):
        pictures.append(smaller(ale.getScreenGrayscale(), size, size))
        for _ in range(APART):
            if ale.game_over():
                ale.reset_game()
            ale.act(actions[random.integers(len(actions))])
    return np.median(pictures, 0).astype(np.uint8)
