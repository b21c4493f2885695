"""Small policies and rewards that follow the user-facing protocols."""

from __future__ import annotations

import torch

from grpo import GRPOConfig, GRPOTrainer

ARMS = 5


class Softmax(torch.nn.Module):
    """A table of logits: state i has its own distribution over five arms."""

    def __init__(self, states: int = 4, dtype=torch.float32):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(states, ARMS, dtype=dtype))

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        p = self.logits[torch.tensor(states)].softmax(-1)
        return torch.multinomial(p, num_actions_per_state, replacement=True).tolist()

    def get_log_probabilities(self, states, actions):
        return self.logits.log_softmax(-1)[torch.tensor(states), torch.tensor(actions)]

    def get_parameters(self):
        return dict(self.named_parameters())


class Match:
    """1 for the arm with the state's own number."""

    def compute_rewards(self, states, actions):
        return torch.tensor([1.0 if a == s else 0.0 for s, a in zip(states, actions, strict=True)])

    def train(self):
        pass

    def eval(self):
        pass

    def to(self, device):
        return self


class Given(Match):
    """Whatever function is given."""

    def __init__(self, function):
        self.function = function

    def compute_rewards(self, states, actions):
        return self.function(states, actions)


def trainer(
    draw=0, reward=None, policy=None, optimizer=None, reference_policy=None, states=None, **settings
) -> GRPOTrainer:
    """A trainer of a softmax policy, seeded."""
    torch.manual_seed(draw)
    policy = Softmax() if policy is None else policy
    config = GRPOConfig(**{"group_size": 8, "learning_rate": 0.1} | settings)
    return GRPOTrainer(config, policy, reference_policy, reward or Match(), optimizer, states=states)
