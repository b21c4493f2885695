"""AdamW with random rounding: torch's own where nothing is rounded, and on average where everything is."""

import copy
import importlib.util
import sys
import types

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo.config import ConfigError
from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.model.loading import keep_as_asked
from grpo.language.model.optimizer import RoundedAdamW, rounded, small_adam
from tests.unit.language.functions import digits
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

HOW = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def moved(make, weights, steps=5):
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = make(parameters)
    random = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=random).to(p.dtype)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("adamw_8bit", "AdamW8bit"),
        ("adamw_bnb_8bit", "AdamW8bit"),
        ("paged_adamw_8bit", "PagedAdamW8bit"),
        ("paged_adamw_32bit", "PagedAdamW32bit"),
    ],
)
def test_optimizers_of_bitsandbytes_where_it_is_there(monkeypatch, word, kind):
    config = GRPOConfig(optim=word)
    with pytest.warns(UserWarning, match="needs a GPU and bitsandbytes: AdamW keeps float32 moments"):
        assert small_adam(config, [torch.zeros(1)]) is None
    offered = types.ModuleType("bitsandbytes.optim")
    setattr(offered, kind, object())
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", offered)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: offered)
    on_gpu = types.SimpleNamespace(is_cuda=True, dtype=torch.float32)
    assert small_adam(config, [on_gpu]) is getattr(offered, kind)


def test_it_is_adamw_where_weights_are_float32():
    weights = [torch.randn(7, 3), torch.randn(5)]
    mine, _ = moved(lambda p: RoundedAdamW(p, **HOW), weights)
    theirs, _ = moved(lambda p: torch.optim.AdamW(p, **HOW), weights)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)


def test_rounding_is_right_on_average_and_to_a_neighbour():
    x = torch.tensor([1.0, 1.001, -3.14159, 1e-30, 0.0, 255.3]).repeat(20_000, 1)
    found = rounded(x, torch.Generator().manual_seed(0)).float()
    gap = x.abs().log2().floor().exp2() / 128  # between neighbours in bfloat16
    gap[x == 0] = 0.0
    assert bool(((found - x).abs() < gap + 1e-45).all())
    error = (found.double().mean(0) - x[0].double()).abs()
    assert bool((error <= 5 * gap[0] / 20_000**0.5).all())
    odd = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(rounded(odd, torch.Generator()).float().nan_to_num(7.0), odd.nan_to_num(7.0))


def test_small_steps_are_not_lost_in_bfloat16():
    weights = [torch.ones(4096, dtype=torch.bfloat16)]

    def pushed(make):
        parameters = [torch.nn.Parameter(weights[0].clone())]
        optimizer = make(parameters)
        for _ in range(100):
            parameters[0].grad = torch.ones_like(parameters[0])
            optimizer.step()
        return float(parameters[0].detach().double().mean())

    assert pushed(lambda p: torch.optim.AdamW(p, lr=1e-5, weight_decay=0.0)) == 1.0  # rounded away, each of them
    assert pushed(lambda p: RoundedAdamW(p, lr=1e-5)) == pytest.approx(1.0 - 100 * 1e-5, abs=2e-4)


def test_going_on_from_a_saved_state_is_exact():
    weights = [torch.randn(9, 4).bfloat16(), torch.randn(3).bfloat16()]
    parameters, optimizer = moved(lambda p: RoundedAdamW(p, seed=5, **HOW), weights)
    saved, kept = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in parameters]
    again = [torch.nn.Parameter(w) for w in kept]
    other = RoundedAdamW(again, seed=5, **HOW)
    other.load_state_dict(saved)
    for p in other.state:
        assert other.state[p]["exp_avg"].dtype == torch.float32
    for mine, theirs in zip(parameters, again, strict=True):
        mine.grad = theirs.grad = torch.full_like(mine, 0.3)
    optimizer.step()
    other.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters, again, strict=True))


def test_other_seeds_round_otherwise():
    weights = [torch.randn(64, 64).bfloat16()]
    first, _ = moved(lambda p: RoundedAdamW(p, lr=1e-5, seed=0), weights, 1)
    second, _ = moved(lambda p: RoundedAdamW(p, lr=1e-5, seed=1), weights, 1)
    assert not torch.equal(first[0], second[0])


def test_what_cannot_go_together_is_refused():
    with pytest.raises(ConfigError, match="adapter"):
        GRPOConfig(weights="bfloat16", lora_rank=4)
    with pytest.raises(ConfigError, match="dtype=float32"):
        GRPOConfig(weights="bfloat16", dtype="float32")
    few = LoraConfig(r=2, target_modules="all-linear")
    for model, config in ((tiny_model(), few), (get_peft_model(tiny_model(), few), None)):
        with pytest.raises(ConfigError, match="weights=bfloat16 is for training all weights"):
            GRPOTrainer(model, digits, GRPOConfig(weights="bfloat16"), train_dataset=[{"prompt": "1"}],
                        processing_class=tiny_tokenizer(), peft_config=config)  # fmt: skip


def test_a_loaded_model_keeps_its_buffers_as_they_are():
    model = tiny_model()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    keep_as_asked(model, GRPOConfig(weights="bfloat16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert before and all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


@pytest.mark.parametrize(
    "handed, weights, kept, products",
    [
        ("float32", None, "float32", None),
        ("float32", "bfloat16", "bfloat16", None),
        ("bfloat16", None, "bfloat16", None),
        ("bfloat16", "bfloat16", "bfloat16", None),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float16", None, "float32", None),
        ("float16", "bfloat16", "bfloat16", None),
    ],
)
def test_a_loaded_model_keeps_its_weights_as_asked_and_small_steps_count(handed, weights, kept, products):
    """At a learning rate of 1e-6 nearly every step is too small for bfloat16; as many weights move as in float32."""
    model = tiny_model().to(getattr(torch, handed))
    args = GRPOConfig(**({} if weights is None else {"weights": weights}), preflight=False)
    trainer = GRPOTrainer(model, digits, args, train_dataset=[{"prompt": "1"}], processing_class=tiny_tokenizer())
    parameters = list(trainer.policy.parameters().values())
    assert {str(p.dtype) for p in parameters} == {f"torch.{kept}"}
    assert trainer.policy.scorer.autocast == (products and getattr(torch, products))
    before = [p.detach().float().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.full_like(p, 0.5)
    for _ in range(3):
        trainer.optimizer.step()
    drift = torch.cat([(b - p.detach().float()).flatten() for b, p in zip(before, parameters, strict=True)]).mean()
    assert float(drift) == pytest.approx(3 * args.learning_rate, rel=0.3)


def test_an_optimizer_of_ones_own_that_would_lose_small_steps_is_remarked():
    model = tiny_model().bfloat16()
    own = torch.optim.AdamW(model.parameters(), lr=1e-6)
    with pytest.warns(UserWarning, match="small steps of AdamW are rounded away"):
        GRPOTrainer(model, digits, GRPOConfig(preflight=False), train_dataset=[{"prompt": "1"}],
                    processing_class=tiny_tokenizer(), optimizers=(own, None))  # fmt: skip


def test_the_state_of_a_plain_adamw_is_gone_on_with():
    weights = [torch.randn(9, 4).bfloat16()]
    _, plain = moved(lambda p: torch.optim.AdamW(p, **HOW), weights)
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    rounded = RoundedAdamW(parameters, seed=3, **HOW)
    rounded.load_state_dict(copy.deepcopy(plain.state_dict()))
    parameters[0].grad = torch.full_like(parameters[0], 0.3)
    rounded.step()
    (state,) = rounded.state.values()
    assert state["step"] == next(iter(plain.state.values()))["step"] + 1 and rounded.param_groups[0]["seed"] == 3
