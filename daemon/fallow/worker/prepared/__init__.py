"""The objects that a script has given to `prepare`."""
