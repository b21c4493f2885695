"""What the KL is measured to: a copy, the adapter off, or a second adapter; none moves unless it is synced."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo.config import ConfigError
from grpo.language.config import LanguageConfig
from grpo.language.model import reference
from grpo.language.model.adapters import merged, with_adapter
from grpo.language.scoring.policy import LanguagePolicy
from grpo.language.scoring.probe import make_scorer
from grpo.rollouts import Rollouts
from tests.unit.language.test_policy import samples
from tests.unit.language.tiny import tiny_model

CONFIG = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def make_policy(lora: bool, louder: bool = False) -> LanguagePolicy:
    torch.manual_seed(0)
    model = tiny_model()
    model = get_peft_model(model, CONFIG) if lora else model
    if louder:
        nudge(model)
    return LanguagePolicy(model, make_scorer(model, 1.0))


@torch.no_grad()
def nudge(model, by=0.1):
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(by * torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape))


def rollouts():
    rows = samples(4)
    mask_NT = torch.zeros(4, 8, dtype=torch.bool)
    for number, row in enumerate(rows):
        mask_NT[number, : row.length] = True
    return Rollouts(
        group_N=torch.arange(4), mask_NT=mask_NT, old_logp_NT=torch.zeros(4, 8), reward_N=torch.zeros(4), inputs=rows
    )


@pytest.mark.parametrize(
    ("lora", "synced", "fresh", "kind"),
    [
        (False, False, True, reference.FrozenCopy),
        (False, True, True, reference.FrozenCopy),
        (True, False, True, reference.AdapterOff),
        (True, True, True, reference.FrozenAdapter),
        (True, False, False, reference.FrozenAdapter),
    ],
)
def test_it_stays_where_the_policy_began_and_follows_when_synced(lora, synced, fresh, kind):
    policy, rows = make_policy(lora, louder=not fresh), rollouts()
    trained_before = set(policy.parameters())
    began = policy.scorer.in_parts(rows.inputs, 8).logp_NT
    made = reference.make(policy, synced, fresh)
    assert type(made) is kind
    nudge(policy.model)
    moved = policy.scorer.in_parts(rows.inputs, 8).logp_NT
    assert (moved - began).abs().max() > 1e-2
    torch.testing.assert_close(made.score(rows), began, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.scorer.in_parts(rows.inputs, 8).logp_NT, moved)  # looking changed nothing
    assert {n for n, p in policy.model.named_parameters() if p.requires_grad} == trained_before
    if kind is reference.AdapterOff:
        with pytest.raises(ConfigError, match="cannot follow"):
            made.sync(policy.parameters(), 1.0)
        return
    made.sync(policy.parameters(), 1.0)
    torch.testing.assert_close(made.score(rows), moved, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lora", [False, True])
def test_mixing_is_linear_in_the_parameters(lora):
    policy = make_policy(lora)
    made = reference.make(policy, synced=True)
    before = {name: p.detach().clone() for name, p in made.parameters().items()}
    nudge(policy.model)
    made.sync(policy.parameters(), 0.9)
    for name, mine in made.parameters().items():
        torch.testing.assert_close(mine, 0.9 * policy.parameters()[name] + 0.1 * before[name])


def test_a_model_of_your_own_can_be_the_reference():
    policy, rows, other = make_policy(False), rollouts(), tiny_model(seed=5)
    made = reference.FrozenCopy(policy, other)
    expected = make_scorer(other, 1.0).in_parts(rows.inputs, 8).logp_NT
    torch.testing.assert_close(made.score(rows), expected)
    assert not any(p.requires_grad for p in other.parameters())


def test_weights_trained_beside_the_adapter_cannot_be_doubled():
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], bias="all"))
    policy = LanguagePolicy(model, make_scorer(model, 1.0))
    if not any("lora" not in name for name in policy.parameters()):
        pytest.skip("this model has no biases")
    with pytest.raises(ConfigError, match="trained beside the adapter"):
        reference.make(policy, synced=True)


def test_merged_and_unmerged_log_probs_agree_and_the_trained_one_stays():
    policy, rows = make_policy(True, louder=True), rollouts()
    own = policy.scorer.in_parts(rows.inputs, 8).logp_NT
    flat = merged(policy.model)
    torch.testing.assert_close(make_scorer(flat, 1.0).in_parts(rows.inputs, 8).logp_NT, own, atol=1e-4, rtol=1e-4)
    assert not hasattr(flat, "peft_config") and hasattr(policy.model, "peft_config")
    torch.testing.assert_close(policy.scorer.in_parts(rows.inputs, 8).logp_NT, own)


def test_a_trained_adapter_is_taken_up_again(tmp_path):
    policy, rows = make_policy(True, louder=True), rollouts()
    own = policy.scorer.in_parts(rows.inputs, 8).logp_NT
    policy.model.save_pretrained(tmp_path)
    model, fresh = with_adapter(tiny_model(), LanguageConfig(adapter=str(tmp_path)))
    assert not fresh
    again = LanguagePolicy(model, make_scorer(model, 1.0))
    assert again.parameters().keys() == policy.parameters().keys()
    torch.testing.assert_close(again.scorer.in_parts(rows.inputs, 8).logp_NT, own)


def test_adapters_that_contradict_each_other_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="already"):
        with_adapter(get_peft_model(tiny_model(), CONFIG), LanguageConfig(lora_rank=4))
    with pytest.raises(ConfigError, match="adapter="):
        with_adapter(tiny_model(), LanguageConfig(adapter=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="does not fit"):
        with_adapter(tiny_model(), LanguageConfig(lora_rank=4, lora_targets=("nothing",)))
    with pytest.raises(ConfigError, match="one of them"):
        with_adapter(tiny_model(), LanguageConfig(adapter="x"), CONFIG)
