"""Decoding on a GPU: a step of all rows captured as one CUDA graph, replayed without a word from the host.

prompts ─► pages (read once for a group) ─► slots ─► step ─► step ─► … ─► rows that ended leave, others take over

kernels    what a layer is made of           decoder   a model as kernels
choosing   a token from logits               machine   all that lasts from rollout to rollout: memory, graphs
pages      keys and values, and whose        rollout   which row is in which slot, and when
"""
