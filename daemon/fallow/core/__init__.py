"""Decisions: events in, instructions out. No clock, no socket, no torch."""
