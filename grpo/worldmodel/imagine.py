"""Futures that never happened: G from each of P remembered states, H steps long, all at once and without gradients.

    P latents ─► × G ─► actor ─► action ─► prior ─► next latents … H times ─► rewards and ends, for all steps at once

Everything random is drawn before the loop from one generator, on a GPU from one there that it seeds, so the same
futures can be had again. An imagined future does not stop where its episode would: it goes on and counts less, by the
probability that it got there (`weight_NH`).

Letters: H steps of a future, S discrete latents, F numbers that the actor gives for a decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from grpo.agreement import attempted
from grpo.graphs import GraphedCallable, Tensors
from grpo.protocols import Alone, Ranks, Slots, State
from grpo.worldmodel.model.compiled import Compiled
from grpo.worldmodel.model.distributions import there, uniform
from grpo.worldmodel.model.dream import Dreamt, DreamWeights, dream_start, dream_step
from grpo.worldmodel.model.rssm import Latent
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.policy import ActorPolicy

RewardFn = Callable[["Futures"], Any]


@dataclass(frozen=True)
class Imagined:
    """N futures of H steps; a step's reward and continuation are those of the state it leads to."""

    latent: Latent
    """(N, H + 1): where each decision was made, and where the last one led."""
    action_NH: Tensor
    """(N, H, …), as the head records them."""
    out_NHF: Tensor
    """The actor's numbers for each decision."""
    logp_NH: Tensor
    reward_NH: Tensor
    """As the reward head expects them."""
    continue_NH: Tensor
    """Probability that the episode does not end there."""
    group: int

    @property
    def flat(self) -> Tensor:
        """(N, H + 1, F): what heads read."""
        return self.latent.flat

    def weight_NH(self, gamma: float) -> Tensor:
        """How much each decision counts: γ^t times the probability that the future got there."""
        reached_NH = (gamma * self.continue_NH).cumprod(1)
        return torch.cat([torch.ones_like(reached_NH[:, :1]), reached_NH[:, :-1]], 1)


class Imagination:
    """Futures of one actor in one world model. `compiled`: a step is the formulas of `dream`, through torch.compile.

    `coarse`: on CUDA devices the world model multiplies in bfloat16; its memory and the actor stay as they are.
    """

    def __init__(
        self, model: WorldModel, policy: ActorPolicy, compiled: bool = False, graphs: bool = True, coarse: bool = False
    ) -> None:
        self._model, self._policy, self._coarse = model, policy, coarse
        self.ranks: Ranks = Alone()
        """Who shares the futures."""
        self._compiled = compiled
        self._compiled_step, self._compiled_heads = Compiled(self._dreamt), Compiled(self._judged)
        uses = (model, policy.module)
        self._futures = GraphedCallable(self._rolled_out, lambda: chain(*(x.parameters() for x in uses)), graphs)

    @torch.no_grad()
    def __call__(self, start: Latent, group: int, horizon: int, random: torch.Generator) -> Imagined:
        """`group` futures from each of the P states in `start`, those of one state after each other."""
        state = start.each(lambda x: x.repeat_interleave(group, 0))
        count, stoch = state.stoch.shape[:2]
        drawn = there(random, state.deter.device)
        uniform_HNS = uniform((horizon, count, stoch), drawn, state.deter)
        noise_HN = self._policy.actions.noise((horizon, count), drawn, state.deter)
        given = {"deter": state.deter, "stoch": state.stoch, "uniform": uniform_HNS, "noise": noise_HN}
        found = self._shared(given, group) if self.divided(state.deter.device) else self._futures(given)
        latent = Latent(found.pop("deter"), found.pop("stoch"))
        return Imagined(latent=latent, group=group, **found)

    def divided(self, device: torch.device) -> bool:
        """Whether ranks divide the futures: a GPU has all of them sooner than the others' through the CPU."""
        return self.ranks.size > 1 and device.type == "cpu"

    def _shared(self, given: Tensors, group: int) -> Tensors:
        """Everybody's futures, those of each rank's states rolled out by it: what was drawn for them, all have drawn.

        Latents travel as the numbers of their classes, and without the first, which all know.
        """
        own = Slots(self.ranks.rank, self.ranks.size).of(len(given["deter"]) // group)
        rows, classes = slice(own.start * group, own.stop * group), given["stoch"].shape[-1]

        def mine() -> State:
            if not own:
                return State({}, {})
            drawn = {name: given[name][:, rows] for name in ("uniform", "noise")}
            found = self._futures({"deter": given["deter"][rows], "stoch": given["stoch"][rows], **drawn})
            number = found.pop("stoch")[:, 1:].argmax(-1).to(torch.uint8 if classes <= 256 else torch.int64)
            return State({}, {**found, "deter": found["deter"][:, 1:], "stoch": number})

        told = [state.arrays for state in attempted(self.ranks, "imagining", mine) if state.arrays]
        found = {name: torch.cat([torch.as_tensor(arrays[name]) for arrays in told]) for name in told[0]}
        found["stoch"] = torch.nn.functional.one_hot(found["stoch"].long(), classes).to(given["stoch"].dtype)
        first = {name: given[name][:, None] for name in ("deter", "stoch")}
        return found | {name: torch.cat([x, found[name]], 1) for name, x in first.items()}

    def _rolled_out(self, given: Tensors) -> Tensors:
        """All steps, then what is asked of them at once."""
        rolled = self._in_few_kernels if self._compiled else self._step_by_step
        latent, action_NH, out_NHF, reward_NH, continue_NH = rolled(given)
        return {
            "deter": latent.deter,
            "stoch": latent.stoch,
            "action_NH": action_NH,
            "out_NHF": out_NHF,
            "logp_NH": self._policy.head.logp(out_NHF, action_NH),
            "reward_NH": reward_NH,
            "continue_NH": continue_NH,
        }

    # --- as the model has it ----------------------------------------------------------------------------------------

    def _step_by_step(self, given: Tensors) -> tuple[Latent, Tensor, Tensor, Tensor, Tensor]:
        """Latents, actions, the actor's numbers, rewards and continuations: one operation after the other."""
        states, actions, outs = [Latent(given["deter"], given["stoch"])], [], []
        # Adapters are added up at every step: `parametrize.cached` takes a copy that plays beside for its original.
        for uniform_NS, noise_N in zip(given["uniform"], given["noise"], strict=True):
            out_NF, action_N, led_to = self._next(states[-1], uniform_NS, noise_N)
            states.append(led_to)
            actions.append(action_N)
            outs.append(out_NF)
        latent = Latent(*(torch.stack([getattr(x, name) for x in states], 1) for name in ("deter", "stoch")))
        return latent, torch.stack(actions, 1), torch.stack(outs, 1), *self._judged(latent[:, 1:].flat)

    def _next(self, latent: Latent, uniform_NS: Tensor, noise_N: Tensor) -> tuple[Tensor, Tensor, Latent]:
        """One step: the actor's numbers, its action, and where that leads."""
        out_NF, action_N, code_NA = self._decided(latent.flat, noise_N)
        with torch.autocast("cuda", torch.bfloat16, enabled=self._kind(latent.deter) == torch.bfloat16):
            led_to = self._model.rssm.imagine_step(latent, code_NA, uniform_NS, self._coarse)
        return out_NF, action_N, led_to

    # --- compiled ---------------------------------------------------------------------------------------------------

    def _in_few_kernels(self, given: Tensors) -> tuple[Latent, Tensor, Tensor, Tensor, Tensor]:
        """The same from formulas, compiled; how exact the products are is decided once for all steps."""
        start = Latent(given["deter"], given["stoch"])
        weights = DreamWeights.of(self._model.rssm, self._kind(start.deter))
        states, actions, outs = [dream_start(weights, start)], [], []
        for uniform_NS, noise_N in zip(given["uniform"], given["noise"], strict=True):
            out_NF, action_N, led_to = self._compiled_step(weights, states[-1], uniform_NS, noise_N)
            states.append(led_to)
            actions.append(action_N)
            outs.append(out_NF)
        flat = torch.stack([x.flat_NF for x in states], 1)
        width, shape = start.deter.shape[1], start.stoch.shape[1:]
        # The first states are judged with the others, and in vain: without them all would be copied.
        reward_NH, continue_NH = (x[:, 1:] for x in self._compiled_heads(flat))
        latent = Latent(flat[..., :width], flat[..., width:].view(*flat.shape[:2], *shape))
        return latent, torch.stack(actions, 1), torch.stack(outs, 1), reward_NH, continue_NH

    def _dreamt(
        self, weights: DreamWeights, here: Dreamt, uniform_NS: Tensor, noise_N: Tensor
    ) -> tuple[Tensor, Tensor, Dreamt]:
        """`_next` of the formulas."""
        out_NF, action_N, code_NA = self._decided(here.flat_NF, noise_N)
        return out_NF, action_N, dream_step(weights, here, code_NA, uniform_NS)

    # --- of both ----------------------------------------------------------------------------------------------------

    def _decided(self, flat_NF: Tensor, noise_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The actor's numbers, its action, and that as the model reads it."""
        out_NF = self._policy.network(flat_NF)
        action_N = self._policy.actions.draw(out_NF, noise_N)
        return out_NF, action_N, self._policy.actions.code(action_N)

    def _judged(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Reward and continuation of arriving there."""
        return self._model.reward(flat).mean, self._model.continues(flat).mean

    def _kind(self, like: Tensor) -> torch.dtype:
        """What the world model multiplies in."""
        return torch.bfloat16 if self._coarse and like.is_cuda else torch.float32


# --- rewards of your own --------------------------------------------------------------------------------------------


class Futures(dict[str, Tensor]):
    """A batch of imagined futures as a reward function gets it, every entry (N, H, …), about the states arrived in.

    `action` (the model's code), `reward` and `continue` (as the model predicts them), `latent`; any of the
    environment's observations (`vector`, `image`, …) is painted when it is asked for. Setting `rewards` overrides.
    """

    def __init__(self, imagined: Imagined, model: WorldModel, policy: ActorPolicy) -> None:
        led_to = imagined.latent[:, 1:]
        super().__init__(
            action=policy.actions.code(imagined.action_NH),
            reward=imagined.reward_NH,
            latent=led_to.flat,
        )
        self["continue"] = imagined.continue_NH
        self._led_to, self._model = led_to, model

    def __missing__(self, key: str) -> Tensor:
        if key not in self._model.shapes:
            raise KeyError(f"a batch of futures has no {key!r}; it has {', '.join([*self, *self._model.shapes])}")
        with torch.no_grad():
            painted = self._model.decoder(self._led_to.deter, self._led_to.stoch)
            self.update(self._model.decoder.observations(painted))
        return self[key]


def own_rewards(reward_fn: RewardFn, batch: Futures) -> Tensor:
    """What a user's function pays: (N,) for whole futures, or (N, H) for each step."""
    rows, steps = batch["reward"].shape
    name = getattr(reward_fn, "__name__", type(reward_fn).__name__)
    with torch.no_grad():
        given = reward_fn(batch)
    found = batch.get("rewards") if given is None else given
    if found is None:
        raise ValueError(f"{name}(batch) gave nothing; return rewards, or set batch['rewards']")
    rewards = torch.as_tensor(found, dtype=torch.float32, device=batch["reward"].device)
    if tuple(rewards.shape) not in ((rows,), (rows, steps)):
        wanted = f"({rows},) for whole futures or ({rows}, {steps}) for their steps"
        raise ValueError(f"{name}(batch) gave rewards of shape {tuple(rewards.shape)}; expected {wanted}")
    if not torch.isfinite(rewards).all():
        where = int((~torch.isfinite(rewards)).reshape(rows, -1).any(1).nonzero()[0, 0])
        raise ValueError(f"{name}(batch) gave a reward that is NaN or infinite, first for future {where}")
    return rewards
