"""Sends the state of a run to members that lack it. Start with `transfer`."""
