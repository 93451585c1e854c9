"""Benchmarks: measure Fallow on this machine, side by side with its peers.

Input: names, world sizes and model sizes (`make bench ARGS="pause --members 2,4 --json"`). Output: `Row`s.
Each benchmark is a function `run(settings) -> Iterator[Row]` of a module. Most start `fallow local` with the script
`training`, and read its report and its log of finished steps (`session`). The wheel does not contain this package.
"""
