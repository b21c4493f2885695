"""Decoding as on a GPU, its kernels interpreted: the same scheduler, blocks and arithmetic, without the graphs."""

import copy
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, Qwen3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="kernels need triton, which is there for Linux")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # in slots that nobody reads

from grpo.language.engines import Sampling, Tokens  # noqa: E402
from grpo.language.engines.cuda_graphs import (  # noqa: E402
    kernels,
    model_runner,
    noise,
    pages,
    sampler,
    scheduler,
    sequence,
)
from grpo.language.engines.cuda_graphs.attention import attending  # noqa: E402
from grpo.language.engines.cuda_graphs.blocks import BlockManager  # noqa: E402
from grpo.language.engines.cuda_graphs.decoder import COARSE, EXACT, allowed_gap, make_decoder  # noqa: E402
from grpo.language.engines.cuda_graphs.fused_decoder import FusedDecoder  # noqa: E402
from grpo.language.engines.cuda_graphs.kernels import Attention, attend  # noqa: E402
from grpo.language.engines.cuda_graphs.model_runner import buckets, grown  # noqa: E402
from grpo.language.engines.cuda_graphs.module_decoder import ModuleDecoder  # noqa: E402
from grpo.language.engines.cuda_graphs.sampler import Outputs, sample  # noqa: E402
from grpo.language.engines.inline import InlineEngine  # noqa: E402
from grpo.language.engines.sampling import draw, uniforms  # noqa: E402
from grpo.language.scoring.decoder_layout import Unsupported  # noqa: E402
from tests.unit.language.families import FAMILIES, FUSED, family  # noqa: E402
from tests.unit.language.tiny import tiny_model, tiny_tokenizer  # noqa: E402


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """An interpreter is not filled by many programs, and pays for each padded token of a captured prefill."""
    monkeypatch.setattr(kernels, "TARGET_PROGRAMS", 1)
    monkeypatch.setattr(model_runner, "PREFILL_CAPTURED", 0)
    monkeypatch.setattr(sampler, "BLOCK_V", 128)  # several blocks of a small vocabulary


def captured_prefill(monkeypatch):
    """Prompts are padded to the shape of a graph, by a little: by a prompt without tokens and three tokens each."""
    monkeypatch.setattr(model_runner, "PREFILL_CAPTURED", 8192)
    monkeypatch.setattr(model_runner, "buckets", lambda most: [most + 1])
    monkeypatch.setattr(model_runner, "grown", lambda number, least=8: number + 3)


def small():
    return tiny_model(num_hidden_layers=1, hidden_size=16, intermediate_size=16).to(DEVICE)


def ids_of(completions):
    return [completion.ids.tolist() for completion in completions]


def asked(*texts):
    return [tiny_tokenizer().encode(text) for text in (texts or ("What is 1 + 2?", "x", "Sort these digits: 4 1 9 3"))]


def tokens(eos=(10_000,)):
    return Tokens(tiny_tokenizer(), frozenset(eos), 0)


# --- kernels --------------------------------------------------------------------------------------------------------


def attended(how, q, key, value, position, prompt, base):
    """One row's attention by its definition; key and value as they lie in its blocks."""
    index = torch.arange(len(key))
    at = torch.where(index < prompt, index, index - base + prompt)
    sees = ((index < prompt) | (index >= base)) & (at <= position)
    if how.window is not None:
        sees &= at > position - how.window
    group = how.heads // how.kv_heads
    out = []
    for head in range(how.heads):
        score = key[:, head // group] @ q[head] * how.scale
        if how.softcap is not None:
            score = how.softcap * torch.tanh(score / how.softcap)
        out.append(score.masked_fill(~sees, -torch.inf).softmax(0) @ value[:, head // group])
    return torch.cat(out)


@pytest.mark.parametrize(("splits", "long_rows"), [(1, 0), (3, 3)], ids=["whole rows", "rows in parts"])
@pytest.mark.parametrize("share_prompts", [False, True], ids=["each row alone", "shared prompts"])
@pytest.mark.parametrize(
    "how",
    [
        Attention(6, 2, 16, 0.25),
        Attention(2, 2, 8, 0.3, window=21),
        Attention(4, 1, 24, 0.2, softcap=5.0),
    ],
    ids=["grouped", "window", "softcap"],
)
def test_a_new_token_attends_to_the_live_positions_of_its_row(monkeypatch, how, share_prompts, splits, long_rows):
    block_size, slots = 8, 9
    monkeypatch.setattr(kernels, "TARGET_PROGRAMS", splits * (long_rows or slots) * how.kv_heads)
    monkeypatch.setattr(kernels, "SPLITS", 1 if long_rows else 16)
    random = torch.Generator().manual_seed(0)
    blocks = BlockManager([how], 60, torch.float32, torch.device(DEVICE), block_size)
    for pool in blocks.kv_cache[0]:
        pool.copy_(torch.randn(pool.shape, generator=random))
    prompt_S = [0, 5, 5, 8, 13, 13, 13, 5, 13]  # several prompts among neighbours, one without any, one full block
    shared = {n: blocks.allocate(-(-n // block_size)) for n in set(prompt_S)}
    shared_other = blocks.allocate(1)  # the eighth slot's prompt is as long as another's, yet another one
    made_S = [3, 0, 17, 9, 30, 1, 16, 4, 2]
    table = torch.zeros(slots, 8, dtype=torch.int32)
    state = torch.zeros(kernels.FIELDS, slots, dtype=torch.int32)
    for slot, (prompt, made) in enumerate(zip(prompt_S, made_S, strict=True)):
        first = shared_other if slot == 7 else shared[prompt]
        mine = [*first, *blocks.allocate(made // block_size + 1)]
        table[slot, : len(mine)] = torch.tensor(mine)
        state[:, slot] = torch.tensor([slot != 6, 0, prompt + made, 0, 99, slot, prompt])
    q, k, v = (
        torch.randn(slots, heads * how.head_dim, generator=random) for heads in (how.heads, how.kv_heads, how.kv_heads)
    )
    before = [pool.clone() for pool in blocks.kv_cache[0]]
    arguments = [x.to(DEVICE) for x in (q, k, v)]
    how_far = {"share_prompts": share_prompts, "long_rows": long_rows}
    out = attend(how, *arguments, *blocks.kv_cache[0], table.to(DEVICE), state.to(DEVICE), **how_far, tile=16)
    for slot in range(slots):
        if slot == 6:  # dead: nothing is written
            continue
        base = -(-prompt_S[slot] // block_size) * block_size
        at = base + made_S[slot]
        rows = []
        for pool, new in zip(blocks.kv_cache[0], (k, v), strict=True):
            row = pool.cpu()[table[slot].long()].transpose(1, 2).flatten(0, 1)[: at + 1]
            torch.testing.assert_close(row[at], new[slot].view(how.kv_heads, -1))
            rows.append(row)
        query = q[slot].view(how.heads, -1)
        expected = attended(how, query, *rows, prompt_S[slot] + made_S[slot], prompt_S[slot], base)
        torch.testing.assert_close(out[slot].cpu(), expected, atol=1e-5, rtol=1e-4)
    changed = sum(int((pool != old).any(-1).sum()) for pool, old in zip(blocks.kv_cache[0], before, strict=True))
    assert changed == 2 * (slots - 1) * how.kv_heads, "more was written than the new tokens"


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=0.0),
        Sampling(top_k=7),
        Sampling(top_p=0.6),
        Sampling(min_p=0.1),
        Sampling(temperature=1.3, top_k=40, top_p=0.8, min_p=0.02, repetition_penalty=1.4),
        Sampling(temperature=0.0, repetition_penalty=1.4),
    ],
    ids=str,
)
@pytest.mark.parametrize("slots", [8, pytest.param(24, marks=pytest.mark.slow)])  # interpreted, each costs its time
def test_a_token_is_sampled_as_on_the_cpu(sampling, slots):
    size, steps = 300, 2
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(slots, size, generator=random) * 3
    logits[:, 290:] = -torch.inf
    state = torch.zeros(kernels.FIELDS, slots, dtype=torch.int32)
    state[kernels.LIVE], state[kernels.LIMIT] = 1, 2
    state[kernels.LIVE, 3] = 0
    state[kernels.ROW] = torch.arange(slots).flip(0)
    state[kernels.STEP, 5] = 1  # has but one token left
    uniform = uniforms(range(slots), steps)
    seen = (torch.rand(slots, size, generator=random) < 0.2).to(torch.int8)
    penalised = sampling.repetition_penalty != 1.0
    outputs = Outputs(
        made_RT=torch.full((slots, steps), -1, dtype=torch.int32, device=DEVICE),
        logp_RT=torch.zeros(slots, steps, device=DEVICE),
        kept_RT=torch.ones(slots, steps, device=DEVICE),
        uniform_RW=uniform.to(DEVICE),
        ended_R=torch.zeros(slots, dtype=torch.int32, device=DEVICE),
        eos_E=torch.tensor([], dtype=torch.int32, device=DEVICE),
        seen_SV=seen.clone().to(DEVICE) if penalised else None,
    )
    step_S, row_S = state[kernels.STEP].long(), state[kernels.ROW].long()
    expected = draw(logits, sampling, uniform[row_S, step_S], seen.bool() if penalised else None)
    eos = int(expected.token_N[7])
    outputs = Outputs(**{**vars(outputs), "eos_E": torch.tensor([1, eos], dtype=torch.int32, device=DEVICE)})
    after = state.clone().to(DEVICE)
    sample(logits.to(DEVICE), sampling, after, outputs)
    after = after.cpu()
    for slot in range(slots):
        row, step = int(row_S[slot]), int(step_S[slot])
        if slot == 3:
            assert int(outputs.made_RT[row, step]) == -1 and torch.equal(after[:, slot], state[:, slot])
            continue
        token = int(expected.token_N[slot])
        assert int(outputs.made_RT[row, step]) == token
        torch.testing.assert_close(float(outputs.logp_RT[row, step]), float(expected.logp_N[slot]), atol=1e-5, rtol=0)
        if expected.kept_N is not None:
            torch.testing.assert_close(
                float(outputs.kept_RT[row, step]), float(expected.kept_N[slot]), atol=1e-5, rtol=0
            )
        over = 1 if token in (1, eos) else 2 if step == 1 else 0
        assert int(outputs.ended_R[row]) == ((step + 1) * 4 + over if over else 0)
        assert after[:5, slot].tolist() == [int(not over), token, 1, step + 1, 2]
        assert not penalised or int(outputs.seen_SV[slot, token]) == 1


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    """An interpreter lets pass what a compiler does not; none of it needs a GPU."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))],
        env=kept | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# --- models ---------------------------------------------------------------------------------------------------------


def test_what_rounding_may_do_to_logits_is_seen_in_the_model_itself():
    """A wide model with random weights: two ways of rounding are further apart than of a small or trained one."""
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "num_hidden_layers": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(**shape, hidden_size=1024, intermediate_size=64, head_dim=32, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        exact = model(ids).logits[:, -1]
        assert allowed_gap(model, ids, exact, torch.float32) == EXACT
        rounded = model.bfloat16()(ids).logits[:, -1].float()
        allowed = allowed_gap(model, ids, rounded, torch.bfloat16)
    own = float((rounded - exact).norm() / exact.norm())
    assert own < allowed and COARSE[0] <= allowed < max(4 * own, COARSE[0]) <= COARSE[1]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_family_gives_the_module_s_logits(name):
    """`make_decoder` compares before it hands out; here it must also have found the fast way where there is one."""
    decoder = make_decoder(family(name).to(DEVICE), 64)
    assert type(decoder) is (FusedDecoder if name in FUSED else ModuleDecoder)


@torch.no_grad()
def test_a_layer_that_differs_in_one_number_is_noticed():
    model = family("llama").to(DEVICE)
    for layer in model.model.layers:
        plain = layer.mlp.forward
        layer.mlp.forward = lambda x, plain=plain: plain(x) * 1.5
    assert type(make_decoder(model, 64)) is ModuleDecoder


@torch.no_grad()
def test_a_forward_that_fails_is_a_reason_and_no_crash(monkeypatch):
    model = family("llama").to(DEVICE)
    monkeypatch.setattr(FusedDecoder, "prefill", lambda *_: {}["gone"])
    assert type(make_decoder(model, 64)) is ModuleDecoder
    monkeypatch.setattr(ModuleDecoder, "prefill", lambda *_: {}["gone"])
    with pytest.raises(Unsupported, match="KeyError"):
        make_decoder(model, 64)
    with pytest.raises(Unsupported, match="float64"):
        make_decoder(model.double(), 64)


@torch.no_grad()
def test_blocks_are_fewer_where_memory_is_short(monkeypatch):
    class Short(BlockManager):
        def __init__(self, layers, count, *rest):
            if count > 3:
                raise torch.OutOfMemoryError("no room")
            super().__init__(layers, count, *rest)

        def grow(self, count):
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model_runner, "BlockManager", Short)
    engine = InlineEngine(small(), tokens(), graphs=True)
    made = engine.generate(asked("x", "y"), 2, Sampling(max_new_tokens=2), range(4))
    assert len(made) == 4 and engine._runner.blocks.count <= 3


@torch.no_grad()
def test_attention_is_the_module_s_own_again_and_nothing_is_left_behind():
    model = family("llama").to(DEVICE)
    before, known = model.config._attn_implementation, set(ALL_ATTENTION_FUNCTIONS)
    with pytest.raises(KeyError), attending(model, lambda *_: {}["gone"]):
        assert model.config._attn_implementation != before
        model(torch.tensor([[3, 4]], device=DEVICE))
    assert model.config._attn_implementation == before and set(ALL_ATTENTION_FUNCTIONS) == known


@torch.no_grad()
def test_why_a_model_cannot_be_decoded_so():
    model = AutoModelForCausalLM.from_config(GPTJConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=2, rotary_dim=8))
    with pytest.raises(Unsupported, match="0 of its 2 layers"):
        make_decoder(model.to(DEVICE).eval(), 64)


def test_what_cannot_be_captured_is_said_once_and_sampled_all_the_same():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPTJConfig(vocab_size=128, n_embd=32, n_layer=2, n_head=2, rotary_dim=8))
    model = model.to(DEVICE).eval()
    engine, plain = InlineEngine(model, tokens(), graphs=True), InlineEngine(model, tokens(), graphs=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = [ids_of(engine.generate(asked(), 2, Sampling(max_new_tokens=5), range(6))) for _ in range(2)]
    said = [str(warning.message) for warning in said if "CUDA graphs" in str(warning.message)]
    assert len(said) == 1 and "GPTJForCausalLM: 0 of its 2 layers" in said[0]
    assert made[0] == made[1] == ids_of(plain.generate(asked(), 2, Sampling(max_new_tokens=5), range(6)))


# --- rollouts -------------------------------------------------------------------------------------------------------


def test_rows_come_and_go_and_are_what_the_plain_loop_makes(monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 2)
    monkeypatch.setattr(scheduler, "SHARED_BYTES", 0)
    captured_prefill(monkeypatch)
    model, eos = small(), tokens(range(40, 70))
    engine = InlineEngine(model, eos, graphs=True, rows_at_a_time=9, blocks=14)
    sampling = Sampling(max_new_tokens=7)
    made = dict(engine.stream(asked(), 4, sampling, range(12)))
    expected = InlineEngine(model, eos, graphs=False).generate(asked(), 4, sampling, range(12))
    mine = [completion for number in range(3) for completion in made[number]]
    assert ids_of(mine) == ids_of(expected) and [c.stop for c in mine] == [c.stop for c in expected]
    assert len({len(ids) for ids in ids_of(mine)}) > 2 and list(made) != [0, 1, 2]
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a.logp, b.logp, atol=1e-5, rtol=1e-4)
    home = engine._runner
    assert home.counts.prefills == 2, "a prompt is prefilled once for its group, and one of a single token not at all"
    assert home.blocks.num_free == home.blocks.count
    assert home.counts.tokens == sum(map(len, ids_of(mine)))
    assert 0 < engine.metrics()["engine/slots_in_use"] <= 1


@pytest.mark.slow
def test_slots_are_closed_up_under_rows_that_go_on(monkeypatch):
    """Rows end at each of their first tokens: graphs shrink while results in the former order are still to be read."""
    monkeypatch.setattr(scheduler, "CHUNK", 1)
    monkeypatch.setattr(scheduler, "buckets", lambda most: list(range(1, most + 1)))
    model, eos, sampling = small(), tokens(range(20, 60)), Sampling(max_new_tokens=8)
    engine, plain = (InlineEngine(model, eos, graphs=graphs) for graphs in (True, False))
    mine, expected = (e.generate(asked(), 3, sampling, range(9)) for e in (engine, plain))
    assert ids_of(mine) == ids_of(expected) and [c.stop for c in mine] == [c.stop for c in expected]
    assert engine._runner.counts.captures > 3


@pytest.fixture
def short_pages(monkeypatch):
    """Everything in small pieces: blocks of 4 tokens, one at a time, and 8 numbers."""
    monkeypatch.setattr(model_runner, "BlockManager", lambda *args: BlockManager(*args, block_size=4))
    monkeypatch.setattr(model_runner, "block_bytes", lambda *args: 1)
    for module in (scheduler, sequence):
        monkeypatch.setattr(module, "blocks_for", lambda tokens: -(-tokens // 4))
    for module in (noise, model_runner):
        monkeypatch.setattr(module, "HALF", 4)
    for module in (pages, scheduler):
        monkeypatch.setattr(module, "PAGE", 1)
    monkeypatch.setattr(scheduler, "CHUNK", 3)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(Sampling(), id="plain", marks=pytest.mark.slow),
        pytest.param(Sampling(repetition_penalty=1.4, stop=("77",)), id="penalty"),
    ],
)
def test_what_a_row_says_does_not_depend_on_whether_it_had_to_wait_for_blocks(short_pages, sampling):
    sampling, model, texts = replace(sampling, max_new_tokens=9), small(), asked("1+", "x")
    plain = InlineEngine(model, tokens(), graphs=False)
    engine = InlineEngine(model, tokens(), graphs=True, blocks=7)  # a row needs 3, and the first prompt 1
    mine, expected = (e.generate(texts, 2, sampling, range(4)) for e in (engine, plain))
    assert ids_of(mine) == ids_of(expected) and [c.stop for c in mine] == [c.stop for c in expected]
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a.logp, b.logp, atol=1e-5, rtol=1e-4)
    assert engine.metrics()["engine/preemptions"] > 0
    assert engine._runner.blocks.num_free == engine._runner.blocks.count == 7


@pytest.mark.slow
def test_memory_grows_with_the_rows_and_is_as_large_as_it_was_the_next_time(short_pages, monkeypatch):
    monkeypatch.setattr(scheduler, "START", 1)
    monkeypatch.setattr(model_runner, "grown", lambda number, least=1: number)
    model = small()
    engine, plain = (InlineEngine(model, tokens(), graphs=graphs) for graphs in (True, False))
    sampling = Sampling(max_new_tokens=6)
    for _ in range(2):
        mine, expected = (e.generate(asked("1+2"), 2, sampling, range(2)) for e in (engine, plain))
        assert ids_of(mine) == ids_of(expected)
        counts = engine._runner.counts
        assert counts.allocations > 1 and counts.preemptions == 0
        grown_to, engine._runner.counts = engine._runner.blocks.count, replace(counts, allocations=2)
    assert engine._runner.counts.allocations == 2 and engine._runner.blocks.count == grown_to
    assert engine.make_room()
    engine.generate(asked("1+2"), 2, sampling, range(2))
    assert engine._runner.counts.allocations == 3, "what was once in use is there from the beginning"


@pytest.mark.slow
def test_a_draft_decides_how_many_steps_are_taken_and_nothing_else(short_pages):
    sampling, model = Sampling(max_new_tokens=6, min_p=0.02, stop=("7",)), small()
    plain = InlineEngine(model, tokens(), graphs=False).generate(asked("1+2", "x"), 3, sampling, range(6))
    eos = tokens({ids_of(plain)[2][4]})
    expected = InlineEngine(model, eos, graphs=False).generate(asked("1+2", "x"), 3, sampling, range(6))
    right = ids_of(expected)
    drafts = {
        0: right[0],
        1: right[1][:4],
        2: [*right[2], 5, 5, 5, 5, 5],  # longer than it may be
        3: [(right[3][0] + 1) % 60, *right[3][1:]],
        4: [*right[4][:3], (right[4][3] + 1) % 60, 7],
    }
    engine = InlineEngine(model, eos, graphs=True, blocks=12)
    for known, accepted in (
        (drafts, len(right[0]) + len(right[1][:4]) + len(right[2]) + 0 + 3),
        (dict(enumerate(right)), sum(map(len, right))),
    ):
        engine.expect(known)
        before = replace(engine._runner.counts) if engine._runner else model_runner.Counts()
        mine = engine.generate(asked("1+2", "x"), 3, sampling, range(6))
        assert ids_of(mine) == right and [c.stop for c in mine] == [c.stop for c in expected]
        assert [c.kept for c in mine] == pytest.approx([c.kept for c in expected], abs=1e-5)
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a.logp, b.logp, atol=1e-5, rtol=1e-4)
        counts, told = engine._runner.counts, engine.metrics()["engine/draft_accepted"]
        assert counts.accepted - before.accepted == accepted
        assert told == accepted / (counts.drafted - before.drafted)
        assert engine._runner.blocks.num_free == engine._runner.blocks.count
    assert told == 1.0 and counts.slot_steps <= before.slot_steps + 24, "all but a stop text is known after one pass"


@pytest.mark.slow
def test_a_row_that_memory_does_not_hold_is_refused_with_the_remedy(short_pages, monkeypatch):
    monkeypatch.setattr(scheduler, "START", 1)
    monkeypatch.setattr(BlockManager, "grow", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
    engine = InlineEngine(small(), tokens(), graphs=True)
    with pytest.raises(torch.OutOfMemoryError, match="lower max_completion_length"):
        engine.generate(asked("x"), 2, Sampling(max_new_tokens=40), range(2))
    assert engine._runner.blocks.num_free == engine._runner.blocks.count
    assert engine._runner._used > engine._runner.blocks.count, "the next rollout begins with what was lacking"


def test_few_long_rows_are_divided_among_many_programs():
    assert [kernels.splits_for(rows, 8, 512) for rows in (256, 64, 8, 1)] == [1, 1, 8, 16]
    assert [kernels.splits_for(rows, 8, 512, kernels.MOST_SPLITS) for rows in (4, 2, 1)] == [16, 32, 64]


@pytest.mark.slow
def test_stop_texts_truncation_and_penalty_are_those_of_the_plain_loop(monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 3)
    model = small()
    engine, plain = (InlineEngine(model, tokens(), graphs=graphs, rows_at_a_time=4) for graphs in (True, False))
    first = ids_of(plain.generate(asked(), 2, Sampling(max_new_tokens=8), range(6)))
    stops = tuple(tiny_tokenizer().decode(first[row][at : at + 2]) for row, at in ((0, 2), (3, 5)))
    for sampling in (
        Sampling(max_new_tokens=8, stop=stops),
        Sampling(max_new_tokens=4, temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.5),
    ):
        mine, expected = (e.generate(asked(), 2, sampling, range(6)) for e in (engine, plain))
        assert ids_of(mine) == ids_of(expected) and [c.stop for c in mine] == [c.stop for c in expected]
        assert [c.kept for c in mine] == pytest.approx([c.kept for c in expected], abs=1e-5)
        assert not sampling.stop or {"stop", "length"} == {c.stop for c in mine}


def test_a_rollout_that_nobody_wants_to_its_end_gives_everything_back(monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 3)
    engine = InlineEngine(small(), tokens(range(40, 60)), graphs=True, rows_at_a_time=2)
    stream = engine.stream(asked(), 1, Sampling(max_new_tokens=12), range(3))
    next(stream)
    with pytest.raises(RuntimeError, match="another rollout of this engine is under way"):
        engine.generate(asked("x"), 1, Sampling(max_new_tokens=1), range(1))
    stream.close()
    engine.generate(asked("x"), 1, Sampling(max_new_tokens=1), range(1))
    blocks = engine._runner.blocks
    assert blocks.num_free == blocks.count
    assert not engine.model.training


def test_nothing_is_lost_when_prefill_fails(monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 1)
    engine = InlineEngine(small(), tokens(), graphs=True, rows_at_a_time=2)
    engine.generate(asked(), 2, Sampling(max_new_tokens=1), range(6))
    prefill = model_runner.ModelRunner.prefill
    monkeypatch.setattr(model_runner.ModelRunner, "prefill", lambda *_: {}["interrupted"])
    with pytest.raises(KeyError):
        engine.generate(asked(), 2, Sampling(max_new_tokens=1), range(6))
    assert engine._runner.blocks.num_free == engine._runner.blocks.count and not engine._runner.busy
    monkeypatch.setattr(model_runner.ModelRunner, "prefill", prefill)
    assert len(engine.generate(asked(), 2, Sampling(max_new_tokens=1), range(6))) == 6


def test_padding_stays_within_a_table_of_positions():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=16, n_layer=1, n_head=2, n_positions=50, eos_token_id=2, bos_token_id=1)
    model = AutoModelForCausalLM.from_config(config).to(DEVICE).eval()
    engine, plain = (InlineEngine(model, tokens(), graphs=graphs) for graphs in (True, False))
    prompts, greedy = asked("a" * 46, "b" * 3), Sampling(max_new_tokens=3, temperature=0.0)
    assert ids_of(engine.generate(prompts, 1, greedy, range(2))) == ids_of(plain.generate(prompts, 1, greedy, range(2)))
    assert engine._runner is not None


@pytest.mark.slow
def test_weights_and_adapters_are_those_of_now(monkeypatch):
    monkeypatch.setattr(scheduler, "CHUNK", 4)
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(small(), LoraConfig(r=2, lora_alpha=6, target_modules="all-linear"))
    sampling = Sampling(max_new_tokens=4)
    engine = InlineEngine(model, tokens(), graphs=True)
    before = ids_of(engine.generate(asked(), 1, sampling, range(3)))
    captures = engine._runner.counts.captures
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)
    after = ids_of(engine.generate(asked(), 1, sampling, range(3)))
    assert type(engine._runner.decoder) is FusedDecoder and engine._runner.counts.captures == captures
    assert after != before
    assert after == ids_of(InlineEngine(model, tokens(), graphs=False).generate(asked(), 1, sampling, range(3)))


@torch.no_grad()
def test_a_longer_prompt_once_makes_nothing_anew_for_shorter_ones():
    engine = InlineEngine(small(), tokens(), graphs=True)
    runner = model_runner.ModelRunner(engine.model, engine.tokens)
    runner.prepare(100)
    first = runner.decoder
    runner.prepare(1000)
    assert runner.decoder is first
    runner.prepare(1100)
    longer = runner.decoder
    assert longer is not first and len(longer.cos) >= 1100
    runner.prepare(100)
    runner.prepare(1100)
    assert runner.decoder is longer


def test_the_module_s_parameters_stay_its_own():
    model = small()
    before = {name: p.clone() for name, p in model.named_parameters()}
    engine = InlineEngine(model, tokens(), graphs=True)
    engine.generate(asked("x"), 1, Sampling(max_new_tokens=1), range(1))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.is_contiguous() and isinstance(attention.q_proj.weight, torch.nn.Parameter)
    again = copy.deepcopy(model)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    model(torch.tensor([asked()[0]], device=DEVICE)).logits.sum().backward()
    assert attention.q_proj.weight.grad is not None


def test_room_is_made_and_taken_again():
    engine = InlineEngine(small(), tokens(), graphs=True)
    assert not engine.make_room()
    engine = InlineEngine(engine.model, tokens(), graphs=True)
    first = ids_of(engine.generate(asked("x"), 2, Sampling(max_new_tokens=2), range(2)))
    assert engine.metrics()["engine/kv_gib"] > 0
    assert engine.make_room() and engine.metrics()["engine/kv_gib"] == 0
    assert ids_of(engine.generate(asked("x"), 2, Sampling(max_new_tokens=2), range(2))) == first
    assert engine._runner.blocks is None, "from now on it lets go after every rollout"


def test_sizes_of_graphs_and_of_buffers_grow_by_steps():
    assert buckets(1) == [8] and buckets(9) == [8, 12] and buckets(48)[-2:] == [32, 48]
    for number in (1, 9, 100, 1000, 12345):
        assert number <= grown(number) <= max(number * 1.25, number + 8)


def test_blocks_that_come_back_elsewhere_make_graphs_void_and_stay_where_that_goes_on():
    engine = InlineEngine(small(), tokens(), graphs=True)
    engine.generate(asked("x"), 2, Sampling(max_new_tokens=2), range(2))
    runner = engine._runner
    runner.keep_between_rollouts, count, seen = False, runner.blocks.count, []
    for place in (1, 1, 2, 2, 3, 4):
        runner._graphs = {"a": "graph"}
        runner._note(SimpleNamespace(place=(place, count), count=count))
        seen.append((bool(runner._graphs), runner.keep_between_rollouts))
    assert seen == [(False, False), (True, False), (False, False), (True, False), (False, True), (False, True)]
    assert engine.make_room() and not runner.keep_between_rollouts
    for place in (5, 6, 7, 8):
        runner._note(SimpleNamespace(place=(place, count), count=count))
    assert not runner.keep_between_rollouts, "training has run out of memory beside them"


def test_keys_and_values_of_all_layers_are_one_piece_that_grows_with_what_it_holds():
    layers = make_decoder(small(), 8).layers
    blocks = BlockManager(layers, 3, torch.float32, torch.device(DEVICE))
    whole = {x.untyped_storage().data_ptr() for pair in blocks.kv_cache for x in pair}
    assert len(whole) == 1 and all(x.is_contiguous() and not x.any() for pair in blocks.kv_cache for x in pair)
    for number, pair in enumerate(blocks.kv_cache):
        pair[0].fill_(number + 1), pair[1].fill_(-number - 1)
    taken = blocks.allocate(2)
    blocks.grow(7)
    for number, pair in enumerate(blocks.kv_cache):
        for x, sign in zip(pair, (1, -1), strict=True):
            assert len(x) == 8 and (x[:4] == sign * (number + 1)).all() and not x[4:].any()
    assert blocks.num_free == 5 and not {*taken} & {*blocks.allocate(5)}
