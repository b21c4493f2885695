"""What a test needs that `make test` does not install."""

import importlib.util

import pytest

needs_envpool = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None,
    reason="EnvPool is a download of 700 MB: make test EXTRAS=dev,envpool",
)
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install 'anygrpo[ray]'",
)
