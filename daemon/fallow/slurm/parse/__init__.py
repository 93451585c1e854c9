"""Readers of what Slurm's commands print: pure functions, tried on real output of 22.05, 24.11, 25.11 and 26.05.

Text, not `--json`: the JSON of 22.05 ignores filters, and its shape changes with every release. Users may put any
character into job names and comments, line ends too. So rows of jobs carry separators that nobody can guess
(`job_format`). `scontrol -o` prints what only administrators choose: the first `Key=` of a line is the true one.

An unknown state stays as text. An unreadable time or number is None or 0, never an error.
"""

from fallow.slurm.parse.configuration import *
from fallow.slurm.parse.inventory import *
from fallow.slurm.parse.queue import *
from fallow.slurm.parse.values import *
