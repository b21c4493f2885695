"""Ranks that share a GPU: sums go through the CPU, and come to what one rank finds; nobody shares one unasked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.distributed.group import Group
from grpo.distributed.owners import GradientOwners
from grpo.distributed.places import Machine
from grpo.distributed.start import start
from grpo.language.model.optimizer import RoundedAdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROOT = Path(__file__).parents[2]
TWO = Machine(0, 1, 2, "127.0.0.1", 0)
DEVICE = "cuda"


def one_gpu():
    """What processes see of a machine with more."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {"CUDA_VISIBLE_DEVICES": first, "PYTHONPATH": path}


def read(path):
    """The arrays of a file, and what is told of them."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Two steps of one rank."""
    into = tmp_path_factory.mktemp("alone") / "rank"
    command = [sys.executable, "-m", "tests.gpu.sharing", str(into), "none", DEVICE]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **one_gpu()}, check=True)
    return read(f"{into}-0.safetensors")


@pytest.mark.parametrize("shard", ["none", "states", "gradients"])
def test_two_ranks_on_one_gpu_find_what_one_finds(alone, tmp_path, monkeypatch, shard):
    monkeypatch.chdir(ROOT)
    command = [sys.executable, "-m", "tests.gpu.sharing", str(tmp_path / "rank"), shard, DEVICE]
    assert start(TWO, command, {"GRPO_SHARED_GPU": "1", **one_gpu()}) == 0
    arrays, said = alone
    (first, told), (second, of_second) = (read(tmp_path / f"rank-{rank}.safetensors") for rank in range(2))
    assert told["texts"] == of_second["texts"] == said["texts"]
    assert told["backend"] == "gloo"
    assert first.keys() == arrays.keys() and any("exp_avg" in name for name in arrays)
    for name, x in arrays.items():
        most = 1e-6 if name.startswith("policy/") else 1e-5  # of the largest: in what order a sum is made is left open
        assert float((first[name] - x).abs().max()) <= most * float(x.abs().max()), name
        if name.startswith("policy/"):
            assert torch.equal(first[name], second[name]), name


def test_two_ranks_on_one_gpu_are_refused_unless_asked_for(tmp_path):
    command = [sys.executable, "-m", "grpo", "train", "bandit", "--ranks", "2", "--groups-per-step", "2"]
    command += ["--logdir", str(tmp_path / "runs")]
    done = subprocess.run(command, env={**os.environ, **one_gpu()}, cwd=tmp_path, capture_output=True, text=True)
    said = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    # A rank may be ended with the other before it has said it, too.
    assert 1 <= len(said) <= 2 and all("ranks 0, 1 share one GPU" in text and "--shared-gpu" in text for text in said)
    assert list(tmp_path.iterdir()) == []


QWEN_7B = {
    "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def one_of_eight():
    """Rank 0 of ranks that are not there: what it sends is lost, what it gets is what it had."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield Group(dist.group.WORLD, dist.group.WORLD)
    dist.destroy_process_group()


def test_seven_billion_weights_with_gradients_and_states_divided_by_eight_are_at_most_25_gb(one_of_eight):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**QWEN_7B), dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    weights = {name: torch.nn.Parameter(torch.zeros_like(p, device="cuda")) for name, p in model.named_parameters()}
    count = sum(p.numel() for p in weights.values())
    assert count == 7_615_616_512
    owners = GradientOwners(one_of_eight, weights)
    optimizer = RoundedAdamW(weights.values(), lr=1e-6)
    torch.cuda.reset_peak_memory_stats()
    owners.backward(sum(p.sum() for p in weights.values()))
    passes = torch.cuda.max_memory_allocated() - before
    # A gradient at a time beside the sums of its own; the largest, of the words, is 1.1 GB, and a piece of it float32.
    assert passes <= 2 * count * (1 + 1 / 8) * 1.02 + 3e9
    owners.settle(one_of_eight, weights, set(weights))
    owners.step(optimizer)
    assert count / 8.5 < sum(p.numel() for p in optimizer.state) < count / 7.5
    assert {id(p) for p in weights.values() if p.grad is not None} == {id(p) for p in optimizer.state}
    assert torch.cuda.memory_allocated() - before <= 25e9
