"""The command line, `fallow`."""
