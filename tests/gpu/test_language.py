"""The language room on a GPU: the same numbers as on a CPU, in either precision, and no more memory than promised."""

import pytest
import torch

from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.scoring.probe import make_scorer
from grpo.language.scoring.scorer import Scorer
from tests.gpu.ways import same_way, weights
from tests.unit.language.functions import digits
from tests.unit.language.test_policy import samples
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS = [{"prompt": f"What is {a}+{a}?", "answer": str(a + a)} for a in range(6)]


def make(model=None, **settings) -> GRPOTrainer:
    config = GRPOConfig(
        num_generations=4,
        prompts_per_step=4,
        max_completion_length=12,
        learning_rate=1e-3,
        preflight=False,
        reward_workers=1,
        beta=0.04,
        device="cuda",
        **settings,
    )
    model = tiny_model() if model is None else model
    return GRPOTrainer(model, digits, config, train_dataset=ROWS, processing_class=tiny_tokenizer())


@pytest.mark.parametrize("packing", ["padded", "packed", "shared"])
def test_log_probs_are_those_of_the_cpu(packing):
    rows = samples(6)
    there = make_scorer(tiny_model(), 0.7, packing)(rows, 12, entropy=True)
    here = make_scorer(tiny_model().cuda(), 0.7, packing)(rows, 12, entropy=True)
    torch.testing.assert_close(here.logp_NT.cpu(), there.logp_NT, atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(here.entropy_NT.cpu(), there.entropy_NT, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("settings", [{}, {"lora_rank": 2}, {"gradient_checkpointing": True}, {"packing": "packed"}])
def test_steps_learn_and_recorded_log_probs_are_the_scoring_pass_s(settings):
    trainer = make(dtype="float32", **settings)
    report = trainer.step()
    rollouts = report.experience.rollouts
    assert report["loss"] is not None and report["updates"] == 1
    again = make(dtype="float32", **settings)
    with torch.no_grad():
        torch.testing.assert_close(again.policy.score(rollouts).logp_NT, rollouts.old_logp_NT, atol=2e-3, rtol=1e-3)
    trainer.source.close()
    again.source.close()


def test_bfloat16_arithmetic_trains_float32_weights_and_samples_with_the_same():
    trainer = make(dtype="bfloat16")
    report = trainer.step()
    assert {p.dtype for p in trainer.policy.parameters().values()} == {torch.float32}
    rollouts = report.experience.rollouts
    gap = (report.scores.logp_NT - rollouts.old_logp_NT)[rollouts.mask_NT].abs().mean()
    assert gap < 0.05
    trainer.source.close()


def test_out_of_memory_halves_the_passes_and_the_gradient_stays(monkeypatch):
    whole = make(dtype="float32")
    before = weights(whole.policy.parameters().values())
    plain_report = whole.step()
    tight = make(dtype="float32")
    plain = Scorer.__call__

    def limited(self, rows, *rest):
        if torch.is_grad_enabled() and len(rows) > 4:
            raise torch.OutOfMemoryError("no room")
        return plain(self, rows, *rest)

    monkeypatch.setattr(Scorer, "__call__", limited)
    with pytest.warns(UserWarning, match="out of memory"):
        report = tight.step()
    assert report["microbatch_halvings"] >= 1
    for name in ("loss", "grad_norm"):  # Adam's first step is the same for a gradient that is too large or too small
        assert report[name] == pytest.approx(plain_report[name], rel=1e-3, abs=1e-5)
    same_way(before, *(weights(made.policy.parameters().values()) for made in (whole, tight)), most=0.05)
    whole.source.close()
    tight.source.close()
