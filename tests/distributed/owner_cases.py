"""A few updates of a small model with its states, or its gradients too, divided among ranks."""

from __future__ import annotations

import torch
from torch import nn

from grpo.distributed.owners import GradientOwners, StateOwners
from grpo.shards import Again, Unsharded

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


class Small(nn.Module):
    """An embedding, a layer, a head that may be tied to it, and one weight that nothing depends on."""

    def __init__(self, tied, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle = nn.Embedding(7, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype)
        self.head = nn.Linear(4, 7, bias=False, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.tanh(self.middle(self.embedding(ids)))).log_softmax(-1)


def sharded(ranks, kind, parameters):
    made = {"states": StateOwners, "gradients": GradientOwners}
    return made[kind](ranks, parameters) if kind in made and ranks.size > 1 else Unsharded()


def updated(ranks, kind, tied, steps=3, fails=None):
    """Rows 0 … 11, cut among ranks; the last rank has the fewest passes, or none. Weights, norms, state, bytes kept."""
    model = Small(tied)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1, weight_decay=0.1)
    shards, norms, again = sharded(ranks, kind, parameters), [], 0
    for step in range(steps):
        rows = list(range(step, 12))
        own = rows[ranks.rank :: ranks.size] if ranks.rank < 2 else []
        own = rows if ranks.size == 1 else own + (rows[2 :: ranks.size] if ranks.size == 3 and ranks.rank == 0 else [])
        broken = fails == (step, ranks.rank)
        while True:
            for p in parameters.values():
                p.grad = None
            try:
                for row in own:
                    if broken and row == own[1]:
                        raise torch.OutOfMemoryError("planted")
                    shards.backward(-model(torch.tensor([row % 7]))[0, (row * 3) % 7])
                shards.finish()
                break
            except Again:
                again += 1
            except torch.OutOfMemoryError:
                broken = False
                shards.restart()
        told = ranks.gather(_state(shards.moved(parameters)), "moved")
        shards.settle(ranks, parameters, {name for state in told for name in state.values["moved"]})
        kept = sum(p.grad.numel() for p in parameters.values() if p.grad is not None)
        norms.append(float(shards.norm([p for p in parameters.values() if p.grad is not None])))
        shards.step(optimizer)
    state = shards.state_dict(optimizer)
    states = sum(v.numel() for entry in optimizer.state.values() for v in entry.values() if torch.is_tensor(v))
    return {name: p.detach().clone() for name, p in parameters.items()}, norms, state, (kept, states, again)


def resumed(ranks, kind, state):
    """A whole state, loaded by ranks that keep a part of it, and gathered again."""
    model = Small(True)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.1)
    shards = sharded(ranks, kind, parameters)
    shards.load_state_dict(optimizer, state)
    kept = len(optimizer.state)
    return shards.state_dict(optimizer), kept


def failed(ranks, kind):
    """A rank that cannot go on in the middle of its passes: nobody waits for it."""
    model = Small(True)
    shards = sharded(ranks, kind, dict(model.named_parameters()))
    try:
        shards.backward(model(torch.tensor([1])).sum())
        if ranks.rank == 1:
            shards.fail()
            return "failed"
        shards.backward(model(torch.tensor([2])).sum())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def failed_update(ranks, kind):
    """The same through the trainer's door: every rank raises, and the one that failed with its own error."""
    from grpo import together
    from grpo.experience import Experience
    from grpo.recipes import recipe
    from grpo.rollouts import Rollouts

    model = Small(True)
    parameters = dict(model.named_parameters())
    mask_NT = torch.ones(6, 1, dtype=torch.bool)
    rows = Rollouts(torch.arange(6) // 2, mask_NT, -mask_NT.float(), reward_N=torch.arange(6.0))
    shards = sharded(ranks, kind, parameters)

    def compute(batch):
        shards.backward(model(torch.tensor([1])).sum())
        if ranks.rank == 1:
            raise ValueError("on purpose")
        shards.backward(model(torch.tensor([2])).sum())
        shards.finish()
        return {"loss": 0.0}, torch.zeros(len(batch), 1)

    try:
        together.gradients(ranks, shards, Experience.build(rows, recipe("grpo")), parameters, compute)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _state(names):
    from grpo.protocols import State

    return State({"moved": names}, {})
