"""Collectives of device tensors through the host, for a device that torch has no communicator for. Nothing overlaps."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fallow.worker.transport import device as devices
from fallow.worker.transport.communicators import Communicator, Work
from fallow.worker.transport.gloo import reason

_POLL_S = 1e-3

Launch = Callable[[torch.Tensor, torch.Tensor], Any]


class Staged(Communicator):
    """A communicator for tensors of `device`, over a gloo group."""

    def __init__(self, process_group: Any, device: torch.device) -> None:
        super().__init__(process_group, device)
        self._host = Communicator(process_group, devices.HOST)
        self.failure: str | None = None

    def sum(self, tensor: torch.Tensor) -> Work:
        return _Work(self, tensor, tensor, lambda _, taken: self._host.sum(taken))

    def copy(self, tensor: torch.Tensor, root: int) -> Work:
        return _Work(self, tensor, tensor, lambda _, taken: self._host.copy(taken, root))

    def exchange(self, given: torch.Tensor, counts: list[int], taken: torch.Tensor, arriving: list[int]) -> Work:
        return _Work(self, given, taken, lambda given, taken: self._host.exchange(given, counts, taken, arriving))

    def collect(self, piece: torch.Tensor, whole: torch.Tensor) -> Work:
        return _Work(self, piece, whole, self._host.collect)

    def error(self) -> str | None:
        return self.failure

    def abort(self) -> None:
        self.failure = self.failure or "aborted"

    def shutdown(self) -> None:
        """The group of the host tensors is its owner's."""


class _Work:
    """A collective that begins when somebody waits for it: all members wait in the order of the launches."""

    def __init__(self, transport: Staged, given: torch.Tensor, taken: torch.Tensor, launch: Launch) -> None:
        self._transport, self._taken, self._launch = transport, taken, launch
        self._given_on_host = devices.to_host(given)
        self._taken_on_host = self._given_on_host if taken is given else devices.to_host(taken)
        self._copied = devices.event(transport.device)

    def wait(self) -> None:
        transport = self._transport
        devices.wait(self._copied, transport.error)
        try:
            if transport.failure is None:
                work = self._launch(self._given_on_host, self._taken_on_host)
                while not work.is_completed() and transport.failure is None:
                    time.sleep(_POLL_S)
                if transport.failure is None:
                    work.wait()
                    self._taken.copy_(self._taken_on_host, non_blocking=True)
        except RuntimeError as error:
            transport.failure = reason(error)
