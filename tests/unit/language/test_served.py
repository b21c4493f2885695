"""A teacher behind vLLM's port: a small server with a tiny model, its faults, and the line that each ends with."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from grpo.cli import main
from grpo.config import ConfigError
from grpo.protocols import CollectRequest
from tests.unit.language.test_teacher import make, saved, whole
from tests.unit.language.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


class Double:
    """Answers as `vllm serve` does: /v1/models, /tokenize, /detokenize, /v1/completions with prompt_logprobs."""

    def __init__(self, model):
        self.model, self.asked, self.spoil = model, [], {}
        """spoil: path → a function of the answer that gives (status, text)."""

    def models(self, body):
        return {"data": [{"id": "teacher", "max_model_len": 64}]}

    def tokenize(self, body):
        return {"tokens": TOKENIZER(body["prompt"], add_special_tokens=body["add_special_tokens"])["input_ids"]}

    def detokenize(self, body):
        return {"prompt": TOKENIZER.decode(body["tokens"])}

    @torch.no_grad()
    def completions(self, body):
        assert body["model"] == "teacher" and body["max_tokens"] == 1 and len(body["prompt"]) < 64
        if body["prompt_logprobs"] > 20:
            return 400, {"error": {"message": "Requested prompt logprobs of 64, which is greater than max allowed: 20"}}
        ids = torch.tensor(body["prompt"])
        logp = self.model(ids[None]).logits[0].log_softmax(-1)
        told = [None]
        for at in range(1, len(ids)):
            order = logp[at - 1].argsort(descending=True).tolist()
            named = {*order[: body["prompt_logprobs"]], int(ids[at])}
            told.append(
                {
                    str(v): {"logprob": float(logp[at - 1, v]), "rank": order.index(v) + 1, "decoded_token": "?"}
                    for v in named
                }
            )
        return {"choices": [{"text": "", "prompt_logprobs": told}]}


@pytest.fixture
def served():
    double = Double(tiny_model(7))
    answers = {"/v1/models": double.models, "/tokenize": double.tokenize, "/detokenize": double.detokenize}
    answers["/v1/completions"] = double.completions

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"{}")
            double.asked.append((self.path, body))
            found = answers[self.path](body)
            status, found = found if isinstance(found, tuple) else (200, found)
            text = json.dumps(found).encode()
            if self.path in double.spoil:
                status, text = double.spoil[self.path](text)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *_):
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    double.url = f"http://127.0.0.1:{server.server_port}"
    yield double
    server.shutdown()
    server.server_close()


def taught(double, **settings):
    return make(model=tiny_model(1), teacher=double.url, **settings)


@pytest.mark.parametrize("settings", [{}, {"loss_type": "gkd", "teacher_top_k": 9}], ids=["opd", "gkd"])
def test_it_says_what_the_same_model_says_here(served, settings):
    trainer = taught(served, **settings)
    rollouts = trainer.source.collect(CollectRequest(0)).rollouts
    far, here = trainer.teacher.teach(rollouts), None
    if settings:
        here = make(expert=tiny_model(7), model=tiny_model(1), **settings).teacher.teach(rollouts)
    for row, sample in enumerate(rollouts.inputs):
        want = whole(tiny_model(7), sample).gather(-1, sample.ids[:, None])[:, 0]
        torch.testing.assert_close(far.logp_NT[row, : sample.length], want, rtol=1e-4, atol=1e-4)
        if here is not None:
            made = slice(0, sample.length)
            torch.testing.assert_close(far.choice_NTK[row, made], here.choice_NTK[row, made])
            torch.testing.assert_close(
                far.choice_logp_NTK[row, made], here.choice_logp_NTK[row, made], rtol=1e-4, atol=1e-4
            )
    assert trainer.step()["grad_norm"] > 0


def half(text):
    answer = json.loads(text)
    answer["choices"][0]["prompt_logprobs"].pop()
    return 200, json.dumps(answer).encode()


@pytest.mark.parametrize(("spoil", "told"), [
    (lambda text: (500, b'{"error": {"message": "CUDA error"}}'), "/v1/completions refused: 500 CUDA error; see"),
    (half, r"answered without the log-probs of its prompt \(\d+ numbers for \d+ tokens\); it must be vLLM"),
    (lambda text: (200, text[: len(text) // 2]), r"did not answer with JSON .*; is it vLLM\?"),
    (lambda text: (200, b'{"choices": []}'), "answered without the log-probs of its prompt"),
    (lambda text: (200, text.replace(b'"logprob": -', b'"logprob": -1e999, "x": -')), "no finite number"),
    (lambda text: (503, b"starting"), r"completions did not answer within 3 s \(503 starting\); start it \(vllm"),
], ids=["500", "half", "cut", "empty", "infinite", "503"])  # fmt: skip
def test_answers_that_cannot_be_used_end_with_one_line(served, spoil, told):
    trainer = taught(served, teacher_timeout=3.0 if "within 3 s" in told else 20.0)
    served.spoil["/v1/completions"] = spoil
    with pytest.raises(RuntimeError, match=told) as raised:
        trainer.step()
    assert "\n" not in str(raised.value)


@pytest.mark.filterwarnings("ignore:. of 4 completions were cut off")
def test_a_run_ends_with_that_line_alone(served, tmp_path, capsys):
    """Before its first step, and in the midst of it."""
    path = saved(tmp_path / "student", tiny_model(1))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n' * 4)
    words = ["train", str(tmp_path / "rows.jsonl"), "opd", "--model", path, "--device", "cpu", "--group-size", "2"]
    words += ["--max-completion-length", "4", "--groups-per-step", "2", "--run.steps", "1", "--teacher-timeout", "0.3"]
    assert main([*words, "--logdir", str(tmp_path / "none"), "--teacher", "http://127.0.0.1:9"]) == 1
    assert "grpo: teacher=http://127.0.0.1:9/v1/models did not answer within 0.3 s" in (said := capsys.readouterr().err)
    assert "Traceback" not in said
    served.spoil["/v1/completions"] = lambda text: (500, b"no room")
    assert main([*words, "--logdir", str(tmp_path / "run"), "--teacher", served.url]) == 1
    assert "/v1/completions refused: 500 no room" in (said := capsys.readouterr().err) and "Traceback" not in said


def test_a_busy_server_is_asked_again(served):
    trainer, left = taught(served), [503, 429]
    served.spoil["/v1/completions"] = lambda text: (left.pop(), b"busy") if left else (200, text)
    assert trainer.step()["grad_norm"] > 0


def test_a_server_that_does_not_fit_is_refused_before_the_first_step(served):
    with pytest.raises(RuntimeError, match=r"127.0.0.1:9/v1/models did not answer within 0.3 s .*refused"):
        make(teacher="http://127.0.0.1:9", teacher_timeout=0.3)
    with pytest.raises(
        ConfigError, match=r"gives log-probs at temperature 1, and the student samples at 0.7; set temp"
    ):
        taught(served, temperature=0.7)
    with pytest.raises(RuntimeError, match=r"max allowed: 20; serve it with --max-logprobs of teacher_top_k at least"):
        taught(served, loss_type="gkd").step()
    served.model = tiny_model(7, vocab_size=130)  # a head that is padded
    with pytest.raises(RuntimeError, match=r"\(token 1\d\d among the likeliest, which the student does not have\)"):
        taught(served, loss_type="gkd", teacher_top_k=9).step()
    served.spoil["/detokenize"] = lambda text: (200, b'{"prompt": "another"}')
    with pytest.raises(
        ConfigError, match=r"\(teacher\) has another vocabulary: it reads .*; serve a teacher of the same"
    ):
        taught(served)
    served.spoil["/detokenize"] = lambda text: (404, b"{}")
    with pytest.warns(UserWarning, match="does not say how it reads text"):
        taught(served)
    served.spoil["/v1/models"] = lambda text: (200, b'{"data": []}')
    with pytest.raises(RuntimeError, match="/v1/models answered without a model"):
        taught(served)


def test_rows_that_are_too_long_for_it_have_no_teacher(served):
    trainer = taught(served, max_completion_length=5)
    rollouts = trainer.source.collect(CollectRequest(0)).rollouts
    longest = max(len(sample.prompt.ids) + sample.length for sample in rollouts.inputs)
    trainer.teacher._reader.context = float(longest)
    with pytest.warns(UserWarning, match=r"rows are longer than the teacher's context"):
        said = trainer.teacher.teach(rollouts)
    lengths = torch.tensor([len(sample.prompt.ids) + sample.length for sample in rollouts.inputs])
    assert (said.logp_NT.isnan().all(1) == (lengths >= longest)).all()
