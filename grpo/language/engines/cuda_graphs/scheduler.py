"""One rollout: rows take slots, steps are replayed, rows that have ended make room.

The host runs one chunk of steps behind the device: while a chunk is computed it looks at what the one before has left,
hands over the groups that are complete, and fills or closes slots. It never waits for a single token. What it decides
follows from the tokens alone, not from the clock: the same rows in the same order, every time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from grpo.language.engines import Completion, Sampling, Stop
from grpo.language.engines.cuda_graphs.blocks import needed
from grpo.language.engines.cuda_graphs.kernels import FIELDS, LIMIT, LIVE, POSITION, PROMPT, ROW, STEP, TOKEN
from grpo.language.engines.cuda_graphs.model_runner import Machine, Need, buckets
from grpo.language.engines.cuda_graphs.sampler import ENDED_BY_EOS
from grpo.language.engines.sampling import StopTexts, uniforms

CHUNK = 8
"""Steps between two looks of the host."""
SLOTS = 1024
"""Rows that are decoded at a time, at most."""
READ_AT_A_TIME = 32_768
"""Tokens of prompts, padding included, in one pass."""
SHARED_BY = 3
SHARED_BYTES = 48 * 2**20
"""Completions of a prompt, and bytes of a layer's keys and values of the prompts of all slots, from which on it pays to
read a prompt once for several rows: a kernel more, for fewer bytes."""


@dataclass(eq=False)
class Row:
    """One completion that is asked for."""

    number: int
    prompt: int
    limit: int
    pages: list[int] = field(default_factory=list)
    steps: int = 0
    """That were computed since it has a slot, whether or not it ended among them."""
    over: bool = False


@dataclass
class Shared:
    """A prompt, and those of its pages that its completions share: all of it but the last token."""

    ids: Sequence[int]
    rows: int
    """Completions that have not ended."""
    pages: list[int] | None = None
    read: bool = False


@dataclass(frozen=True)
class Mark:
    """What the device will have left after a chunk."""

    rows: Sequence[Row | None]
    """In which slot which row was."""
    live_S: Tensor
    step_S: Tensor
    """Tokens made so far."""
    done: Any
    """The event after which it may be read."""


class Rollout:
    """One call's rows on their way through the slots."""

    def __init__(
        self,
        machine: Machine,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        count: int,
        sampling: Sampling,
        seeds: Sequence[int],
        slots: int | None = None,
    ) -> None:
        rows = [Row(number, number // count, limits[number // count]) for number in range(len(seeds))]
        self.machine, self.count, self.sampling, self.seeds = machine, count, sampling, seeds
        self.prompts = [Shared(prompt, count) for prompt in prompts]
        self.rows, self.waiting, self.longest = rows, deque(rows), max(limits)
        self.most = min(slots or SLOTS, len(rows))
        self.decoder, self.pages, self.buffers = machine.begin(self._need(rows))
        self.state_FS, self.table_SP, self.outputs = self.buffers.state_FS, self.buffers.table_SP, self.buffers.outputs
        self.sizes = buckets(self.most)
        self.slots: list[Row | None] = []
        self.stops = StopTexts(machine.tokens.tokenizer, sampling.stop) if sampling.stop else None
        self.looked = [0] * len(rows)
        """Tokens of each row in which stop texts have been looked for."""
        self.stopped: dict[int, int] = {}
        """Rows that a stop text has ended, and their lengths."""
        width = max(2 * how.kv_heads * how.head_dim for how in self.decoder.layers) * self.decoder.dtype.itemsize
        read = sum(map(len, prompts)) / len(prompts)
        self.pays = SHARED_BYTES / (read * width) if count >= SHARED_BY else math.inf
        """Slots from which on neighbours attend to their prompt together."""
        self.cuda = machine.device.type == "cuda"
        self.copies = torch.cuda.Stream(machine.device) if self.cuda else None  # type: ignore[no-untyped-call]
        self.state_FS[LIVE] = 0
        self.outputs.ended_R.zero_()
        self.outputs.kept_RT.fill_(1.0)

    def _need(self, rows: Sequence[Row]) -> Need:
        own = [needed(row.limit + 1) for row in rows]  # the last token of the prompt is written with the completion
        shared = [needed(len(prompt.ids) - 1) for prompt in self.prompts]
        # The neediest that may be there at once.
        pages = sum(sorted(own, reverse=True)[: self.most])
        pages += sum(sorted(shared, reverse=True)[: -(-self.most // self.count) + 1])
        table = max(a + shared[row.prompt] for a, row in zip(own, rows, strict=True))
        return Need(self.most, len(rows), self.longest, table, pages, self.sampling.repetition_penalty != 1.0)

    def __call__(self) -> Iterator[tuple[int, list[Completion]]]:
        """A prompt's number and its completions, as soon as the last of them has ended."""
        self.machine.busy = True
        try:
            yield from self._groups()
        finally:
            self._close()
            self.machine.end()

    def _groups(self) -> Iterator[tuple[int, list[Completion]]]:
        before: Mark | None = None
        self._fill()
        # While the prompts are read.
        noise_RT = uniforms(self.seeds, self.longest)
        self.outputs.uniform_RT[: len(self.seeds), : self.longest] = self._sent(noise_RT, torch.float64)
        while self.waiting or any(self.slots):
            mark = self._chunk()
            if before is not None:
                yield from self._complete(self._ended(before))
            before = mark
            self._fill()
        if before is not None:  # what it says is known: all have ended
            yield from self._complete(self._ended(before))

    def _close(self) -> None:
        """All pages are free again, whether or not the rows were wanted to their end."""
        for row in self.rows:
            self.pages.give(row.pages)
            row.pages = []
        for prompt in self.prompts:
            if prompt.pages:
                self.pages.give(prompt.pages)
                prompt.pages = None

    # --- slots ------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Close the gaps where that makes for a smaller graph, and let waiting rows in."""
        alive = sum(row is not None for row in self.slots)
        coming = self._next(self.most - alive) if self._worth(alive) else []
        if self.waiting and not alive and not coming:
            raise RuntimeError(f"{self.pages.free} free pages do not hold one row: pages were lost; close the engine")
        if not coming:
            if alive and self._bucket(alive) < self._bucket(len(self.slots)):
                self._close_up()
            return
        self._read([self.prompts[number] for number in dict.fromkeys(row.prompt for row in coming)])
        free = [slot for slot, row in enumerate(self.slots) if row is None]
        fresh = range(len(self.slots), len(self.slots) + len(coming) - len(free))
        self.slots += [None] * len(fresh)
        at = [*free, *fresh][: len(coming)]
        self._seat(coming, at)

    def _worth(self, alive: int) -> bool:
        """Reading prompts holds up the rest, so it is done for several at a time."""
        return bool(self.waiting) and (not alive or self.most - alive >= max(self.most // 8, 1))

    def _next(self, room: int) -> list[Row]:
        """Rows, in order, that there are slots and pages for; their pages are taken."""
        coming: list[Row] = []
        while self.waiting and len(coming) < room:
            row = self.waiting[0]
            prompt = self.prompts[row.prompt]
            own, shared = needed(row.limit + 1), 0 if prompt.pages is not None else needed(len(prompt.ids) - 1)
            if own + shared > self.pages.free:
                break
            if prompt.pages is None:
                prompt.pages = self.pages.take(shared)
            row.pages = self.pages.take(own)
            coming.append(self.waiting.popleft())
        return coming

    def _read(self, prompts: Sequence[Shared]) -> None:
        """Keys and values of all but the last token of those that have not been read, similar lengths together."""
        new = sorted((p for p in prompts if not p.read and len(p.ids) > 1), key=lambda p: len(p.ids))
        start = 0
        while start < len(new):
            end = start + 1
            while end < len(new) and (len(new[end].ids) - 1) * (end + 1 - start) <= READ_AT_A_TIME:
                end += 1
            self._read_together(new[start:end])
            start = end

    def _read_together(self, prompts: Sequence[Shared]) -> None:
        lengths = [len(prompt.ids) - 1 for prompt in prompts]
        steps, width = max(lengths), needed(max(lengths))
        ids = [[*prompt.ids[:-1], *[0] * (steps - n)] for prompt, n in zip(prompts, lengths, strict=True)]
        table = [[*(prompt.pages or ()), *[0] * width][:width] for prompt in prompts]
        self.machine.read(
            torch.tensor(ids),
            torch.tensor(table, dtype=torch.int32).view(len(prompts), width),
            torch.tensor(lengths, dtype=torch.int32),
        )
        for prompt in prompts:
            prompt.read = True
        self.machine.counts.reads += len(prompts)

    def _seat(self, rows: Sequence[Row], at: Sequence[int]) -> None:
        """Put rows into slots."""
        columns, tables = [], []
        for row, slot in zip(rows, at, strict=True):
            self.slots[slot] = row
            prompt = self.prompts[row.prompt]
            read = len(prompt.ids) - 1
            column = [0] * FIELDS
            column[LIVE], column[TOKEN], column[POSITION] = 1, prompt.ids[-1], read
            column[LIMIT], column[ROW], column[PROMPT] = row.limit, row.number, read
            columns.append(column)
            mine = [*(prompt.pages or ()), *row.pages]
            tables.append([*mine, *[0] * (self.table_SP.shape[1] - len(mine))])
        slots_N = self._sent(at, torch.long)
        self.state_FS[:, slots_N] = self._sent(columns, torch.int32).t()
        self.table_SP[slots_N] = self._sent(tables, torch.int32)
        seen_SV = self.outputs.seen_SV
        if seen_SV is not None:
            seen_SV[slots_N] = 0
            seats = zip(rows, at, strict=True)
            pairs = [(slot, token) for row, slot in seats for token in {*self.prompts[row.prompt].ids}]
            slot_M, token_M = self._sent(pairs, torch.long).unbind(1)
            seen_SV[slot_M, token_M] = 1

    def _close_up(self) -> None:
        """Rows to the front, so that a smaller graph holds them."""
        stay = [slot for slot, row in enumerate(self.slots) if row is not None]
        stay_N = self._sent(stay, torch.long)
        self.state_FS[:, : len(stay)] = self.state_FS[:, stay_N]
        self.state_FS[LIVE, len(stay) :] = 0
        self.table_SP[: len(stay)] = self.table_SP[stay_N]
        if self.outputs.seen_SV is not None:
            self.outputs.seen_SV[: len(stay)] = self.outputs.seen_SV[stay_N]
        self.slots = [self.slots[slot] for slot in stay]

    def _bucket(self, slots: int) -> int:
        return next(size for size in self.sizes if size >= slots)

    def _sent(self, values: Any, dtype: torch.dtype) -> Tensor:
        """To the device, without waiting for it."""
        return self.machine.sent(torch.as_tensor(values, dtype=dtype))

    # --- steps ------------------------------------------------------------------------------------------------------

    def _chunk(self) -> Mark | None:
        """Some steps of all slots, and a note of which are still live behind them; none where all must have ended."""
        seated = [row for row in self.slots if row is not None]
        steps = min(CHUNK, max((row.limit - row.steps for row in seated), default=0))
        if steps <= 0:
            return None
        for row in seated:
            row.steps += steps
        size = self._bucket(len(self.slots))
        replay = self.machine.step(self.sampling, size, size >= self.pays)
        for _ in range(steps):
            replay()
        self.machine.counts.slot_steps += steps * size
        now = self.state_FS[: STEP + 1, : len(self.slots)]  # a list as index would be sent, and waited for
        now, done = torch.empty(now.shape, dtype=torch.int32, pin_memory=self.cuda).copy_(now, non_blocking=True), None
        if self.cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return Mark(list(self.slots), now[LIVE], now[STEP], done)

    def _ended(self, mark: Mark) -> list[Row]:
        """Rows that are known to be over since a mark; their slots and pages are free."""
        if mark.done is not None:
            mark.done.synchronize()
        seated = [
            (row, live, steps)
            for row, live, steps in zip(mark.rows, mark.live_S.tolist(), mark.step_S.tolist(), strict=True)
            if row is not None and not row.over
        ]
        if self.stops is not None:
            self._find_stops([(row, steps) for row, _, steps in seated])
        over = [row for row, live, _ in seated if not live or row.number in self.stopped]
        for row in over:
            row.over = True
            self.pages.give(row.pages)
            row.pages = []
            prompt = self.prompts[row.prompt]
            prompt.rows -= 1
            if not prompt.rows and prompt.pages is not None:
                self.pages.give(prompt.pages)
                prompt.pages = None
        if self.stops is not None:  # the device does not know of those
            ended = [slot for slot, row in enumerate(self.slots) if row is not None and row.over]
            self.state_FS[LIVE].index_fill_(0, self._sent(ended, torch.long), 0)
        self.slots = [None if row is None or row.over else row for row in self.slots]
        return over

    def _find_stops(self, rows: Sequence[tuple[Row, int]]) -> None:
        """Note the rows that have come to a stop text, and where."""
        assert self.stops is not None
        rows = [(row, steps) for row, steps in rows if steps > self.looked[row.number]]
        if not rows:
            return
        (made,) = self._fetched([row.number for row, _ in rows], self.outputs.made_RT)
        ends = [(k, t) for k, (row, steps) in enumerate(rows) for t in range(self.looked[row.number] + 1, steps + 1)]
        texts = [made[k, max(0, t - self.stops.tail) : t].tolist() for k, t in ends]
        for (k, t), reached in zip(ends, self.stops.reached(texts), strict=True):
            if reached:
                self.stopped.setdefault(rows[k][0].number, t)
        for row, steps in rows:
            self.looked[row.number] = steps

    def _complete(self, over: Sequence[Row]) -> Iterator[tuple[int, list[Completion]]]:
        """Groups whose last row was among these."""
        numbers = [n for n in dict.fromkeys(row.prompt for row in over) if not self.prompts[n].rows]
        if not numbers:
            return
        at = [number * self.count + member for number in numbers for member in range(self.count)]
        out = self.outputs
        made, logp, kept, ended = self._fetched(at, out.made_RT, out.logp_RT, out.kept_RT, out.ended_R)
        made, ends = made.long(), ended.tolist()
        for i, number in enumerate(numbers):
            these = range(i * self.count, (i + 1) * self.count)
            yield number, [self._completion(at[k], made[k], logp[k], kept[k], ends[k]) for k in these]

    def _completion(self, number: int, made_T: Tensor, logp_T: Tensor, kept_T: Tensor, code: int) -> Completion:
        length = code >> 2
        reason: Stop = "eos" if code & 3 == ENDED_BY_EOS else "length"
        stopped = self.stopped.get(number)
        if stopped is not None and (not length or stopped < length or reason == "length"):
            length, reason = stopped, "stop"
        logp_T = logp_T[:length]
        if not math.isfinite(float(logp_T.sum())):
            raise FloatingPointError("the model's logits are not finite: its weights hold NaN or infinity, or overflow")
        share: float | None = 1.0
        if self.sampling.temperature == 0.0:
            share = None
        elif self.sampling.truncates:
            share = float(kept_T[:length].mean())
        self.machine.counts.tokens += length
        return Completion(made_T[:length], logp_T, reason, share)

    def _fetched(self, at: Sequence[int], *wanted: Tensor) -> tuple[Tensor, ...]:
        """These rows of the outputs; beside the steps that are being computed, not behind them."""
        if not self.cuda:
            return tuple(tensor[list(at)] for tensor in wanted)
        with torch.cuda.stream(self.copies):
            at_K = self._sent(at, torch.long)
            return tuple(tensor[at_K].cpu() for tensor in wanted)
