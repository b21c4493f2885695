"""Scripted experts that presets imitate: from what is seen to what a sensible robot would do.

`warm_start: grpo.control.experts:umaze` names one; one's own is a function in a file, named the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

U_MAZE = ((-1.0, 1.0), (0.0, 1.0), (1.0, 1.0), (1.0, 0.0), (1.0, -1.0), (0.0, -1.0), (-1.0, -1.0))
"""Middles of the cells of PointMaze_UMaze, from one end of the U to the other."""
PUSH, BRAKE = 4.0, 1.5
"""Force for each unit of distance, and against each unit of speed."""


def umaze(seen: Mapping[str, Any]) -> np.ndarray:
    """PointMaze_UMaze: along the U, cell by cell, and then to the goal."""
    at, goal = np.asarray(seen["achieved_goal"]), np.asarray(seen["desired_goal"])
    speed, cells = np.asarray(seen["observation"])[2:4], np.array(U_MAZE)
    mine, theirs = (int(np.square(cells - place).sum(1).argmin()) for place in (at, goal))
    # Two neighbouring cells are a rectangle without walls inside: from there the goal is in sight.
    aim = goal if abs(mine - theirs) <= 1 else cells[mine + np.sign(theirs - mine)]
    return np.clip(PUSH * (aim - at) - BRAKE * speed, -1.0, 1.0)
