"""What travels between head, agents and workers, besides reports and orders (`core.membership.messages`).

`agents`: between the head and the agent of a node, over ZeroMQ. `workers`: between an agent and its workers, over a
socket that a worker inherits. Both say how things stand, again and again; the newest counts, so whatever is lost,
repeated or late does no harm. Only ends are said until they are noted.
"""
