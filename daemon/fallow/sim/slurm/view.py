"""Polls of the simulated Slurm. Records of jobs and nodes that have not changed are reused."""

from math import inf

from fallow.model import ClusterConfig, ClusterState, JobInfo, NodeInfo
from fallow.sim.slurm.cluster import places
from fallow.sim.slurm.jobs import Job
from fallow.sim.slurm.lifecycle import Lifecycle
from fallow.sim.slurm.owners import Owners
from fallow.sim.types import Site


class View:
    """Answers of `squeue` and `scontrol`. Arguments: see `SchedulingLoop`."""

    def __init__(self, lifecycle: Lifecycle, owners: Owners | None) -> None:
        self._lifecycle, self._cluster, self._site = lifecycle, lifecycle.cluster, lifecycle.cluster.site
        self._owners = owners
        self._nodes: list[NodeInfo] = [NodeInfo(node=node.node, state="IDLE") for node in self._site.nodes]
        self._planned = 0

    def state(self, now: float) -> ClusterState:
        """One poll."""
        jobs: list[JobInfo] = []
        for job in self._lifecycle.jobs.values():
            if not job.is_owner or job.state == "PENDING":
                job.job_info = job.job_info or self._job(job)
                jobs.append(job.job_info)
        if self._owners is not None:
            jobs += self._owners.planned_jobs()
        planned = self._cluster.mask_of([node for job in jobs for node in job.planned_nodes])
        for place in places(self._cluster.changed_nodes | (planned ^ self._planned)):
            self._nodes[place] = self._node(place, bool(planned >> place & 1))
        self._cluster.changed_nodes, self._planned = 0, planned
        return ClusterState(at=now, nodes=list(self._nodes), jobs=jobs, partitions=list(self._site.partitions))

    def _node(self, place: int, is_planned: bool) -> NodeInfo:
        cluster, node = self._cluster, self._site.nodes[place]
        running = [job for job in cluster.jobs[place] if job.state == "RUNNING"]
        slots = cluster.slots[place]
        slots_used = sum(slots if job.is_exclusive else job.slots for job in running)
        cpus, gpus = max(node.cpus, slots), slots_used if node.gpus else 0
        flags = []
        if cluster.drained_nodes >> place & 1:
            flags.append("DRAIN")
        if cluster.ending_nodes >> place & 1:
            flags.append("COMPLETING")
        if is_planned and not any(job.is_exclusive for job in running):
            flags.append("PLANNED")
        return NodeInfo(
            node=node.node,
            state="ALLOCATED" if slots_used >= slots else "MIXED" if running else "IDLE",
            flags=flags,
            partitions=[partition.name for partition in cluster.partitions_of[place]],
            arch="x86_64",
            cpus=cpus,
            cpus_used=cpus * slots_used // slots,
            gpus=node.gpus,
            gpus_used=gpus,
            gpu_types={"": node.gpus} if node.gpus else {},
            gpu_types_used={"": gpus} if gpus else {},
        )

    def _job(self, job: Job) -> JobInfo:
        cluster, is_pending = self._cluster, job.state == "PENDING"
        limit_s = job.limit_s if is_pending else job.granted_s
        end_at = None if is_pending or job.end_at == inf else job.end_at
        nodes = job.mask or job.partition.mask
        place = (nodes & -nodes).bit_length() - 1
        return JobInfo(
            job_id=job.job_id,
            name=job.name,
            user=job.user,
            state=job.state,
            partition=job.partition.name,
            reason=job.reason,
            nodes=cluster.names_of(job.mask),
            num_nodes=job.nodes,
            planned_nodes=cluster.names_of(job.planned),
            submit_at=job.submit_at,
            start_at=job.planned_at if is_pending else job.start_at,
            end_at=end_at,
            time_limit_s=None if limit_s == inf else limit_s,
            preempt_at=job.preempt_at,
            priority=job.priority,
            comment=job.name if job.is_ours else "",
            cpus_per_node=self._cpus(job, place),
            gpus_per_node=job.slots if self._site.nodes[place].gpus else 0,
            exclusive=job.is_exclusive,
            required_nodes=cluster.names_of(job.required),
            excluded_nodes=cluster.names_of(job.excluded),
            eligible_at=job.submit_at,
        )

    def _cpus(self, job: Job, place: int) -> int:
        """CPUs of the job on a node, in proportion to its slots."""
        slots = self._cluster.slots[place]
        cpus = max(self._site.nodes[place].cpus, slots)
        return cpus if job.is_exclusive else max(1, cpus * job.slots // slots)


def config(site: Site) -> ClusterConfig:
    """The answer of `scontrol show config`."""
    s = site.scheduler
    shared = not all(partition.exclusive for partition in site.partitions)
    return ClusterConfig(
        cluster=site.name,
        slurm_version=f"{s.version[0]}.{s.version[1]:02}.0",
        preempt_type=site.preempt_type,
        kill_wait_s=s.kill_wait_s,
        backfill_interval_s=s.bf_interval_s,
        message_timeout_s=s.message_timeout_s,
        priority_type="priority/basic",
        scheduler_parameters=s.parameters,
        select_type="select/cons_tres" if shared else "select/linear",
    )
