"""Runs of this folder draw no curve: it takes longer than the steps themselves, and is tested elsewhere."""

import pytest

from grpo.run import plot


@pytest.fixture(autouse=True)
def _no_curve(monkeypatch):
    monkeypatch.setattr(plot, "draw", lambda folder, panels=(): None)
