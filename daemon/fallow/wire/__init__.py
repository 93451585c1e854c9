"""ZeroMQ with CURVE between the head (`router`) and its agents and workers (`link`)."""
