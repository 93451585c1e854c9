"""sbatch's options as data: Slurm 22.05 to 26.05, and what becomes of each in a harvest job.

If versions differ in whether a value is required, the table says "optional". An optional value is always the part after
`=` (or glued to the letter), so a command line splits the same way for all versions.
"""

import re
from collections.abc import Iterator
from enum import StrEnum

import msgspec


class Value(StrEnum):
    NONE = "none"
    OPTIONAL = "optional"
    REQUIRED = "required"


class Reach(StrEnum):
    """What becomes of a base option in harvest jobs."""

    KEPT = "kept"
    "kind of node, or account: harvest jobs get it too"
    SHAPE = "shape"
    "amount of a node: harvest jobs get it too, unless they take part of a node that others use"
    OURS = "ours"
    "Fallow sets it for harvest jobs (size, time, name, output ...)"
    BASE = "base"
    "applies to the base job only"
    FIRST = "first"
    "applies to the first submission of the base job only"
    OWN = "own"
    "read by Fallow; sbatch never sees it"


class Option(msgspec.Struct, frozen=True):
    long: str
    short: str
    value: Value
    reach: Reach
    sticky: bool
    "True if sbatch keeps it in force for later components of a heterogeneous job"
    variable: str
    "input environment variable, without `SBATCH_`"
    adds_up: bool = False
    "True if each use adds to the earlier ones; else the last use holds"


# The `container-*` flags without letters are those of the Pyxis plugin, which many GPU sites have.
# REACH [sticky] [adds-up]: NAME[,LETTER][=|?|!][VARIABLE] ...; `=`: value required, `?`: value optional, else a flag.
_TABLE = {
    "kept sticky": """
        account,A=ACCOUNT acctg-freq=ACCTG_FREQ container=CONTAINER container-id=CONTAINER_ID container-type= context=
        exclude,x= get-user-env?GET_USER_ENV mcs-label= oom-kill-step? prefer= profile=PROFILE qos,q=QOS
        reservation=RESERVATION stepmgr wckey=WCKEY
    """,
    "kept": """
        constraint,C=CONSTRAINT cpu-freq=CPU_FREQ_REQ gpu-freq=GPU_FREQ gres-flags=GRES_FLAGS hint=HINT licenses,L=
        mem-bind=MEM_BIND network=NETWORK tmp= container-image= container-workdir= container-mount-home
        container-remap-root container-entrypoint container-writable container-readonly no-container-mount-home
        no-container-remap-root no-container-entrypoint
    """,
    "kept adds-up": """
        container-mounts= container-env=
    """,
    "shape sticky": """
        mem=MEM_PER_NODE
    """,
    "shape": """
        core-spec,S=CORE_SPEC cores-per-socket= cpus-per-gpu=CPUS_PER_GPU cpus-per-task,c= extra-node-info,B=
        gpus-per-node=GPUS_PER_NODE gres=GRES mem-per-cpu=MEM_PER_CPU mem-per-gpu=MEM_PER_GPU mincpus= sockets-per-node=
        thread-spec=THREAD_SPEC threads-per-core=THREADS_PER_CORE
    """,
    "ours sticky": """
        chdir,D= comment= error,e=ERROR export=EXPORT ignore-pbs!IGNORE_PBS job-name,J=JOB_NAME nice?
        no-requeue!NO_REQUEUE open-mode=OPEN_MODE output,o=OUTPUT priority= propagate? requeue?REQUEUE signal=SIGNAL
        time,t=TIMELIMIT time-min=
    """,
    "ours": """
        exclusive?EXCLUSIVE gpus,G=GPUS gpus-per-socket=GPUS_PER_SOCKET gpus-per-task=GPUS_PER_TASK mail-type= nodes,N=
        ntasks,n= ntasks-per-gpu= ntasks-per-node= oversubscribe,s partition,p=PARTITION tres-per-task=TRES_PER_TASK
    """,
    "base sticky": """
        array,a=ARRAY_INX autocomplete= batch=BATCH cluster= cluster-constraint=CLUSTER_CONSTRAINT clusters,M=CLUSTERS
        deadline= delay-boot=DELAY_BOOT export-file= external extra= gid= help,h input,i=INPUT mem-update=
        no-kill,k?NO_KILL power=POWER reboot uid= usage version,V wait-all-nodes=WAIT_ALL_NODES
    """,
    "base": """
        bb=BURST_BUFFER bbf= consolidate-segments contiguous distribution,m=DISTRIBUTION gpu-bind=GPU_BIND mail-user=
        nodefile,F= nodelist,w= ntasks-per-core= ntasks-per-socket= ntasks-per-tres= overcommit,O!OVERCOMMIT resources=
        resv-ports? segment=SEGMENT_SIZE spread-job!SPREAD_JOB spread-segments!SPREAD_SEGMENTS switches=REQ_SWITCH
        tres-bind=TRES_BIND use-min-nodes!USE_MIN_NODES container-name= container-save=
    """,
    "first sticky": """
        begin,b= dependency,d= hold,H kill-on-invalid-dep= parsable quiet,Q test-only verbose,v!DEBUG wait,W!WAIT wrap=
    """,
    "own": """
        dry-run fallow= json
    """,
}
_WORD = re.compile(r"([a-z-]+)(?:,(\w))?([=?!]?)([A-Z_]*)")


def _options() -> Iterator[Option]:
    for group, words in _TABLE.items():
        reach, *how = group.split()
        for match in map(_WORD.fullmatch, words.split()):
            assert match is not None
            long, short, mark, variable = match.groups("")
            value = {"=": Value.REQUIRED, "?": Value.OPTIONAL}.get(mark, Value.NONE)
            yield Option(long, short, value, Reach(reach), "sticky" in how, variable, "adds-up" in how)


OPTIONS: tuple[Option, ...] = tuple(_options())

BY_LONG: dict[str, Option] = {option.long: option for option in OPTIONS}
BY_LONG["tasks-per-node"] = BY_LONG["ntasks-per-node"]
BY_SHORT: dict[str, Option] = {option.short: option for option in OPTIONS if option.short}

FALLOW_KEYS = {
    "nodes": "MIN:MAX",
    "workers-per-node": "N",
    "partitions": "A,B",
    "budget-node-hours": "HOURS",
    "weight": "NUMBER",
    "deadline": "YYYY-MM-DD[THH:MM]",
    "seed": "N",
    "min-minutes": "N",
    "harvest-account": "NAME",
    "outlive-base": "",
}
"""Key of a `#FALLOW` line and of `--fallow` -> form of its value; empty: a flag."""

INFORMATIVE = frozenset({"help", "usage", "version", "autocomplete"})
"""sbatch prints something and submits nothing."""
