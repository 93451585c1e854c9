"""What a script calls: `fallow.init`, `Run`, and how a process of a run begins and ends."""
