"""The world model's own learning: replayed sequences, as many updates as are due, and the states seen on the way."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from grpo.protocols import State
from grpo.run.session import SamplesFailed
from grpo.worldmodel.adapters import trained
from grpo.worldmodel.learner import WorldModel
from grpo.worldmodel.optimiser import LaProp, load_moments, moments, part
from grpo.worldmodel.replay import Replay, Sample
from grpo.worldmodel.rssm import Latent

MAX_NONFINITE = 3
"""Updates in a row that may be non-finite before learning stops."""


class ModelDiverged(SamplesFailed):
    """The world model's updates kept being non-finite."""


class Study:
    """A world model and its optimiser."""

    def __init__(self, model: WorldModel, rate: float, warmup: int, frozen: bool) -> None:
        self.model, self.frozen = model, frozen
        tensors = list(trained(model).values())
        self._optimiser = None if frozen or not tensors else LaProp(tensors, lr=rate, warmup=warmup)
        self.updates, self.skipped = 0, 0
        self._in_a_row = 0
        self.metrics: dict[str, float] = {}
        """Of the last update."""

    def update(self, sample: Sample, replay: Replay, random: torch.Generator) -> tuple[Latent, Tensor]:
        """Learn from one batch; the states it passed through, (B·T), and which of them are ends."""
        assert self._optimiser is not None
        batch, latent = self.given(sample)
        loss, metrics, posterior, _ = self.model.loss(batch, latent, random)
        self._optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        grads = [p.grad for group in self._optimiser.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads))
        if math.isfinite(norm) and math.isfinite(float(loss.detach())):
            self._optimiser.step()
            self.updates, self._in_a_row = self.updates + 1, 0
            values = torch.stack([x.float() for x in metrics.values()]).tolist()  # the device is waited for once
            self.metrics = {f"model/{name}": x for name, x in zip(metrics, values, strict=True)}
            self.metrics["model/grad_norm"] = norm
            replay.write_latents(sample.ids_BT, posterior.deter, posterior.stoch)
        else:
            self._skip()
        self._optimiser.zero_grad()
        return _flat(posterior.detach()), batch["is_terminal"].flatten()

    @torch.no_grad()
    def remember(self, sample: Sample, random: torch.Generator) -> tuple[Latent, Tensor]:
        """The same states without learning from them."""
        batch, latent = self.given(sample)
        return _flat(self.model.observe(batch, latent, random).latent), batch["is_terminal"].flatten()

    def given(self, sample: Sample) -> tuple[dict[str, Tensor], Latent | None]:
        """Replayed sequences and the states before them, on the model's device."""
        device = next(self.model.parameters()).device
        latent = None
        if sample.deter_BD is not None and sample.stoch_BSC is not None:
            latent = Latent(torch.from_numpy(sample.deter_BD).to(device), torch.from_numpy(sample.stoch_BSC).to(device))
        return sample.tensors(device), latent

    def _skip(self) -> None:
        """Everything stays as it was, and is counted; several in a row are the end."""
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MAX_NONFINITE:
            raise ModelDiverged(
                f"the world model's last {MAX_NONFINITE} updates had a non-finite loss or gradient and were skipped; "
                "lower model_learning_rate, or look at the rewards and observations of the environment"
            )

    def state(self) -> State:
        """Weights, moments and counts."""
        kept = {} if self._optimiser is None else moments(self._optimiser)
        arrays = {f"weights/{name}": x for name, x in self.model.state_dict().items()}
        counts = {"updates": self.updates, "skipped": self.skipped, "in_a_row": self._in_a_row}
        values = {**counts, "moments": sorted(kept), "metrics": self.metrics}
        return State(values, arrays | {f"moments/{name}": x for name, x in kept.items()})

    def load_state(self, state: State) -> None:
        """Go on from there."""
        self.model.load_state_dict(part(state.arrays, "weights"))
        if self._optimiser is not None:
            load_moments(self._optimiser, state.values["moments"], part(state.arrays, "moments"))
        self.updates, self.skipped = int(state.values["updates"]), int(state.values["skipped"])
        self._in_a_row, self.metrics = int(state.values["in_a_row"]), dict(state.values["metrics"])


def choose(latent: Latent, ends_M: Tensor, count: int, random: np.random.Generator) -> Latent:
    """`count` of M states, no end among them, each at most once while there are enough."""
    fit = np.flatnonzero(~ends_M.cpu().numpy())
    fit = np.arange(len(ends_M)) if not len(fit) else fit
    chosen = random.choice(fit, count, replace=count > len(fit))
    return latent[torch.from_numpy(chosen).to(latent.deter.device)]


def _flat(latent: Latent) -> Latent:
    return latent.each(lambda x: x.flatten(0, 1))
