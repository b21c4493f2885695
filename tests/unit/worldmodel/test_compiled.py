"""Speed is taken where it can be had: compiled and captured work gives the same, and nothing ends where it cannot."""

import os
import shutil

import pytest
import torch

from grpo.config import ConfigError
from grpo.graphs import GraphedCallable
from grpo.worldmodel.config import WorldModelConfig
from grpo.worldmodel.imagine import Imagination
from grpo.worldmodel.model.compiled import Compiled, wanted
from tests.unit.worldmodel.worlds import make

NO_FALLBACK = pytest.mark.filterwarnings("error:goes on without torch.compile")
"""What was not compiled is the same for no reason."""
COMPILER = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler here")


def test_what_cannot_be_compiled_is_called_as_it_is_and_says_so_once():
    def broken(x):
        raise RuntimeError("no compiler found")

    work = Compiled(broken, instead=lambda x: x + 1)
    with pytest.warns(UserWarning, match="without torch.compile, which failed: .*no compiler found"):
        assert work(torch.ones(1)) == 2
    assert work(torch.ones(1)) == 2


def test_an_error_of_the_work_itself_is_not_hidden():
    def broken(x):
        raise ValueError("the work's own")

    work = Compiled(broken)
    with pytest.warns(UserWarning, match="failed"), pytest.raises(ValueError, match="the work's own"):
        work(torch.ones(1))


def test_running_out_of_memory_is_not_taken_for_the_compilers_fault(monkeypatch):
    """Pieces add to what they are given: one that was broken off must not be done again in another way."""

    def full(total):
        total += 1
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    work, total = Compiled(full, instead=lambda total: total.add_(1)), torch.zeros(1)
    for count in (1, 2):
        with pytest.raises(torch.OutOfMemoryError):
            work(total)
        assert total == count


def test_where_torch_refuses_to_compile_at_all_work_goes_on(monkeypatch):
    def refuse(function, dynamic):
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    monkeypatch.setattr(torch, "compile", refuse)
    work = Compiled(lambda x: x + 1)
    with pytest.warns(UserWarning, match="without torch.compile, which failed: .*not supported on Python"):
        assert work(torch.ones(1)) == 2
    assert work(torch.ones(1)) == 2


def test_nobody_is_made_to_compile_on_a_cpu():
    assert not wanted(None, torch.device("cpu")) and wanted(True, torch.device("cpu"))
    assert not wanted(False, torch.device("cuda"))


def test_nothing_is_captured_without_a_cuda_device():
    weight = torch.ones(2)
    work = GraphedCallable(lambda given: {"y": given["x"] * weight}, lambda: [weight])
    for k in range(6):
        assert work({"x": torch.full((2,), float(k))})["y"].tolist() == [k, k]
    assert len(work) == 0


@NO_FALLBACK
@COMPILER
@pytest.mark.slow
def test_futures_of_a_compiled_step_are_those_without():
    trainer = make(env="Pendulum-v1", vector="serial")
    trainer.step()
    model, policy = trainer.source.learner.model, trainer.policy
    start = model.rssm.initial(3)
    plain, compiled = (Imagination(model, policy, how)(start, 2, 4, torch.Generator().manual_seed(1)) for how in (0, 1))
    for name in ("flat", "action_NH", "logp_NH", "reward_NH", "continue_NH"):
        torch.testing.assert_close(getattr(plain, name), getattr(compiled, name), rtol=1e-4, atol=1e-5)
    trainer.source.close()


@NO_FALLBACK
@COMPILER
@pytest.mark.slow
def test_a_run_with_a_compiled_step_learns_the_same():
    one, two = (make(env="CartPole-v1", torch_compile=how, horizon=4) for how in (False, True))
    for _ in range(2):
        first, second = one.step(), two.step()
        assert second["imagined/return"] == pytest.approx(first["imagined/return"], rel=1e-3)
    for trainer in (one, two):
        trainer.source.close()


def test_adapters_are_not_compiled(tmp_path):
    with pytest.raises(ConfigError, match="cannot see through adapters"):
        WorldModelConfig(adapter_rank=4, init_from=str(tmp_path), torch_compile=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_run_goes_from_device_to_device_with_its_settings(device):
    WorldModelConfig(device=device, cuda_graphs=False, precision="bfloat16")


def test_a_model_that_stays_as_it_is_learns_in_no_precision():
    with pytest.raises(ConfigError, match="precision has no effect here: it needs train_ratio > 0"):
        WorldModelConfig(train_ratio=0, precision="bfloat16")
