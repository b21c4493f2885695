"""Blocks that are kept between turns, as on a GPU, kernels interpreted: the same is said, no block is lost."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="kernels need triton, which is there for Linux")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # in slots that nobody reads

from grpo.language.engines import Sampling  # noqa: E402
from grpo.language.engines.cuda_graphs import kernels, model_runner, sampler  # noqa: E402
from grpo.language.engines.cuda_graphs.blocks import BlockManager  # noqa: E402
from grpo.language.engines.cuda_graphs.kept import KeptBlocks, KeptConversations, PromptBlocks  # noqa: E402
from grpo.language.engines.cuda_graphs.kernels import Attention  # noqa: E402
from grpo.language.engines.inline import InlineEngine  # noqa: E402
from tests.unit.language.test_cuda_graphs import asked, ids_of, small, tokens  # noqa: E402
from tests.unit.language.tiny import CHARACTERS, SPECIAL  # noqa: E402

HEARD = [70, 71, 72, 73, 74]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    monkeypatch.setattr(kernels, "TARGET_PROGRAMS", 1)
    monkeypatch.setattr(model_runner, "PREFILL_CAPTURED", 0)
    monkeypatch.setattr(sampler, "BLOCK_V", 128)


def of_the_module():
    """Learned positions: no fused decoder knows them."""
    torch.manual_seed(0)
    shape = {"vocab_size": len(SPECIAL) + len(CHARACTERS), "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 128}
    return GPT2LMHeadModel(GPT2Config(**shape)).eval().to(DEVICE)


def two_turns(engine):
    """Two prompts, two completions each; three of them hear something and go on, one begins anew."""
    with engine.conversing():
        first = engine.generate(asked("What is 1 + 2, and what is 40 + 7?", "x"), 2, Sampling(2), range(4))
        prompts = asked("What is 1 + 2, and what is 40 + 7?", "x")
        said = [[*prompts[i // 2], *one.ids.tolist()] for i, one in enumerate(first)]
        heard = [said[0] + HEARD, said[1] + HEARD[:2], said[3] + HEARD, asked("y")[0]]
        then = engine.generate(heard, 1, Sampling(2), range(10, 14))
        told = engine.metrics()
    return first, then, told


@pytest.mark.parametrize(
    "make", [pytest.param(small, id="fused"), pytest.param(of_the_module, id="module", marks=pytest.mark.slow)]
)
def test_the_same_is_said_and_all_blocks_are_free_afterwards(make):
    model = make()
    engine = InlineEngine(model, tokens(), graphs=True, kept_bytes=2**30)
    first, then, told = two_turns(engine)
    others = two_turns(InlineEngine(model, tokens(), graphs=True, kept_bytes=0))
    assert ids_of(first) == ids_of(others[0]) and ids_of(then) == ids_of(others[1])
    for one, other in zip(then, others[1], strict=True):
        torch.testing.assert_close(one.logp, other.logp, atol=2e-5, rtol=0)
    assert told["engine/prompt_kept"] > 0.5 and "engine/prompt_kept" not in others[2]
    assert engine._runner.blocks is None or engine._runner.blocks.num_free == engine._runner.blocks.count
    assert not len(engine._runner.kept.book) and not engine._runner.conversing
    engine.generate(asked("x"), 1, Sampling(1), [0])
    assert "engine/prompt_kept" not in engine.metrics(), "of a conversation, which this was not"


def test_all_that_go_on_find_what_is_kept_where_more_blocks_are_needed():
    """Every kept conversation is taken, and the next turn is much longer than the memory there is."""
    model, said = small(), []
    for most in (2**30, 0):
        engine = InlineEngine(model, tokens(), graphs=True, kept_bytes=most)
        with engine.conversing():
            (prompt,) = asked("What is 1 + 2, and what is 40 + 7?")
            first = engine.generate([prompt], 1, Sampling(2), [0])
            heard = [*prompt, *first[0].ids.tolist(), *HEARD * 20]
            said.append(engine.generate([heard], 1, Sampling(2), [1])[0])
            held = engine._runner.kept.book
        blocks = engine._runner.blocks
        assert blocks is None or sorted(blocks._free) == list(range(1, blocks.count + 1))
        assert bool(held.found) == bool(most)
    assert said[0].ids.tolist() == said[1].ids.tolist()
    torch.testing.assert_close(said[0].logp, said[1].logp, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_who_needs_blocks_gets_those_that_are_kept():
    model = small()
    engine = InlineEngine(
        model, tokens(), graphs=True, blocks=7, kept_bytes=1
    )  # a prompt of two and one each; not all of both turns
    first, then, _ = two_turns(engine)
    others = two_turns(InlineEngine(model, tokens(), graphs=True, kept_bytes=0))
    assert ids_of(first) == ids_of(others[0]) and ids_of(then) == ids_of(others[1])
    assert engine._runner.blocks.num_free == engine._runner.blocks.count <= 8


def test_a_prompts_blocks_stay_until_the_last_that_holds_them():
    manager = BlockManager([Attention(1, 1, 16, 1.0)], 8, torch.float32, torch.device("cpu"))
    prompt, kept = PromptBlocks(manager.allocate(2)), KeptConversations()
    for last in (5, 6):
        kept.put([1, 2, 3, last], KeptBlocks(prompt, 40, manager.allocate(1)), manager)
    kept.put([1, 2, 3, 6], KeptBlocks(prompt, 40, manager.allocate(1)), manager)  # the same once more
    prompt.leave(manager)  # its sequences have ended
    assert manager.num_free == 4
    length, one = kept.book.take([1, 2, 3, 5, 9])
    assert length == 4 and one.places(42, 32)[31:34] == [(1, 31), (2, 0), (2, 1)] and one.places(42, 32)[40:] == [
        (one.own[0], 0), (one.own[0], 1)]  # fmt: skip
    kept.let_go(one, manager)
    assert manager.num_free == 5
    assert not kept.make_room(9, manager) and manager.num_free == 8
