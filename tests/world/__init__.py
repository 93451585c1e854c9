"""A simulated world around the membership machine: head, store, network, agents, workers with a data plane, and faults.

Each seed is one history. The observer raises `Violation` when something happens that must never happen.
"""
