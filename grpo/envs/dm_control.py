"""dm_control beside a MuJoCo that is newer than it: what that one no longer has is not asked for.

dm_control keeps a table of MuJoCo's arrays and reads each of them from every model it makes. MuJoCo 4 has left out nine
of them, all about flexible bodies, which no task of the suite has; up to version 1.0.50 dm_control says nothing of that
and fails at the first task with an AttributeError. Without those lines of its table all tasks of the suite work.
"""

from __future__ import annotations

import mujoco
from dm_control.mujoco.wrapper.mjbindings import sizes


def fit_to_mujoco() -> list[str]:
    """Strike the arrays that the installed MuJoCo does not have from dm_control's table; their names."""
    model = mujoco.MjModel.from_xml_string("<mujoco/>")
    struck = []
    for table, there in (("mjmodel", model), ("mjdata", mujoco.MjData(model))):
        for name in [name for name in sizes.array_sizes[table] if not hasattr(there, name)]:
            del sizes.array_sizes[table][name]
            struck.append(name)
    return struck
