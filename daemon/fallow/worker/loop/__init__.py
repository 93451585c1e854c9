"""The training loop: steps, what happens between two of them, and where the script is."""
