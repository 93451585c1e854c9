"""What a submission would ask for, and what it would find: the JSON of `fallow submit --dry-run`."""

from __future__ import annotations

from fallow.model.base import Struct


class WouldAsk(Struct, frozen=True, kw_only=True):
    """Harvest jobs that would be submitted."""

    partition: str
    minutes: int
    nodes: int


class Prospect(Struct, frozen=True, kw_only=True):
    """What a run would find, by the head's last poll."""

    polled_at: float
    idle_nodes: int
    "in partitions that may be harvested"
    asks: list[WouldAsk]
    "harvest jobs that would be asked for at once, after the base job has begun"
    nodes: int
    "of the run, with its base job, if all idle nodes that it could use were asked for, one interval after the other"
    notes: list[str] = []


class BaseStart(Struct, frozen=True, kw_only=True):
    """What `sbatch --test-only` says of the base job."""

    says: str
    "in Slurm's words"
    refused: bool = False
    "it would not be submitted at all"


class DryRun(Struct, frozen=True, kw_only=True):
    base: list[str]
    "sbatch and its arguments; RUN and its tokens are named by the head"
    base_environment: dict[str, str]
    base_script: str
    harvest: list[str]
    "likewise of a harvest job; partition and minutes are examples"
    harvest_script: str
    min_nodes: int
    max_nodes: int
    budget_node_hours: float | None
    start: BaseStart | None
    "None: Slurm could not be asked"
    prospect: Prospect | None
    "likewise"
    notes: list[str] = []
