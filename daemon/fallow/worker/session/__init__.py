"""The conversation with the head."""
