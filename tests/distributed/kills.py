"""A run of two or three ranks, one of which is killed at a point of step 3."""

from __future__ import annotations

import os
import time
from pathlib import Path

STEP = 2
"""Steps that are done when it happens."""


def take_part(rank: int, meeting: str, folder: str, point: str, victim: int, size: int = 2, **settings) -> None:
    """One rank's life; it ends with 9 where it is killed, with 3 where it has lost the others."""
    import torch.distributed as dist

    from grpo import together
    from grpo.bandit import BanditSource, SoftmaxPolicy
    from grpo.distributed.group import Group
    from grpo.errors import RanksLost
    from grpo.run import checkpoint
    from tests.distributed import cases

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    ranks = Group(dist.group.WORLD, dist.group.WORLD)
    trainer = cases.bandit_trainer(ranks, **settings)

    def deadly(call, now=lambda *args: True):
        def killed(*args, **kwargs):
            if trainer.steps_done == STEP and now(*args):
                while not [*Path(folder, "checkpoints").glob("step-*")]:
                    time.sleep(0.01)  # the chief writes it beside its steps
                os._exit(9)
            return call(*args, **kwargs)

        return killed

    if rank == victim:
        if point == "collect":
            BanditSource.collect_part = deadly(BanditSource.collect_part)
        elif point == "gather":
            Group.gather = deadly(Group.gather, lambda self, mine, what: what == "collecting")
        elif point == "pass":
            SoftmaxPolicy.score = deadly(SoftmaxPolicy.score)
        elif point == "sum":
            Group.sum = deadly(Group.sum)
        elif point == "a gradient":
            Group.onto = deadly(Group.onto)
        elif point == "the weights":
            Group.sent = deadly(Group.sent)
        elif point == "optimizer":
            trainer._move = deadly(trainer._move)
        elif point == "agree":
            Group.gather = deadly(Group.gather, lambda self, mine, what: what == "the end of a step")
        elif point == "taken":
            trainer.state = deadly(trainer.state)
        else:
            assert point in checkpoint.POINTS
            publish = checkpoint.publish

            def deadly_save(folder, taken, **kwargs):
                """Of the step's own checkpoint: an older one may still be written while the step is made."""

                def at(reached):
                    if reached == point and taken.step == STEP:
                        os._exit(9)

                return publish(folder, taken, **kwargs | {"at": at})

            checkpoint.publish = deadly_save
    together.here = lambda: ranks
    try:
        trainer.planned = lambda asked, kept: (
            type(trainer).planned(trainer, asked, kept).model_copy(update={"checkpoint_every": 1})
        )
        trainer.train(steps=5, folder=folder, progress=None)
    except RanksLost:
        os._exit(3)
    os._exit(0)
