"""A tiny language model whose weights are divided among ranks."""

from __future__ import annotations

import torch

from grpo import together
from grpo.bandit import BanditConfig, make_trainer
from grpo.config import ConfigError
from grpo.seeding import seed_all


def trainer_of(ranks, tied=False, adam=True, dtype=torch.float64, **settings):
    from grpo.language import GRPOConfig, GRPOTrainer
    from tests.unit.language.functions import digits
    from tests.unit.language.tiny import tiny_model, tiny_tokenizer

    together.here = lambda: ranks
    usual = {"num_generations": 4, "prompts_per_step": 5, "max_completion_length": 6, "preflight": False}
    usual |= {"reward_workers": 1, "device": "cpu", "learning_rate": 1e-3, "eval_samples": 2, "max_grad_norm": None}
    rows = [{"prompt": f"What is {a}+{a}" + "?" * a, "answer": str(a + a)} for a in range(7)]
    config = GRPOConfig(**usual | settings, shard="weights")
    model = tiny_model(tie_word_embeddings=tied).to(dtype)
    return GRPOTrainer(model, digits, config, rows, rows[:5], processing_class=tiny_tokenizer())


def stepped(trainer, steps=2):
    reports, texts = [], []
    for step in range(steps):
        seed_all(trainer.config.seed, step)
        report = trainer.step()
        reports.append(dict(report.metrics))
        texts.append([sample.text for sample in report.experience.rollouts.inputs])
    return reports, texts


def divided(ranks, **settings):
    """Metrics, whole weights and moments on the chief, completions, numbers of weights that are kept here."""
    trainer = trainer_of(ranks, **settings)
    try:
        reports, texts = stepped(trainer)
        reports.append(dict(trainer.source.evaluate(2)))
        state = trainer.state()
        local = sum(p.to_local().numel() for p in trainer.policy.parameters().values())
        weights = {k.removeprefix("policy/"): v for k, v in state.arrays.items() if k.startswith("policy/")}
        moments = [v for k, v in state.arrays.items() if k.endswith("exp_avg")]
        return reports, weights if ranks.chief else {}, moments, texts, local
    finally:
        trainer.source.close()


def resumed(ranks, **settings):
    """A state, loaded into another trainer, and its state again; every rank loads the chief's."""
    first = trainer_of(ranks, **settings)
    stepped(first, 1)
    state = first.state()
    saved = ranks.broadcast(state if ranks.chief else None, "a test")
    second = trainer_of(ranks, **settings)
    second.load_state(saved)
    again = second.state()
    for trainer in (first, second):
        trainer.source.close()
    return {k: torch.as_tensor(v) for k, v in state.arrays.items()}, {
        k: torch.as_tensor(v) for k, v in again.arrays.items()
    }


def refused(ranks, **settings):
    try:
        trainer_of(ranks, **settings)
    except ConfigError as error:
        return str(error)


def refused_elsewhere(ranks):
    together.here = lambda: ranks
    try:
        make_trainer(BanditConfig(groups_per_step=4, shard="weights"))
    except ConfigError as error:
        return str(error)
