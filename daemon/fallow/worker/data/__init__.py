"""Which samples a member reads, in which order, and the record of those that counted."""
