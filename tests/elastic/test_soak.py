"""A thousand events on one run: `make soak`. The result is that of the undisturbed run, and nothing has leaked.

`FALLOW_SOAK_EVENTS` takes another number of events, `FALLOW_SOAK_SEED` another history.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from pathlib import Path

import psutil
import pytest
from elastic_rig import Elastic, NurseryClient, Rig, alive, judge, until
from test_histories import LEASE_S, Story

from conftest import Undisturbed
from fallow.local.driver import store_pid

EVENTS = int(os.environ.get("FALLOW_SOAK_EVENTS", "1000"))
SEED = int(os.environ.get("FALLOW_SOAK_SEED", "1"))
STEPS_PER_EVENT = 20
SAMPLE_EVERY = 5
KINDS = {
    "join": 40,
    "leave": 15,
    "kill": 18,
    "freeze-and-thaw": 4,
    "kill-during-join": 2,
    "stop": 2,
    "head-kill": 1,
    "store-kill": 1,
}
"""Kinds of events and how often they are drawn."""

MORE_THAN = {"memory": 10.0, "descriptors": 4.0, "threads": 3.0, "sockets": 4.0}
"""What may be added between the second tenth of the events and the last: MiB and counts. Members come and go, and with
them lines and threads, so medians are compared; a leak of one per event would be hundreds."""

pytestmark = [pytest.mark.soak, pytest.mark.timeout(4 * 3600)]

Figures = dict[str, dict[str, float]]


def measure(rig: Rig, run: Elastic) -> Figures:
    """What the long-lived processes hold now: head, store, and agent and worker of the member that never goes."""
    found = {"head": rig.head.pid, "store": store_pid(rig.paths), "agent": run.agent_of["w0"], "member": run.pids["w0"]}
    return {name: held(psutil.Process(pid)) for name, pid in found.items()}


def held(process: psutil.Process) -> dict[str, float]:
    return {
        "memory": process.memory_info().rss / 2**20,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "sockets": len(process.net_connections(kind="all")),
    }


def growth(samples: list[Figures]) -> Figures:
    """By how much each figure grew from the second tenth to the last."""
    tenth = max(1, len(samples) // 10)
    early, late = samples[tenth : 2 * tenth], samples[-tenth:]
    return {
        name: {
            what: statistics.median(s[name][what] for s in late) - statistics.median(s[name][what] for s in early)
            for what in MORE_THAN
        }
        for name in samples[0]
    }


async def test_a_thousand_events_on_one_run(nursery: NurseryClient, undisturbed: Undisturbed, tmp_path: Path) -> None:
    options = ("--steps", STEPS_PER_EVENT * EVENTS, "--pace", 0.1)
    drawn = random.Random(SEED)
    samples: list[Figures] = []
    (tmp_path / "rig").mkdir(mode=0o700)
    async with Rig(nursery, tmp_path / "rig", membership__lease_s=LEASE_S) as rig:
        story = Story(rig, options, anchor=True)
        await story.begin(3)
        began = time.monotonic()
        while len(story.told) < EVENTS:
            (kind,) = drawn.choices(list(KINDS), list(KINDS.values()))
            if kind in ("head-kill", "store-kill") and len(story.told) > EVENTS // 10:
                continue  # from here on they are looked at, and a new process would hide what an old one gathered
            await story.turn(kind, drawn.randrange(100))
            if len(story.told) % SAMPLE_EVERY == 0:
                await until(lambda: alive(store_pid(rig.paths)), "the store does not come back")
                samples.append(measure(rig, story.run))
            if len(story.told) % 50 == 0:
                print(len(story.told), "events", round(time.monotonic() - began), "s", flush=True)
        took = time.monotonic() - began
        report = await story.run.ends(within_s=1800)
    grown = growth(samples)
    figures = {
        "events": EVENTS,
        "seconds": round(took),
        "generations": len(report.generations),
        "steps_discarded": report.steps_discarded,
        "pause_s": [report.pause_s.planned.p50, report.pause_s.unplanned.p50],
        "first": samples[len(samples) // 10],
        "grown": grown,
    }
    print(json.dumps(figures, default=str, indent=1))
    judge(report, await undisturbed(*options))
    for name, values in grown.items():
        for what, value in values.items():
            assert value <= MORE_THAN[what], f"{name}: {value:+.1f} {what} over {EVENTS} events"
