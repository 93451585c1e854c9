"""Scripts that are started by torchrun: restarts and the rendezvous backend."""
