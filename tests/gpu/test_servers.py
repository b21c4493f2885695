"""A real vLLM server on the GPU that is trained on: weights reach it, and it says what the model says."""

import importlib.util
import os
import socket
import subprocess
import sys
import time

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo.language.data.chat import prepare_tokenizer
from grpo.language.engines import Sampling
from grpo.language.engines.vllm import RECEIVER, VLLMEngine
from grpo.language.engines.vllm.server import VLLMServer
from tests.unit.language.tiny import CHARACTERS, SPECIAL, tiny_tokenizer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install vllm"),
]
START = 180.0
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": len(SPECIAL) + len(CHARACTERS)}
    return Qwen3ForCausalLM(Qwen3Config(**shape)).bfloat16().cuda().eval()


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port),
               "--host", "127.0.0.1", "--generation-config", "vllm", "--dtype", "bfloat16", "--max-model-len", "512",
               "--enforce-eager", "--gpu-memory-utilization", "0.1", "--load-format", "dummy",
               "--worker-extension-cls", RECEIVER]  # fmt: skip
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command, env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"}, stdout=log, stderr=subprocess.STDOUT
        )
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + START
    try:
        while not VLLMServer(address, 5.0).healthy(2.0):
            assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()[-2000:]
            time.sleep(0.5)
        yield address
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("transfer", ["ipc", "file"])
def test_weights_reach_a_server_and_it_says_what_the_model_says(model, url, transfer):
    engine = VLLMEngine(model, prepare_tokenizer(TOKENIZER), servers=[url], transfer=transfer, deadline=60.0)
    prompts = [[10, 11, 12], [20, 21]]
    for version, factor in enumerate((1.0, 1.5, 0.5), 1):
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(factor)
        engine.refresh(version)
        for i, made in enumerate(engine.generate(prompts, 2, Sampling(16, temperature=0.7), range(4))):
            ids = torch.tensor([[*prompts[i // 2], *made.ids.tolist()]], device="cuda")
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompts[i // 2]) - 1 : -1].float() / 0.7
            logp = logits.log_softmax(-1).gather(-1, made.ids[:, None].cuda())[:, 0].cpu()
            assert float((logp - made.logp).abs().mean()) < 1e-2 and made.version.tolist() == [version] * len(made.ids)
    engine.close()
