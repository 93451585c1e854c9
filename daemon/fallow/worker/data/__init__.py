"""Which samples a member reads, in which order, and the ledger of the samples that counted."""
