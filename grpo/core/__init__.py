"""The algorithm as pure functions: one formula each, per-decision arrays out, no framework imported.

Every function works on NumPy, PyTorch and JAX arrays alike and gives the same numbers.
"""
