"""Conversations with agents: messages become events of the run's membership, and each beat gets an answer.

In: messages of `core.protocol`. Out: events for the membership's state machine, and answers. `agents` handles all
messages. `throughput` measures speed from reports, `checkpoints` finds checkpoints on disk, and `whereabouts` publishes
the head's address.
"""
