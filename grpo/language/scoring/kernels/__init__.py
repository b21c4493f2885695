"""Triton kernels of scoring."""
