"""What reading one poll costs by size: text as scontrol and squeue print it (25.11), for made-up nodes and jobs."""

from __future__ import annotations

import time

from fallow.slurm import parse
from fallow.slurm.state import cluster_state

PARTITIONS = 8
NOW = 1_795_293_362

_NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=32  CPUAlloc={used} CPUEfctv=64 CPUTot=64 CPULoad=6.56 "
    "AvailableFeatures=ib ActiveFeatures=ib Gres=gpu:8 GresDrain=N/A GresUsed=gpu:{gpus} NodeAddr={name} "
    "NodeHostName={name} Port=6818 Version=25.11.7 OS=Linux RealMemory=512000 AllocMem=0 FreeMem=18989 Sockets=2 "
    "Boards=1 State={state} ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions={partition},spare  "
    "BootTime={now} SlurmdStartTime={now} LastBusyTime={now} ResumeAfterTime=None "
    "CfgTRES=cpu=64,mem=512000M,billing=64 AllocTRES= CurrentWatts=0 AveWatts=0"
)
_PARTITION = (
    "PartitionName={name} AllowGroups=ALL AllowAccounts=ALL AllowQos=ALL AllocNodes=ALL Default=NO QoS=N/A "
    "DefaultTime=NONE DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 Hidden=NO MaxNodes=UNLIMITED "
    "MaxTime=3-00:00:00 MinNodes=0 LLN=NO Nodes={nodes} PriorityJobFactor=1 PriorityTier={tier} RootOnly=NO "
    "ReqResv=NO OverSubscribe=NO PreemptMode=REQUEUE State=UP"
)


def texts(nodes: int, layout: parse.JobFormat) -> tuple[str, str]:
    """scontrol's and squeue's: seven nodes in ten with a job of one or four nodes, a waiting job per ten nodes."""
    rows, jobs = [], []
    names = [f"n{number:05}" for number in range(nodes)]
    number = 0
    for place, name in enumerate(names):
        taken = place % 10 < 7
        partition = f"p{place * PARTITIONS // nodes}"
        used, gpus, state = (64, 8, "ALLOCATED") if taken else (0, 0, "IDLE")
        rows.append(_NODE.format(name=name, used=used, gpus=gpus, state=state, partition=partition, now=NOW))
        if taken and place % 10 >= 3:
            number += 1
            jobs.append(_job(layout, number, partition, "RUNNING", name, 1))
        elif place % 10 == 0:
            number += 2
            several = f"n[{place:05}-{min(place + 2, nodes - 1):05}]"
            jobs.append(_job(layout, number, partition, "RUNNING", several, 3))
            jobs.append(_job(layout, number + 1, partition, "PENDING", "", 4))
    for number in range(PARTITIONS):
        first, last = number * nodes // PARTITIONS, (number + 1) * nodes // PARTITIONS - 1
        rows.append(_PARTITION.format(name=f"p{number}", nodes=f"n[{first:05}-{last:05}]", tier=10))
    rows.append(_PARTITION.format(name="spare", nodes=f"n[00000-{nodes - 1:05}]", tier=1))
    return "\n".join(rows), "\n".join(jobs)


def measure(nodes: int) -> float:
    """Processor seconds from the two texts to a `ClusterState`."""
    layout = parse.JobFormat.fresh("5ca1ab1e")
    cluster, queue = texts(nodes, layout)
    began = time.process_time()
    found = cluster_state(*parse.cluster(cluster), parse.jobs(queue, layout), at=NOW, user="me", names_prefix="fallow-")
    took_s = time.process_time() - began
    assert len(found.nodes) == nodes
    return took_s


def _job(layout: parse.JobFormat, number: int, partition: str, state: str, nodes: str, count: int) -> str:
    start = NOW - 600 if state == "RUNNING" else NOW + 3600
    row = {
        "JobID": str(number),
        "UserName": "alice",
        "State": state,
        "Partition": partition,
        "NumNodes": str(count),
        "NodeList": nodes,
        "SubmitTime": str(NOW - 900),
        "StartTime": str(start),
        "EndTime": str(start + 7200),
        "TimeLimit": "2:00:00",
        "PriorityLong": str(number),
        "NumCPUs": str(64 * count),
        "NumTasks": str(count),
        "MinMemory": "0",
        "tres-alloc": f"cpu={64 * count},mem=512000M,node={count},billing=64",
        "tres-per-node": "gres/gpu:8",
        "OverSubscribe": "NO",
        "Reason": "None" if state == "RUNNING" else "Priority",
        "Name": f"job-{number}",
    }
    return layout.separator.join(row.get(field, "(null)") for field in layout.fields) + layout.end
