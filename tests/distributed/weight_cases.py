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


def out_of_memory(rank, folder, where):
    """Rank 1 has no memory left in the middle of a pass: while it samples, once while it scores, or in an update.

    What each rank says is left in the folder.
    """
    import os
    from pathlib import Path

    import torch.distributed as dist

    from grpo.distributed.group import Group
    from grpo.distributed.meeting import Meeting
    from grpo.errors import RanksLost

    folder = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    meeting = Meeting(dist.FileStore(str(folder / "store"), 2), rank, 2, 30.0)
    how = {"engine": "transformers", "packing": "padded", "prompts_per_step": 2}
    how |= {"num_iterations": 2} if where == "scoring" else {}
    trainer = trainer_of(Group(dist.group.WORLD, dist.group.WORLD, meeting), **how)
    scoring = []

    def full(*given):
        raise torch.OutOfMemoryError("there is no more")

    def inside(module, given, out):
        if torch.is_grad_enabled() != (where in ("forward", "backward")) or (where == "scoring" and not scoring):
            return
        scoring.clear()
        if where == "backward":
            out.register_hook(full)
        else:
            full()

    if rank == 1:
        layers = max((m for m in trainer.model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
        layers[0].mlp.register_forward_hook(inside)
        scored = trainer.policy.scorer.in_parts

        def in_parts(*given):
            scoring.append(True)
            return scored(*given)

        trainer.policy.scorer.in_parts = in_parts
    try:
        seed_all(0, 0)
        trainer.step()
    except RanksLost as error:
        meeting.excuse(str(error))
        (folder / f"rank-{rank}").write_text(str(error))
        os._exit(3)
    os._exit(0)
