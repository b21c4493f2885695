"""The world model's own learning: replayed sequences, as many updates as are due, and the states seen on the way.

Letters: B sequences, T steps of one, M = B·T states, D width of the deterministic latent, S × C the discrete.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor

from grpo.agreement import attempted
from grpo.errors import SamplesFailed
from grpo.graphs import GraphedCallable, Tensors
from grpo.protocols import Alone, Ranks, Slots, State, as_part, part
from grpo.threads import few_threads
from grpo.worldmodel.model.adapters import trained
from grpo.worldmodel.model.optimizer import LaProp, load_moments, moments
from grpo.worldmodel.model.pieces import fused
from grpo.worldmodel.model.rssm import Latent
from grpo.worldmodel.model.world_model import WorldModel
from grpo.worldmodel.replay.buffer import Replay, Sample

MAX_NONFINITE = 3
"""Updates in a row that may be non-finite before learning stops."""
DETER, STOCH, UNIFORM = "/deter", "/stoch", "/uniform"
"""What an update is given, and gives back, beside a batch: no observation is called so."""


class ModelDiverged(SamplesFailed):
    """The world model's updates kept being non-finite."""


class Learner:
    """A world model and its optimizer. On a CUDA device, updates are captured (`graphs`) and what surrounds the
    recurrence may learn in bfloat16 (`coarse`); `compiled`: see `pieces`.
    """

    def __init__(
        self,
        model: WorldModel,
        rate: float,
        warmup: int,
        frozen: bool,
        graphs: bool = True,
        compiled: bool = False,
        coarse: bool = False,
    ) -> None:
        self.model, self.frozen, self.compiled, self._coarse = model, frozen, compiled, coarse
        if compiled and next(model.parameters()).is_cuda:
            model.rssm.pieces = fused()
        self._tensors = list(trained(model).values())
        self._optimizer = None if frozen or not self._tensors else LaProp(self._tensors, lr=rate, warmup=warmup)
        self._gradients = GraphedCallable(self._differentiated, self._in_use, graphs)
        self._step = GraphedCallable(self._moved, self._in_use, graphs)
        self.ranks: Ranks = Alone()
        """Who shares every update."""
        self.updates, self.skipped = 0, 0
        self._in_a_row = 0
        self.metrics: dict[str, float] = {}
        """Of the last update."""

    def update(self, sample: Sample, replay: Replay, random: torch.Generator) -> tuple[Latent, Tensor]:
        """Learn from one batch; the states it passed through, (B·T), and which of them are ends."""
        batch, latent = self.given(sample)
        given = batch if latent is None else {**batch, DETER: latent.deter, STOCH: latent.stoch}
        drawn = torch.rand(*batch["is_first"].shape, self.model.size.stoch, generator=random)
        with self._threads(len(drawn)):
            found = self._shared({**given, UNIFORM: drawn.to(batch["reward"].device)})
        posterior = Latent(found.pop(DETER), found.pop(STOCH))
        values = torch.stack([x.float() for x in found.values()]).tolist()  # the device is waited for once
        metrics = dict(zip(found, values, strict=True))
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            with self._threads(len(drawn)):
                self._step()
            self.updates, self._in_a_row = self.updates + 1, 0
            self.metrics = {f"model/{name}": x for name, x in metrics.items()}
            replay.write_latents(sample.ids_BT, posterior.deter, posterior.stoch)
        else:
            self._skip()
        self._clear()
        return _flat(posterior), batch["is_terminal"].flatten()

    def _shared(self, given: Tensors) -> Tensors:
        """Gradients of the whole batch, each rank's sequences differentiated by it; the losses are means over them."""
        if self.ranks.size == 1:
            return self._gradients(given)
        rows = len(given[UNIFORM])
        own = Slots(self.ranks.rank, self.ranks.size).of(rows)

        def mine() -> State:
            if not own:
                self._clear()
                return State({"rows": 0, "moved": []}, {})
            found = self._gradients({name: x[own.start : own.stop] for name, x in given.items()})
            moved = {number: p.grad for number, p in enumerate(self._tensors) if p.grad is not None}
            torch._foreach_mul_(list(moved.values()), len(own) / rows)
            return State({"rows": len(own), "moved": list(moved)}, found)

        told = [state for state in attempted(self.ranks, "learning the world", mine) if state.values["rows"]]
        gradients = []
        for number in told[0].values["moved"]:
            p = self._tensors[number]
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            gradients.append(p.grad)
        self.ranks.sum(gradients, "the world model's gradients")
        found = {name: _joined(told, name).to(given[UNIFORM].device) for name in told[0].arrays}
        return {**found, "grad_norm": torch.nn.utils.get_total_norm(gradients)}

    def _threads(self, batch: int) -> AbstractContextManager[None]:
        """Where the recurrence takes one thread, waking others for the rest gains nothing; pictures want them all."""
        weight = self.model.rssm.gru.weight
        return nullcontext() if self.model.encoder.pictures else few_threads(batch * weight.numel(), weight.device)

    def _differentiated(self, given: Tensors) -> Tensors:
        """Gradients into every tensor's `grad`; metrics and the posterior's samples."""
        self._clear()
        latent = Latent(given[DETER], given[STOCH]) if DETER in given else None
        with torch.autocast("cuda", torch.bfloat16, enabled=self._coarse and given[UNIFORM].is_cuda):
            loss, metrics, posterior, _ = self.model.loss(given, latent, given[UNIFORM])
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._tensors if p.grad is not None])
        return {**metrics, "grad_norm": norm, DETER: posterior.deter.detach(), STOCH: posterior.stoch.detach()}

    def _clear(self) -> None:
        assert self._optimizer is not None
        self._optimizer.zero_grad(set_to_none=not self._tensors[0].is_cuda)  # a graph has them where they were

    def _moved(self, given: Tensors) -> Tensors:
        assert self._optimizer is not None
        self._optimizer.step()
        return given

    def _in_use(self) -> Iterator[Tensor]:
        """All that an update reads and changes."""
        yield from self.model.parameters()
        yield from (p.grad for p in self._tensors if p.grad is not None)
        if self._optimizer is not None:
            yield from (x for entry in self._optimizer.state.values() for x in entry.values())

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
        kept = {} if self._optimizer is None else moments(self._optimizer)
        arrays = as_part("weights", self.model.state_dict())
        counts = {"updates": self.updates, "skipped": self.skipped, "in_a_row": self._in_a_row}
        values = {**counts, "moments": sorted(kept), "metrics": self.metrics}
        return State(values, arrays | as_part("moments", kept))

    def load_state(self, state: State) -> None:
        """Go on from there."""
        self.model.load_state_dict(part(state.arrays, "weights"))
        if self._optimizer is not None:
            load_moments(self._optimizer, state.values["moments"], part(state.arrays, "moments"))
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


def _joined(told: list[State], name: str) -> Tensor:
    """What ranks found of their sequences, one after the other; of means the mean."""
    parts = [state.arrays[name] for state in told]
    if parts[0].ndim:
        return torch.cat(parts)
    rows = torch.tensor([state.values["rows"] for state in told], dtype=parts[0].dtype)
    return (torch.stack(parts) * rows).sum() / rows.sum()
