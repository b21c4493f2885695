"""Who says of every decision how likely it would have been: a teacher made of any policy that can score."""

from __future__ import annotations

from typing import Any

import torch

from grpo.capabilities import ScoresRows, Teaches
from grpo.errors import ConfigError
from grpo.experience import Experience
from grpo.models import ModelPolicy
from grpo.protocols import Phase
from grpo.recipes import Recipe
from grpo.rollouts import Rollouts, Scores, Taught


class ScoringTeacher:
    """A policy, or a reference, that is asked for its log-probs of what was sampled. It does not learn."""

    def __init__(self, policy: Any) -> None:
        """policy: has `score`, as a `SequencePolicy` or a `Reference`."""
        self._policy = policy

    @torch.no_grad()
    def teach(self, rows: Rollouts) -> Taught:
        """Its log-probs of the recorded decisions."""
        found = self._policy.score(rows)
        return Taught(found.logp_NT if isinstance(found, Scores) else found)


def make_teacher(given: Any, recipe: Recipe, device: str) -> Teaches | None:
    """The teacher that the recipe needs, made of what was given."""
    if not recipe.teacher_coef:
        if given is not None:
            raise ConfigError("a teacher has no effect here: it needs teacher_coef > 0, or a recipe such as opd")
        return None
    if given is None:
        raise ConfigError(
            f'recipe "{recipe.name}": teacher_coef={recipe.teacher_coef:g} needs a teacher: give teacher= (a policy '
            "with score; for language models --teacher PATH), or set teacher_coef=0"
        )
    if isinstance(given, Teaches):
        return given
    if recipe.teacher_over != "sampled" or recipe.teacher_sees != "prompt":
        wanted = "teacher_over=top_k" if recipe.teacher_over != "sampled" else f"teacher_sees={recipe.teacher_sees}"
        raise ConfigError(f"{wanted} needs a teacher with teach(rows); one that only scores knows what was sampled")
    return ScoringTeacher(given if isinstance(given, ScoresRows) else ModelPolicy(given, device))


def with_lesson(experience: Experience, teacher: Teaches, recipe: Recipe, phase: Phase) -> Experience:
    """What is learned from, with what the teacher says of it."""
    with phase("teacher"):
        return experience.taught(teacher.teach(experience.rollouts), recipe)
