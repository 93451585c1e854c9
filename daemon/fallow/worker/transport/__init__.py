"""Connections among the members of one generation: collectives, and point-to-point transfers of state."""
