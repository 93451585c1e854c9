"""Cut and slow links between nodes, with real packets: every node is a network namespace. Ids: see README.md.

The links to the head are whole: it hears of everybody, and has to find out who cannot talk to whom.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
from elastic_rig import Elastic, MakeRig, phase

from lacking import lacks
from network import FAST, HUB, Network, NoNetworkError, fast_address

FOUND_S = 180.0
"""To find a cut link: 5 s of waiting, up to 4 s for the bytes that do not come, and what a busy machine adds."""

MakeNetwork = Callable[[int], Network]
OnNetwork = Callable[..., AbstractAsyncContextManager[Elastic]]


@pytest.fixture
def make_network() -> Iterator[MakeNetwork]:
    """`make_network(3)`: a hub and so many nodes; see `lacks` where they cannot be had."""
    made: list[Network] = []

    def make(nodes: int) -> Network:
        try:
            made.append(Network(nodes))
        except NoNetworkError as error:
            lacks(str(error))
        return made[-1]

    yield make
    for network in made:
        network.close()


@pytest.fixture
def on_network(make_rig: MakeRig) -> OnNetwork:
    """`on_network(network, 2, "--steps", 60)`: a run whose member `nN` of two is on node N, to be entered."""

    @asynccontextmanager
    async def enter(network: Network, members: int, *options: object, **config: object) -> AsyncIterator[Elastic]:
        rig = make_rig(head__address=HUB, **config)
        assert rig.undisturbed is not None
        await rig.undisturbed(*options)  # outside of the network
        with network.at_the_hub():
            async with rig:
                run = await rig.run(*options)
                for number in range(members):
                    await run.arrive(namespace=network.node(number), SLURMD_NODENAME=f"node{number}")
                await run.grow(members)
                await run.becomes([f"n{number}" for number in range(members)])
                yield run

    return enter


async def test_members_meet_on_the_network_that_the_configuration_names(
    on_network: OnNetwork, make_network: MakeNetwork
) -> None:
    """A second network beside that of the head."""
    network = make_network(2)
    network.add_fast("fast0")
    async with on_network(network, 2, "--steps", 60, network__subnet=FAST) as run:
        addresses = [node.entry for node in (await run.roster()).nodes.values()]
        await run.judged()
    assert addresses == [fast_address(0), fast_address(1)]


async def test_s13_a_link_that_is_cut_while_they_train_costs_one_of_the_two(
    on_network: OnNetwork, make_network: MakeNetwork
) -> None:
    """The younger; the third, which reaches both, is not touched."""
    network = make_network(3)
    async with on_network(network, 3, "--steps", 60) as run:
        network.cut(0, 1)
        await run.becomes(["n0", "n2"], within_s=FOUND_S)
        report = await run.judged()
    assert [g.kind for g in report.generations] == ["start", "eject"]
    assert "no connection between it and n0" in report.generations[1].reason


async def test_s13_a_newcomer_with_a_cut_link_is_left_out_while_the_others_train(
    on_network: OnNetwork, make_network: MakeNetwork
) -> None:
    """Its group is built beside the old one, which loses nothing by it."""
    network = make_network(3)
    async with on_network(network, 2, "--steps", 60, "--pace", 0.1) as run:
        await run.arrive(namespace=network.node(2))
        network.cut(1, 2)
        await run.grow()
        await run.until(lambda view: view.change is not None, "nothing is begun")
        await run.goes_on(5)
        await run.until(lambda view: phase(view, "n2") is None and view.change is None, "it is not left out")
        told = " ".join(event.text for event in await run.events())
        report = await run.judged()
    assert "no connection between it and n1" in told
    assert [g.kind for g in report.generations] == ["start"]
    assert report.steps_discarded == 0


@pytest.mark.soak
async def test_s13_a_node_whose_link_holds_all_up_is_named_and_let_go(
    on_network: OnNetwork, make_network: MakeNetwork
) -> None:
    """The other three train faster without it."""
    network = make_network(4)
    async with on_network(network, 4, "--steps", 160, "--wide", 2048) as run:
        await run.goes_on(5)
        network.slow_down_node(2, bits_per_s=1_000_000)
        await run.goes_on(5)
        slow_from = run.steps_seen()
        view = await run.becomes(["n0", "n1", "n3"], within_s=180.0)
        slow_to = run.steps_seen()
        report = await run.judged()
        times = run.times()
        bars = [event.text for event in await run.events("bar")]
    assert list(view.barred) == ["node2"]
    assert "node2's link holds the run up: " in view.barred["node2"]
    assert [text.partition(": ")[0] for text in bars] == ["node2 is barred from this run"]
    assert [(g.kind, g.members) for g in report.generations[1:]] == [("release", ["n0", "n1", "n3"])]
    assert report.steps_discarded == 0
    with_it = (times[slow_to - 1] - times[slow_from]) / (slow_to - 1 - slow_from)
    without = (times[-1] - times[slow_to + 1]) / (len(times) - slow_to - 2)
    assert without < 0.8 * with_it
