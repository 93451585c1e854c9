"""The systemd units have the settings that the head relies on."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from command_line import Fallow
from fallow.cli import start
from fallow.model import Exit

FOLDER = Path(__file__).parents[3] / "contrib" / "systemd"
SYSTEM, USER = "fallow@.service", "fallow-user.service"

UNITS = {
    "Type": "notify",
    "NotifyAccess": "main",
    "WatchdogSec": "30",
    "Restart": "on-failure",
    "KillMode": "mixed",
    "UMask": "0077",
}
ONLY_SYSTEM = {"User": "%i", "StateDirectoryMode": "0700", "RuntimeDirectoryMode": "0700"}
ONLY_SYSTEM |= {"WantedBy": "multi-user.target"}
ONLY_USER = {"WantedBy": "default.target"}


def _keys(unit: str) -> dict[str, str]:
    keys: dict[str, str] = {}
    for line in (FOLDER / unit).read_text().splitlines():
        if re.match(r"[A-Za-z]+=", line):
            key, _, value = line.partition("=")
            assert key not in keys, f"{unit} says {key} twice"
            keys[key] = value
    return keys


@pytest.mark.parametrize(("unit", "settings"), [(SYSTEM, UNITS | ONLY_SYSTEM), (USER, UNITS | ONLY_USER)])
def test_unit_says_what_the_head_relies_on(unit: str, settings: dict[str, str]) -> None:
    keys = _keys(unit)
    assert {key: keys.get(key) for key in settings} == settings
    assert keys["ExecStart"].endswith("fallow daemon")
    beyond_mending = {Exit.NO_RESTART, Exit.CONFIG, Exit.USAGE, Exit.CANTCREAT}
    assert {int(code) for code in keys["RestartPreventExitStatus"].split()} == beyond_mending
    assert int(keys["TimeoutStopSec"]) > int(keys["WatchdogSec"])
    needs_privileges = {key for key in keys if key.startswith(("Protect", "Private", "Capability", "User"))}
    assert bool(needs_privileges) is (unit == SYSTEM)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize(("unit", "manager"), [(SYSTEM, "--system"), (USER, "--user")])
def test_systemd_understands_the_unit(unit: str, manager: str, tmp_path: Path) -> None:
    instance = tmp_path / unit.replace("@", "@daemon")
    shutil.copy(FOLDER / unit, instance)
    result = subprocess.run(
        ["systemd-analyze", "verify", manager, "--man=no", str(instance)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_LOG_COLOR": "0"},
    )
    # It also looks at the machine's own units; only what it says about ours counts.
    about_ours = [line for line in result.stderr.splitlines() if instance.name in line]
    assert about_ours == []


@pytest.mark.parametrize(("words", "unit"), [(["--user"], "fallow-user.service"), ([], "fallow@.service")])
def test_the_unit_that_is_installed_starts_this_very_program(
    words: list[str], unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallow: Fallow
) -> None:
    system, config = tmp_path / "etc", tmp_path / "config"
    monkeypatch.setattr(start, "_SYSTEM_UNITS", system)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config))
    program = tmp_path / "bin" / "fallow"
    program.parent.mkdir()
    program.touch(0o755)
    monkeypatch.setattr("sys.argv", [str(program)])
    unit_text = Path(fallow("service", "install", *words, "--json").json["unit"])
    assert unit_text == (config / "systemd/user/fallow.service" if words else system / "fallow@.service")
    shipped = (FOLDER / unit).read_text()
    assert unit_text.read_text() == shipped.replace("/usr/bin/env fallow daemon", f"{program} daemon") != shipped
    assert "daemon-reload" in fallow("service", "install", *words).out, "again"
    unit_text.write_text("[Service]\n")
    result = fallow("service", "install", *words)
    assert (result.code, "--force" in result.err) == (Exit.CANTCREAT, True)
    assert f"`{' '.join(['systemctl', *words])} edit {unit_text.name}`" in result.err
    assert fallow("service", "install", *words, "--force").code == 0
    assert f"ExecStart={program} daemon" in unit_text.read_text()
