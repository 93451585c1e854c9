"""A run over several hosts with networks, /tmp and clocks of their own: what one machine cannot show."""

import pytest

pytest.importorskip("torch")

from site_rig import LOGIN, Site

from lacking import lacks
from network import NoNetworkError
from slurm_training import START_S

pytestmark = pytest.mark.slurm

PACE_S, ABSENT_S, LEASE_S = 0.25, 21.0, 10.0
"""The absence is more than twice the lease, and longer than ZeroMQ keeps a silent connection."""


def test_a_run_spans_hosts_that_share_only_their_home_and_a_head_that_is_cut_off_ejects_nobody(
    slurm_installed: None,
) -> None:
    """The head is found though its host's name means loopback there."""
    try:
        made = Site(nodes=3)
    except NoNetworkError as error:
        lacks(str(error))
    with made as site:
        training = site.submit("--nodes=1:3", steps=580, pace_s=PACE_S)
        assert sorted(member.node for member in training.wait_members(3)) == ["n1", "n2", "n3"]
        training.wait_steps()
        before = training.view().generation
        site.hosts.unplug(LOGIN)
        # Every step takes its pace at least.
        training.wait_steps(round(ABSENT_S / PACE_S), START_S)
        site.hosts.plug(LOGIN)
        step = training.step()
        training.wait_for("the head hears of new steps", lambda: training.view().step > step)
        training.wait_steps(round(LEASE_S / PACE_S), START_S)
        assert training.view().generation == before
        assert training.finish().steps_discarded == 0
        assert not training.events("eject", "bar", "suspend", "orphan", "abort", "lost")
        assert training.lines_after() == [training.job]
