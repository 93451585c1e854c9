"""The overview, one run, and the dialogs."""
