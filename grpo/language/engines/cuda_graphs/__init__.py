"""Decoding on a GPU: a step of all sequences captured as one CUDA graph, replayed without a word from the host.

prompts ─► prefill (once for a group) ─► slots ─► decode ─► decode ─► … ─► sequences that ended leave, others take over

scheduler      which sequence is in which slot, and when; `pages`: its blocks, `noise`: its numbers, `reading`: its past
model_runner   what lasts from rollout to rollout: memory, graphs
decoder        a model as kernels: any (module_decoder, attention), or of the common layout (fused_decoder)
blocks         keys and values, and whose
sampler        a token from logits
kernels        what a layer is made of
"""
