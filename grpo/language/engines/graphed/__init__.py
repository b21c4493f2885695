"""Decoding on a GPU: a step of all rows captured as one CUDA graph, replayed without a word from the host.

prompts ─► pages (read once for a group) ─► slots ─► step ─► step ─► … ─► rows that ended leave, others take over

kernels    what a step is made of            decoder   a model as kernels
pages      where keys and values are kept    machine   all that lasts from rollout to rollout: memory, graphs
rollout    which row is in which slot, and when
"""
