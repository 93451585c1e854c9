"""The torch side: what runs inside a training process."""
