"""Benchmarks: measure Fallow on this machine, side by side with its peers.

In: names of benchmarks, world sizes and model sizes (`make bench ARGS="pause --members 2,4 --json"`). Out: `Row`s.
Each benchmark is a module with `run(settings) -> Iterator[Row]`. Most start a `fallow local` with the script
`training`, and read its report and its log of finished steps (`session`). The wheel has none of this.
"""
