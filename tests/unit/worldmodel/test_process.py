"""A run asks things of the whole process; making a model asks none."""

import platform
import subprocess
import sys

import pytest
import torch

from grpo.worldmodel import process
from grpo.worldmodel.model.world_model import WorldModel
from tests.unit.worldmodel.worlds import make

FAULTS = """
import resource, sys, torch
from grpo.worldmodel.process import keep_freed
assert sys.argv[1] == "as_it_is" or keep_freed()
faults = []
for _ in range(20):
    torch.ones(2**24).sum()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-9])  # where the first ones end up is chance
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
@pytest.mark.slow
def test_what_was_freed_is_used_again_and_not_asked_for_anew():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("kept") < faults("as_it_is") / 10


def test_a_run_prepares_the_process_and_making_its_agent_does_not(monkeypatch):
    asked = []
    monkeypatch.setattr(process, "keep_freed", lambda: asked.append("memory"))
    WorldModel({"vector": (3,)}, 2, "0.5m")
    trainer = make()
    assert asked == []
    trainer.step()
    assert asked == ["memory"]
    trainer.evaluate(1)
    assert asked == ["memory"] * 2


@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("bfloat16", True), ("float32", False)])
def test_products_leave_their_last_bits_out_on_cuda_devices_alone(monkeypatch, precision, allowed):
    homes = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [home.allow_tf32 for home in homes]
    try:
        process.prepare(torch.device("cpu"), precision)
        assert [home.allow_tf32 for home in homes] == before
        process.prepare(torch.device("cuda"), precision)
        assert [home.allow_tf32 for home in homes] == [allowed] * 2
    finally:
        for home, was in zip(homes, before, strict=True):
            home.allow_tf32 = was
