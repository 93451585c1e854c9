"""The script's interface: `fallow.init` and `Run`, and the start and end of a worker process."""
