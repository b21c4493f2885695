"""Environments that are pure functions of arrays: JAX compiles them together with the policy that plays."""
