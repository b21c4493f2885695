"""A real vLLM server on this machine's CPU, in a Python of its own: weights reach it, and it says what the model says.

`make vllm-server` makes that Python and runs this; elsewhere GRPO_VLLM_PYTHON names one that has vLLM.
"""

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

import grpo
from grpo.language import GRPOConfig, GRPOTrainer
from grpo.language.data.chat import prepare_tokenizer
from grpo.language.engines import Sampling
from grpo.language.engines.inline import InlineEngine
from grpo.language.engines.vllm import RECEIVER, VLLMEngine
from grpo.language.engines.vllm.server import VLLMServer

from .functions import digits
from .tiny import tiny_model, tiny_tokenizer

PYTHON = os.environ.get("GRPO_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="GRPO_VLLM_PYTHON names no Python that has vLLM: make vllm-server"),
]
START, DEADLINE = 600.0, 120.0
PROMPTS = [[10, 11, 12], [20, 21]]
FLAGS = ["--generation-config", "vllm", "--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]


def made(**settings):
    """Heads of 32: vLLM's CPU attention knows no narrower ones."""
    return tiny_model(head_dim=32, **settings).eval()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """An address for each kind of server, started when it is first asked for."""
    running, folder = {}, tmp_path_factory.mktemp("served")
    model = made()
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    home = str(Path(grpo.__file__).parents[1])

    def start(kind):
        if kind in running:
            return running[kind][0]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        own = {
            "whole": ["--load-format", "dummy", "--worker-extension-cls", RECEIVER],
            "adapters": ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "3"],
        }
        command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", port]
        more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "PYTHONPATH": home}
        more |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        with (folder / f"{kind}.log").open("wb") as log:
            command += ["--host", "127.0.0.1", *FLAGS, *own[kind]]
            server = subprocess.Popen(command, env={**os.environ, **more}, stdout=log, stderr=subprocess.STDOUT)
        running[kind] = f"http://127.0.0.1:{port}", server
        end = time.monotonic() + START
        while not VLLMServer(running[kind][0], 5.0).healthy(2.0):
            assert server.poll() is None and time.monotonic() < end, (folder / f"{kind}.log").read_text()[-3000:]
            time.sleep(0.5)
        return running[kind][0]

    yield start
    for _, server in running.values():
        server.terminate()
    for _, server in running.values():
        server.wait(60)


def off(model, answers, temperature):
    """The largest difference between recorded log-probs and those of a pass of the model."""
    worst = 0.0
    for i, answer in enumerate(answers):
        prompt = PROMPTS[i // (len(answers) // len(PROMPTS))]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
        logp = (logits / temperature).log_softmax(-1).gather(-1, answer.ids[:, None])[:, 0]
        worst = max(worst, float((logp - answer.logp).abs().max()))
    return worst


def test_weights_reach_a_server_and_it_says_what_the_model_says(served, tmp_path):
    model = made()
    tokens = prepare_tokenizer(tiny_tokenizer())
    engine = VLLMEngine(model, tokens, servers=[served("whole")], folder=str(tmp_path), deadline=DEADLINE)
    for version, factor in enumerate((1.0, 1.5, 0.5), 1):
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(factor)
        engine.refresh(version)
        answers = engine.generate(PROMPTS, 2, Sampling(16, temperature=0.7), range(4))
        assert off(model, answers, 0.7) < 1e-4
        assert all(answer.version.tolist() == [version] * len(answer.ids) for answer in answers)
    engine.close()


def test_an_adapter_alone_reaches_a_server(served, tmp_path):
    model = get_peft_model(made(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    tokens = prepare_tokenizer(tiny_tokenizer())
    engine = VLLMEngine(model, tokens, servers=[served("adapters")], folder=str(tmp_path), deadline=DEADLINE)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    engine.refresh(1)
    assert off(model, engine.generate(PROMPTS, 2, Sampling(12), range(4)), 1.0) < 1e-4
    engine.close()


@pytest.mark.parametrize("staleness", [0.0, 1.0])
def test_a_run_learns_from_what_a_server_samples(served, tmp_path, staleness):
    how = {"num_generations": 4, "prompts_per_step": 2, "max_completion_length": 6, "preflight": False, "seed": 0}
    how |= {"device": "cpu", "learning_rate": 1e-2, "engine": "vllm", "servers": [served("whole")], "max_steps": 3}
    rows = [{"prompt": f"What is {a}+{a}?", "answer": str(a + a)} for a in range(6)]
    how |= {"engine_kwargs": {"folder": str(tmp_path), "deadline": DEADLINE}, "staleness": staleness}
    config = GRPOConfig(output_dir=str(tmp_path / "run"), **how)
    trainer = GRPOTrainer(made(), digits, config, rows, processing_class=tiny_tokenizer())
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    reports = trainer.train(progress=None)
    assert len(reports) == 3 and not torch.equal(before, trainer.model.get_input_embeddings().weight)
    assert abs(reports[0]["mismatch_kl"]) < 1e-4


def test_an_evaluation_amid_what_is_asked_ahead_is_of_the_present_weights(served, tmp_path):
    """The next step's requests are under way when the weights are pushed, stop, and go on beside the evaluation's."""
    how = {"num_generations": 4, "prompts_per_step": 4, "max_completion_length": 24, "preflight": False, "seed": 0}
    how |= {"device": "cpu", "learning_rate": 1e-2, "engine": "vllm", "servers": [served("whole")], "staleness": 1.0}
    rows = [{"prompt": f"What is {a}+{a}?", "answer": str(a + a)} for a in range(12)]
    how |= {"engine_kwargs": {"folder": str(tmp_path), "deadline": DEADLINE}, "eval_prompts": len(rows)}
    config = GRPOConfig(output_dir=str(tmp_path / "run"), **how)
    trainer = GRPOTrainer(made(), digits, config, rows, rows, processing_class=tiny_tokenizer())
    for _ in range(5):
        trainer.step()
        samples = trainer.evaluate().samples
        own = InlineEngine(trainer.policy.model, trainer.tokens)
        answers = own.generate([s.prompt.ids for s in samples], 1, Sampling(24, temperature=0.0), range(len(samples)))
        assert [s.ids.tolist() for s in samples] == [answer.ids.tolist() for answer in answers]
        own.close()
    trainer.source.close()
