"""What the ranks of the pool carry out; every function gets its ranks first."""

from __future__ import annotations

import os
import signal
import warnings
from dataclasses import replace

import numpy as np
import torch

from grpo import GRPOConfig, GRPOTrainer, agreement, together
from grpo.bandit import BanditConfig, BanditSource, BanditTrainer, SoftmaxPolicy, make_trainer
from grpo.envs.episodes import EpisodeRunner
from grpo.errors import ConfigError, RankFailed, RanksDiffer
from grpo.protocols import State
from grpo.reference import FrozenReference
from grpo.seeding import seed_all
from tests import toys

PAID = ((1.1, 1.2, 1.0, 1.8, 1.3),)
torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # here, once for all ranks: it loads much of torch


def calls(ranks):
    """All three calls once, with arrays of every kind and lengths that differ."""
    mine = State(
        {"rank": ranks.rank, "nan": float("nan"), "text": "ä"},
        {
            "ids": torch.arange(ranks.rank, dtype=torch.int32),
            "half": torch.full((2, ranks.rank + 1), ranks.rank, dtype=torch.bfloat16),
            "mask": np.array([[True, False]]),
            "number": torch.tensor(3.5, dtype=torch.float64),
        },
    )
    gathered = ranks.gather(mine, "a test")
    told = ranks.broadcast(State({"chief": ranks.rank}, {"x": torch.arange(5)}) if ranks.chief else None, "a test")
    summed = [torch.full((3,), ranks.rank + 1.0, dtype=torch.float64), torch.ones(2, 2, dtype=torch.bfloat16)]
    ranks.sum(summed, "a test")
    return gathered, told, summed


def bandit(ranks, steps=3, **settings):
    """A few steps of the bandit; its weights, metrics, and the gradients of every update."""
    return trained(bandit_trainer(ranks, **settings), steps)


def bandit_trainer(ranks, double=False, **settings):
    together.here = lambda: ranks
    config = BanditConfig(**{"groups_per_step": 5, "group_size": 4, "payoffs": PAID, "noise": 0.1} | settings)
    if not double:
        return make_trainer(config)
    policy = SoftmaxPolicy(torch.zeros(config.arms, dtype=torch.float64))
    make = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[config.optimizer]
    optimizer = make([policy.logits_V], lr=config.learning_rate, weight_decay=config.weight_decay)
    beside = {"source": BanditSource(policy, config)}
    if config.recipe.teacher_coef:
        beside["teacher"] = SoftmaxPolicy(torch.arange(config.arms, dtype=torch.float64))
    reference = FrozenReference.copy_of(policy) if config.recipe.beta else None
    return BanditTrainer(config, policy, reference, optimizer=optimizer, **beside)


def trained(trainer, steps):
    """What came of some steps: metrics, the gradients of every update, the weights."""
    gradients, move = [], trainer._move

    def seen(parameters, norm):
        gradients.append([p.grad.clone() for p in parameters])
        move(parameters, norm)

    trainer._move = seen
    reports = []
    for step in range(steps):
        seed_all(trainer.config.seed, step)
        reports.append(dict(trainer.step().metrics))
    return reports, gradients, {name: p.detach().clone() for name, p in trainer.policy.parameters().items()}


def own_models(ranks, steps=3, dtype=torch.float64, policy=toys.Softmax, reward=toys.Match, **settings):
    """A user's own policy and reward; nobody seeds the first weights, so that they are the chief's."""
    together.here = lambda: ranks
    model, asked = policy(dtype=dtype), []
    torch.manual_seed(ranks.rank)
    with torch.no_grad():
        if not ranks.chief:
            model.logits.normal_()
    judge = reward()
    compute, judge.compute_rewards = judge.compute_rewards, lambda s, a: asked.append(len(s)) or compute(s, a)
    config = GRPOConfig(**{"group_size": 4, "groups_per_step": 4, "learning_rate": 0.1} | settings)
    plain = torch.optim.SGD(model.parameters(), lr=config.learning_rate)
    trainer = GRPOTrainer(config, model, reward_model=judge, states=[0, 1, 2, 3], optimizer=plain)
    return *trained(trainer, steps), asked


def other_rows(ranks, who, column):
    """Rank `who` has another question, or another answer, in a row that another rank samples; what each rank says."""

    def changed(rows):
        return [{**row, column: row[column] + ("0" if ranks.rank == who else "")} for row in rows]

    try:
        language(ranks, steps=1, evaluate=False, changed=changed)
    except RanksDiffer as error:
        return str(error)


class Echo:
    """Says one of two things, by what it heard; two turns."""

    def reset(self, row):
        self.turns = 0

    def step(self, completion):
        self.turns += 1
        return f"{len(completion) % 2}", float(len(set(completion))), self.turns == 2


def language_trainer(
    ranks, double=True, tied=False, adam=False, changed=list, teacher=None, turns=False, reward="digits", **settings
):
    """A tiny language model; teacher: the seed of another one; turns: it talks with an environment."""
    from grpo.language import GRPOConfig as LanguageConfig
    from grpo.language import GRPOTrainer as LanguageTrainer
    from tests.unit.language import functions
    from tests.unit.language.tiny import tiny_model, tiny_tokenizer

    together.here = lambda: ranks
    usual = {"num_generations": 4, "prompts_per_step": 5, "max_completion_length": 6, "preflight": False}
    usual |= {"reward_workers": 1, "device": "cpu", "learning_rate": 1e-3, "eval_samples": 2, "max_grad_norm": None}
    config = LanguageConfig(**usual | settings)
    model = tiny_model(tie_word_embeddings=tied)
    model = model.double() if double else model
    rows = changed([{"prompt": f"What is {a}+{a}" + "?" * a, "answer": str(a + a)} for a in range(7)])
    # Adam divides by what rounding leaves of a gradient that is 0, and would say nothing about the ranks.
    plain = None if adam or config.lora_rank else torch.optim.SGD(model.parameters(), lr=0.1)
    given = {} if teacher is None else {"teacher_model": tiny_model(teacher).double()}
    given |= {"environment": Echo} if turns else {}
    return LanguageTrainer(
        model,
        getattr(functions, reward),
        config,
        rows,
        rows[:5],
        processing_class=tiny_tokenizer(),
        optimizers=(plain, None),
        **given,
    )


def language(ranks, steps=2, evaluate=True, **settings):
    """Its held-out rows are evaluated at the end; metrics, gradients, weights, completions."""
    trainer = language_trainer(ranks, **settings)
    completions, step = [], trainer.step

    def seen(*args):
        report = step(*args)
        completions.append([sample.text for sample in report.experience.rollouts.inputs])
        return report

    trainer.step = seen
    try:
        found = trained(trainer, steps)
        if evaluate:
            found[0].append(dict(trainer.source.evaluate(steps)))
        return *found, completions
    finally:
        trainer.source.close()


def run(ranks, folder, steps, room="bandit", asked=None, stop=None, **settings):
    """A run in a folder that the chief has; rank `asked` is sent a signal after step 3, rank `stop` says enough."""
    together.here = lambda: ranks

    def after(report):
        if report.step == 3 and ranks.rank == asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return not (report.step == 4 and ranks.rank == stop)

    make = {
        "bandit": bandit_trainer, "control": control_trainer, "language": language_trainer,
        "worldmodel": worldmodel_trainer,
    }[room]  # fmt: skip
    trainer = make(ranks, **settings)
    mine = folder if ranks.chief else f"{folder}-of-nobody"
    try:
        reports = trainer.train(steps=steps, folder=mine, progress="plain", callbacks=[after])
    finally:
        trainer.source.close()
    assert ranks.chief or not os.path.exists(mine)
    weights = torch.cat([p.detach().flatten() for p in trainer.policy.parameters().values()])
    return [dict(r.metrics) for r in reports], trainer.steps_done, weights


def refused(ranks, folder, **settings):
    """Why a run of a language model is not begun."""
    try:
        run(ranks, folder, 2, room="language", **settings)
    except ConfigError as error:
        return str(error)


def planted(ranks, who):
    """One advantage of rank `who` is another than everybody's; what each rank says, and whether its weights moved."""
    trainer = bandit_trainer(ranks)
    if ranks.rank == who:
        agreed = trainer._agreed
        trainer._agreed = lambda experience: agreed(replace(experience, advantage_NT=-experience.advantage_NT))
    before = trainer.policy.logits_V.detach().clone()
    try:
        trainer.step()
    except RanksDiffer as error:
        return str(error), bool(torch.equal(before, trainer.policy.logits_V))


def other_draws(ranks):
    """A policy that draws from a generator of its own, which nobody has seeded alike."""

    class Wild(toys.Softmax):
        def generate_actions(self, states, num_actions_per_state, **kwargs):
            return np.random.default_rng(ranks.rank).integers(0, 5, (len(states), num_actions_per_state)).tolist()

    try:
        own_models(ranks, policy=Wild)
    except RanksDiffer as error:
        return str(error)


def failing(ranks, who):
    """The reward of rank `who` fails."""

    class Broken(toys.Match):
        def compute_rewards(self, states, actions):
            if ranks.rank == who:
                raise KeyError("no such judge")
            return super().compute_rewards(states, actions)

    try:
        own_models(ranks, reward=Broken)
    except (KeyError, RankFailed) as error:
        return type(error).__name__, str(error)


def chief_fails(ranks, kind):
    """What each rank raises where the chief cannot do its part."""

    def work():
        raise kind("there is no such folder")

    try:
        agreement.by_chief(ranks, "opening it", work)
    except Exception as error:
        return type(error), str(error)


class Recorded:
    """Ranks that note every call, and every pass in between."""

    def __init__(self, ranks):
        self.rank, self.size, self.chief, self._ranks = ranks.rank, ranks.size, ranks.chief, ranks
        self.calls = []

    def gather(self, mine, what):
        self.calls.append(f"gather {what}")
        return self._ranks.gather(mine, what)

    def broadcast(self, chiefs, what):
        self.calls.append(f"broadcast {what}")
        return self._ranks.broadcast(chiefs, what)

    def sum(self, tensors, what):
        self.calls.append(f"sum {what} {[tuple(x.shape) for x in tensors]}")
        self._ranks.sum(tensors, what)


def recorded(ranks, **settings):
    """The calls of two steps, passes among them."""
    noted = Recorded(ranks)
    trainer = bandit_trainer(noted, **settings)
    score = trainer.policy.score

    def passed(rows, entropy=False):
        if torch.is_grad_enabled():
            noted.calls.append("pass")
        return score(rows, entropy)

    trainer.policy.score = passed
    trained(trainer, 2)
    return noted.calls


def out_of_memory(ranks, who):
    """The first pass of rank `who` does not fit."""
    trainer = bandit_trainer(ranks, double=True)
    score, failed = trainer.policy.score, []

    def full(rows, entropy=False):
        if torch.is_grad_enabled() and ranks.rank == who and not failed:
            failed.append(1)
            raise torch.OutOfMemoryError("there is no more")
        return score(rows, entropy)

    trainer.policy.score = full
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return trained(trainer, 2)


def not_a_number(ranks, who):
    """The log-probs of one rank's share are not finite in step 2: nobody moves."""
    trainer = bandit_trainer(ranks, double=True)
    score = trainer.policy.score

    def wrong(rows, entropy=False):
        found = score(rows, entropy)
        bad = torch.is_grad_enabled() and ranks.rank == who and trainer.steps_done == 1
        return replace(found, logp_NT=found.logp_NT * float("nan")) if bad else found

    trainer.policy.score = wrong
    return trained(trainer, 3)


def control_trainer(ranks, **settings):
    from grpo.control import GRPOTrainer as ControlTrainer

    together.here = lambda: ranks
    usual = {"env": "CartPole-v1", "group_size": 4, "groups_per_step": 3, "hidden": (8,), "eval_episodes": 2}
    trainer = ControlTrainer(**usual | settings)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters().values(), lr=0.01)
    return trainer


def control(ranks, steps=2, **settings):
    """Each rank plays and differentiates its share; also how many episodes were played here, in each call."""
    trainer = control_trainer(ranks, **settings)
    played, began = [], EpisodeRunner.__init__

    def seen(runner, fleet, starts, rules):
        played.append(len(starts))
        began(runner, fleet, starts, rules)

    EpisodeRunner.__init__ = seen
    try:
        return *room(trainer, steps), played
    finally:
        EpisodeRunner.__init__ = began


def worldmodel_trainer(ranks, **settings):
    """A small dreamer."""
    from tests.unit.worldmodel.worlds import make

    together.here = lambda: ranks
    trainer = make(**settings)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters().values(), lr=0.01)
    return trainer


def worldmodel(ranks, steps=2, **settings):
    """Every rank plays alike; the world model's batch, futures and the actor's rows are shared.

    Also how many futures were rolled out here, in each call.
    """
    trainer = worldmodel_trainer(ranks, **settings)
    imagination, imagined = trainer.source._imagination, []
    roll = imagination._futures
    imagination._futures = lambda given: imagined.append(len(given["deter"])) or roll(given)
    return *room(trainer, steps), imagined


def room(trainer, steps):
    """Some steps and an evaluation, then the environments are closed."""
    try:
        found = trained(trainer, steps)
        found[0].append(dict(trainer.source.evaluate(steps)))
        return found
    finally:
        trainer.source.close()
