"""Modules by the names they had before: a script, a settings file or a run folder that says one of these still works.

Importing an old name gives the module itself, with a DeprecationWarning that says the new one; so do names of another
library whose readers look for them here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from grpo.errors import warn

MOVED = {
    "language.rows": "language.data.rows",
    "language.columns": "language.data.columns",
    "language.prompts": "language.data.prompts",
    "language.stream": "language.data.stream",
    "language.chat": "language.data.chat",
    "language.loading": "language.model.loading",
    "language.adapters": "language.model.adapters",
    "language.reference": "language.model.reference",
    "language.optimizer": "language.model.optimizer",
    "language.output": "language.model.output",
    "language.warmup": "language.model.warmup",
    "language.policy": "language.scoring.policy",
    "language.packing": "language.scoring.packing",
    "language.segments": "language.scoring.segments",
    "language.head": "language.scoring.head",
    "language.layers": "language.scoring.layers",
    "language.layout": "language.scoring.decoder_layout",
    "language.head_kernels": "language.scoring.kernels.head",
    "language.layer_kernels": "language.scoring.kernels.layers",
    "language.engines.graphed.machine": "language.engines.cuda_graphs.model_runner",
    "language.engines.graphed.rollout": "language.engines.cuda_graphs.scheduler",
    "language.engines.graphed.pages": "language.engines.cuda_graphs.blocks",
    "language.engines.graphed.choosing": "language.engines.cuda_graphs.sampler",
    "language.engines.graphed.kernels": "language.engines.cuda_graphs.kernels",
    "language.engines.graphed.decoder": "language.engines.cuda_graphs.decoder",
    "language.engines.graphed": "language.engines.cuda_graphs",
    "language.tools": "language.turns.tools",
    "language.vinference": "language.compat.easydel",
    "language.callbacks": "language.compat.callbacks",
    "worldmodel.rssm": "worldmodel.model.rssm",
    "worldmodel.networks": "worldmodel.model.networks",
    "worldmodel.distributions": "worldmodel.model.distributions",
    "worldmodel.pieces": "worldmodel.model.pieces",
    "worldmodel.adapters": "worldmodel.model.adapters",
    "worldmodel.compiled": "worldmodel.model.compiled",
    "worldmodel.memory": "worldmodel.process",
    "worldmodel.learner": "worldmodel.model.world_model",
    "worldmodel.study": "worldmodel.model.learner",
    "worldmodel.scan": "worldmodel.model.recurrence",
    "worldmodel.optimiser": "worldmodel.model.optimizer",
    "worldmodel.store": "worldmodel.replay.store",
    "worldmodel.chunks": "worldmodel.replay.chunks",
    "worldmodel.records": "worldmodel.replay.records",
    "worldmodel.beside": "worldmodel.background",
    "worldmodel.recorded": "graphs",
    "worldmodel.held": "envs.action_repeat",
    "envs.board": "envs.shared_memory",
    "envs.frozen": "reference",
    "envs.evaluation": "envs.evaluate",
    "control.mirror": "control.numpy_policy",
    "control.fitted": "control.baselines.fitted",
    "control.points": "control.baselines.points",
    "control.critic": "control.baselines.critic",
    "dialects.run": "run.dialect",
    "dialects.trl": "language.compat.dialect",
    "dialects.embodied": "control.dialect",
    "run.seeding": "seeding",
    "run.sinks": "run.trackers",
}
"""Old name → new name, both inside `grpo`."""

ELSEWHERE = {
    "policy_base": "protocols",
    "reward_model_base": "protocols",
    "experience_collector": "models",
    "advantage_estimator": "core.advantages",
    "grpo_objective": "objective",
}
"""What the protocol-based GRPO calls its modules, and ours that do the same; `grpo/README.md` compares them."""


class Moved(MetaPathFinder, Loader):
    """Finds what has moved."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Only names of the table are ours."""
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == "grpo" and name in MOVED | ELSEWHERE else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module under its new name."""
        name = spec.name.partition(".")[2]
        new = f"grpo.{(MOVED | ELSEWHERE)[name]}"
        if name in MOVED:
            warn(f"{spec.name} is {new} now", DeprecationWarning)
        else:
            warn(f"{spec.name} is called {new} here")
        module = import_module(new)
        self._spec, self._loader = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already; the import machinery has written the old name into it, which is undone."""
        module.__spec__, module.__loader__ = self._spec, self._loader


def install() -> None:
    """Once; first, so that an empty folder that an older version left behind does not answer for it."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, Moved())
