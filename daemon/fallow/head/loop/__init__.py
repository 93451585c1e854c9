"""The parts of one turn: items come in (`inbox`), become effects (`turn`), and changes are written first (`durable`).

In: messages, polls, requests and ticks, in the order of their arrival. Out: effects, which `app` carries out once the
store holds the changes. `faults` contains unexpected errors, and `monitoring` reports to systemd and Prometheus.
"""
