"""The training loop: optimizer steps, changes of the membership between two steps, and the script's place."""
