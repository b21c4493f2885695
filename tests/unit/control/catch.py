"""A ball falls, a paddle moves: a game of seconds in pictures. Each caught ball pays 1, each lost one costs 1."""

import gymnasium as gym
import numpy as np

SIDE, CELL = 8, 5


class Catch(gym.Env):
    """`balls` fall one after the other over a board of 8 × 8 cells, drawn as 40 × 40 grey pixels."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012 (as Gymnasium has it)
    observation_space = gym.spaces.Box(0, 255, (SIDE * CELL, SIDE * CELL, 1), np.uint8)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, balls: int = 1, render_mode: str | None = None) -> None:
        self.balls, self.render_mode = balls, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left, self.paddle = self.balls, SIDE // 2
        self._next()
        return self._drawn(), {}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + int(action) - 1, 0, SIDE - 1))
        self.row += 1
        reward = 0.0
        if self.row == SIDE - 1:
            reward = 1.0 if self.paddle == self.column else -1.0
            self.left -= 1
            self._next()
        return self._drawn(), reward, self.left == 0, False, {}

    def render(self):
        return np.repeat(self._drawn(), 3, 2)

    def _next(self) -> None:
        self.row, self.column = 0, int(self.np_random.integers(SIDE))

    def _drawn(self) -> np.ndarray:
        board = np.zeros((SIDE, SIDE), np.uint8)
        board[self.row, self.column], board[-1, self.paddle] = 255, 128
        return board.repeat(CELL, 0).repeat(CELL, 1)[..., None]
