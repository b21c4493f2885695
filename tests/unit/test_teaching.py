"""A teacher beside the rewards, or in their place."""

from __future__ import annotations

import pytest
import torch

from grpo import GRPOConfig, GRPOTrainer
from grpo.config import ConfigError
from grpo.experience import Experience
from grpo.objective import objective
from grpo.recipes import recipe
from grpo.rollouts import Rollouts, Scores, Taught
from grpo.teaching import ScoringTeacher
from tests.toys import ARMS, Match, Softmax


def expert(scale=4.0):
    """Takes the arm with the state's own number."""
    made = Softmax()
    with torch.no_grad():
        made.logits.copy_(scale * torch.eye(4, ARMS))
    return made


class Blind(Match):
    """Pays the same for everything: only a teacher can help."""

    def compute_rewards(self, states, actions):
        return torch.zeros(len(actions))


def taught(policy, steps=60, reward=None, teacher=None, **settings):
    torch.manual_seed(0)
    given = {"loss_type": "opd", "group_size": 8, "learning_rate": 0.1} | settings
    made = GRPOTrainer(GRPOConfig(**given), policy, None, reward or Blind(), teacher=teacher or expert())
    return [made.step([0, 1, 2, 3]) for _ in range(steps)]


@pytest.mark.parametrize("settings", [
    {},
    {"loss_type": "iw_opd"},
    {"teacher_in": "loss"},
    {"teacher_in": "loss", "teacher_kl": "forward"},
    {"teacher_in": "loss", "teacher_kl": "js"},
    {"teacher_in": "loss", "teacher_clip": 2.0, "num_iterations": 2, "rows_per_minibatch": 16},
])  # fmt: skip
def test_a_student_becomes_its_teacher_without_any_reward(settings):
    student = Softmax()
    reports = taught(student, steps=80, **settings)
    assert reports[0]["teacher_kl"] > 0.2 and all(report["reward"] == 0 for report in reports)
    gap = (student.logits.softmax(-1) - expert().logits.softmax(-1)).abs().max()
    assert float(gap.detach()) < 0.2, gap


def test_beside_the_reward_both_count():
    student = Softmax()
    taught(student, reward=Match(), loss_type="dr_grpo", teacher_coef=0.2, length=1.0, teacher=Softmax(), steps=20)
    assert float(student.logits.detach().softmax(-1).diagonal().min()) > 0.4  # although the teacher would take any arm


def lesson(rows=6, steps=4):
    torch.manual_seed(3)
    logits = torch.randn(rows, steps, 7, dtype=torch.float64, requires_grad=True)
    theirs = torch.randn(rows, steps, 7, dtype=torch.float64).log_softmax(-1)
    token = torch.randint(7, (rows, steps))
    choice = theirs.topk(3, -1).indices
    teacher = theirs.gather(-1, token[..., None])[..., 0]
    teacher[1, 2] = float("nan")  # no opinion
    rollouts = Rollouts(
        group_N=torch.arange(rows) // 3,
        mask_NT=torch.arange(steps)[None] < torch.tensor([4, 3, 2, 4, 1, 4])[:, None],
        old_logp_NT=logits.detach().log_softmax(-1).gather(-1, token[..., None])[..., 0] + 0.1,
        reward_N=torch.arange(rows, dtype=torch.float64) % 2,
        inputs=torch.arange(rows),
    )
    return logits, token, rollouts, Taught(teacher, choice, theirs.gather(-1, choice))


def scored(logits, token, rollouts, row):
    logp = logits[row].log_softmax(-1)
    choices = None if rollouts.choice_NTK is None else logp.gather(-1, rollouts.choice_NTK)
    return Scores(logp.gather(-1, token[row][..., None])[..., 0], choice_logp_NTK=choices)


@pytest.mark.parametrize("settings", [
    {"loss_type": "opd"}, {"loss_type": "gkd"}, {"loss_type": "sdpo"}, {"loss_type": "dapo", "teacher_coef": 0.5},
])  # fmt: skip
def test_the_gradient_does_not_know_how_the_work_was_cut(settings):
    settings = dict(settings)
    how = recipe(settings.pop("loss_type"), **settings)
    logits, token, rollouts, said = lesson()
    batch = Experience.build(rollouts, how).taught(said, how)
    whole = torch.autograd.grad(objective(scored(logits, token, batch.rollouts, slice(None)), batch, how).loss, logits)[
        0
    ]
    parts = torch.zeros_like(whole)
    for rows in ([4], [0, 2], [5, 1, 3]):
        part = batch.select(rows)
        loss = objective(scored(logits, token, part.rollouts, rows), part, how).loss
        parts += torch.autograd.grad(loss, logits)[0]
    assert bool(whole.abs().sum() > 0)
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)
    silent = recipe("gkd") if how.name == "gkd" else recipe("opd")
    alone = Experience.build(rollouts, silent).taught(said, silent)
    loss = objective(scored(logits, token, alone.rollouts, slice(None)), alone, silent).loss
    assert not torch.autograd.grad(loss, logits)[0][1, 2].any()  # where the teacher has no opinion nothing is learned


def test_what_is_missing_is_said():
    with pytest.raises(ConfigError, match=r"teacher_coef=1 needs a teacher: give teacher="):
        GRPOTrainer(GRPOConfig(loss_type="opd"), Softmax(), None, Match())
    with pytest.raises(ConfigError, match=r"a teacher has no effect here"):
        GRPOTrainer(GRPOConfig(loss_type="grpo"), Softmax(), None, Match(), teacher=expert())
    with pytest.raises(ConfigError, match=r"teacher_over=top_k needs a teacher with teach"):
        GRPOTrainer(GRPOConfig(loss_type="gkd"), Softmax(), None, Match(), teacher=expert())
    with pytest.raises(ConfigError, match=r"teacher_kl has no effect here: it needs teacher_coef > 0"):
        GRPOConfig(teacher_kl="js")
    with pytest.raises(ConfigError, match=r"teacher_kl and teacher_over need teacher_in=loss"):
        GRPOConfig(loss_type="opd", teacher_kl="js")
    with pytest.raises(ConfigError, match=r"outcome_coef has no effect without teacher_coef"):
        GRPOConfig(outcome_coef=0.5)
    with pytest.raises(ConfigError, match=r"teacher_mix is in \(0, 1\)"):
        GRPOConfig(loss_type="gkd", teacher_mix=1.0)
    logits, token, rollouts, said = lesson()
    batch = Experience.build(rollouts, recipe("gkd")).taught(Taught(said.logp_NT), recipe("gkd"))
    with pytest.raises(ValueError, match=r"teacher_over=top_k needs choice_logp_NTK"):
        objective(scored(logits, token, batch.rollouts, slice(None)), batch, recipe("gkd"))


def test_a_reference_teaches_as_a_policy_does():
    class Frozen:
        def score(self, rows):
            return rows.old_logp_NT * 2

    rollouts = lesson()[2]
    assert torch.equal(ScoringTeacher(Frozen()).teach(rollouts).logp_NT, rollouts.old_logp_NT * 2)


def test_control_learns_from_whoever_scores():
    from grpo.control import GRPOTrainer as ControlTrainer

    class Right:
        """Nearly always pushes to the right."""

        def score(self, rows):
            return torch.where(rows.inputs["action"] == 1, 0.9, 0.1).log()

    made = ControlTrainer("CartPole-v1", loss_type="opd", group_size=4, learning_rate=0.02, teacher=Right(), seed=2)
    told = [made.step()["teacher_kl"] for _ in range(20)]
    assert told[-1] < told[0] / 2
    made.source.close()


def test_in_imagination_a_critics_actor_teaches():
    from tests.unit.worldmodel.worlds import make

    critic = make(actor="critic", learning_rate=0.02)
    for _ in range(3):
        critic.step()
    student = make(loss_type="opd", teacher=critic.policy, train_ratio=0, pretrain=None, learning_rate=0.003)
    student.source.model.load_state_dict(critic.source.model.state_dict())  # latents mean the same to both
    told = [student.step()["teacher_kl"] for _ in range(25)]
    assert told[-1] < told[0] / 2
    for trainer in (critic, student):
        trainer.source.close()
