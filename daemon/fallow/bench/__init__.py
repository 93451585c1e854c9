"""Measured figures, side by side with peers: what `fallow bench` runs."""
