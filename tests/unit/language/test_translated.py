"""A teacher with another tokenizer reads the student's text in its own tokens, and speaks of the student's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo.config import ConfigError
from grpo.language.data.chat import Chat
from grpo.language.model.teacher import LanguageTeacher
from grpo.language.model.translated import TranslatedReader, difference
from grpo.language.samples import Prompt, Sample
from grpo.rollouts import Taught
from tests.unit.language.functions import never
from tests.unit.language.test_teacher import make, request, saved, whole
from tests.unit.language.tiny import TEMPLATE, tiny_model, tiny_tokenizer
from tests.unit.language.tokenizers_of_kinds import CHATML, of_bytes, of_pairs, of_sentencepiece

PAIRS = of_pairs()
SUMS = [{"prompt": f"{a}+{a + 1}=", "answer": str(2 * a + 1)} for a in range(20, 26)]


def pairs_model(seed=7, tokenizer=PAIRS, **settings):
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<pad>"])
    ids = {"eos_token_id": end, "pad_token_id": pad, "bos_token_id": None}
    return tiny_model(seed, vocab_size=len(tokenizer), **ids | settings)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("other"), pairs_model(), PAIRS)


def sample(ids, text="", stop="eos", prompt=None):
    ids = torch.tensor(ids)
    prompt = prompt or Prompt(0, [5, 6], "1+1=", None)
    return Sample(prompt, ids, torch.ones(len(ids), dtype=torch.bool), None, stop, text)


class Countable:
    """A teacher whose log-prob of token i is −i, that would say nothing else, and that remembers what it was shown."""

    context, vocabulary = 99.0, 100

    def read(self, samples, steps, count):
        self.shown = samples
        rows = [[-float(i) for i in s.ids.tolist()] + [0.0] * (steps - s.length) for s in samples]
        choice_NTK = torch.zeros(len(samples), steps, 1, dtype=torch.int64)
        return Taught(torch.tensor(rows), choice_NTK, torch.full(choice_NTK.shape, -1e9))


def reader(student, teacher, **chat):
    inner = Countable()
    end = teacher.convert_tokens_to_ids("<|im_end|>")
    return TranslatedReader(inner, Chat(student, **chat), Chat(teacher), end), inner, end


def test_the_same_tokenizer_through_the_text_is_the_plain_way():
    """Per token, up to a control token in the midst, which is read by its name."""
    trainer = make(expert=tiny_model(7), model=tiny_model(1), loss_type="opd", max_completion_length=9)
    plain, chat = trainer.teacher._reader, trainer.teacher._chat
    aligned = TranslatedReader(plain, chat, Chat(tiny_tokenizer()), tiny_tokenizer().eos_token_id)
    rows = trainer.source.collect(request()).rollouts
    said, plainly = LanguageTeacher(aligned, chat, trainer.config).teach(rows), trainer.teacher.teach(rows)
    control = {i for i, token in tiny_tokenizer().added_tokens_decoder.items() if token.special}
    compared = 0
    for row, made in enumerate(rows.inputs):
        end = next((i for i, token in enumerate(made.ids.tolist()[:-1]) if token in control), made.length)
        compared += end
        torch.testing.assert_close(said.logp_NT[row, :end], plainly.logp_NT[row, :end], rtol=1e-5, atol=1e-5)
    assert compared > 20


def test_a_token_has_its_part_of_the_teachers():
    student, (aligned, inner, end) = tiny_tokenizer(None), reader(tiny_tokenizer(None), PAIRS)
    ids = student("a123")["input_ids"]
    said = aligned.read([sample([*ids, student.eos_token_id])], 6, 0)
    a, pair, three = PAIRS.convert_tokens_to_ids(["a", "12", "3"])
    assert inner.shown[0].ids.tolist() == [a, pair, three, end]
    assert said.logp_NT[0, :5].tolist() == [-a, -pair, 0, -three, -end] and said.logp_NT[0, 5:].isnan().all()
    back, (aligned, inner, _) = [a, pair, three], reader(PAIRS, student)  # and the other way round
    said = aligned.read([sample(back, stop="stop")], 3, 0)
    assert said.logp_NT.tolist() == [[-ids[0], -ids[1] - ids[2], -ids[3]]]


def test_an_answer_that_was_cut_has_no_end():
    student, (aligned, inner, _) = tiny_tokenizer(None), reader(tiny_tokenizer(None), PAIRS)
    said = aligned.read([sample(student("a12")["input_ids"], stop="length")], 3, 0)
    assert inner.shown[0].ids.tolist() == PAIRS.convert_tokens_to_ids(["a", "12"]) and not said.logp_NT.isnan().any()


def test_characters_of_several_tokens():
    """Bytes are compared: an answer whose characters the two sides cut differently, and one that breaks off in one."""
    student, teacher = of_bytes(template=None), of_sentencepiece()
    aligned, inner, end = reader(student, teacher)
    text = "46 größer 🙂 日本"
    ids = student(text)["input_ids"]
    said = aligned.read([sample([*ids, student.eos_token_id])], len(ids) + 1, 0)
    theirs = inner.shown[0].ids.tolist()
    assert teacher.decode(theirs[:-1]) == text and theirs[-1] == end
    assert not said.logp_NT.isnan().any()
    assert said.logp_NT.double().sum() == pytest.approx(-sum(theirs), rel=1e-6)
    aligned.read([sample(ids[:-1], stop="stop")], len(ids), 0)
    assert teacher.decode(inner.shown[0].ids) == "46 größer 🙂 日\ufffd"
    cut = aligned.read([sample(ids[:-1], stop="length")], len(ids), 0)
    assert teacher.decode(inner.shown[0].ids) == "46 größer 🙂 "  # nothing of a character that was cut
    assert cut.logp_NT[0, -2:].isnan().all() and not cut.logp_NT[0, :-4].isnan().any()


def test_control_tokens_of_either_side():
    """One that the student samples is charged by its name; the text of one is text to the teacher."""
    student, teacher = tiny_tokenizer(None), of_bytes(template=None)
    aligned, inner, end = reader(student, teacher)
    user = student.convert_tokens_to_ids("<|user|>")
    digits = student("12")["input_ids"]
    said = aligned.read([sample([*digits, user, *digits, student.eos_token_id])], 6, 0)
    assert teacher.decode(inner.shown[0].ids) == "12<|user|>12<|im_end|>"
    assert not said.logp_NT.isnan().any() and float(said.logp_NT[0, 2]) < -100
    aligned.read([sample([*student("<|im_end|>")["input_ids"], student.eos_token_id])], 20, 0)
    assert inner.shown[0].ids.tolist().count(end) == 1 and inner.shown[0].ids[-1] == end


def test_what_the_teacher_cannot_write_is_charged():
    """A letter that is none of its tokens: the student's token pays for all that the teacher reads from there on."""
    student, (aligned, inner, end) = of_bytes(template=None), reader(of_bytes(template=None), PAIRS)
    ids = student("1é2")["input_ids"]
    said = aligned.read([sample([*ids, student.eos_token_id])], len(ids) + 1, 0)
    one, unknown, two = PAIRS.convert_tokens_to_ids(["1", "<unk>", "2"])
    assert inner.shown[0].ids.tolist() == [one, unknown, two, end]
    assert said.logp_NT[0, :2].tolist() == [-one, -(unknown + two + end)] and said.logp_NT[0, 2:].isnan().all()


def test_prompts_are_written_by_the_teachers_own_template():
    student, teacher = tiny_tokenizer(TEMPLATE), of_bytes(template=CHATML)
    aligned, inner, _ = reader(student, teacher)
    asked = [{"role": "user", "content": "1+1="}]
    prompt = Prompt(3, [1], "<|user|>1+1=<eos><|assistant|>", asked)
    aligned.read([sample([student.eos_token_id], prompt=prompt)], 1, 0)
    assert teacher.decode(inner.shown[0].prompt.ids) == "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(ConfigError, match="row 3: its prompt holds the student's chat template already"):
        aligned.read([sample([student.eos_token_id], prompt=replace(prompt, messages=None))], 1, 0)


def test_rows_too_long_for_the_teacher_have_none():
    aligned, inner, _ = reader(tiny_tokenizer(None), PAIRS)
    inner.context = 5.0
    with pytest.warns(UserWarning, match=r"longer than the teacher's context \(5 tokens\)"):
        said = aligned.read([sample(tiny_tokenizer()("abcdefgh")["input_ids"], stop="stop")], 8, 0)
    assert said.logp_NT.isnan().all()


def test_a_run_with_such_a_teacher(other):
    """Over a text that ended, tokens add up to what the teacher's own module says of it in its tokens."""
    with pytest.warns(UserWarning, match=r"another vocabulary \(token 0 is .* aligned with the student's tokens"):
        trainer = make(teacher=other, model=after(tiny_model(1), tiny_tokenizer(), 25), data=SUMS)
    report, their = trainer.step(), pairs_model()
    batch, ended = report.experience, 0
    for row, made in enumerate(batch.rollouts.inputs):
        said, old = batch.teacher_logp_NT[row, : made.length], batch.rollouts.old_logp_NT[row, : made.length]
        torch.testing.assert_close(batch.advantage_NT[row, : made.length], (said - old).nan_to_num())
        if made.stop == "eos":
            theirs, *_ = trainer.teacher._reader._translated(made, trainer.teacher._reader._prompt(made.prompt))
            total = whole(their, theirs).gather(-1, theirs.ids[:, None]).sum()
            torch.testing.assert_close(said.nansum(), total, rtol=1e-4, atol=1e-3)
            ended += 1
    assert report["grad_norm"] > 0 and ended > 2


@pytest.mark.parametrize("settings", [
    {"loss_type": "iw_opd"}, {"loss_type": "opd", "teacher_in": "loss", "teacher_kl": "js"},
    {"loss_type": "dapo", "teacher_coef": 0.5, "rewards": [never], "drop_no_signal": False},
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*another vocabulary")
def test_rows_that_look_at_sampled_tokens_take_it(other, settings):
    report = make(teacher=other, model=tiny_model(1), data=SUMS, tokens_per_microbatch=30, **settings).step()
    assert report["grad_norm"] > 0 and report["teacher_kl"] != 0


def test_what_such_a_teacher_cannot_do(other):
    match = r"another vocabulary .*: recipe \"gkd\" compares distributions over tokens .* take recipe opd"
    with pytest.raises(ConfigError, match=match):
        make(teacher=other, loss_type="gkd")
    with pytest.raises(ConfigError, match=r"aligned by the text of one answer; leave out tools"):
        make(teacher=other, environment="tests.unit.language.slow_envs:Echo")
    assert difference(PAIRS, of_pairs()) is None


def after(model, tokenizer, steps):
    """The model after supervised steps on the sums' answers, in its own tokens and template."""
    chat, optimizer = Chat(tokenizer), torch.optim.Adam(model.parameters(), lr=3e-3)
    rows = [(chat.render(row["prompt"])[0], [*chat.said(row["answer"]), tokenizer.eos_token_id]) for row in SUMS]
    width = max(len(p) + len(a) for p, a in rows)
    ids = torch.tensor([[*p, *a] + [tokenizer.pad_token_id] * (width - len(p) - len(a)) for p, a in rows])
    label = torch.tensor([[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in rows])
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids, labels=label).loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
@pytest.mark.filterwarnings("ignore:.*another vocabulary", "ignore:.*no chat template")
def test_a_student_learns_from_a_teacher_with_other_tokens(tmp_path, seed):
    """From a teacher that knows six sums and writes two digits as one token; no reward is given."""
    place = saved(tmp_path / "teacher", after(pairs_model(3), PAIRS, 200), PAIRS)
    student = after(tiny_model(seed), tiny_tokenizer(), 45)
    how = {"learning_rate": 1e-3, "group_size": 16, "groups_per_step": 6, "max_completion_length": 4, "seed": seed}
    trainer = make(teacher=place, model=student, data=SUMS, **how)
    reports = [trainer.step() for _ in range(60)]
    told = [report["teacher_kl"] for report in reports]

    def right(report):
        made = report.experience.rollouts.inputs
        return sum(one.text == one.prompt.columns["answer"] for one in made) / len(made)

    assert sum(told[-5:]) < sum(told[:5]) / 2
    assert sum(map(right, reports[-3:])) > sum(map(right, reports[:3])) + 0.3
