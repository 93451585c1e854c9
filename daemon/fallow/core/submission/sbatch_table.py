"""sbatch's options as data: Slurm 22.05 to 26.05, and what becomes of each in a harvest job.

Where versions differ in whether a value is required, "optional" is taken: an optional value is only ever the part
after `=` (or glued to the letter), so a command line splits the same way for all of them.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Value(StrEnum):
    NONE = "none"
    OPTIONAL = "optional"
    REQUIRED = "required"


class Reach(StrEnum):
    """What becomes of a base option in harvest jobs."""

    KEPT = "kept"
    "says what kind of node, or on whose account: harvest jobs get it too"
    SHAPE = "shape"
    "says how much of a node: harvest jobs get it too, but for those that take part of a node that others use"
    OURS = "ours"
    "Fallow sets it itself for harvest jobs (size, time, name, output ...)"
    BASE = "base"
    "means the base job alone"
    FIRST = "first"
    "means the moment of its first submission"
    OWN = "own"
    "read by Fallow; sbatch never sees it"


class Option(msgspec.Struct, frozen=True):
    long: str
    short: str
    value: Value
    reach: Reach
    sticky: bool
    "stays in force for the later components of a heterogeneous job, as sbatch has it"
    variable: str
    "input environment variable, without `SBATCH_`"
    adds_up: bool = False
    "given again, it says something more; else the last one holds"


# The `container-*` flags without letters near the end are those of the Pyxis plugin, which many GPU sites have.
# One option per line: NAME[,LETTER][=|?] REACH [sticky] [adds-up] [VARIABLE]; `=`: value required, `?`: value optional.
_ROWS = """
account,A=            kept sticky ACCOUNT
acctg-freq=           kept sticky ACCTG_FREQ
array,a=              base sticky ARRAY_INX
autocomplete=         base sticky
batch=                base sticky BATCH
bb=                   base BURST_BUFFER
bbf=                  base
begin,b=              first sticky
chdir,D=              ours sticky
cluster=              base sticky
cluster-constraint=   base sticky CLUSTER_CONSTRAINT
clusters,M=           base sticky CLUSTERS
comment=              ours sticky
consolidate-segments  base
constraint,C=         kept CONSTRAINT
container=            kept sticky CONTAINER
container-id=         kept sticky CONTAINER_ID
container-type=       kept sticky
context=              kept sticky
contiguous            base
core-spec,S=          shape CORE_SPEC
cores-per-socket=     shape
cpu-freq=             kept CPU_FREQ_REQ
cpus-per-gpu=         shape CPUS_PER_GPU
cpus-per-task,c=      shape
deadline=             base sticky
delay-boot=           base sticky DELAY_BOOT
dependency,d=         first sticky
distribution,m=       base DISTRIBUTION
error,e=              ours sticky ERROR
exclude,x=            kept sticky
exclusive?            ours EXCLUSIVE
export=               ours sticky EXPORT
export-file=          base sticky
external              base sticky
extra=                base sticky
extra-node-info,B=    shape
get-user-env?         kept sticky GET_USER_ENV
gid=                  base sticky
gpu-bind=             base GPU_BIND
gpu-freq=             kept GPU_FREQ
gpus,G=               ours GPUS
gpus-per-node=        shape GPUS_PER_NODE
gpus-per-socket=      ours GPUS_PER_SOCKET
gpus-per-task=        ours GPUS_PER_TASK
gres=                 shape GRES
gres-flags=           kept GRES_FLAGS
help,h                base sticky
hint=                 kept HINT
hold,H                first sticky
ignore-pbs            ours sticky IGNORE_PBS
input,i=              base sticky INPUT
job-name,J=           ours sticky JOB_NAME
kill-on-invalid-dep=  first sticky
licenses,L=           kept
mail-type=            ours
mail-user=            base
mcs-label=            kept sticky
mem=                  shape sticky MEM_PER_NODE
mem-bind=             kept MEM_BIND
mem-per-cpu=          shape MEM_PER_CPU
mem-per-gpu=          shape MEM_PER_GPU
mem-update=           base sticky
mincpus=              shape
network=              kept NETWORK
nice?                 ours sticky
no-kill,k?            base sticky NO_KILL
no-requeue            ours sticky NO_REQUEUE
nodefile,F=           base
nodelist,w=           base
nodes,N=              ours
ntasks,n=             ours
ntasks-per-core=      base
ntasks-per-gpu=       ours
ntasks-per-node=      ours
ntasks-per-socket=    base
ntasks-per-tres=      base
oom-kill-step?        kept sticky
open-mode=            ours sticky OPEN_MODE
output,o=             ours sticky OUTPUT
overcommit,O          base OVERCOMMIT
oversubscribe,s       ours
parsable              first sticky
partition,p=          ours PARTITION
power=                base sticky POWER
prefer=               kept sticky
priority=             ours sticky
profile=              kept sticky PROFILE
propagate?            ours sticky
qos,q=                kept sticky QOS
quiet,Q               first sticky
reboot                base sticky
requeue?              ours sticky REQUEUE
reservation=          kept sticky RESERVATION
resources=            base
resv-ports?           base
segment=              base SEGMENT_SIZE
signal=               ours sticky SIGNAL
sockets-per-node=     shape
spread-job            base SPREAD_JOB
spread-segments       base SPREAD_SEGMENTS
stepmgr               kept sticky
switches=             base
test-only             first sticky
thread-spec=          shape THREAD_SPEC
threads-per-core=     shape THREADS_PER_CORE
time,t=               ours sticky TIMELIMIT
time-min=             ours sticky
tmp=                  kept
tres-bind=            base TRES_BIND
tres-per-task=        ours TRES_PER_TASK
uid=                  base sticky
usage                 base sticky
use-min-nodes         base USE_MIN_NODES
verbose,v             first sticky DEBUG
version,V             base sticky
wait,W                first sticky WAIT
wait-all-nodes=       base sticky WAIT_ALL_NODES
wckey=                kept sticky WCKEY
wrap=                 first sticky
container-image=      kept
container-mounts=     kept adds-up
container-workdir=    kept
container-name=       base
container-save=       base
container-env=        kept adds-up
container-mount-home  kept
container-remap-root  kept
container-entrypoint  kept
container-writable    kept
container-readonly    kept
no-container-mount-home kept
no-container-remap-root kept
no-container-entrypoint kept
dry-run               own
fallow=               own
json                  own
"""


def _row(line: str) -> Option:
    head, reach, *rest = line.split()
    value = {"=": Value.REQUIRED, "?": Value.OPTIONAL}.get(head[-1], Value.NONE)
    long, _, short = head.rstrip("=?").partition(",")
    variable = next((word for word in rest if word.isupper()), "")
    return Option(long, short, value, Reach(reach), "sticky" in rest, variable, "adds-up" in rest)


OPTIONS: tuple[Option, ...] = tuple(_row(line) for line in _ROWS.strip().splitlines())

BY_LONG: dict[str, Option] = {option.long: option for option in OPTIONS}
BY_LONG["tasks-per-node"] = BY_LONG["ntasks-per-node"]
BY_SHORT: dict[str, Option] = {option.short: option for option in OPTIONS if option.short}

INFORMATIVE = frozenset({"help", "usage", "version", "autocomplete"})
"""sbatch prints something and submits nothing."""
