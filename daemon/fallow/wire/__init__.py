"""How messages travel: ZeroMQ with CURVE between head (`router`) and agents (`link`), sockets to workers (`frames`)."""
