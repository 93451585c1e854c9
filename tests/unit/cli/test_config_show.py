"""`fallow config show`: values, where they come from, and what is wrong with them."""

import tomllib
from pathlib import Path

import pytest

from command_line import Fallow
from fallow.cli import config as command
from fallow.config import SECTIONS, Config
from fallow.model import Exit


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The administrators' file and the user's. Neither exists yet."""
    system, user = tmp_path / "system.toml", tmp_path / "fallow" / "config.toml"
    user.parent.mkdir()
    monkeypatch.setattr(command, "SYSTEM_FILE", system)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("FALLOW_CONFIG", raising=False)
    return system, user


def test_each_value_has_its_origin(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fallow: Fallow) -> None:
    system, user = files
    system.write_text("[site]\nmax_nodes = 16\nmax_minutes = 60\n[harvest]\nnice = 5\nmin_minutes = 3\n")
    user.write_text("[harvest]\nmax_nodes = 64\nnice = 6\n")
    monkeypatch.setenv("FALLOW_HARVEST__NICE", "7")
    monkeypatch.setenv("FALLOW_HARVEST__PARTITIONS", "a,b")
    found = fallow("config", "show", "--json").json
    assert list(found) == list(SECTIONS)
    harvest = {key: (one["value"], one["origin"]) for key, one in found["harvest"].items()}
    assert {key: harvest[key] for key in ("nice", "min_minutes", "max_nodes", "max_minutes", "qos", "partitions")} == {
        "nice": (7, "FALLOW_HARVEST__NICE"),
        "min_minutes": (3, str(system)),
        "max_nodes": (16, f"{user}, cut by [site] max_nodes"),
        "max_minutes": (60, "default, cut by [site] max_minutes"),
        "qos": (None, "default"),
        "partitions": (["a", "b"], "FALLOW_HARVEST__PARTITIONS"),
    }
    assert found["site"]["max_nodes"] == {"value": 16, "origin": str(system)}
    assert list(fallow("config", "show", "harvest", "--json").json) == ["harvest"]


def test_people_read_toml_with_the_files_that_were_looked_for(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fallow: Fallow
) -> None:
    system, user = files
    user.write_text(
        '[usage]\nnode_hour = {"*" = 0.5}\ncurrency = "\\u202e\\u001b"\n[head]\nredis_url = "rediss://me:hunter2@redis"\n'
    )
    result = fallow("config", "show")
    assert result.code == Exit.OK
    assert result.out.startswith(f"# {system}: no such file\n# {user}: read\n\n[harvest]\n")
    shown = tomllib.loads(result.out)
    assert list(shown) == list(SECTIONS)
    assert (shown["usage"]["node_hour"], shown["harvest"]["nice"]) == ({"*": 0.5}, Config().harvest.nice)
    assert (shown["usage"]["currency"], "\u202e" in result.out, "\x1b" in result.out) == ("\u202e\x1b", False, False)
    assert "# qos is not set" in result.out
    assert shown["head"]["redis_url"] == "rediss://***@redis"
    assert "hunter2" not in result.out + fallow("config", "show", "--json").out


def test_a_wrong_configuration_and_a_wrong_section(files: tuple[Path, Path], fallow: Fallow) -> None:
    files[1].write_text("[harvst]\n")
    result = fallow("config", "show")
    assert (result.code, result.out) == (Exit.CONFIG, "")
    assert "did you mean harvest?" in result.err
    assert fallow("config", "show", "harvst").code == Exit.USAGE


def test_a_section_of_long_settings_only(files: tuple[Path, Path], fallow: Fallow) -> None:
    files[1].write_text(
        f"[usage]\nnode_hour = {{{'n' * 40} = 1}}\ngpu_hour = {{{'g' * 40} = 1}}\ncurrency = '{'c' * 40}'\n"
    )
    result = fallow("config", "show", "usage")
    assert (result.code, tomllib.loads(result.out)["usage"]["currency"]) == (Exit.OK, "c" * 40), result.err
