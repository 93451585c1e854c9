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

if "stuck" in _BEHAVIOUR:
    time.sleep(60)
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


class Row(SimpleNamespace):
    """An object of pyslurm's; of what is not given it says nothing."""

    def __getattr__(self, name: str) -> str:
        return ""


class Nodes:
    @staticmethod
    def load() -> dict:
        _behave()
        return {"n": Row(name="from-pyslurm", state="IDLE", partitions=["gpu"], configured_gres={"gpu:a100": 4})}


class Partitions:
    @staticmethod
    def load() -> dict:
        return {"gpu": Row(name="gpu", nodes="from-pyslurm", state="UP")}


class Reservations:
    @staticmethod
    def load() -> dict:
        raise RPCError(2002, "Access/permission denied")


class Jobs:
    @staticmethod
    def load() -> dict:
        return {}
