"""Action heads: from the numbers a network gives to actions, their probabilities, and back.

A head turns F numbers a decision into a distribution over one environment's actions. What it records of a decision is
what its log-prob is of; `to_env` makes the action of it. For a Box that is not the same thing:

    gaussian   records the sample before it is clipped to the bounds    as PPO does
    squashed   records the sample before tanh                           exact: tanh cannot be undone near ±1
    beta       records the sample in (0, 1)

Networks work in units of the bounds: 0 is their middle and ±1 are the bounds, wherever both are finite. Log-probs and
entropies are of what is recorded (after tanh, for squashed), so they differ from densities in the environment's units
by a constant.

Playing is NumPy, because it happens once a step of the environment; learning is torch. The same formulas serve both.

Letters: M decisions, F numbers of the network, A numbers or choices of an action, K options of a choice, or
terms of a sum.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from grpo.core.arrays import Array, clip, is_torch, namespace
from grpo.core.kl import exact, exact_entropy
from grpo.envs.draws import Random
from grpo.envs.fleet import EnvError

LOG_STD = (-10.0, 10.0)
"""Limits of a Gaussian's log standard deviation: anything divided by it still has a square in float32."""
_BETA_EDGE = 1e-6
"""A Beta sample is kept this far from 0 and 1, where the logarithms end."""
_TANH_EDGE = 0.999
"""A shown action nearer to a bound than this stands for a sample this near: tanh reaches the bound nowhere."""


class Head(nn.Module):
    """A distribution over actions. `out` is (…, F), a record (…, *shape); sums run over the action's dimensions."""

    size: int
    """F, the numbers that the network must give for a decision."""
    shape: tuple[int, ...]
    """Of the record of one decision."""
    dtype: np.dtype[Any]
    """Of the record."""

    def __init__(self, space: gym.Space[Any], size: int, shape: tuple[int, ...], dtype: type, **kept: Any) -> None:
        super().__init__()
        self.size, self.shape, self.dtype, self._space = size, shape, np.dtype(dtype), space
        self._kept = kept
        for name, array in kept.items():
            tensor = torch.as_tensor(array)
            self.register_buffer(name, tensor.float() if tensor.is_floating_point() else tensor, persistent=False)

    def sample(self, out_MF: np.ndarray, random: Random) -> tuple[np.ndarray, np.ndarray]:
        """Records of M random decisions and their log-probs, NaN where the network gave NaN. NumPy."""
        raise NotImplementedError

    def mode(self, out: Array) -> Array:
        """Records of greedy decisions. NumPy or torch."""
        raise NotImplementedError

    def to_env(self, recorded: Array) -> Array:
        """The actions that M records stand for, in the space's shape and dtype. NumPy or torch."""
        raise NotImplementedError

    def from_env(self, actions: np.ndarray) -> np.ndarray:
        """The records that stand for M actions of the space: `to_env` undone, inside the bounds. NumPy."""
        raise NotImplementedError

    def greedy(self, out: Tensor) -> Tensor:
        """The greedy actions, in the environment's units."""
        return self.to_env(self.mode(out))

    def logp(self, out: Tensor, recorded: Tensor) -> Tensor:
        """log π of what was recorded."""
        raise NotImplementedError

    def entropy(self, out: Tensor) -> Tensor:
        """Exact."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Numbers or choices that one action is made of, each drawn on its own."""
        return math.prod(self.shape)

    def token_logp(self, out: Tensor, recorded: Tensor) -> Tensor:
        """(…, tokens), whose sum is `logp`."""
        raise NotImplementedError

    def token_entropy(self, out: Tensor) -> Tensor:
        """(…, tokens), whose sum is `entropy`."""
        raise NotImplementedError

    def describe(self, out: Array) -> Array:
        """The numbers that fix the distribution, whatever becomes of the head's parameters. NumPy or torch."""
        return out

    def kl(self, old: Tensor, out: Tensor) -> Tensor:
        """KL(old ‖ now), exact; `old` is a description from when it was sampled."""
        raise NotImplementedError

    def _get(self, name: str, like: Array) -> Array:
        """A kept array: NumPy beside NumPy, a tensor on its device beside a tensor."""
        return self.get_buffer(name) if is_torch(like) else self._kept[name]

    def _shaped(self, action: Array) -> Array:
        """As the space has it."""
        action = action.reshape(-1, *(self._space.shape or ()))
        kind = np.dtype(self._space.dtype)
        return action.to(getattr(torch, kind.name)) if is_torch(action) else action.astype(kind, copy=False)


class Choices(Head):
    """Independent choices, counted from 0."""

    def logits(self, out: Array) -> Array:
        """(…, K) for one choice, (…, A, K) for several; −inf: no such. NumPy or torch."""
        raise NotImplementedError

    def _total(self, x: Array) -> Array:
        return x.sum(-1) if self.shape else x

    def _apart(self, x: Tensor) -> Tensor:
        return x if self.shape else x[..., None]

    def sample(self, out_MF: np.ndarray, random: Random) -> tuple[np.ndarray, np.ndarray]:
        """By inverting the distribution function, with one uniform number a choice."""
        logits = self.logits(out_MF)
        flat = logits.reshape(-1, logits.shape[-1])
        flat = flat - flat.max(axis=1, keepdims=True)
        cumulative = np.exp(flat).cumsum(axis=1)
        total = cumulative[:, -1]
        point = random.random(len(flat)) * total
        chosen = (cumulative[:, :-1] <= point[:, None]).sum(axis=1, dtype=self.dtype)
        logp = flat[np.arange(len(flat)), chosen] - np.log(total)
        return chosen.reshape(logits.shape[:-1]), self._total(logp.reshape(logits.shape[:-1]))

    def mode(self, out: Array) -> Array:
        """The likeliest, the first of equals."""
        return self.logits(out).argmax(-1)

    def logp(self, out: Tensor, recorded: Tensor) -> Tensor:
        """Of the choices made."""
        return self._total(self._chosen(out, recorded))

    def entropy(self, out: Tensor) -> Tensor:
        """Over all choices."""
        return self._total(exact_entropy(self.logits(out).log_softmax(-1)))

    def token_logp(self, out: Tensor, recorded: Tensor) -> Tensor:
        """Of each choice."""
        return self._apart(self._chosen(out, recorded))

    def token_entropy(self, out: Tensor) -> Tensor:
        """Of each choice."""
        return self._apart(exact_entropy(self.logits(out).log_softmax(-1)))

    def _chosen(self, out: Tensor, recorded: Tensor) -> Tensor:
        return self.logits(out).log_softmax(-1).gather(-1, recorded.long()[..., None])[..., 0]

    def kl(self, old: Tensor, out: Tensor) -> Tensor:
        """Over all choices."""
        return self._total(exact(self.logits(old).log_softmax(-1), self.logits(out).log_softmax(-1)))


class Categorical(Choices):
    """One of n: a Discrete space."""

    def __init__(self, space: spaces.Discrete) -> None:
        super().__init__(space, int(space.n), (), np.int64)
        self._start = int(space.start)

    def logits(self, out: Array) -> Array:
        """The numbers themselves."""
        return out

    def to_env(self, recorded: Array) -> Array:
        """Counted from the space's start."""
        return self._shaped(recorded + self._start)

    def from_env(self, actions: np.ndarray) -> np.ndarray:
        """Counted from 0."""
        return np.asarray(actions, self.dtype).reshape(-1) - self._start


class MultiCategorical(Choices):
    """Several choices at once: a MultiDiscrete space, the logits of one choice after those of the other."""

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        n_A, start_A = np.ravel(space.nvec).astype(np.int64), np.ravel(space.start).astype(np.int64)
        option_K = np.arange(n_A.max())
        absent_AK = option_K >= n_A[:, None]
        index_AK = np.where(absent_AK, 0, (n_A.cumsum() - n_A)[:, None] + option_K)
        kept = {"start_A": start_A, "absent_AK": absent_AK, "index_AK": index_AK}
        super().__init__(space, int(n_A.sum()), n_A.shape, np.int64, **kept)

    def logits(self, out: Array) -> Array:
        """(…, A, K), K the most options that a choice has."""
        return namespace(out).where(self._get("absent_AK", out), -math.inf, out[..., self._get("index_AK", out)])

    def to_env(self, recorded: Array) -> Array:
        """Counted from the space's start."""
        return self._shaped(recorded + self._get("start_A", recorded))

    def from_env(self, actions: np.ndarray) -> np.ndarray:
        """Counted from 0."""
        return np.asarray(actions, self.dtype).reshape(-1, *self.shape) - self._kept["start_A"]


class Bernoulli(Choices):
    """Several switches: a MultiBinary space. Each number is the logit of on."""

    def __init__(self, space: spaces.MultiBinary) -> None:
        count = math.prod(space.shape)
        super().__init__(space, count, (count,), np.int8)

    def logits(self, out: Array) -> Array:
        """(…, A, 2): of off and on."""
        xp = namespace(out)
        return xp.stack([xp.zeros_like(out), out], -1)

    def to_env(self, recorded: Array) -> Array:
        """1 is on."""
        return self._shaped(recorded)

    def from_env(self, actions: np.ndarray) -> np.ndarray:
        """1 is on."""
        return np.asarray(actions, self.dtype).reshape(-1, *self.shape)


class Real(Head):
    """A numbers: a Box."""

    def __init__(self, space: spaces.Box, numbers: int) -> None:
        low_A, high_A = np.ravel(space.low).astype(float), np.ravel(space.high).astype(float)
        with np.errstate(over="ignore"):  # ± the largest float is no bound either: in float32 the span is infinite
            bounded_A = np.isfinite(high_A.astype(np.float32) - low_A.astype(np.float32))
        middle_A, half_A = np.zeros(len(low_A)), np.ones(len(low_A))
        middle_A[bounded_A] = (high_A[bounded_A] + low_A[bounded_A]) / 2
        half_A[bounded_A] = (high_A[bounded_A] - low_A[bounded_A]) / 2
        kept = {"low_A": low_A, "high_A": high_A, "middle_A": middle_A, "half_A": half_A}
        super().__init__(space, numbers * len(low_A), low_A.shape, np.float32, **kept)
        self.bounded = bool(bounded_A.all())
        self._whole = np.issubdtype(space.dtype, np.integer)

    def unit(self, recorded: Array) -> Array:
        """Records in units of the bounds. NumPy or torch."""
        raise NotImplementedError

    def _record(self, unit_MA: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def from_env(self, actions: np.ndarray) -> np.ndarray:
        """What would have been drawn; short of the bounds where those are at infinity."""
        low_A, high_A, middle_A, half_A = (self._kept[name] for name in ("low_A", "high_A", "middle_A", "half_A"))
        inside_MA = np.clip(np.asarray(actions, np.float64).reshape(-1, *self.shape), low_A, high_A)
        return self._record((inside_MA - middle_A) / half_A).astype(self.dtype)

    def logp(self, out: Tensor, recorded: Tensor) -> Tensor:
        """Summed over the numbers."""
        return self.token_logp(out, recorded).sum(-1)

    def entropy(self, out: Tensor) -> Tensor:
        """Summed over the numbers."""
        return self.token_entropy(out).sum(-1)

    def to_env(self, recorded: Array) -> Array:
        """Inside the bounds; rounded where the space counts."""
        xp, (low_A, high_A, middle_A, half_A) = namespace(recorded), (self._get(n, recorded) for n in self._kept)
        action = xp.clip(middle_A + half_A * self.unit(recorded), low_A, high_A)
        return self._shaped(xp.round(action) if self._whole else action)


class Gaussian(Real):
    """A normal distribution a number, clipped to the bounds. `state_std`: the network gives the log std as well."""

    def __init__(self, space: spaces.Box, log_std: float = -0.5, state_std: bool = False) -> None:
        super().__init__(space, 2 if state_std else 1)
        self._first, self.limits = log_std, LOG_STD
        """Where the log std begins, and what it lies between: to be changed, if at all, before anything is learned."""
        self.log_std_A = None if state_std else nn.Parameter(torch.full(self.shape, float(log_std)))

    def _split(self, out: Array) -> tuple[Array, Array]:
        """Mean and log std."""
        if self.log_std_A is None:
            log_std = out[..., self.shape[0] :] + self._first
        else:
            log_std = self.log_std_A if is_torch(out) else self.log_std_A.detach().cpu().numpy()
        return self.mode(out), clip(log_std, *self.limits)

    def unit(self, recorded: Array) -> Array:
        """As they are; beyond the bounds where they are to be clipped."""
        return recorded

    def _record(self, unit_MA: np.ndarray) -> np.ndarray:
        return unit_MA

    def sample(self, out_MF: np.ndarray, random: Random) -> tuple[np.ndarray, np.ndarray]:
        """Mean plus noise, neither clipped nor squashed."""
        mean_MA, log_std = self._split(out_MF)
        recorded_MA = mean_MA + np.exp(log_std) * random.standard_normal(mean_MA.shape, dtype=np.float32)
        return recorded_MA, self._density(mean_MA, log_std, recorded_MA).sum(-1)

    def mode(self, out: Array) -> Array:
        """The mean."""
        return out[..., : self.shape[0]]

    def token_logp(self, out: Tensor, recorded: Tensor) -> Tensor:
        """Of the sample before clipping, or after tanh."""
        return self._density(*self._split(out), recorded)

    def _density(self, mean: Array, log_std: Array, recorded: Array) -> Array:
        z = (recorded - mean) * namespace(log_std).exp(-log_std)
        return -0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)

    def token_entropy(self, out: Tensor) -> Tensor:
        """Before clipping."""
        mean, log_std = self._split(out)
        return (log_std + 0.5 * math.log(2 * math.pi * math.e)).expand(mean.shape)

    def describe(self, out: Array) -> Array:
        """Means, then log stds."""
        xp, (mean, log_std) = namespace(out), self._split(out)
        return xp.concatenate([mean, xp.broadcast_to(log_std, mean.shape)], -1)

    def kl(self, old: Tensor, out: Tensor) -> Tensor:
        """In closed form; squashing both the same way does not change it."""
        (old_mean, old_log_std), (mean, log_std) = old.chunk(2, -1), self._split(out)
        gap = old_log_std - log_std
        return (0.5 * torch.expm1(2 * gap) - gap + 0.5 * ((old_mean - mean) * torch.exp(-log_std)) ** 2).sum(-1)


# A logistic variable is a normal one of random scale. These shares of eight scales (1 / rate) give its distribution
# function to 1e-8: Monahan & Stefanski 1992, in Balakrishnan (ed.), Handbook of the Logistic Distribution.
_SHARE_K = (0.003246343, 0.051517477, 0.195077913, 0.315569824, 0.274149576, 0.131076881, 0.027912419, 0.001449568)
_RATE_K = (1.365340806, 1.059523971, 0.830791314, 0.650732167, 0.508135425, 0.396313345, 0.308904252, 0.238212616)


class SquashedGaussian(Gaussian):
    """A normal distribution taken to the bounds by tanh, so that nothing is clipped."""

    def unit(self, recorded: Array) -> Array:
        """After tanh."""
        return namespace(recorded).tanh(recorded)

    def _record(self, unit_MA: np.ndarray) -> np.ndarray:
        return np.arctanh(np.clip(unit_MA, -_TANH_EDGE, _TANH_EDGE))

    def _density(self, mean: Array, log_std: Array, recorded: Array) -> Array:
        slope = 2 * (math.log(2) - recorded - _softplus(-2 * recorded))  # log(1 − tanh²) without the difference
        return super()._density(mean, log_std, recorded) - slope

    def token_entropy(self, out: Tensor) -> Tensor:
        """The Gaussian's plus E[log(1 − tanh²u)] = 2 log 2 − 2 E[log 2cosh u], to float32 for every mean and std.

        log 2cosh u = E|u − l| for a logistic l of scale ½. With l a mixture of normals, |u − l| is one of folded
        normals, whose means are known. Quadrature would need hundreds of nodes where the std is large.
        """
        mean, log_std = self._split(out)
        std, mean = torch.exp(log_std).expand(mean.shape)[..., None], mean[..., None]
        scale_K = torch.sqrt(std**2 + (0.5 / mean.new_tensor(_RATE_K)) ** 2)
        z_K = mean / scale_K
        folded_K = scale_K * math.sqrt(2 / math.pi) * torch.exp(-0.5 * z_K**2) + mean * torch.erf(z_K * math.sqrt(0.5))
        log_2cosh = (folded_K * mean.new_tensor(_SHARE_K)).sum(-1)
        return super().token_entropy(out) + 2 * (math.log(2) - log_2cosh)


class Beta(Real):
    """A Beta distribution on the bounds, with one peak: α, β = 1 + softplus of the network's numbers."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space, 2)

    def _split(self, out: Array) -> tuple[Array, Array]:
        count, positive = self.shape[0], 1 + _softplus(out)
        return positive[..., :count], positive[..., count:]

    def unit(self, recorded: Array) -> Array:
        """(0, 1) stretched to (−1, 1)."""
        return 2 * recorded - 1

    def _record(self, unit_MA: np.ndarray) -> np.ndarray:
        return np.clip((unit_MA + 1) / 2, _BETA_EDGE, 1 - _BETA_EDGE)

    def sample(self, out_MF: np.ndarray, random: Random) -> tuple[np.ndarray, np.ndarray]:
        """In (0, 1); NumPy has no log Γ, so torch gives the log-prob."""
        drawn_MA = np.clip(random.beta(*self._split(out_MF)), _BETA_EDGE, 1 - _BETA_EDGE).astype(np.float32)
        return drawn_MA, self.logp(torch.tensor(out_MF), torch.from_numpy(drawn_MA)).numpy()

    def mode(self, out: Array) -> Array:
        """The mean: a flat distribution has no peak."""
        alpha, beta = self._split(out)
        return alpha / (alpha + beta)

    def token_logp(self, out: Tensor, recorded: Tensor) -> Tensor:
        """Of the sample in (0, 1)."""
        alpha, beta = self._split(out)
        powers = (alpha - 1) * torch.log(recorded) + (beta - 1) * torch.log1p(-recorded)
        return powers - _log_beta(alpha, beta)

    def token_entropy(self, out: Tensor) -> Tensor:
        """In closed form."""
        alpha, beta = self._split(out)
        slopes = (alpha - 1) * torch.digamma(alpha) + (beta - 1) * torch.digamma(beta)
        return _log_beta(alpha, beta) - slopes + (alpha + beta - 2) * torch.digamma(alpha + beta)

    def kl(self, old: Tensor, out: Tensor) -> Tensor:
        """In closed form."""
        (a, b), (alpha, beta) = self._split(old), self._split(out)
        slopes = (a - alpha) * torch.digamma(a) + (b - beta) * torch.digamma(b)
        both = (a + b - alpha - beta) * torch.digamma(a + b)
        return (_log_beta(alpha, beta) - _log_beta(a, b) + slopes - both).sum(-1)


def make_head(space: gym.Space[Any], kind: str = "auto", log_std: float = -0.5, state_std: bool = False) -> Head:
    """The head for an action space. `kind`, for a Box: gaussian (which auto is too), squashed or beta."""
    if isinstance(space, spaces.Box) and kind in ("auto", "gaussian"):
        return Gaussian(space, log_std, state_std)
    if isinstance(space, spaces.Box) and kind in ("squashed", "beta"):
        head = Beta(space) if kind == "beta" else SquashedGaussian(space, log_std, state_std)
        if not head.bounded:
            raise EnvError(f"the {kind} head needs finite bounds, the action space is {space}; use gaussian")
        return head
    if kind != "auto":
        raise EnvError(f"there is no {kind} head for the action space {space}; for a Box: gaussian, squashed or beta")
    if isinstance(space, spaces.Discrete):
        return Categorical(space)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(space)
    if isinstance(space, spaces.MultiBinary):
        return Bernoulli(space)
    wanted = "Discrete, MultiDiscrete, MultiBinary or Box"
    raise EnvError(f"no head for the action space {space}; wrap the environment to take a {wanted} action")


def _softplus(x: Array) -> Array:
    return nn.functional.softplus(x) if is_torch(x) else np.logaddexp(x, 0)


def _log_beta(alpha: Tensor, beta: Tensor) -> Tensor:
    return torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
