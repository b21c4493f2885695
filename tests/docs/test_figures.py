"""Figures that the README states are those of the files in bench/results, and its pictures are small."""

import runpy
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_states_what_was_measured():
    page = runpy.run_path(str(ROOT / "docs" / "reaching.py"))
    gpu, control = page["results"]("gpu")["cells"], page["results"]("control")["cells"]
    ours = median(gpu["step_smollm"]["seconds"])
    vllm, generate = (median(gpu[cell]["seconds"]) / ours for cell in ("trl_vllm_smollm", "trl_smollm"))
    assert f"takes {vllm:.1f} × ours with vLLM, {generate:.0f} × with `generate`" in README
    pole = [page["_median"](control, "cartpole", peer, "cpu_s") for peer in ("sb3", "ours")]
    assert f"CartPole takes {pole[0] / pole[1]:.1f} × our CPU time" in README
    steps = [[page["_median"](control, task, peer, "env_steps") for peer in ("sb3", "ours")] for task in page["TASKS"]]
    shares = [theirs / own for theirs, own in steps if theirs and own]
    assert len(shares) == 5 and f"{min(shares):.1f} to {max(shares):.1f} of our environment steps" in README
    beside = page["results"]("worldmodel_jax_gpu")
    rates, coarse = (page["_rates"](beside, way) for way in ("ours", "ours_bfloat16"))
    jax = f"{1 / rates['update']:.2f} of our updates on vectors and {1 / rates['imagine']:.2f} of our imagined steps"
    assert f"{jax}, {1 / coarse['imagine']:.2f} where ours are in bfloat16" in README


def test_the_readmes_pictures_load_fast():
    pictures = [ROOT / "docs" / "figures" / name for name in ("pole.gif", "answers.svg", "dream.png")]
    assert all(f"docs/figures/{path.name}" in README for path in pictures)
    assert sum(path.stat().st_size for path in pictures) < 400_000
