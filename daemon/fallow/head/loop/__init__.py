"""One turn of the head: what comes in (`inbox`), what it leads to (`turn`), and that it is written first (`durable`).

In: messages, polls, questions and ticks, in the order in which they came. Out: effects, carried out once the store has
what they follow from. `faults` says what an error that nobody expected costs, `clock` which time it is.
"""
