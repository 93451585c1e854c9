"""What is on a screen; every widget draws one part of a `View`."""
