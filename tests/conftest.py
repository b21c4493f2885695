"""Settings every test shares."""

import os

import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels are interpreted; read when triton is first imported, by anyone
torch.set_num_threads(1)  # arrays here are tiny; threads only cost
settings.register_profile("ci", derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
