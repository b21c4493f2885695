"""Import what one extra brings and the part of the library that uses it: `python scripts/import_extra.py control`.

For a wheel that was installed with that extra alone: a module that also needs another extra fails here.
"""

import sys
from importlib import import_module

BASE = ["grpo.trainer", "grpo.bandit", "grpo.feedback", "grpo.run.loop", "grpo.app.builders", "grpo.cli", "matplotlib"]
EXTRAS = {
    "none": [],
    "language": [
        *("transformers", "datasets", "peft", "accelerate", "gguf", "math_verify"),
        *("grpo.language.trainer", "grpo.language.rewards.maths", "grpo.language.rewards.code"),
        *("grpo.language.turns.conversation", "grpo.language.preflight", "grpo.language.compat.trl"),
    ],
    "control": [
        *("gymnasium", "gymnasium_robotics", "minigrid", "imageio_ffmpeg", "mujoco", "Box2D", "pygame"),
        *("grpo.control.trainer", "grpo.envs.make", "grpo.envs.video", "grpo.envs.vectors"),
    ],
    "atari": ["ale_py"],
    "dm-control": ["dm_control.suite", "shimmy", "grpo.envs.dm_control", "grpo.worldmodel.trainer"],
    "envpool": ["envpool"],
    "export": ["onnx", "onnxruntime", "onnxscript"],
    "worldmodel": ["gymnasium", "grpo.worldmodel.trainer", "grpo.worldmodel.show"],
    "distributed": ["ray"],
    "ray": ["ray"],
    "vision": ["transformers", "PIL"],
    "sweep": ["optuna"],
    "view": ["starlette", "uvicorn", "grpo.view.server", "grpo.view.launch", "grpo.view.export"],
    "tensorboard": ["tensorboardX"],
    "wandb": ["wandb"],
    "trackio": ["trackio"],
    "mlflow": ["mlflow"],
    "swanlab": ["swanlab"],
    "comet": ["comet_ml"],
    "jax": ["jax", "grpo.objective"],
}
"""Name of an extra → modules that are there with it. The workshop's tools (dev, docs) are no part of a wheel's use."""


def main(extra: str) -> None:
    """Import them one by one, so that the first that is missing is named."""
    for name in [*BASE, *EXTRAS[extra]]:
        print(name, flush=True)
        import_module(name)
    if extra == "view":
        from grpo.view.launch import DEMO

        if not list(DEMO.glob("*/run.json")):
            sys.exit(f"{DEMO}: the runs of grpo view --demo are not in the wheel")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in EXTRAS:
        sys.exit(f"usage: import_extra.py {{{','.join(EXTRAS)}}}")
    main(sys.argv[1])
