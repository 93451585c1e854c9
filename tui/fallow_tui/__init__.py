"""The terminal monitor, `fallow top`: what the head sees, and the operator's actions. Talks to the head only."""
