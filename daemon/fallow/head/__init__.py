"""The head: one daemon per user that turns events into effects.

`app` has the main loop. In each turn the loop takes items (`loop.inbox`), lets the state machines of runs decide
(`loop.turn`), writes the decisions to the store (`loop.durable`), and only then carries them out. `state` holds the
runs, `peers` talks to agents, `slurm` talks to Slurm, and `api` answers people and programs.
"""
