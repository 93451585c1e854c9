"""A run over several hosts with networks, /tmp and clocks of their own: what one machine cannot show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from namespaces import NoHostsError
from site_rig import LOGIN, Head, Site, Training

pytestmark = pytest.mark.slurm

ABSENT_S = 9.0
"""More than twice the lease, and than ZeroMQ keeps a silent connection."""
LONG_S = pytest.param(60.0, marks=pytest.mark.soak)
ALARMS = ("eject", "bar", "suspend", "orphan", "abort", "lost")
"""Kinds of events that must not come of a head's absence."""


@pytest.fixture(scope="module")
def site(slurm_installed: None) -> Iterator[Site]:
    try:
        made = Site(nodes=3)
    except NoHostsError as error:
        pytest.skip(f"no hosts can be made here: {error}")
    with made:
        yield made


@pytest.fixture
def head(site: Site) -> Iterator[Head]:
    with site.head() as head:
        yield head


@pytest.mark.parametrize("seconds", [ABSENT_S, LONG_S])
def test_a_run_spans_hosts_that_share_only_their_home_and_a_head_that_is_cut_off_ejects_nobody(
    head: Head, site: Site, seconds: float
) -> None:
    """The head is found though its host's name means loopback there."""
    training = train_on_three_nodes(head, seconds)
    before = training.view()["generation"]
    site.hosts.unplug(LOGIN)
    training.wait_paced(seconds)
    site.hosts.plug(LOGIN)
    check_nothing_happened(training, before)
    assert (training.folder / "after").read_text().split() == [training.job]


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [ABSENT_S, LONG_S])
def test_a_head_whose_state_folder_hangs_ejects_nobody(head: Head, site: Site, seconds: float) -> None:
    training = train_on_three_nodes(head, seconds)
    before = training.view()["generation"]
    site.file_server_hangs()
    training.wait_paced(seconds)
    site.file_server_goes_on()
    check_nothing_happened(training, before)


@pytest.mark.soak
def test_a_node_that_is_killed_whole_costs_one_step(head: Head, site: Site) -> None:
    training = head.submit("--nodes=1:3", steps=1500)
    nodes = training.wait_members(3)
    training.wait_steps()
    lost = nodes[-1]
    site.hosts.kill(lost)
    try:
        training.wait_for("the node was ejected", lambda: len(training.member_nodes()) == 2)
        training.wait_steps()
    finally:
        site.boot(lost)
    training.wait_members(3)
    report = training.finish()
    assert report["steps_discarded"] <= 1
    assert lost in " ".join(event["text"] for event in training.events("eject"))


@pytest.mark.soak
def test_a_blocked_head_is_named(head: Head, site: Site) -> None:
    port = head.port()
    site.hosts.block(LOGIN, port)
    try:
        training = head.submit("--nodes=1:1")

        def told() -> bool:
            words = site.hosts.run(LOGIN, "fallow", "status", training.run)
            return "no agent has come" in words and str(port) in words

        training.wait_for("status names the head's address", told)
    finally:
        site.hosts.unblock(LOGIN, port)
    training.wait_members(1)
    training.finish()


def train_on_three_nodes(head: Head, seconds: float) -> Training:
    training = head.submit("--nodes=1:3", steps=400 + round(20 * seconds))
    assert sorted(training.wait_members(3)) == ["n1", "n2", "n3"]
    training.wait_steps()
    return training


def check_nothing_happened(training: Training, generation: int) -> None:
    """The head has come back, and the same generation has trained on without a loss."""
    step = training.step()
    training.wait_for("the head hears of new steps", lambda: training.view()["step"] > step)
    training.wait_paced(4.0)  # a lease
    assert training.view()["generation"] == generation
    report = training.finish()
    assert report["generations"][0]["kind"] == "start"
    assert not training.events(*ALARMS)
    assert report["steps_discarded"] == 0
