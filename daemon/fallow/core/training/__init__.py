"""Rules of training that worker and head share. Pure.

In go shards, paces, steps and ledgers; out come who computes which shards (`shards`), which samples were lost
or repeated (`audit`), whose link holds the others up (`slow_links`), and how often a script may restart (`restarts`).
"""
