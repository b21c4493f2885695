"""The world model and what it learns from: observations, rewards and ends of replayed sequences.

    model = WorldModel({"observation": (4,)}, action_width=2, size="1m")
    loss, metrics, posterior, last = model.loss(batch, latent)

A batch is a dict of tensors (B, T, …): one for each observation, and `action`, `reward`, `is_first`, `is_terminal`. The
action and the reward of a step are those that led into it.

Letters: B sequences, T steps of one, A numbers of an action's code, S × C the discrete latents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grpo.config import ConfigError
from grpo.worldmodel.model.distributions import Bernoulli, Latents, TwoHot
from grpo.worldmodel.model.networks import Decoder, Encoder, Shapes, TwoHotHead, head, readings
from grpo.worldmodel.model.rssm import RSSM, Latent, Observed, Size, size_of

DYNAMICS, REPRESENTATION = 1.0, 0.1
"""Weights of the KL: the prior learns from the posterior faster than the posterior is drawn to the prior."""
FREE_NATS = 1.0
"""A KL below this is left alone, for either, as in DreamerV3."""

Batch = Mapping[str, Tensor]
_TAKEN = ("action", "reward", "continue", "is_first", "is_last", "is_terminal")


@dataclass(frozen=True)
class Forecast:
    """One observation as it was, as predicted, and the difference: (B, T, …).

    Pictures are bytes, their error is grey where there is none; anything else is in its own units.
    """

    truth: Tensor
    prediction: Tensor
    error: Tensor


class WorldModel(nn.Module):
    """Encoder, recurrent model, decoder, reward and continue heads. `shapes`: of each observation, by key.

    scaled: numbers are read and predicted in standard deviations, once they have been measured. free_nats: a KL below
    this is left alone. reconstruction: weight of the errors of predicted observations.
    """

    def __init__(
        self,
        shapes: Shapes,
        action_width: int,
        size: str | Size = "12m",
        seed: int = 0,
        scaled: bool = False,
        free_nats: float = FREE_NATS,
        reconstruction: float = 1.0,
    ) -> None:
        super().__init__()
        self.free_nats, self.reconstruction = free_nats, reconstruction
        if taken := [key for key in shapes if key in _TAKEN]:
            raise ConfigError(f"an observation cannot be called {taken[0]!r}, a batch has that already; rename it")
        self.shapes, self.action_width, self.size = dict(shapes), action_width, size_of(size)
        deter, stoch, units = self.size.deter, self.size.stoch * self.size.classes, self.size.units
        with torch.random.fork_rng(devices=[]):  # the same seed gives the same model, and nobody else's numbers move
            torch.default_generator.manual_seed(seed)
            self.encoder = Encoder(shapes, units, self.size.depth, scaled=scaled)
            self.rssm = RSSM(self.encoder.width, action_width, self.size)
            self.decoder = Decoder(shapes, deter, stoch, units, self.size.depth, scaled=scaled)
            self.reward_head = TwoHotHead(deter + stoch, units)
            self.continue_head = head(deter + stoch, units, 1)

    @property
    def flat_width(self) -> int:
        """Length of `Latent.flat`."""
        return self.size.deter + self.size.stoch * self.size.classes

    def measure(self, batch: Batch) -> None:
        """Learn the mean and deviation of the numbers that are seen, before anything else is learned from them."""
        for part in (self.encoder, self.decoder):
            for key, reading in readings(part):
                reading.measure(batch[key])

    def reward(self, flat: Tensor) -> TwoHot:
        """Of arriving in these states."""
        reward: TwoHot = self.reward_head(flat)
        return reward

    def continues(self, flat: Tensor) -> Bernoulli:
        """Whether the episode does not end in these states."""
        return Bernoulli(self.continue_head(flat).float()[..., 0])

    def observe(
        self, batch: Batch, latent: Latent | None = None, random: torch.Generator | Tensor | None = None
    ) -> Observed:
        """Posteriors and priors of a batch, from the states before it."""
        return self.rssm.observe(self.encoder(batch), batch["action"], batch["is_first"], latent, random)

    def loss(
        self, batch: Batch, latent: Latent | None = None, random: torch.Generator | Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Latent, Latent]:
        """The loss, metrics, the posterior's samples (B, T) with their gradients, and the last of them without."""
        seen = self.observe(batch, latent, random)
        flat = seen.latent.flat
        posterior, prior = Latents.of(seen.posterior_BTSC), Latents.of(seen.prior_BTSC)
        dynamics, representation = balanced_kl(posterior, prior, self.free_nats)
        reward, continues = self.reward(flat), self.continues(flat)
        painted = self.decoder(seen.latent.deter, seen.latent.stoch)
        losses = {
            f"reconstruction/{key}": self.reconstruction * x for key, x in self.decoder.losses(painted, batch).items()
        }
        losses |= {
            "reward": -reward.log_prob(batch["reward"]),
            "continue": -continues.log_prob(~batch["is_terminal"]),
            "dynamics": DYNAMICS * dynamics,
            "representation": REPRESENTATION * representation,
        }
        parts = {name: x.mean() for name, x in losses.items()}
        loss = torch.stack(list(parts.values())).sum()
        with torch.no_grad():
            metrics = {f"loss/{name}": x.detach() for name, x in parts.items()}
            metrics |= {
                "loss": loss.detach(),
                "kl": posterior.kl(prior).mean(),
                "entropy/posterior": posterior.entropy().mean(),
                "entropy/prior": prior.entropy().mean(),
                "reward_error": (reward.mean - batch["reward"]).abs().mean(),
            }
        return loss, metrics, seen.latent, seen.latent[:, -1].detach()

    @torch.no_grad()
    def open_loop(
        self,
        batch: Batch,
        context: int,
        latent: Latent | None = None,
        random: torch.Generator | None = None,
    ) -> dict[str, Forecast]:
        """Look at the first `context` steps, imagine the rest with the true actions; an end in between goes unseen.

        By key: each observation, the reward, and whether the episode goes on.
        """
        length = batch["is_first"].shape[1]
        if not 0 < context <= length:
            raise ValueError(f"context={context} does not lie in a batch of {length} steps")
        start = {key: x[:, :context] for key, x in batch.items()}
        seen = self.observe(start, latent, random).latent
        states = [seen[:, t] for t in range(context)]
        for action_BA in batch["action"][:, context:].unbind(1):
            states.append(self.rssm.imagine_step(states[-1], action_BA, random))
        every = Latent(torch.stack([x.deter for x in states], 1), torch.stack([x.stoch for x in states], 1))
        predicted = self.decoder.observations(self.decoder(every.deter, every.stoch))
        predicted |= {"reward": self.reward(every.flat).mean, "continue": self.continues(every.flat).mean}
        truth = {key: batch[key] for key in self.shapes}
        truth |= {"reward": batch["reward"], "continue": (~batch["is_terminal"]).to(every.deter)}
        return {key: Forecast(truth[key], x, _difference(truth[key], x)) for key, x in predicted.items()}


def balanced_kl(posterior: Latents, prior: Latents, free: float = FREE_NATS) -> tuple[Tensor, Tensor]:
    """KL(posterior ‖ prior) in nats, at least `free`, twice: once only the prior moves, once only the posterior."""
    dynamics, representation = posterior.detach().kl(prior), posterior.kl(prior.detach())
    return dynamics.clamp(min=free), representation.clamp(min=free)


def _difference(truth: Tensor, prediction: Tensor) -> Tensor:
    if truth.dtype != torch.uint8:
        return prediction - truth
    return ((prediction.int() - truth.int() + 255) // 2).to(torch.uint8)
