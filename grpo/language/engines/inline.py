"""Our own sampling loop over the very module that is trained: no copy of the weights, nothing to keep in step.

A prompt is read once and its keys and values are shared out to its completions; rows that have ended leave the batch,
so that the cost follows the rows that are still written. Between the turns of a conversation they are kept
(`prefixes`), and a turn reads what is new in it. Log-probs are recorded as the tokens are drawn. On a GPU the
steps are captured as CUDA graphs (`cuda_graphs`), where the model allows it.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from grpo.config import ConfigError
from grpo.errors import warn
from grpo.language.engines import Completion, Engine, Groups, Sampling, Stop, Tokens
from grpo.language.engines.attention import folded_heads, give_room
from grpo.language.engines.batch import LiveRows, Written
from grpo.language.engines.drafts import Begun, Draft, begun, up_to_end
from grpo.language.engines.linears import laid_out
from grpo.language.engines.prefixes import KEPT_BYTES, Prefixes, Remembered, can_keep
from grpo.language.engines.reading import Reader
from grpo.language.engines.sampling import StopTexts, draw, uniforms
from grpo.language.pictures.ids import alike, then
from grpo.language.scoring.head import unrounded

if TYPE_CHECKING:
    from grpo.language.engines.cuda_graphs.model_runner import ModelRunner

PICTURED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "idefics3", "smolvlm", "llava", "llava_next")
"""Layouts of image-text models whose prompts with images are read here as the module itself reads them."""
LOGITS = 2**26
"""That are there at a time when drafts are checked."""


class InlineEngine(Engine):
    """Samples with the module itself, on the CPU or a GPU."""

    name = "inline"
    exact = True

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        *,
        rows_at_a_time: int | None = None,
        graphs: bool | None = None,
        blocks: int | None = None,
        kept_bytes: int | None = None,
    ) -> None:
        """rows_at_a_time, blocks (of keys and values): at most; None: by need. graphs: None: where there is a GPU.
        kept_bytes: of keys and values that are kept between turns, at most; 0: every turn reads all of its own;
        None: a gibibyte, and nothing where steps are captured on a GPU."""
        reason = self.supports(model)
        if reason:
            raise ConfigError(f"engine=inline cannot run this model: {reason}; use engine=transformers")
        config: Any = model.config
        if tokens.unsaid and config.model_type not in PICTURED:
            raise ConfigError(
                f"engine=inline reads the images of {', '.join(PICTURED)}, not of {config.model_type}; use "
                "engine=transformers"
            )
        if tokens.unsaid and graphs:
            raise ConfigError("engine_kwargs: graphs: images are read by the plain loop; leave graphs out, or false")
        self.model, self.tokens, self.rows_at_a_time = model, tokens, rows_at_a_time
        self.context = context_of(model)
        known = inspect.signature(bare(model).forward).parameters
        self._reader = Reader(model, tokens.pad, known)
        self._blocks = blocks
        most = KEPT_BYTES if kept_bytes is None else kept_bytes
        may_keep = most > 0 and not tokens.unsaid  # equal ids may show different images
        # With graphs on a GPU nobody has measured yet that it pays: who asks for it gets it.
        self._keeps = may_keep and (kept_bytes is not None or next(model.parameters()).device.type != "cuda")
        may_keep = may_keep and "position_ids" in self._reader.takes and can_keep(model, model.config)
        self._prefixes, self._most = Prefixes(most) if may_keep else None, most
        self._parties: dict[int, Prefixes] = {}
        """Of the present rollout, where some are sampled apart."""
        self._rollouts = 0
        """Of conversations, that are under way."""
        self._expected: Mapping[int, Sequence[int]] = {}
        self._drafted = self._accepted = 0
        on_gpu = next(model.parameters()).device.type == "cuda"
        self._runner: ModelRunner | None = None
        self.repeatable = not on_gpu
        self._graphs = on_gpu and not tokens.unsaid if graphs is None else graphs
        """Whether steps are captured; not again once it has been found that they cannot be."""

    @staticmethod
    def supports(model: nn.Module) -> str | None:
        """Why this loop cannot run a model, in a few words; None: it can."""
        config: Any = getattr(model, "config", None)
        if config is None or not hasattr(config, "get_text_config"):
            return f"{type(model).__name__} is not a transformers model"
        if getattr(config, "is_encoder_decoder", False):
            return "it has an encoder"
        adapter = getattr(model, "active_peft_config", None)
        if adapter is not None and adapter.is_prompt_learning:
            return f"its adapter ({adapter.peft_type.value}) puts learned tokens before the prompt"
        if getattr(bare(model), "_is_stateful", False):
            return "it carries a recurrent state, which padding would change"
        takes = inspect.signature(bare(model).forward).parameters
        named = {"past_key_values", "attention_mask"} | (set() if config.model_type in PICTURED else {"use_cache"})
        if not named <= takes.keys():
            return "its forward takes no cache"
        if getattr(config.get_text_config(decoder=True), "attention_chunk_size", None):
            return "its attention works in chunks, which padding would shift"
        odd = {type(layer).__name__ for layer in DynamicCache(config=config).layers}
        odd -= {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
        return f"it needs a cache of its own kind ({', '.join(sorted(odd))})" if odd else None

    def generate(
        self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Completion]:
        """`count` completions of each prompt, those of a prompt together; a seed for every completion."""
        made = dict(self.stream(prompts, count, sampling, seeds))
        return [completion for number in range(len(prompts)) for completion in made[number]]

    @torch.no_grad()
    def stream(self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]) -> Groups:
        """The same, a prompt's number and its completions at a time, as soon as the last of them has ended."""
        room = check(self.model, prompts, count, sampling, seeds)
        if not prompts:
            return
        if not self._rollouts:  # what follows is no conversation: of the last one nothing is told any more
            for book in self._books:
                book.asked = book.found = 0
        with evaluating(self.model), unrounded(head_of(self.model)):
            runner = self._graph_runner(max(map(len, prompts)) + max(room))
            if runner is not None:
                from grpo.language.engines.cuda_graphs.scheduler import Scheduler

                drafts = [self._expected.get(seed, ()) for seed in seeds] if self._expected else []
                yield from Scheduler(runner, prompts, room, count, sampling, seeds, self.rows_at_a_time, drafts)()
                return
            groups: dict[int, dict[int, Completion]] = {}
            with laid_out(self.model, max(room)), folded_heads():
                for row, completion in self._rows(prompts, room, count, sampling, seeds):
                    group = groups.setdefault(row // count, {})
                    group[row % count] = completion
                    if len(group) == count:
                        yield row // count, [group[member] for member in range(count)]

    def _graph_runner(self, positions: int) -> ModelRunner | None:
        """What decodes in CUDA graphs; None where it cannot be, which is said once."""
        if not self._graphs:
            return None
        try:
            if importlib.util.find_spec("triton") is None:
                raise ImportError("there is no triton; pip install triton")
            from grpo.language.engines.cuda_graphs.model_runner import ModelRunner
            from grpo.language.scoring.decoder_layout import Unsupported
        except ImportError as reason:
            self._without_graphs(str(reason))
            return None
        self._runner = self._runner or ModelRunner(self.model, self.tokens, blocks=self._blocks)
        if self._rollouts and self._keeps and not self._runner.conversing:
            self._runner.converse(True)
        try:
            self._runner.prepare(positions)
        except Unsupported as reason:
            self._without_graphs(str(reason))
        return self._runner

    def _without_graphs(self, reason: str) -> None:
        self._graphs, self._runner = False, None
        kind = type(bare(self.model)).__name__
        warn(f"sampling without CUDA graphs, which is slower: {kind}: {reason}")

    def _rows(
        self,
        prompts: Sequence[Sequence[int]],
        room: Sequence[int],
        count: int,
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> Iterator[tuple[int, Completion]]:
        """A row's number and its completion, as rows end."""
        known = self._begun(prompts, room, count, sampling, seeds)
        yield from ((row, one.made) for row, one in known.items() if one.over)
        said = [known[i].made.ids.tolist() if i in known else [] for i in range(len(seeds))]
        # Prompts of similar length go together: less padding.
        rows = [i for i in range(len(seeds)) if i not in known or not known[i].over]
        rows = sorted(rows, key=lambda i: len(prompts[i // count]) + len(said[i]))
        step = self.rows_at_a_time or max(len(rows), 1)
        for start in range(0, len(rows), step):
            batch = rows[start : start + step]
            asked = [then(prompts[i // count], said[i]) for i in batch]
            limits = [room[i // count] - len(said[i]) for i in batch]
            some = self._batch(asked, limits, sampling, [seeds[i] for i in batch], [said[i] for i in batch])
            for row, completion in some:
                i = batch[row]
                yield i, known[i].with_rest(completion) if i in known else completion

    def _begun(
        self,
        prompts: Sequence[Sequence[int]],
        room: Sequence[int],
        count: int,
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> dict[int, Begun]:
        """Rows of which a draft is known, as far as it is right and a token more."""
        self._drafted = self._accepted = 0
        known: dict[int, Begun] = {}
        if not self._expected or sampling.repetition_penalty != 1.0:
            return known
        stops = StopTexts(self.tokens.tokenizer, sampling.stop) if sampling.stop else None
        drafts = []
        for row, seed in enumerate(seeds):
            ids = up_to_end(self._expected.get(seed, ())[: room[row // count]], self.tokens.eos)
            if len(ids):
                drafts.append(Draft(row, prompts[row // count], ids, seed))
        drafts = sorted(drafts, key=lambda draft: len(draft.prompt) + len(draft.ids))
        longest = max((len(draft.prompt) + len(draft.ids) for draft in drafts), default=1)
        vocabulary = bare(self.model).get_output_embeddings().weight.shape[0]  # type: ignore[operator]
        step = max(LOGITS // (longest * vocabulary), 1)
        for start in range(0, len(drafts), step):
            known |= begun(self._scored, drafts[start : start + step], sampling, self.tokens.eos, stops)
        for row, one in known.items():
            known[row] = replace(one, over=one.over or len(one.made.ids) >= room[row // count])
        self._drafted = sum(len(draft.ids) for draft in drafts)
        self._accepted = sum(one.right for one in known.values())
        return known

    def _scored(self, ids_NT: Tensor) -> Tensor:
        """Logits behind every token; what is padded on the right is seen by none before it."""
        logits_NTV: Tensor = self.model(
            input_ids=ids_NT.to(next(self.model.parameters()).device), use_cache=False
        ).logits
        return logits_NTV

    def expect(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """What completions with these seeds may turn out to be."""
        self._expected = drafts

    @contextmanager
    def conversing(self, party: int = 0, of: int = 1) -> Iterator[None]:
        """Inside, what was made may be gone on from; parties have an equal share each."""
        mine = self._prefixes
        if mine is not None and not self._rollouts:
            mine.kept.asked = mine.kept.found = 0
            self._parties.clear()
        if mine is not None and of > 1:
            self._prefixes = self._parties.setdefault(party, Prefixes(self._most // of))
        self._rollouts += 1
        try:
            yield
        finally:
            self._prefixes = mine
            self._rollouts -= 1
            if not self._rollouts:
                self.refresh()
                if self._runner is not None and self._runner.conversing:
                    self._runner.converse(False)

    def refresh(self, version: int = 0) -> None:
        """What is kept is the old weights'."""
        for one in self._kept:
            one.forget()
        if self._runner is not None:
            self._runner.kept.forget(self._runner.blocks)

    def metrics(self) -> Mapping[str, float]:
        """Of the last rollout."""
        if self._runner is not None:
            return self._runner.metrics()
        told = {"engine/draft_accepted": self._accepted / self._drafted} if self._drafted else {}
        if asked := sum(one.kept.asked for one in self._kept):
            told["engine/prompt_kept"] = sum(one.kept.found for one in self._kept) / asked
        return told

    @property
    def _kept(self) -> list[Prefixes]:
        return [*self._parties.values(), *([] if self._prefixes is None else [self._prefixes])]

    @property
    def _books(self) -> list[Remembered[Any]]:
        """Of all that may be kept."""
        return [one.kept for one in self._kept] + ([] if self._runner is None else [self._runner.kept.book])

    def make_room(self) -> bool:
        """Let go of what is kept between rollouts; whether there was anything."""
        return self._runner is not None and self._runner.make_room()

    def close(self) -> None:
        """Let go of keys, values and graphs."""
        self._runner = None

    def _batch(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        sampling: Sampling,
        seeds: Sequence[int],
        said: Sequence[Sequence[int]],
    ) -> Iterator[tuple[int, Completion]]:
        """A row's number in the batch and its completion, as rows end; `said`: of its prompt, what belongs to it."""
        device, steps = next(self.model.parameters()).device, max(limits)
        live, logits_NV = self._prefill(prompts, limits, sampling.repetition_penalty != 1.0, device)
        eos = torch.tensor(sorted(self.tokens.eos), dtype=torch.long, device=device)
        unsaid = sorted(self.tokens.unsaid)
        never = torch.tensor(unsaid, dtype=torch.long, device=device) if unsaid else None
        stops = StopTexts(self.tokens.tokenizer, sampling.stop) if sampling.stop else None
        uniform_NT = uniforms(seeds, steps, [len(ids) for ids in said]).to(device)
        written = Written.empty(len(prompts), steps, self.tokens.pad, device)
        for t in range(steps):
            drawn = draw(logits_NV, sampling, uniform_NT[live.row_N, t], live.seen_NV, never)
            written.put(live.row_N, t, drawn)
            eos_N = torch.isin(drawn.token_N, eos)
            stop_N = torch.zeros_like(eos_N)
            if stops is not None:
                ends = written.made_NT[live.row_N, max(0, t + 1 - stops.tail) : t + 1].tolist()
                ends = [[*said[row][-stops.tail :], *end] for row, end in zip(live.row_N.tolist(), ends, strict=True)]
                stop_N = torch.tensor(stops.reached(ends), device=device) & ~eos_N
            over_N = eos_N | stop_N | (live.limit_N <= t + 1)
            token_N = drawn.token_N
            if bool(over_N.any()):
                over = [x[over_N].tolist() for x in (live.row_N, eos_N, stop_N)]
                if self._rollouts and self._prefixes is not None:
                    ids = [[*prompts[row], *written.made_NT[row, :t].tolist()] for row in over[0]]
                    self._prefixes.put(ids, *live.ended(over_N.nonzero()[:, 0]))
                for row, by_eos, by_stop in zip(*over, strict=True):
                    reason: Stop = "eos" if by_eos else "stop" if by_stop else "length"
                    yield row, written.completion(row, t + 1, reason, greedy=sampling.temperature == 0.0)
                going = (~over_N).nonzero()[:, 0]
                if not len(going):
                    break
                live.keep(going)
                token_N = token_N[going]
            live.append(token_N)
            logits_NV = self._reader.forward(token_N[:, None], live.next_N[:, None] + t, live.mask_NT, live.cache)

    def _prefill(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], penalty: bool, device: torch.device
    ) -> tuple[LiveRows, Tensor]:
        """All rows, and the logits behind their prompts; rows of one prompt share what was read."""
        distinct = {alike(prompt): prompt for prompt in prompts}
        number = {key: i for i, key in enumerate(distinct)}
        source_N = torch.tensor([number[alike(prompt)] for prompt in prompts], device=device)
        kept = self._prefixes if self._rollouts else None
        logits_PV, cache, mask_PT, next_P = self._reader.read(list(distinct.values()), device, kept)
        logits_NV, mask_NT = logits_PV[source_N], mask_PT[source_N]
        cache.batch_select_indices(source_N)
        give_room(cache)
        seen_NV = None
        if penalty:
            seen_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
            for row_V, prompt in zip(seen_NV, prompts, strict=True):
                row_V[list(prompt)] = True
        live = LiveRows(
            row_N=torch.arange(len(prompts), device=device),
            next_N=next_P[source_N],
            limit_N=torch.tensor(limits, device=device),
            mask_NT=None if bool(mask_NT.all()) else mask_NT,
            seen_NV=seen_NV,
            cache=cache,
        )
        return live, logits_NV


def bare(model: nn.Module) -> nn.Module:
    """The model under an adapter's wrapper."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return inner


def head_of(model: nn.Module) -> Any:
    """What makes logits of hidden states."""
    inner: Any = bare(model)
    return inner.get_output_embeddings()


def context_of(model: nn.Module) -> float:
    """Tokens that the model can read, as far as it says."""
    config: Any = model.config
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or math.inf


def check(
    model: nn.Module, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling, seeds: Sequence[int]
) -> list[int]:
    """Refuse what cannot be sampled; the most new tokens that fit behind each prompt."""
    if len(seeds) != len(prompts) * count:
        raise ValueError(f"{len(prompts)} prompts × {count} completions need as many seeds, not {len(seeds)}")
    if sampling.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens is {sampling.max_new_tokens}; ask for at least 1")
    config: Any = model.config
    vocabulary, context = getattr(config.get_text_config(decoder=True), "vocab_size", None), context_of(model)
    room = []
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ConfigError(f"prompt {i} is empty: the model needs at least one token to go on from")
        if vocabulary is not None and not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ConfigError(
                f"prompt {i} holds a token outside the model's vocabulary of {vocabulary}; is this its tokenizer?"
            )
        if len(prompt) >= context:
            raise ConfigError(
                f"prompt {i} has {len(prompt)} tokens and the model's context {context:.0f}; lower max_prompt_length"
            )
        room.append(int(min(sampling.max_new_tokens, context - len(prompt))))
    return room


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """eval(), and afterwards every submodule in the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
