"""The head: one daemon per user that turns events into effects."""
