"""Stands in for pyslurm in tests of the process around it. The file that PYSLURM_STUB names says how it behaves."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

_BEHAVIOUR = json.loads(Path(os.environ["PYSLURM_STUB"]).read_text())
__version__ = _BEHAVIOUR.get("version", "25.11.2")

if "exit" in _BEHAVIOUR:
    print("pyslurm: fatal: Could not establish a configuration source", file=sys.stderr, flush=True)
    os._exit(1)


class RPCError(Exception):
    def __init__(self, errno: int, msg: str) -> None:
        super().__init__(msg)
        self.errno, self.msg = errno, msg


def _behave() -> None:
    print("noise on standard output", flush=True)
    if "crash" in _BEHAVIOUR:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "hang" in _BEHAVIOUR:
        time.sleep(60)
    if "error" in _BEHAVIOUR:
        raise RPCError(1800, "Unable to contact slurm controller (connect failure)")


class Nodes:
    @staticmethod
    def load() -> dict:
        _behave()
        node = SimpleNamespace(name="from-pyslurm", state="IDLE", partitions=["gpu"], architecture="x86_64", owner=None)
        vars(node).update(
            total_cpus=8,
            effective_cpus=8,
            allocated_cpus=0,
            real_memory=1000,
            allocated_memory=0,
            memory_reserved_for_system=None,
            last_busy_time=1795226000,
        )
        vars(node).update(configured_gres={"gpu:a100": 4}, allocated_tres={}, active_features=[])
        return {"n": node}


class Partitions:
    @staticmethod
    def load() -> dict:
        partition = SimpleNamespace(name="gpu", nodes="from-pyslurm", state="UP", is_default=True)
        lists = ("allowed_accounts", "denied_accounts", "allowed_qos", "denied_qos", "allowed_groups")
        vars(partition).update({name: [] for name in lists})
        vars(partition).update(max_time=None, priority_tier=1, preempt_mode=None, qos=None)
        vars(partition).update(preemption_grace_time=0, oversubscribe="NO", is_user_exclusive=False, min_nodes=0)
        vars(partition).update(max_nodes=None, is_root_only=False, requires_reservation=False)
        return {partition.name: partition}


class Reservations:
    @staticmethod
    def load() -> dict:
        raise RPCError(2002, "Access/permission denied")


class Jobs:
    @staticmethod
    def load() -> dict:
        return {}
