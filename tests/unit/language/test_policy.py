"""Log-probs of samples: right, tiled, the same however rows are laid out, with memory that follows the settings."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Cohere2Config, Gemma2Config, GPT2Config, GraniteConfig, Qwen3Config

from grpo.language.samples import Prompt, Sample
from grpo.language.scoring import memory
from grpo.language.scoring.modes import without_dropout
from grpo.language.scoring.packing import fill, pack
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.scoring.probe import make_scorer, plan_scoring
from grpo.language.scoring.scorer import Scorer, ScoringPlan
from tests.unit.language.tiny import tiny_model

SHAPE = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def samples(count=5, seed=0, vocabulary=104, tools=False):
    """Rows of different lengths; with `tools`, every third token is somebody else's."""
    random = torch.Generator().manual_seed(seed)
    made, prompts = [], []
    for row in range(count):
        if row % 2 == 0:  # two completions of each prompt
            ids = torch.randint(3, vocabulary, (2 + 3 * (row % 3),), generator=random).tolist()
            prompts.append(Prompt(row, ids, "", None))
        ids = torch.randint(3, vocabulary, (1 + 2 * row,), generator=random)
        chosen = torch.ones(len(ids), dtype=torch.bool)
        if tools:
            chosen[1::3] = False
        made.append(Sample(prompts[-1], ids, chosen, None, "eos", ""))
    return made


def naive(model, rows, steps, temperature=1.0):
    """One row at a time, whole logits."""
    logp_NT, entropy_NT = torch.zeros(len(rows), steps), torch.zeros(len(rows), steps)
    for number, row in enumerate(rows):
        ids = torch.cat([torch.tensor(row.prompt.ids), row.ids])[None]
        every = (model(ids).logits[0].float() / temperature).log_softmax(-1)
        for t in range(row.length):
            if row.made[t]:
                at = every[len(row.prompt.ids) + t - 1]
                logp_NT[number, t] = at[row.ids[t]]
                entropy_NT[number, t] = -(at.exp() * at).sum()
    return logp_NT, entropy_NT


@pytest.mark.parametrize("packing", ["padded", "packed", "shared"])
@pytest.mark.parametrize("tools", [False, True])
def test_log_probs_and_entropy_are_those_of_whole_logits_row_by_row(packing, tools, monkeypatch):
    monkeypatch.setitem(memory.TILE_BYTES, "cpu", 16 * 4 * 104)  # several tiles
    model, rows = tiny_model(), samples(tools=tools)
    steps = max(row.length for row in rows) + 2
    found = make_scorer(model, 0.7, packing)(rows, steps, entropy=True)
    logp_NT, entropy_NT = naive(model, rows, steps, 0.7)
    torch.testing.assert_close(found.logp_NT, logp_NT, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.entropy_NT, entropy_NT, atol=1e-5, rtol=1e-5)


CONFIGS = [
    Qwen3Config(**SHAPE),
    GPT2Config(vocab_size=104, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    Gemma2Config(**SHAPE, final_logit_softcapping=2.0, query_pre_attn_scalar=8),
    GraniteConfig(**{k: v for k, v in SHAPE.items() if k != "head_dim"}, logits_scaling=3.0),
    Cohere2Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"}, logit_scale=0.25),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
@pytest.mark.parametrize("packing", ["padded", "packed", "auto"])
def test_architectures_that_treat_their_logits_differently(config, packing, recwarn):
    torch.manual_seed(0)
    model, rows = AutoModelForCausalLM.from_config(config).eval(), samples()
    found = make_scorer(model, 1.0, packing)(rows, 12)
    torch.testing.assert_close(found.logp_NT, naive(model, rows, 12)[0], atol=2e-5, rtol=1e-4)
    assert not [w for w in recwarn if "does more with its head" in str(w.message)]


def test_an_architecture_nobody_knows_is_scored_from_its_own_logits():
    class Odd(type(tiny_model())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 2 + 1
            return out

    model = tiny_model()
    model.__class__ = Odd
    rows = samples()
    with pytest.warns(UserWarning, match="does more with its head"):
        scorer = make_scorer(model, 1.0)
    torch.testing.assert_close(scorer(rows, 10).logp_NT, naive(model, rows, 10)[0], atol=1e-5, rtol=1e-5)


def gradients(model, scorer, rows, parts, steps=14):
    model.zero_grad()
    weight_NT = torch.arange(len(rows) * steps).reshape(len(rows), steps).double().sin()
    for part in parts:
        logp_NT = scorer([rows[i] for i in part], steps).logp_NT
        (logp_NT * weight_NT[list(part)]).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def adapted(model):
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, p in made.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return made


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_do_not_depend_on_budget_or_packing(lora, monkeypatch):
    model = tiny_model().double()
    model = adapted(model) if lora else model
    rows = samples(7)
    whole = gradients(model, make_scorer(model, 0.8, "padded"), rows, [range(7)])
    assert len(whole) > 5
    for packing in ("padded", "packed", "shared"):
        for budget in (1, 25, 60):
            scorer = make_scorer(model, 0.8, packing, budget)
            parts = scorer.split(rows, None)
            assert sorted(i for part in parts for i in part) == list(range(7))
            found = gradients(model, scorer, rows, parts)
            assert found.keys() == whole.keys()
            for name in whole:
                close = {"rtol": 1e-5, "atol": 1e-7} if packing == "shared" else {"rtol": 1e-10, "atol": 1e-12}
                torch.testing.assert_close(found[name], whole[name], **close)  # a mask takes attention's other path


def test_parts_stay_within_the_budget_padding_included():
    rows = samples(8)
    length = [len(row.prompt.ids) + row.length for row in rows]
    for part in fill(rows, 60, "padded"):
        assert len(part) == 1 or max(length[i] for i in part) * len(part) <= 60
    assert [len(part) for part in fill(rows, 1, "packed")] == [1] * 8
    assert fill(rows, 1000, "packed") == [list(range(8))]
    together = fill(rows, 40, "shared")
    assert sorted(row for part in together for row in part) == list(range(8))
    assert any({0, 1} <= set(part) for part in together)


def test_a_prompt_that_is_shared_is_computed_once():
    rows = samples(6)
    shared, padded = (pack(rows, 12, how, 0, torch.device("cpu")) for how in ("shared", "padded"))
    assert shared.input_ids.shape[0] == 3 and padded.input_ids.shape[0] == 6
    assert make_scorer(tiny_model(), 1.0).packing == "shared"
    assert make_scorer(AutoModelForCausalLM.from_config(CONFIGS[2]), 1.0).packing == "padded"  # a sliding window


def test_without_gradient_the_passes_follow_the_budget_and_rows_keep_their_order():
    model, rows = tiny_model(), samples(6)
    whole = make_scorer(model, 1.0, budget=10**6).in_parts(rows, 12, entropy=True)
    small = make_scorer(model, 1.0, budget=12).in_parts(rows, 12, entropy=True)
    torch.testing.assert_close(small.logp_NT, whole.logp_NT, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(small.entropy_NT, whole.entropy_NT, atol=1e-5, rtol=1e-5)
    assert not small.logp_NT.requires_grad


def test_out_of_memory_without_gradient_tries_smaller_passes(monkeypatch):
    model, rows = tiny_model(), samples(6)
    scorer, sizes = make_scorer(model, 1.0), []
    plain = Scorer.__call__

    def tight(self, some, *rest):
        sizes.append(len(some))
        if len(some) > 2:
            raise torch.OutOfMemoryError("no room")
        return plain(self, some, *rest)

    expected = scorer.in_parts(rows, 12).logp_NT
    monkeypatch.setattr(Scorer, "__call__", tight)
    torch.testing.assert_close(scorer.in_parts(rows, 12).logp_NT, expected, atol=1e-5, rtol=1e-5)
    assert max(sizes) == 6 and sizes[-1] <= 2


def test_dropout_is_off_while_training_and_checkpointing_stays_on():
    model = tiny_model(attention_dropout=0.5)
    policy = LanguagePolicy(model, make_scorer(model, 1.0), checkpointing=True)
    policy.train()
    assert model.training and model.is_gradient_checkpointing
    rows = samples()
    first, second = policy.scorer(rows, 12).logp_NT, policy.scorer(rows, 12).logp_NT
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    policy.eval()
    torch.testing.assert_close(policy.scorer(rows, 12).logp_NT, first, atol=1e-6, rtol=1e-6)


def test_dropout_of_an_adapter_is_off_too():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear"))
    without_dropout(model)
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))


def kept_bytes(policy, rows):
    """What the backward pass will need, counted as it is stored."""
    seen: dict[int, int] = {}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy.scorer(rows, 40).logp_NT.sum().backward()
    return sum(seen.values())


def test_gradient_checkpointing_lowers_what_is_kept():
    rows = samples(16)
    found = {}
    for checkpointing in (False, True):
        model = tiny_model(num_hidden_layers=8)
        policy = LanguagePolicy(model, make_scorer(model, 1.0), checkpointing)
        policy.train()
        weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
        found[checkpointing] = kept_bytes(policy, rows) - weights
    assert found[True] < 0.5 * found[False]


@pytest.mark.parametrize(
    "plan", [ScoringPlan("packed"), ScoringPlan("shared"), ScoringPlan(whole_logits=True)], ids=str
)
def test_a_plan_written_by_hand_is_followed_without_a_probe(plan):
    model, rows = tiny_model(), samples()
    found = Scorer(model, 1.0, plan)(rows, 12)
    torch.testing.assert_close(found.logp_NT, naive(model, rows, 12)[0], atol=1e-5, rtol=1e-5)


def test_what_a_model_allows_is_written_down():
    plain = Scorer(tiny_model(), 1.0, ScoringPlan())
    assert plan_scoring(plain) == ScoringPlan("shared") and plan_scoring(plain, "padded") == ScoringPlan("padded")
