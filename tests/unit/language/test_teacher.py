"""Another model, or the same one with more in its prompt, says how likely each token would have been to it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from grpo.config import ConfigError
from grpo.core import teachers
from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.looking import make_speaker
from grpo.language.model.teacher import NoTeacher
from grpo.learners import marked
from grpo.protocols import CollectRequest
from grpo.recipes import RECIPES
from tests.unit.language.functions import never
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

ROWS = [{"prompt": f"{a}+{a}=", "answer": str(a + a)} for a in range(3, 9)]


def make(folder=None, model=None, expert=None, rewards=None, environment=None, data=ROWS, **settings):
    given = {"group_size": 4, "groups_per_step": 2, "max_completion_length": 5, "preflight": False, "device": "cpu"}
    args = GRPOConfig(**given | {"output_dir": str(folder or "unused"), "learning_rate": 1e-3} | settings)
    return GRPOTrainer(
        model=model or tiny_model(), reward_funcs=rewards, args=args, train_dataset=data,
        processing_class=tiny_tokenizer(), teacher_model=expert, environment=environment,
    )  # fmt: skip


@torch.no_grad()
def whole(model, sample, temperature=1.0, vocabulary=None):
    """Log-probs of every token of the vocabulary at each place of a completion, by the module itself."""
    ids = torch.cat([torch.as_tensor(sample.prompt.ids), sample.ids])[None]
    logits = model(ids).logits[0, len(sample.prompt.ids) - 1 : -1, :vocabulary]
    return (logits.float() / temperature).log_softmax(-1)


def saved(folder, model=None, tokenizer=None):
    (model or tiny_model(7)).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return str(folder)


def test_a_teacher_alone_is_on_policy_distillation(tmp_path):
    path = saved(tmp_path / "teacher")
    trainer = make(tmp_path, teacher=path, model=tiny_model(1))  # no reward, no recipe
    assert trainer.config.loss_type == "opd" and trainer.recipe.outcome_coef == 0
    report = trainer.step()
    rows, their = report.experience.rollouts, tiny_model(7)
    for row, sample in enumerate(rows.inputs):
        want = whole(their, sample).gather(-1, sample.ids[:, None])[:, 0]
        got = report.experience.teacher_logp_NT[row, : sample.length]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            report.experience.advantage_NT[row, : sample.length], want - rows.old_logp_NT[row, : sample.length],
            rtol=1e-4, atol=1e-4,
        )  # fmt: skip
    assert report["reward"] is None and report["grad_norm"] > 0 and math.isfinite(report["teacher_kl"])


@pytest.mark.parametrize("settings", [
    {"loss_type": "gkd", "teacher_top_k": 9},
    {"loss_type": "gkd", "teacher_top_k": 500},
    {"loss_type": "opd", "teacher_in": "loss", "teacher_kl": "forward", "temperature": 0.7},
    {"loss_type": "gkd", "teacher_top_k": 9, "padded": 130},
    {"loss_type": "gkd", "teacher_top_k": 500, "padded": 130},
    {"loss_type": "opd", "teacher_in": "loss", "padded": 130},
])  # fmt: skip
def test_terms_are_those_of_whole_distributions(settings):
    """Of a teacher whose head is padded, over the student's vocabulary."""
    settings = dict(settings)
    size = {"vocab_size": settings.pop("padded")} if "padded" in settings else {}
    student, their = tiny_model(1), tiny_model(7, **size)
    tokens = student.config.vocab_size
    trainer = make(model=student, expert=their, **settings)
    rollouts = trainer.source.collect(request()).rollouts
    said = trainer.teacher.teach(rollouts)
    recipe, total, count = trainer.recipe, 0.0, 0
    for row, sample in enumerate(rollouts.inputs):
        mine, theirs = (whole(model, sample, trainer.config.temperature, tokens) for model in (student, their))
        if recipe.teacher_over == "sampled":
            token = sample.ids[:, None]
            each = teachers.sampled(mine.gather(-1, token).T, theirs.gather(-1, token).T, recipe.teacher_kl)[0]
        else:
            best = theirs.topk(min(recipe.teacher_top_k, theirs.shape[1]), -1).indices
            torch.testing.assert_close(
                said.choice_logp_NTK[row, : sample.length], theirs.gather(-1, best), rtol=1e-4, atol=1e-4
            )
            some = [teachers.with_tail(x.gather(-1, best))[None] for x in (mine, theirs)]
            each = teachers.divergence(*some, recipe.teacher_kl, recipe.teacher_mix)[0]
            if recipe.teacher_top_k > theirs.shape[1]:
                torch.testing.assert_close(
                    each, teachers.divergence(mine[None], theirs[None], "js")[0], rtol=1e-3, atol=1e-5
                )
        total, count = total + float(each.sum()), count + sample.length
    assert trainer.step()["teacher_kl"] == pytest.approx(total / count, rel=1e-3, abs=1e-5)


def request():
    return CollectRequest(0)


def test_a_student_comes_to_do_what_its_teacher_does():
    told = make(model=tiny_model(1), expert=tiny_model(7), loss_type="gkd", learning_rate=3e-3)
    reports = [told.step()["teacher_kl"] for _ in range(25)]
    assert reports[-1] < reports[0] / 2


def test_the_model_itself_with_the_answer_in_its_prompt():
    trainer = make(loss_type="opsd", teacher_template="{prompt} ({answer})")
    rollouts = trainer.source.collect(request()).rollouts
    prompts = trainer.teacher._prompts(rollouts)
    for sample, prompt in zip(rollouts.inputs, prompts, strict=True):
        asked = sample.prompt.messages[-1]["content"]
        assert prompt.messages[-1]["content"] == f"{asked} ({sample.prompt.columns['answer']})"
        assert prompt.ids != sample.prompt.ids and sample.prompt.messages[-1]["content"] == asked
    said = trainer.teacher.teach(rollouts)
    sample = rollouts.inputs[0]
    want = whole(trainer.model, replace(sample, prompt=prompts[0])).gather(-1, sample.ids[:, None])[:, 0]
    torch.testing.assert_close(said.logp_NT[0, : sample.length], want, rtol=1e-4, atol=1e-4)
    assert trainer.step()["grad_norm"] > 0


def test_a_success_of_the_group_is_shown_to_the_others():
    trainer = make(loss_type="sdpo", rewards=[never])
    rollouts = trainer.source.collect(request()).rollouts
    parts = torch.tensor([[0.0], [1.0], [0.0], [0.0], [0.0], [0.0], [0.0], [0.0]])
    rollouts = rollouts.but(reward_parts_NK=parts)
    prompts = trainer.teacher._prompts(rollouts)
    assert [prompt is not None for prompt in prompts] == [True, False, True, True, False, False, False, False]
    assert rollouts.inputs[1].text in prompts[0].messages[-1]["content"]
    said = trainer.teacher.teach(rollouts)
    assert said.logp_NT.isnan().all(1).tolist() == [False, True, False, False, True, True, True, True]
    report = trainer.step()  # nobody succeeds: nothing to learn, and no harm done
    assert report["grad_norm"] == 0 and report["loss"] == 0


@pytest.mark.parametrize("lora", [0, 2])
def test_an_average_of_itself_teaches(lora):
    """τ ← decay·τ + (1 − decay)·π after each step, and what it says is said with those weights."""
    trainer = make(loss_type="opsd", teacher_decay=0.75, lora_rank=lora, learning_rate=0.05)
    want = {name: p.detach().clone() for name, p in trainer.policy.parameters().items()}
    for _ in range(2):
        trainer.step()
        want = {name: 0.75 * mean + 0.25 * trainer.policy.parameters()[name].detach() for name, mean in want.items()}
    for name, p in trainer.teacher.average.parameters().items():
        torch.testing.assert_close(p, want[name], rtol=1e-5, atol=1e-6)
    rollouts = trainer.source.collect(request()).rollouts
    said = trainer.teacher.teach(rollouts).logp_NT
    sample, prompt = rollouts.inputs[0], trainer.teacher._prompts(rollouts)[0]
    now = whole(trainer.model, replace(sample, prompt=prompt))
    with torch.no_grad():
        for name, p in trainer.policy.parameters().items():
            p.copy_(want[name])
    then = whole(trainer.model, replace(sample, prompt=prompt))
    told, own = (x.gather(-1, sample.ids[:, None])[:, 0] for x in (then, now))
    torch.testing.assert_close(said[0, : sample.length], told, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(told, own, atol=1e-3)


def test_without_a_reward_the_shortest_learn_or_some_at_random():
    """No reward makes no try worth less than the others."""
    for by in ("length", "random"):
        how = {"loss_type": "opd", "group_size": 8, "max_completion_length": 9, "select": 3, "select_by": by}
        trainer = make(model=tiny_model(1), expert=tiny_model(7), **how)
        rollouts = trainer.source.collect(request()).rollouts
        found = marked(rollouts, trainer.config, 0).learns_N.view(2, 8)
        length = rollouts.mask_NT.sum(1).view(2, 8)
        assert found.sum(1).tolist() == [3, 3] and not found[:, :3].all()  # not just the first
        if by == "length":
            assert all(max(length[g][found[g]]) <= min(length[g][~found[g]]) for g in range(2))
        assert trainer.step()["grad_norm"] > 0


def test_any_column_can_be_told():
    rows = [row | {"hint": f"{{prompt}} {row['answer']}"} for row in ROWS]
    trainer = make(loss_type="opsd", teacher_template="{prompt} {{x}} {hint}", data=rows)
    rollouts = trainer.source.collect(request()).rollouts
    for sample, prompt in zip(rollouts.inputs, trainer.teacher._prompts(rollouts), strict=True):
        asked = sample.prompt.messages[-1]["content"]
        assert prompt.messages[-1]["content"] == f"{asked} {{x}} {{prompt}} {sample.prompt.columns['answer']}"


def test_rows_are_looked_at_before_the_first_step():
    with pytest.raises(ConfigError, match="teacher_template: no column hint; found answer — name one of them"):
        make(loss_type="opsd", teacher_template="{prompt} {hint}")
    with pytest.raises(ConfigError, match="no column answer; found none — name one of them in answer_column"):
        make(loss_type="opsd", data=[{"prompt": "1+1="}])
    with pytest.raises(ConfigError, match=r"row 1 has no answer that the teacher could be shown .*; set answer_column"):
        make(loss_type="opsd", data=[ROWS[0], ROWS[1] | {"answer": None}, ROWS[2]])


def test_the_answer_must_be_there():
    trainer = make(loss_type="opsd")
    rollouts = trainer.source.collect(request()).rollouts
    sample = rollouts.inputs[0]
    bare = [replace(sample, prompt=replace(sample.prompt, columns={})), *rollouts.inputs[1:]]
    with pytest.raises(ConfigError, match="has no answer that the teacher could be shown"):
        trainer.teacher.teach(rollouts.but(inputs=bare))


def test_what_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match=r'recipe "opd" needs a teacher: give --teacher PATH'):
        make(loss_type="opd")
    with pytest.raises(ConfigError, match="teacher has no effect here: recipe dapo has no teacher; set teacher_coef"):
        GRPOConfig(recipe="dapo", teacher="x")
    with pytest.raises(ConfigError, match=r"teacher_template has no \{answer\}"):
        GRPOConfig(recipe="opsd", teacher_template="nothing")
    with pytest.raises(ConfigError, match="teacher_top_k=100000 of every token takes too much memory"):
        big = tiny_model(1, vocab_size=5000)
        make(model=big, expert=big, loss_type="gkd", teacher_top_k=100_000)
    with pytest.raises(ConfigError, match="teacher_sees=success shows tries of the whole group"):
        make(loss_type="sdpo", select=2, rewards=[never])
    with pytest.raises(ConfigError, match="select_by=variance compares rewards, and there is none; take select_by=len"):
        make(loss_type="opd", expert=tiny_model(7), select=2)
    with pytest.raises(ConfigError, match="teacher_decay has no effect here: it needs a model that teaches itself"):
        GRPOConfig(recipe="opd", teacher="x", teacher_decay=0.9)
    with pytest.raises(ConfigError, match=r'"sdpo" shows the teacher tries that succeeded .* no reward says which did'):
        make(loss_type="sdpo")
    with pytest.raises(ConfigError, match=r"teacher=\./nowhere: there is no such folder"):
        make(loss_type="opd", teacher="./nowhere")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the teacher's tokenizer=.*bare cannot be loaded"):
        make(loss_type="opd", teacher=str(tmp_path / "bare"))
    tiny_tokenizer().save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"the teacher's model=.*bare cannot be loaded"):
        make(loss_type="opd", teacher=str(tmp_path / "bare"))
    (tmp_path / "run" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has no model in it \(config.json\)"):
        make(loss_type="opd", teacher=str(tmp_path / "run"))
    (tmp_path / "run" / "model" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has an adapter without its model .*grpo export RUN --merge"):
        make(loss_type="opd", teacher=str(tmp_path / "run"))
    other = tiny_tokenizer()
    other.add_tokens(["more"])
    path = saved(tmp_path / "other", tokenizer=other)
    with pytest.raises(
        ConfigError, match=r"has another vocabulary \(.* take recipe opd, .* or a teacher of the same fam"
    ):
        make(teacher=path, loss_type="gkd")
    with pytest.raises(ConfigError, match=r"the teacher has 50 tokens in its head, .* or name its folder in `teacher`"):
        make(expert=tiny_model(1, vocab_size=50), loss_type="opd")


def test_a_teacher_that_does_not_fit_is_refused_with_its_size(tmp_path, monkeypatch):
    path = saved(tmp_path / "teacher")
    monkeypatch.setattr("grpo.language.model.teacher.device_of", lambda name: "cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 2000))
    with pytest.raises(ConfigError, match=r"its weights take 0.0 GiB and 0.0 GiB of the GPU are free; take a"):
        make(model=tiny_model(1), teacher=path)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr("grpo.language.model.teacher.loading.load_model", full)
    with pytest.raises(ConfigError, match=r"does not fit: its weights take 0.0 GiB; take a smaller one, a LoRA"):
        make(model=tiny_model(1), teacher=path)
    stored = tmp_path / "hub" / "models--some--teacher" / "snapshots" / "0123" / "model.safetensors"
    stored.parent.mkdir(parents=True)
    (stored.parent / "config.json").write_text("{}")
    with stored.open("wb") as file:
        file.truncate(3 << 30)  # nothing of it is on the disk
    (stored.parents[2] / "refs").mkdir()
    (stored.parents[2] / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("grpo.language.model.teacher.earlier.tokenizer_of", lambda named: tiny_tokenizer())
    with pytest.raises(ConfigError, match=r"teacher=some/teacher does not fit: its weights take 3.0 GiB; take a small"):
        make(model=tiny_model(1), teacher="some/teacher")
    with pytest.raises(ConfigError, match=r"teacher=un/known does not fit; take a smaller one"):
        make(model=tiny_model(1), teacher="un/known")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps with a reward of its own file, which the file counts."""
    place = tmp_path_factory.mktemp("earlier")
    (place / "mine.py").write_text(f"open({str(place / 'loaded')!r}, 'a').write('x')\ndef f(completion): return 1.0\n")
    how = {"dataset": "addition", "rewards": (f"{place}/mine.py:f",), "preflight": False, "device": "cpu"}
    shape = {"model": "tiny", "group_size": 2, "groups_per_step": 1, "max_completion_length": 3, "reward_workers": 1}
    args = GRPOConfig(**how, **shape, output_dir=str(place / "run"), max_steps=2, save_steps=1, loss_type="dro",
                      learning_rate=0.1, weight_decay=1.0)  # fmt: skip
    GRPOTrainer(args=args, train_dataset=ROWS, eval_dataset=ROWS[:1]).train(progress=None)
    return place


def test_a_checkpoint_of_an_earlier_run_teaches(run):
    """Each has its own weights, also once the model that the run left is gone; none of its code is loaded."""
    folder, before = run / "run", len((run / "loaded").read_text())
    how = {"dataset": "addition", "preflight": False, "device": "cpu", "max_completion_length": 3, "group_size": 2}

    def told(place):
        args = GRPOConfig(model="tiny", seed=5, groups_per_step=1, teacher=str(place), **how)
        return GRPOTrainer(args=args, train_dataset=ROWS, eval_dataset=ROWS[:1]).teacher

    def weights(teacher):
        return torch.cat([p.flatten() for p in teacher._reader._scorer.model.parameters()])

    first, last, left = (told(folder / name) for name in ("checkpoints/step-1", "checkpoints/step-00000002", ""))
    saved = load_file(folder / "checkpoints" / "step-00000001" / "arrays.safetensors")
    mine = dict(first._reader._scorer.model.named_parameters())
    assert mine and all(torch.equal(saved[f"policy/{name}"], p) for name, p in mine.items())
    assert not torch.equal(weights(first), weights(last)) and torch.equal(weights(last), weights(left))
    (folder / "model").rename(run / "gone")
    assert torch.equal(weights(told(folder / "checkpoints" / "step-1")), weights(first))
    assert torch.equal(weights(told(folder)), weights(last))
    (run / "gone").rename(folder / "model")
    assert len((run / "loaded").read_text()) == before
    with pytest.raises(ConfigError, match=r"step-7: there is no such checkpoint; there: step-00000001, step-00000002"):
        told(folder / "checkpoints" / "step-7")


@pytest.mark.filterwarnings("ignore:reward lambda runs in this process")
def test_beside_a_reward_and_in_a_run(tmp_path):
    path = saved(tmp_path / "teacher")
    length = [lambda completion: float(len(completion))]
    how = {"teacher": path, "recipe": "dr_grpo", "teacher_coef": 0.5, "max_steps": 1}
    trainer = make(tmp_path / "run", model=tiny_model(1), rewards=length, **how)
    assert trainer.recipe.outcome_coef == 1
    reports = trainer.train(progress=None)
    assert math.isfinite(reports[-1]["teacher_kl"]) and reports[-1]["reward"] is not None
    speaker = make_speaker(trainer.config.but(model=path, dataset="addition", rewards=("correctness",)))
    assert isinstance(speaker.teacher, NoTeacher)


@pytest.mark.parametrize("beside", [True, False])
def test_where_no_try_is_better_than_another_the_teacher_teaches(beside, tmp_path, capsys):
    """Beside a reward that never comes, under a recipe that alone would drop such groups; and without any reward."""
    how = {"recipe": "dapo", "teacher_coef": 0.5, "mask_truncated": False} if beside else {"recipe": "opd"}
    trainer = make(tmp_path, model=tiny_model(1), expert=tiny_model(7), rewards=[never] if beside else None, **how)
    assert trainer.train(steps=1, progress="plain")[-1]["grad_norm"] > 0
    assert "ended=done" in (out := capsys.readouterr().out) and "nothing was learned" not in out
    assert " teacher_kl=" in out  # without a reward the number that says whether it learns


@pytest.mark.parametrize("name", RECIPES)
def test_a_row_without_what_it_needs_is_refused_in_one_line(name):
    """Rows with nothing but prompts, no reward, no teacher."""
    with pytest.raises(ConfigError) as raised:
        make(loss_type=name, data=[{"prompt": "1+1="}])
    said = str(raised.value)
    wanted = "no column answer" if name == "opsd" else "needs a teacher" if name in ("opd", "iw_opd", "gkd") else (
        "compares turns" if name == "gigpo" else "no reward")  # fmt: skip
    assert wanted in said and "\n" not in said
