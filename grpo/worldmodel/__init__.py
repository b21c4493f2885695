"""Learned worlds: a group of imagined futures from every state that was seen.

The model, its learner and the replay are there; imagination, policy and the front door are not yet.
"""
