"""Settings every test shares."""

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)  # arrays here are tiny; threads only cost
settings.register_profile("ci", derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
