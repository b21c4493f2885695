"""Adam whose numbers a program moves: made, saved and loaded without torch's own compiler, which imports for 2 s."""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer


class ProgramAdam(torch.optim.Adam):
    """torch's Adam, but for a decorator of these methods that keeps torch.compile out of them."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)


ProgramAdam.__name__ = torch.optim.Adam.__name__  # what a checkpoint calls it: either goes on with the other's state
