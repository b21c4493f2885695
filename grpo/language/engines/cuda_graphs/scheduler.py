"""One rollout: sequences take slots, decode steps are replayed, sequences that have ended make room.

The host runs one chunk of steps behind the device: while a chunk is computed it looks at what the one before has left,
hands over the groups that are complete, and fills or closes slots. It never waits for a single token. What it decides
follows from the tokens alone, not from the clock: the same sequences in the same order, every time.

A sequence gets blocks as it becomes longer. Where there are none left, the last of those that have a slot gives up its
slot and its blocks and waits; it is gone on with, behind the tokens it has and with the numbers of its own seed, when
others have ended. What it says does not depend on it.

Letters: S slots, F fields of a slot's state, B blocks of a sequence, R sequences as rows of the outputs, M pairs.
"""

from __future__ import annotations

import math
from collections import abc, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo.language.engines import Completion, Sampling, in_groups
from grpo.language.engines.cuda_graphs.blocks import blocks_for
from grpo.language.engines.cuda_graphs.drafts import Draft, verify
from grpo.language.engines.cuda_graphs.fused_decoder import FusedDecoder
from grpo.language.engines.cuda_graphs.kernels import FIELDS, LIMIT, LIVE, LONG, POSITION, PROMPT, ROW, STEP, TOKEN
from grpo.language.engines.cuda_graphs.model_runner import ModelRunner, Need, buckets
from grpo.language.engines.cuda_graphs.noise import Noise
from grpo.language.engines.cuda_graphs.pages import PAGE, Pages, may_grow
from grpo.language.engines.cuda_graphs.reading import Going, Reading, read, read_behind
from grpo.language.engines.cuda_graphs.results import Results
from grpo.language.engines.cuda_graphs.sampler import ENDED_BY_EOS
from grpo.language.engines.cuda_graphs.sequence import Sequence, SequenceGroup
from grpo.language.engines.cuda_graphs.turns import go_on, keep
from grpo.language.engines.drafts import up_to_end

CHUNK = 8
"""Steps between two looks of the host."""
SLOTS = 1024
"""Sequences that are decoded at a time, at most."""
START = 32
"""Blocks of each sequence that memory is taken for at first: most rollouts need no more, and graphs stay."""
SHARED_BY = 3
SHARED_BYTES = 48 * 2**20
"""Completions of a prompt, and bytes of a layer's keys and values of the prompts of all slots, from which on it pays to
read a prompt once for several sequences: a kernel more, for fewer bytes."""


@dataclass(frozen=True)
class ChunkResult:
    """What the device will have left after a chunk."""

    sequences: abc.Sequence[Sequence | None]
    """In which slot which one was."""
    live_S: Tensor
    step_S: Tensor
    """Tokens made so far."""
    done: Any
    """The event after which it may be read."""


class Scheduler:
    """One call's sequences on their way through the slots."""

    def __init__(
        self,
        runner: ModelRunner,
        prompts: abc.Sequence[abc.Sequence[int]],
        limits: abc.Sequence[int],
        count: int,
        sampling: Sampling,
        seeds: abc.Sequence[int],
        slots: int | None = None,
        drafts: abc.Sequence[abc.Sequence[int]] = (),
    ) -> None:
        self.runner, self.count, self.sampling, self.seeds = runner, count, sampling, seeds
        self.groups = [SequenceGroup(number, prompt, count) for number, prompt in enumerate(prompts)]
        self.sequences = [Sequence(n, self.groups[n // count], limits[n // count]) for n in range(len(seeds))]
        if drafts and sampling.repetition_penalty == 1.0 and isinstance(runner.decoder, FusedDecoder):
            for sequence, draft in zip(self.sequences, drafts, strict=True):
                sequence.draft = up_to_end(draft[: sequence.limit], runner.tokens.eos)
        self.early: list[Sequence] = []
        """Sequences that have ended with their draft."""
        self.kept = runner.kept if runner.keeps() else None
        self.waiting, self.longest = deque(self.sequences), max(limits)
        self.most = min(slots or SLOTS, len(seeds))
        self.decoder, self.blocks, self.buffers = runner.begin(self._need())
        for group in self.groups if self.kept is not None else ():  # what is taken earlier may lie in blocks of before
            group.kept = runner.kept.book.take(group.prompt_ids)
        self.state_FS, self.table_SB, self.outputs = self.buffers.state_FS, self.buffers.table_SB, self.buffers.outputs
        self.sizes = buckets(self.most)
        self.pages = Pages(self.blocks, runner.more_blocks, self.kept)
        self.noise = Noise(seeds, self.longest, self.outputs.uniform_RW, runner.sent)
        self.slots: list[Sequence | None] = []
        self.provided = 0
        """Steps for which all that have a slot have blocks and numbers."""
        self.results = Results(runner, self.outputs, sampling, len(seeds))
        width = max(2 * how.kv_heads * how.head_dim for how in self.decoder.layers) * self.decoder.dtype.itemsize
        length = sum(map(len, prompts)) / len(prompts)
        self.share_prompts_from = SHARED_BYTES / (length * width) if count >= SHARED_BY else math.inf
        """Slots from which on neighbours attend to their prompt together."""
        self.cuda = runner.device.type == "cuda"
        self.state_FS[LIVE] = 0

    def _need(self) -> Need:
        own = [sequence.blocks_needed for sequence in self.sequences]
        shared = [group.blocks_needed for group in self.groups]
        # The neediest that may be there at once.
        neediest = sorted(own, reverse=True)[: self.most]
        prompts = sum(sorted(shared, reverse=True)[: -(-self.most // self.count) + 1])
        held = self.runner.blocks
        prompts += held.count - held.num_free if held is not None and self.kept is not None else 0
        return Need(
            slots=self.most,
            rows=len(self.sequences),
            steps=self.longest,
            table=max(sequence.blocks_needed + sequence.group.blocks_needed for sequence in self.sequences),
            first=sum(min(blocks, START) for blocks in neediest) + prompts,
            blocks=sum(neediest) + prompts,
            penalty=self.sampling.repetition_penalty != 1.0,
            cuts=self.sampling.truncates,
        )

    def __call__(self) -> Iterator[tuple[int, list[Completion]]]:
        """A prompt's number and its completions, as soon as the last of them has ended."""
        self.runner.busy = True
        try:
            yield from self._run()
        finally:
            self._close()
            self.runner.end()

    def _run(self) -> Iterator[tuple[int, list[Completion]]]:
        before: ChunkResult | None = None
        self._schedule()
        while self.waiting or any(self.slots) or self.early:
            if not self._provide():
                if before is not None:  # those that have ended make room
                    yield from self._complete(self._finished(before))
                    before = None
                self._make_room()
            result = self._decode_chunk()
            if before is not None:
                yield from self._complete(self._finished(before))
            if self.early:
                ended, self.early = self.early, []
                yield from self._complete(ended)
            before = result
            self._schedule()
        if before is not None:  # what it says is known: all have ended
            yield from self._complete(self._finished(before))

    def _close(self) -> None:
        """All blocks are free again, whether or not the sequences were wanted to their end."""
        for sequence in self.sequences:
            self.pages.leave(sequence)
        for group in self.groups:
            self.pages.leave_prompt(group)
            self._copied([group])

    # --- blocks and numbers -----------------------------------------------------------------------------------------

    def _chunk(self) -> int:
        """Steps until the next look."""
        return min(CHUNK, max((one.limit - one.steps for one in self.slots if one is not None), default=0))

    def _provide(self) -> bool:
        """Whether all that have a slot have blocks for the next chunk; they get what they lack, and numbers too."""
        steps = self._chunk()
        if steps <= self.provided:
            return True
        seated = sorted((one.number, slot) for slot, one in enumerate(self.slots) if one is not None)
        added: list[tuple[int, int, int]] = []
        enough = True
        for number, slot in seated:
            sequence = self.sequences[number]
            mine = self.pages.extend(sequence, steps)
            enough = mine is not None
            if mine is None:
                break
            at = len(sequence.group.blocks or ()) + len(sequence.blocks) - len(mine)
            added += [(slot, at + i, block) for i, block in enumerate(mine)]
        if added:
            slot_M, at_M, block_M = self._sent(added, torch.long).unbind(1)
            self.table_SB[slot_M, at_M] = block_M.int()
        if not enough:
            return False
        rows = [self.sequences[number] for number, _ in seated]
        self.noise.provide([row for row in rows if self.noise.ahead(row) < min(steps, row.limit - row.steps)])
        self.provided = min((self._ahead(row) for row in rows), default=0)
        return True

    def _ahead(self, row: Sequence) -> int:
        """Steps for which it has all it needs; what has reached its limit needs nothing."""
        numbers, positions = self.noise.ahead(row), len(row.blocks) * self.blocks.block_size - row.steps
        left = row.limit - row.steps
        return min(CHUNK if n >= left else n for n in (numbers, positions))

    def _make_room(self) -> None:
        """Have the last ones wait until the others have blocks for the next chunk; nothing is being computed."""
        while not self._provide():
            seated = [(one.number, slot) for slot, one in enumerate(self.slots) if one is not None]
            idle = [group for group in self.groups if (group.prompt or group.kept) and not group.seated]
            if idle:
                for group in idle:
                    self.pages.leave_prompt(group)
                self._copied(idle)
            elif len(seated) > 1:
                self._preempt(max(seated)[1])
            else:
                held = self.sequences[seated[0][0]]
                raise torch.OutOfMemoryError(
                    f"a sequence of {held.group.shared_tokens + held.steps} tokens has all the keys and values that "
                    "there is memory for; lower max_completion_length, or leave the GPU to this run alone"
                )

    def _preempt(self, slot: int) -> None:
        """A sequence gives up its slot and its blocks, and is the next to get some."""
        sequence = self.slots[slot]
        assert sequence is not None
        self.slots[slot] = None
        self.state_FS[LIVE, slot] = 0
        self.pages.leave(sequence)
        sequence.group.seated -= 1
        self.waiting.appendleft(sequence)
        self.runner.counts.preemptions += 1

    # --- slots ------------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Close the gaps where that makes for a smaller graph, and let waiting sequences in."""
        alive = sum(sequence is not None for sequence in self.slots)
        coming = self._admitted(self.most - alive) if self._worth(alive) else []
        if self.waiting and not alive and not coming:
            free = self.blocks.num_free
            raise RuntimeError(f"{free} free blocks do not hold one sequence: blocks were lost; close the engine")
        if not coming:
            if alive and self._bucket(alive) < self._bucket(len(self.slots)):
                self._compact()
            return
        self._prefill(coming)
        coming = self._verified(coming)
        if not coming:
            return
        free_slots = [slot for slot, sequence in enumerate(self.slots) if sequence is None]
        fresh = range(len(self.slots), len(self.slots) + len(coming) - len(free_slots))
        self.slots += [None] * len(fresh)
        at = [*free_slots, *fresh][: len(coming)]
        self._seat(coming, at)

    def _worth(self, alive: int) -> bool:
        """Prefill holds up the rest, so it is done for several at a time."""
        return bool(self.waiting) and (not alive or self.most - alive >= max(self.most // 8, 1))

    def _admitted(self, room: int) -> list[Sequence]:
        """Sequences, in order, that there are slots and blocks for, and a page more for all; they get their blocks."""
        coming: list[Sequence] = []
        spare = sum(min(PAGE, may_grow(sequence)) for sequence in self.slots if sequence is not None)
        alone = not any(self.slots)
        while self.waiting and len(coming) < room and self.pages.enter(self.waiting[0], spare):
            coming.append(self.waiting.popleft())
            spare += min(PAGE, may_grow(coming[-1]))
        if alone and not coming and self.waiting:  # prompts of others that wait may be in its way
            for group in self.groups:
                self.pages.leave_prompt(group)
            self._copied(self.groups)  # there are no blocks to copy to: they are let go of
            if self.pages.enter(self.waiting[0], 0):
                coming.append(self.waiting.popleft())
        return coming

    def _prefill(self, sequences: abc.Sequence[Sequence]) -> None:
        """Keys and values of prompts that are new, and of what sequences that had to wait have said."""
        groups = [group for group in dict.fromkeys(one.group for one in sequences) if not group.prefilled]
        going, groups_anew = [group for group in groups if group.kept], [group for group in groups if not group.kept]
        readings = [Reading(group.prompt_ids[:-1], group.blocks or ()) for group in groups_anew if group.shared_tokens]
        self.runner.counts.prefills += len(readings)
        read_behind(self.runner, self._copied(going))
        for one in sequences:
            if one.steps:
                ids = [*one.group.prompt_ids, *self.results.said(one)[:-1]]
                readings.append(Reading(ids, one.blocks[: blocks_for(one.steps)], one.group.shared_tokens))
        read(self.runner, readings)
        for group in groups:
            group.prefilled = True

    def _copied(self, groups: abc.Sequence[SequenceGroup]) -> list[Going]:
        """What is kept for them, into their blocks if they have any; what is new."""
        return [] if self.kept is None else go_on(groups, self.kept, self.blocks, self.runner.device)

    def _verified(self, sequences: abc.Sequence[Sequence]) -> list[Sequence]:
        """Those that go on: behind as much of their drafts as is right, if they have any."""
        drafts = []
        for one in sequences:
            if one.draft:
                ids, blocks = [*one.group.prompt_ids, *one.draft[:-1]], one.blocks[: blocks_for(len(one.draft))]
                seed = self.seeds[one.number]
                drafts.append(Draft(ids, blocks, one.group.shared_tokens, one.number, one.draft, seed))
        if not drafts:
            return list(sequences)
        for number, made in verify(self.runner, drafts, self.sampling).items():
            one = self.sequences[number]
            one.steps, one.draft = made, ()
            self.noise.begin(number, made)
        self._end_early([self.sequences[draft.row] for draft in drafts])
        return [one for one in sequences if not one.finished]

    def _end_early(self, sequences: abc.Sequence[Sequence]) -> None:
        """Those whose drafts have brought them to their end."""
        eos, at = self.runner.tokens.eos, [one.steps - 1 for one in sequences]
        last_N = self.results.windows([one.number for one in sequences], at, 1)[:, 0].tolist()
        ended = [(one, t) for one, t in zip(sequences, last_N, strict=True) if t in eos or one.steps >= one.limit]
        self.results.find_stops([(one, one.steps) for one, _ in ended])
        for one, token in ended:
            self.results.ended[one.number] = 4 * one.steps + (ENDED_BY_EOS if token in eos else 2)
            self.early.append(one)
            self._end(one)

    def _end(self, sequence: Sequence) -> None:
        """It has ended: its blocks are free, and its prompt's with the last of its group."""
        sequence.finished = True
        self.pages.leave(sequence)
        sequence.group.unfinished -= 1
        if not sequence.group.unfinished:
            self.pages.leave_prompt(sequence.group)

    def _seat(self, sequences: abc.Sequence[Sequence], at: abc.Sequence[int]) -> None:
        """Put sequences into slots."""
        columns, tables = [], []
        width = max(len(one.group.blocks or ()) + len(one.blocks) for one in sequences)
        for sequence, slot in zip(sequences, at, strict=True):
            self.slots[slot] = sequence
            group, made = sequence.group, sequence.steps
            group.seated += 1
            column = [0] * FIELDS
            column[LIVE], column[TOKEN], column[POSITION] = 1, group.prompt_ids[-1], group.shared_tokens + made
            column[STEP], column[LIMIT], column[ROW] = made, sequence.limit, sequence.number
            column[PROMPT] = group.shared_tokens
            columns.append(column)
            mine = [*(group.blocks or ()), *sequence.blocks]
            tables.append([*mine, *[0] * (width - len(mine))])
        self.provided = 0
        slots_N = self._sent(at, torch.long)
        self.state_FS[:, slots_N] = self._sent(columns, torch.int32).t()
        self.table_SB[slots_N, :width] = self._sent(tables, torch.int32)
        begun = [(slot, one.number, one.steps - 1) for one, slot in zip(sequences, at, strict=True) if one.steps]
        if begun:
            slot_M, row_M, step_M = self._sent(begun, torch.long).unbind(1)
            self.state_FS[TOKEN, slot_M] = self.outputs.made_RT[row_M, step_M]
        self._mark_seen(sequences, at, slots_N)

    def _mark_seen(self, sequences: abc.Sequence[Sequence], at: abc.Sequence[int], slots_N: Tensor) -> None:
        """For the repetition penalty: the tokens of prompts, and of what was said."""
        seen_SV = self.outputs.seen_SV
        if seen_SV is None:
            return
        seen_SV[slots_N] = 0
        pairs = []
        for sequence, slot in zip(sequences, at, strict=True):
            said = self.results.said(sequence) if sequence.steps else []
            pairs += [(slot, token) for token in {*sequence.group.prompt_ids, *said}]
        slot_M, token_M = self._sent(pairs, torch.long).unbind(1)
        seen_SV[slot_M, token_M] = 1

    def _compact(self) -> None:
        """Sequences to the front, so that a smaller graph holds them."""
        stay = [slot for slot, sequence in enumerate(self.slots) if sequence is not None]
        stay_N = self._sent(stay, torch.long)
        self.state_FS[:, : len(stay)] = self.state_FS[:, stay_N]
        self.state_FS[LIVE, len(stay) :] = 0
        self.table_SB[: len(stay)] = self.table_SB[stay_N]
        if self.outputs.seen_SV is not None:
            self.outputs.seen_SV[: len(stay)] = self.outputs.seen_SV[stay_N]
        self.slots = [self.slots[slot] for slot in stay]

    def _bucket(self, slots: int) -> int:
        return next(size for size in self.sizes if size >= slots)

    def _sent(self, values: Any, dtype: torch.dtype) -> Tensor:
        """To the device, without waiting for it."""
        return self.runner.sent(torch.as_tensor(values, dtype=dtype))

    # --- steps ------------------------------------------------------------------------------------------------------

    def _decode_chunk(self) -> ChunkResult | None:
        """Some steps of all slots, and a note of which are still live behind them; none where all must have ended."""
        steps = self._chunk()
        if steps <= 0:
            return None
        reach = live = 0
        for sequence in self.slots:
            if sequence is not None:
                sequence.steps += steps
                reach, live = max(reach, sequence.group.shared_tokens + sequence.steps), live + 1
        self.provided -= steps
        size = self._bucket(len(self.slots))
        few = 1 << (live - 1).bit_length()  # a smallest graph may be nearly empty
        long_rows = few if reach > LONG and few < size == self.sizes[0] else 0
        self.runner.decode(self.sampling, size, steps, size >= self.share_prompts_from, long_rows)
        now = self.state_FS[: STEP + 1, : len(self.slots)]  # a list as index would be sent, and waited for
        now, done = torch.empty(now.shape, dtype=torch.int32, pin_memory=self.cuda).copy_(now, non_blocking=True), None
        if self.cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return ChunkResult(list(self.slots), now[LIVE], now[STEP], done)

    def _finished(self, result: ChunkResult) -> list[Sequence]:
        """Sequences that are known to have ended since a chunk; their slots and blocks are free."""
        if result.done is not None:
            result.done.synchronize()
        seated = [
            (sequence, live, steps)
            for sequence, live, steps in zip(
                result.sequences, result.live_S.tolist(), result.step_S.tolist(), strict=True
            )
            if sequence is not None and not sequence.finished
        ]
        self.results.find_stops([(sequence, steps) for sequence, _, steps in seated])
        finished = [sequence for sequence, live, _ in seated if not live or sequence.number in self.results.stopped]
        if self.kept is not None and finished:
            keep(finished, self.results.ids(finished), self.kept, self.blocks)
        for sequence in finished:
            sequence.group.seated -= 1
            self._end(sequence)
        if self.results.stops is not None:  # the device does not know of those
            ended = [slot for slot, sequence in enumerate(self.slots) if sequence is not None and sequence.finished]
            self.state_FS[LIVE].index_fill_(0, self._sent(ended, torch.long), 0)
        self.slots = [None if sequence is None or sequence.finished else sequence for sequence in self.slots]
        return finished

    def _complete(self, finished: abc.Sequence[Sequence]) -> Iterator[tuple[int, list[Completion]]]:
        """Groups whose last sequence was among these."""
        groups = [group for group in dict.fromkeys(one.group for one in finished) if not group.unfinished]
        if groups:
            rows = [group.number * self.count + member for group in groups for member in range(self.count)]
            made = self.results.completions([self.sequences[row] for row in rows])  # of all of them in one go
            yield from ((groups[number].number, mine) for number, mine in in_groups(made, self.count))
