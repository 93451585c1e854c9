"""The head's control socket: how the command line and the terminal monitor talk to the head."""
