"""One of the ranks that share a GPU, or one alone: two steps of a small language model, kept in a file."""

import json
import sys

import torch.distributed as dist
from safetensors.torch import save_file

from grpo import together
from grpo.distributed import group
from grpo.seeding import seed_all
from tests.distributed import cases


def main(into: str, shard: str, device: str) -> None:
    """What a checkpoint has, which is AdamW's moments too, and what was sampled."""
    ranks = together.here()
    # With a large epsilon AdamW makes nothing of what rounding leaves where a gradient is 0.
    trainer = cases.language_trainer(
        ranks, double=False, adam=True, adam_epsilon=1e-2, loss_type="dapo", device=device, dtype="float32", shard=shard
    )
    texts = []
    for step in range(2):
        seed_all(0, step)
        texts.append([sample.text for sample in trainer.step().experience.rollouts.inputs])
    arrays = trainer.state().arrays
    kept = {name: x.cpu() for name, x in arrays.items() if x is not None and name.startswith(("policy/", "optimizer/"))}
    told = {"texts": json.dumps(texts), "backend": dist.get_backend(ranks.tensors) if ranks.size > 1 else ""}
    save_file(kept, f"{into}-{ranks.rank}.safetensors", told)
    trainer.source.close()
    group.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
