"""What a poll of the simulated Slurm shows: made anew only for what changed since the last one."""

from __future__ import annotations

from fallow.model import ClusterState, JobInfo, NodeInfo
from fallow.sim.slurm.cluster import Cluster, places
from fallow.sim.slurm.jobs import Job
from fallow.sim.slurm.lives import Lives
from fallow.sim.types import Site


class View:
    def __init__(self, site: Site, cluster: Cluster, lives: Lives) -> None:
        self._site = site
        self._cluster = cluster
        self._lives = lives
        self._nodes: list[NodeInfo] = [NodeInfo(node=node.node, state="IDLE") for node in site.nodes]
        self._partitions_of = [
            [p.partition for p in site.partitions if cluster.partitions[p.partition].mask >> place & 1]
            for place in range(len(site.nodes))
        ]
        self._jobs: dict[str, JobInfo] = {}
        self._shown: tuple[list[NodeInfo], list[JobInfo]] = [], []
        "by the last poll"
        self._partitions = list(site.partitions)
        self._planned = 0

    def state(self, now: float) -> ClusterState:
        """One poll; its lists are those of the one before as long as nothing has changed."""
        nodes, jobs = self._shown
        if self._new_jobs():
            jobs = list(self._jobs.values())
            planned = 0
            for job in self._lives.jobs.values():
                planned |= job.planned
            self._cluster.touched |= planned ^ self._planned
            self._planned = planned
        if self._cluster.touched:
            for place in places(self._cluster.touched):
                self._nodes[place] = self._node(place)
            self._cluster.touched = 0
            nodes = list(self._nodes)
        self._shown = nodes, jobs
        return ClusterState(
            at=now,
            nodes=nodes,
            jobs=jobs,
            partitions=self._partitions,
            reservations=[r for r in self._site.reservations if r.end_at > now],
        )

    def _new_jobs(self) -> bool:
        """Take in what has changed about jobs. Does a poll show any of it?"""
        news, self._lives.news = self._lives.news, {}
        found = False
        for job_id in news:
            job, before = self._lives.jobs.get(job_id), self._jobs.get(job_id)
            now = None if job is None else self._job(job)
            if now is None:
                self._jobs.pop(job_id, None)
            elif now != before:
                self._jobs[job_id] = now
            found = found or now != before
        return found

    def _node(self, place: int) -> NodeInfo:
        cluster, node, bit = self._cluster, self._site.nodes[place], 1 << place
        running = [job for job in cluster.jobs[place] if job.state == "RUNNING"]
        gpus = sum(cluster.gpus[place] if job.whole else job.gpus for job in running)
        cpus = sum(cluster.cpus_for(job, place) for job in running)
        flags = []
        if cluster.ending & bit:
            flags.append("COMPLETING")
        if not cluster.answering & bit:
            flags.append("NOT_RESPONDING")
        if cluster.drained & bit:
            flags.append("DRAIN")
        if cluster.reserved & bit:
            flags += ["MAINTENANCE", "RESERVED"]
        if self._planned & bit and not any(job.whole for job in running):
            flags.append("PLANNED")
        if cluster.down & bit:
            state = "DOWN"
        elif not running:
            state = "IDLE"
        elif cpus >= cluster.cpus[place]:
            state = "ALLOCATED"
        else:
            state = "MIXED"
        return NodeInfo(
            node=node.node,
            state=state,
            flags=flags,
            partitions=self._partitions_of[place],
            arch="x86_64",
            cpus=cluster.cpus[place],
            cpus_used=cpus,
            gpus=node.gpus,
            gpus_used=gpus,
            gpu_types={"": node.gpus} if node.gpus else {},
            gpu_types_used={"": gpus} if gpus else {},
            features=list(node.features),
        )

    def _job(self, job: Job) -> JobInfo:
        cluster, waits = self._cluster, job.state == "PENDING"
        limit_s = job.limit_s if waits else job.granted_s
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
            start_at=job.planned_at if waits else job.start_at,
            end_at=None if waits or job.end_at == float("inf") else job.end_at,
            time_limit_s=None if limit_s == float("inf") else limit_s,
            preempt_at=job.preempt_at,
            priority=job.priority,
            comment=job.name if job.ours else "",
            het_job_id=None if job.het is None else job.het.leader,
            account=job.account,
            qos=job.qos,
            cpus_per_node=cluster.least_cpus(job),
            gpus_per_node=job.gpus,
            exclusive=job.whole,
            required_nodes=cluster.names_of(job.required),
            excluded_nodes=cluster.names_of(job.excluded),
            eligible_at=job.eligible_at or job.submit_at,
        )
