"""The state of a run and its way to those who have not got it."""
