"""Conversations with agents: what they say becomes events of their run's membership, and each beat is answered.

In: messages of `core.protocol`. Out: events for the membership's machine, and answers. `agents` is the whole
conversation; the others each note one fact that beats tell: speed, checkpoints.
"""
