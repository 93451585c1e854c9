"""`fallow report --html`: one page about a run, made from what the head has recorded. Pure."""
