"""The head: one daemon per user that turns events into effects.

`app` has the main loop. In each turn it takes what has come (`loop.inbox`), lets the machines of runs decide
(`loop.turn`), writes down what they decided (`loop.durable`), and only then carries it out. `state` is what the head
knows of runs, `peers` its conversations with agents, `slurm` what it asks of Slurm, `api` what people see and ask.
"""
