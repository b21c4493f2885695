"""A sound room of a few lines, for tests that break it."""

import torch

from grpo.protocols import Collected, State
from grpo.rollouts import Rollouts, Scores, by_cost
from grpo.seeding import mixed


class Arms:
    """A softmax over three arms."""

    def __init__(self):
        self.logits_V, self.version = torch.tensor([0.1, 0.2, 0.4], requires_grad=True), 0

    def score(self, rows, entropy=False):
        return Scores(self.logits_V.log_softmax(0)[rows.inputs][:, None])

    def parameters(self):
        return {"logits": self.logits_V}

    def split(self, rows, limit, halvings=0):
        return by_cost([1] * len(rows), limit, halvings)

    def train(self): ...
    def eval(self): ...


class Frozen:
    """The arms as they were."""

    def __init__(self, policy):
        self.logits_V = policy.logits_V.detach().clone()

    def score(self, rows):
        return self.logits_V.log_softmax(0)[rows.inputs][:, None]

    def sync(self, policy, alpha):
        self.logits_V.lerp_(policy["logits"].detach(), alpha)

    def parameters(self):
        return {"logits": self.logits_V}


class Pulls:
    """Four pulls a start; the last arm pays."""

    def __init__(self, policy):
        self.policy, self.pulled = policy, 0

    @torch.no_grad()
    def collect(self, request):
        starts = [0, 1] if request.starts is None else list(request.starts)
        p_V = self.policy.logits_V.softmax(0)
        arm_N = torch.multinomial(p_V, 4 * len(starts), replacement=True, generator=self.draw(request))
        self.pulled += len(arm_N)
        rollouts = Rollouts(
            group_N=torch.arange(len(starts)).repeat_interleave(4),
            mask_NT=torch.ones(len(arm_N), 1, dtype=torch.bool),
            old_logp_NT=p_V.log()[arm_N][:, None],
            reward_N=(arm_N == 2).float(),
            inputs=arm_N,
        )
        return Collected(rollouts, starts)

    def draw(self, request):
        return torch.Generator().manual_seed(mixed(request.step, request.attempt))

    def state(self):
        return State({"pulled": self.pulled}, {})

    def load_state(self, state):
        self.pulled = state.values["pulled"]

    def metrics(self):
        return {"pulled": float(self.pulled)}

    def show(self, rows):
        return [{"arm": arm} for arm in rows.inputs.tolist()]

    def close(self): ...
