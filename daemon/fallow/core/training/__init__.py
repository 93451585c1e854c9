"""Rules of training that worker and head share. Pure.

In: shards, paces, steps and ledgers. Out: each member's shards (`shards`), lost or repeated samples (`audit`), the node
whose link slows the run (`slow_links`), and how often a script may restart (`restarts`).
"""
