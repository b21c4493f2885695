"""What lasts from rollout to rollout, so that captured graphs stay valid: the model as kernels, blocks, buffers.

Nobody sets a share of memory. The blocks are at first as many as rows of a thousand tokens want together, or as were
once in use, and more as rows become longer, as far as memory goes. On a GPU, where they are large, they are given back
after every rollout, so that training computes in their memory, and asked for again. Graphs point to the blocks: where
those come back to another place or are replaced, graphs are captured again, which `metrics` shows; where that goes on,
blocks are kept, unless training runs out of memory beside them (`make_room`).

Letters: S slots, F fields of a slot's state, B blocks, R sequences as rows of the outputs, E ends of a sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo.errors import line
from grpo.graphs import capture
from grpo.language.engines import Sampling, Tokens
from grpo.language.engines.cuda_graphs.blocks import BlockManager, block_bytes
from grpo.language.engines.cuda_graphs.decoder import Decoder, make_decoder
from grpo.language.engines.cuda_graphs.kept import KeptConversations
from grpo.language.engines.cuda_graphs.kernels import FIELDS, LIVE
from grpo.language.engines.cuda_graphs.module_decoder import ModuleDecoder
from grpo.language.engines.cuda_graphs.noise import HALF
from grpo.language.engines.cuda_graphs.sampler import Outputs, sample
from grpo.language.scoring import memory
from grpo.language.scoring.decoder_layout import Unsupported

PREFILL_CAPTURED = 8192
"""Tokens of prompts up to which prefill is captured, too; with more, launching is no longer what takes time."""
MOVES = 2
"""Times that blocks may be found elsewhere than they were, before they are kept."""
SPARE = 0.75
"""Of the memory that is free, what keys and values may take: the rest is for what passes through the model."""

Made = TypeVar("Made")


def buckets(most: int) -> list[int]:
    """Numbers of slots that graphs are captured for: powers of two and the middles between them."""
    sizes = sorted({size for n in range(3, 20) for size in (1 << n, 3 << n - 1)} - {4, 6})
    return [size for size in sizes if size < most] + [next(size for size in sizes if size >= most)]


@dataclass(frozen=True)
class Need:
    """What a rollout needs at least."""

    slots: int
    rows: int
    steps: int
    table: int
    """Blocks of one sequence, with its prompt's."""
    first: int
    """Blocks to begin with."""
    blocks: int
    """So that all that find a slot find blocks to their end, too; `table` of them will do."""
    penalty: bool
    cuts: bool
    """Whether it is written down what truncation and penalty leave."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the buffers."""
        flags = int(self.penalty), int(self.cuts)
        return buckets(self.slots)[-1], grown(self.rows), grown(self.steps, 64), grown(self.table), *flags


@dataclass(frozen=True)
class Buffers:
    """What the device reads and writes at every step."""

    state_FS: Tensor
    table_SB: Tensor
    outputs: Outputs
    shape: tuple[int, ...]

    @classmethod
    def of(cls, shape: tuple[int, ...], eos: Iterable[int], vocabulary: int, device: torch.device) -> Buffers:
        """Of this size."""
        slots, rows, steps, table, penalty, cuts = shape
        outputs = Outputs(
            made_RT=torch.zeros(rows, steps, dtype=torch.int32, device=device),
            logp_RT=torch.zeros(rows, steps, device=device),
            kept_RT=torch.ones(rows, steps if cuts else 1, device=device),
            uniform_RW=torch.zeros(rows, 2 * HALF, dtype=torch.float64, device=device),
            ended_R=torch.zeros(rows, dtype=torch.int32, device=device),
            eos_E=torch.tensor(sorted(eos), dtype=torch.int32, device=device),
            seen_SV=torch.zeros(slots, vocabulary, dtype=torch.int8, device=device) if penalty else None,
        )
        state_FS = torch.zeros(FIELDS, slots, dtype=torch.int32, device=device)
        return cls(state_FS, torch.zeros(slots, table, dtype=torch.int32, device=device), outputs, shape)


@dataclass
class Counts:
    """What has happened so far, for metrics and tests."""

    captures: int = 0
    capture_seconds: float = 0.0
    slot_steps: int = 0
    tokens: int = 0
    prefills: int = 0
    allocations: int = 0
    preemptions: int = 0
    """Sequences that had to wait for blocks after they had begun."""
    drafted: int = 0
    accepted: int = 0
    """Tokens of drafts, and those that were right."""


class ModelRunner:
    """The decoder, blocks, buffers and graphs of one model."""

    def __init__(self, model: Any, tokens: Tokens, *, blocks: int | None = None) -> None:
        self.model, self.tokens, self.max_blocks = model, tokens, blocks
        self.device = next(model.parameters()).device
        self.counts = self._before = Counts()
        self.decoder: Decoder | None = None
        self.blocks: BlockManager | None = None
        self.buffers: Buffers | None = None
        self._need: Need | None = None
        """Of the rollout that is under way."""
        self._used = 0
        """Blocks that were once in use at a time."""
        self.keep_between_rollouts = self.device.type != "cuda"
        """Whether blocks are kept between rollouts; not where training can use their memory meanwhile."""
        self._place, self._moves = (0, 0), 0
        """Where blocks were last, and how often they have been given back and were then found elsewhere."""
        self._made_room = False
        """Whether training once ran out of memory beside the blocks."""
        self._left = 0
        """Bytes that were taken when sampling last ended."""
        self.busy = False
        """Whether a rollout is under way."""
        self.conversing = False
        """Whether blocks are kept, for what was said may be gone on from."""
        self.kept = KeptConversations()
        self._key: Any = None
        self._positions = 0
        """That the decoder has rotations for; never fewer than were once needed."""
        self._graphs: dict[Any, Any] = {}
        self._graph_pool: Any = None
        self._stream: Any = None
        self._tuned = [module for module in model.modules() if hasattr(module, "lora_A")]

    # --- the model --------------------------------------------------------------------------------------------------

    def prepare(self, positions: int) -> None:
        """The model as kernels; made again when its weights have moved or it computes in another type."""
        if self.busy:
            raise RuntimeError("another rollout of this engine is under way: take all of it, or close it, first")
        if self.decoder is not None and positions <= self._positions and self._key == self._weights():
            self.decoder.refresh()
            return
        self.release()
        self.decoder, self._positions = None, max(self._positions, grown(positions, 1024))  # before a new one is made
        decoder = make_decoder(self.model, self._positions)
        if isinstance(decoder, ModuleDecoder):
            self._try(decoder)
        self.decoder, self._key = decoder, self._weights()

    def _try(self, decoder: Decoder) -> None:
        """A module may look at its own numbers on the way, which cannot be captured."""
        blocks = BlockManager(decoder.layers, 1, decoder.dtype, self.device)
        state_FS = torch.zeros(FIELDS, 8, dtype=torch.int32, device=self.device)
        table_SB = torch.zeros(8, 1, dtype=torch.int32, device=self.device)

        def decode() -> None:
            decoder.decode(state_FS, table_SB, blocks)

        try:
            self._captured(decode)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Unsupported(f"it cannot be captured ({line(error)})") from error
        finally:
            self._drop()

    def _weights(self) -> Any:
        """Where the weights lie and how they are computed with."""
        autocast = torch.is_autocast_enabled(self.device.type) and torch.get_autocast_dtype(self.device.type)
        adapters = [(m.disable_adapters, m.merged, tuple(m.active_adapters)) for m in self._tuned]
        return autocast, adapters, [p.data_ptr() for p in self.model.parameters()]

    # --- memory -----------------------------------------------------------------------------------------------------

    def begin(self, need: Need) -> tuple[Decoder, BlockManager, Buffers]:
        """All that a rollout needs; graphs that point into what had to be replaced are dropped."""
        assert self.decoder is not None, "prepare comes first"
        self._before, self._need = replace(self.counts), need
        blocks, buffers = self.blocks, self.buffers
        count = self._count(self.decoder, need)
        if blocks is not None and blocks.count < count and len(self.kept.book):
            if self.more_blocks(count - blocks.count):
                count = blocks.count
            else:
                self.kept.forget(blocks)
        if blocks is None or blocks.count < count:
            blocks = self.blocks = None  # before the new ones are made
            blocks = self._allocated(self.decoder, count, need.table)
            self._note(blocks)
            self.counts.allocations += 1
        if buffers is None or any(have < want for have, want in zip(buffers.shape, need.shape, strict=True)):
            shape = need.shape if buffers is None else tuple(map(max, buffers.shape, need.shape))
            self._drop()
            buffers = Buffers.of(shape, self.tokens.eos, self.decoder.vocabulary, self.device)
        self.blocks, self.buffers = blocks, buffers
        return self.decoder, blocks, buffers

    def more_blocks(self, lacking: int) -> bool:
        """Have so many blocks more at least, better twice as many as there are; whether memory went that far."""
        decoder, blocks, need = self.decoder, self.blocks, self._need
        assert decoder is not None and blocks is not None and need is not None
        count = min(max(2 * blocks.count, blocks.count + lacking), self._affordable(decoder, need))
        if count < blocks.count + lacking:
            return False
        self._drop()
        try:
            blocks.grow(count)
        except torch.OutOfMemoryError:  # the old ones are still there; the next rollout begins with so many
            self._used = max(self._used, count)
            return False
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # what the smaller ones have left is of no size that is asked for again
        self._place = blocks.place
        self.counts.allocations += 1
        return True

    def end(self) -> None:
        """Between rollouts: keep the blocks where training has room beside them, else let go."""
        self.busy = False
        if self.blocks is not None:
            self._used = max(self._used, self.blocks.most_used)
        if self.device.type == "cuda":
            self._left = torch.cuda.memory_allocated(self.device)
        if self.keep_between_rollouts or self.conversing:
            return
        if self.device.type != "cuda" or self._made_room:
            self.release()
        elif self._size() >= memory.GIVEN_BACK:
            self.blocks = None  # graphs stay: they are right again where the memory comes back

    def converse(self, on: bool) -> None:
        """Blocks of what was said are kept from now on, or no longer."""
        self.conversing = on
        if on:
            self.kept.book.asked = self.kept.book.found = 0
            return
        self.kept.forget(self.blocks)
        if not self.busy:
            self.end()

    def keeps(self) -> bool:
        """Whether they are, by a model whose layers all see everything before a token."""
        assert self.decoder is not None
        return self.conversing and all(how.window is None and how.softcap is None for how in self.decoder.layers)

    def _size(self) -> int:
        """Bytes of keys and values, in the last rollout."""
        return 0 if self.decoder is None else self._place[1] * block_bytes(self.decoder.layers, self.decoder.dtype)

    def _note(self, blocks: BlockManager) -> None:
        """Drop graphs that point to where blocks are no longer; where that happens again and again, keep the blocks."""
        if blocks.place == self._place:
            return
        self._drop()
        self._moves += int(self._place[1] == blocks.count)
        self._place = blocks.place
        self.keep_between_rollouts = self.keep_between_rollouts or (self._moves > MOVES and not self._made_room)

    def _count(self, decoder: Decoder, need: Need) -> int:
        """How many blocks to begin with: what the first tokens need, or what was once in use."""
        have = self._place[1] if self.blocks is None else self.blocks.count
        wanted = min(max(need.first, self._used), need.blocks)
        if wanted <= 1.1 * have:  # rather a few sequences that wait than all graphs anew
            return have
        return max(min(grown(wanted), self._affordable(decoder, need)), have)

    def _affordable(self, decoder: Decoder, need: Need) -> int:
        """Blocks that memory goes for beside what training needs, at most what is wanted; one sequence's at least."""
        have = 0 if self.blocks is None else self.blocks.count
        if self.max_blocks is not None:
            return max(min(need.blocks, self.max_blocks), need.table, have)
        wanted = max(grown(need.blocks), need.table)
        if self.device.type != "cuda":
            return wanted
        size = block_bytes(decoder.layers, decoder.dtype)
        free = memory.free_memory(self.device) + have * size
        if self.keep_between_rollouts:
            if self._left:  # as much as training has been seen to take since
                free -= max(torch.cuda.max_memory_allocated(self.device) - self._left, 0)
            else:  # gradients and an optimizer's moments will come, and activations
                trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad and p.grad is None)
                free = (free - 12 * trained) // 2
        return max(min(wanted, int(free * SPARE) // size), need.table, have)

    def _allocated(self, decoder: Decoder, count: int, least: int) -> BlockManager:
        """So many blocks, or fewer where free memory is in pieces."""
        while True:
            try:
                return BlockManager(decoder.layers, count, decoder.dtype, self.device)
            except torch.OutOfMemoryError:
                if count <= least:
                    raise
            torch.cuda.empty_cache()
            count = max(count // 2, least)

    def release(self) -> None:
        """Let go of keys, values and graphs; the next rollout makes them again."""
        self._drop()
        self.kept.forget(None)
        self.blocks = self.buffers = None
        self._place = (0, 0)

    def _drop(self) -> None:
        """The graphs, with their memory: none may be captured into what the last of them has left."""
        if self._graphs and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # one may be at work
        self._graphs.clear()
        self._graph_pool = None

    def make_room(self) -> bool:
        """Let go, now and from now on after every rollout, for training needs the memory; whether there was any."""
        held = self.blocks is not None or self.buffers is not None
        self.keep_between_rollouts, self._made_room = False, True
        self.release()
        return held

    def metrics(self) -> dict[str, float]:
        """Of the last rollout: gigabytes of keys and values, the share of slots that were in use, graphs captured."""
        now, before = self.counts, self._before
        drafted = now.drafted - before.drafted
        drafts = {"engine/draft_accepted": (now.accepted - before.accepted) / drafted} if drafted else {}
        if self.kept.book.asked:
            drafts["engine/prompt_kept"] = self.kept.book.found / self.kept.book.asked
        return drafts | {
            "engine/kv_gib": self._size() / 2**30,
            "engine/slots_in_use": (now.tokens - before.tokens) / max(now.slot_steps - before.slot_steps, 1),
            "engine/preemptions": float(now.preemptions - before.preemptions),
            "engine/captures": float(now.captures - before.captures),
            "engine/capture_seconds": now.capture_seconds - before.capture_seconds,
        }

    # --- graphs -----------------------------------------------------------------------------------------------------

    def decode(self, sampling: Sampling, slots: int, steps: int, share_prompts: bool, long_rows: int) -> None:
        """So many tokens more in each of the first slots; a step is captured once. long_rows: see `attend`."""
        key = replace(sampling, max_new_tokens=1, stop=()), slots, share_prompts, long_rows
        replay = self._known(key, lambda: self._capture_decode(sampling, slots, share_prompts, long_rows))
        for _ in range(steps):
            replay()
        self.counts.slot_steps += steps * slots

    def prefill(
        self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, first_P: Tensor, capture: bool = True
    ) -> Tensor | None:
        """Prompts, padded on the right, into their blocks (all on the CPU here); captured where they are few and whole.

        first_P: the tokens before are read, but kept elsewhere already. What the head reads, where nothing is captured.
        """
        decoder, blocks = self.decoder, self.blocks
        assert decoder is not None and blocks is not None
        prompts, steps = buckets(len(ids_PT))[-1], grown(ids_PT.shape[1], 64)
        complete = not bool(first_P.any())
        if prompts * steps > PREFILL_CAPTURED or not (complete and capture):
            first = None if complete else self.sent(first_P)
            return decoder.prefill(self.sent(ids_PT), self.sent(table_PB), self.sent(length_P), blocks, first)
        shapes = (prompts, steps), (prompts, -(-steps // blocks.block_size)), (prompts,)
        given = ids_PT, table_PB, length_P
        # Padded with prompts of no token, which leave nothing behind.
        filled = [torch.zeros(shape, dtype=tensor.dtype) for shape, tensor in zip(shapes, given, strict=True)]
        for whole, part in zip(filled, given, strict=True):
            whole[tuple(slice(size) for size in part.shape)] = part
        inputs, replay = self._known((prompts, steps), lambda: self._capture_prefill(filled))
        for kept, tensor in zip(inputs, filled, strict=True):
            kept.copy_(self.sent(tensor))
        replay()
        return None

    def prefill_behind(self, ids_PT: Tensor, table_PB: Tensor, length_P: Tensor, past_P: Tensor) -> None:
        """Tokens behind `past_P` others that lie in the same blocks (all on the CPU here); nothing is captured."""
        assert self.decoder is not None and self.blocks is not None
        ids, table, length, past = (self.sent(tensor) for tensor in (ids_PT, table_PB, length_P, past_P))
        self.decoder.prefill_behind(ids, table, length, past, int(past_P.max()), self.blocks)

    def _capture_prefill(self, like: Sequence[Tensor]) -> tuple[Sequence[Tensor], Callable[[], None]]:
        decoder, blocks = self.decoder, self.blocks
        assert decoder is not None and blocks is not None
        ids_PT, table_PB, length_P = (torch.zeros_like(tensor, device=self.device) for tensor in like)

        def prefill() -> None:
            decoder.prefill(ids_PT, table_PB, length_P, blocks)

        return (ids_PT, table_PB, length_P), self._captured(prefill)

    def sent(self, tensor: Tensor) -> Tensor:
        """To the device, without waiting for it."""
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _known(self, key: Any, make: Callable[[], Made]) -> Made:
        if key not in self._graphs:
            began = time.perf_counter()
            self._graphs[key] = make()
            self.counts.captures += 1
            self.counts.capture_seconds += time.perf_counter() - began
        return self._graphs[key]

    def _capture_decode(self, sampling: Sampling, slots: int, share_prompts: bool, long: int) -> Callable[[], None]:
        decoder, blocks, buffers = self.decoder, self.blocks, self.buffers
        assert decoder is not None and blocks is not None and buffers is not None
        state_FS, table_SB = buffers.state_FS, buffers.table_SB[:slots]
        outputs = buffers.outputs if sampling.repetition_penalty != 1.0 else replace(buffers.outputs, seen_SV=None)

        def decode() -> None:
            sample(decoder.decode(state_FS, table_SB, blocks, share_prompts, long), sampling, state_FS, outputs)

        kept = state_FS.clone()
        state_FS[LIVE] = 0  # kernels are compiled and libraries warmed up on slots that nobody is in
        graph = self._captured(decode)
        state_FS.copy_(kept)
        return graph

    def _captured(self, work: Callable[[], None]) -> Callable[[], None]:
        """What replays it; it is done once before."""
        if self.device.type != "cuda":
            return work
        if self._graph_pool is None:
            self._graph_pool = torch.cuda.graph_pool_handle()
        # One stream for all: what the allocator keeps of one capture serves the next.
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        graph, _ = capture(work, self._stream, self._graph_pool, warm_up=True)
        return graph.replay


def grown(number: int, least: int = 8) -> int:
    """Rounded up to eighths of a power of two: the next call may need a little more, and then needs nothing new."""
    step = max(1 << max(number.bit_length() - 3, 0), least)
    return -(-number // step) * step
