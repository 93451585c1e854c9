"""Qualities of service, as far as preemption goes: `sacctmgr show qos`."""

from __future__ import annotations

from fallow.slurm.parse.values import duration, names, preempt_mode

QOS_COLUMNS = "Name,Preempt,PreemptMode,PreemptExemptTime,GraceTime"
"""Of `sacctmgr -n -P show qos`, for the next four."""


def qos_preempt_modes(text: str, default: str) -> dict[str, str]:
    """QOS that another may preempt -> how.

    `default` is the cluster's mode, which holds for a QOS without one of its own (`cluster`).
    """
    victims = qos_preempted_by(text)
    rows = [row for row in _qos_rows(text) if row[0] in victims]
    return {name: default if mode.lower() in ("", "cluster") else preempt_mode(mode) for name, _, mode, *_ in rows}


def qos_preempted_by(text: str) -> dict[str, list[str]]:
    """The same output: QOS -> others whose jobs may preempt its jobs; those alone that have any."""
    found: dict[str, list[str]] = {}
    for own, preempts, *_ in _qos_rows(text):
        for name in names(preempts):
            if name != own:
                found.setdefault(name, []).append(own)
    return found


def qos_grace_s(text: str) -> dict[str, float]:
    """The same output: QOS -> seconds from the warning to the end of a job that is preempted; those alone that say."""
    return {name: seconds for name, *_, grace in _qos_rows(text) if (seconds := duration(grace))}


def qos_exempt_s(text: str) -> dict[str, float]:
    """The same output: QOS -> seconds for which its jobs are safe; those alone that say."""
    found = {name: duration(exempt) for name, _, _, exempt, _ in _qos_rows(text)}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def _qos_rows(text: str) -> list[list[str]]:
    return [row for line in text.splitlines() if len(row := line.strip().split("|")) == 5]
