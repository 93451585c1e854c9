"""The membership of one run as one pure machine: it decides which nodes compute together in which generation.

In: events (`events`): what nodes report, what Slurm says of them, what people ask for, and ticks of the head's clock.
Out: changed records to write first (`roster`), then orders for nodes and entries for the log (`machine`).
Read `tables` first: the two tables say everything that the machine does.
"""
