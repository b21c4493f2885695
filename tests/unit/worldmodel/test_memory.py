"""Freed memory stays with the process."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from grpo.worldmodel.model.memory import keep_freed
assert sys.argv[1] == "as_it_is" or keep_freed()
faults = []
for _ in range(8):
    torch.ones(2**24).sum()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[2])  # where the first ones end up is chance
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_what_was_freed_is_used_again_and_not_asked_for_anew():
    def faults(how):
        done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("kept") < faults("as_it_is") / 10
