"""Decoding on a GPU: a step of all sequences captured as one CUDA graph, replayed without a word from the host.

prompts ─► prefill (once for a group) ─► slots ─► decode ─► decode ─► … ─► sequences that ended leave, others take over

kernels    what a layer is made of             decoder        a model as kernels
sampler    a token from logits                 model_runner   what lasts from rollout to rollout: memory, graphs
blocks     keys and values, and whose          scheduler      which sequence is in which slot, and when
"""
