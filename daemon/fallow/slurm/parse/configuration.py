"""The site's settings from `scontrol show config`, and which QOS preempt which from `sacctmgr show qos`."""

import re

import msgspec

from fallow.model import ClusterConfig
from fallow.slurm.parse.values import count, duration, names, preempt_mode, unix_time, word

QOS_COLUMNS = "Name,Preempt,PreemptMode,PreemptExemptTime,GraceTime"
"""Columns of `sacctmgr -n -P show qos`, for `with_qos`."""


def config(text: str) -> tuple[ClusterConfig, float | None]:
    """Settings from the output of `scontrol show config`, and slurmctld's time of the answer."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, mark, value = line.partition("=")
        if mark:
            values.setdefault(key.strip(), word(value))
    scheduler = values.get("SchedulerParameters", "")
    interval = re.search(r"(?:^|,)bf_interval=(-?\d+)", scheduler)
    backfill_s = float(interval[1]) if interval else 30.0
    private = values.get("PrivateData", "")
    as_of = re.search(r"^Configuration data as of (\S+)", text, re.MULTILINE)
    result = ClusterConfig(
        cluster=values.get("ClusterName", ""),
        slurm_version=values.get("SLURM_VERSION", ""),
        controllers=_controllers(values),
        preempt_type="" if (kind := values.get("PreemptType", "")).endswith("none") else kind,
        preempt_mode=preempt_mode(values.get("PreemptMode", "")),
        preempt_exempt_s=duration(values.get("PreemptExemptTime", "")) or 0.0,
        accounting=not (kind := values.get("AccountingStorageType", "")).endswith("none") and bool(kind),
        kill_wait_s=_seconds(values.get("KillWait"), 30.0),
        backfill_interval_s=-1.0 if values.get("SchedulerType", "").endswith("builtin") else backfill_s,
        message_timeout_s=_seconds(values.get("MessageTimeout"), 10.0),
        private_data=[name for name in private.split(",") if name and name != "none"],
        priority_type=values.get("PriorityType", ""),
        scheduler_parameters=scheduler,
        priority_weights=_weights(values),
        priority_flags=names(values.get("PriorityFlags", "")),
        site_factor="" if (plugin := values.get("PrioritySiteFactorPlugin", "")).endswith("none") else plugin,
        select_type=values.get("SelectType", ""),
    )
    return result, unix_time(as_of[1]) if as_of else None


def _controllers(values: dict[str, str]) -> list[str]:
    """Addresses of `SlurmctldHost[0] = ctl(10.77.0.1)`: other hosts use the address in parentheses."""
    addresses = [address] if (address := values.get("SlurmctldAddr")) else []
    for key, value in values.items():
        match = re.fullmatch(r"([^()]+)(?:\(([^()]+)\))?", value)
        if key.startswith("SlurmctldHost[") and match:
            addresses.append(match[2] or match[1])
    return addresses


def _weights(values: dict[str, str]) -> dict[str, int]:
    """Weights other than 0: `PriorityWeightAge = 1000`, `PriorityWeightTRES = CPU=1000,GRES/gpu=3000`."""
    weights: dict[str, int] = {}
    for key, value in values.items():
        name = key.removeprefix("PriorityWeight")
        if name == "TRES":
            weights |= {
                f"TRES {kind}": count(weight) for kind, _, weight in (w.partition("=") for w in value.split(","))
            }
        elif name != key:
            weights[name] = count(value)
    return {name: weight for name, weight in weights.items() if weight}


def _seconds(text: str | None, default: float) -> float:
    """`5 sec`."""
    match = re.match(r"\d+", text or "")
    return float(match[0]) if match else default


def with_qos(settings: ClusterConfig, text: str) -> ClusterConfig:
    """Add what the accounting says about QOS. A QOS without a preemption mode has the cluster's."""
    rows = [row for line in text.splitlines() if len(row := line.strip().split("|")) == 5]
    exempt_s = {name: seconds for name, _, _, exempt, _ in rows if (seconds := duration(exempt)) is not None}
    settings = msgspec.structs.replace(settings, qos_exempt_s=exempt_s)
    if settings.preempt_type != "preempt/qos":
        return settings
    preempted_by: dict[str, list[str]] = {}
    for own, preempts, *_ in rows:
        for name in names(preempts):
            if name != own:
                preempted_by.setdefault(name, []).append(own)
    modes = {name: mode for name, _, mode, *_ in rows if name in preempted_by}
    return msgspec.structs.replace(
        settings,
        qos_preempted_by=preempted_by,
        qos_preempt_modes={
            name: settings.preempt_mode if mode.lower() in ("", "cluster") else preempt_mode(mode)
            for name, mode in modes.items()
        },
        qos_grace_s={name: seconds for name, *_, grace in rows if (seconds := duration(grace))},
    )
