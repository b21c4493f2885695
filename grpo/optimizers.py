"""torch's optimizers as they are, but for decorators that import torch's own compiler, which takes as long as torch.

`torch.compile` must not look into some of their methods, and the decorators that see to it import it whether or not
anybody compiles: 1.5 CPU seconds at the first optimizer of a process. Without them the arithmetic is the same, and so
are names and state: a checkpoint of either goes on with the other.
"""

from __future__ import annotations

import inspect

import torch
from torch.optim import Optimizer


class Plain(Optimizer):
    """Comes before an optimizer's own class."""

    add_param_group = inspect.unwrap(Optimizer.add_param_group)
    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)


class Adam(Plain, torch.optim.Adam):
    """torch's Adam."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(Plain, torch.optim.AdamW):
    """torch's AdamW."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class SGD(Plain, torch.optim.SGD):
    """torch's SGD."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))
