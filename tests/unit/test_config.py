"""Configuration: layers, types, and clear refusals."""

from pathlib import Path

import pytest

from fallow.config import Config, load_config, user_file
from fallow.model import Exit, FallowError


def load(tmp_path: Path, system: str = "", user: str = "", **environ: str) -> Config:
    (tmp_path / "system.toml").write_text(system)
    (tmp_path / "user.toml").write_text(user)
    return load_config({"FALLOW_CONFIG": str(tmp_path / "user.toml"), **environ}, tmp_path / "system.toml")


def test_where_the_users_file_is() -> None:
    assert user_file({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/fallow/config.toml")
    for environ in ({}, {"XDG_CONFIG_HOME": "relative"}):
        assert user_file({"HOME": "/h", **environ}) == Path("/h/.config/fallow/config.toml")


def test_environment_beats_user_beats_system(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "[harvest]\nmax_pending = 1\nmax_minutes = 1\nnice = 1\n[slurm]\npoll_interval_s = 10\n",
        "[harvest]\nmax_pending = 2\nmax_minutes = 2\n",
        FALLOW_HARVEST__MAX_PENDING="3",
    )
    assert (config.harvest.max_pending, config.harvest.max_minutes, config.harvest.nice) == (3, 2, 1)
    assert config.slurm.poll_interval_s == 10


def test_values_from_the_environment(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        '[harvest]\nmax_nodes = 4\n[usage.node_hour]\ngpu = 3\n"*" = 0.5\n',
        FALLOW_USAGE__GPU_HOUR="gpu=0.7",
        FALLOW_HARVEST__PARTITIONS="a, b",
        FALLOW_HARVEST__MAX_NODES="",
        FALLOW_HARVEST__QOS="idle",
        FALLOW_HARVEST__ACCOUNT="",
        FALLOW_HARVEST__ALLOW_WITHOUT_PREEMPTION="true",
        FALLOW_MEMBERSHIP__BEAT_S="0.25",
        FALLOW_HEAD__REDIS_URL="rediss://h",
        FALLOW_STATE_DIR="/not/a/section",
    )
    assert load(tmp_path) == Config()
    assert config.harvest.partitions == ["a", "b"]
    assert config.harvest.max_nodes is None
    assert config.harvest.allow_without_preemption
    assert (config.harvest.qos, config.harvest.account) == ("idle", None)
    assert config.membership.beat_s == 0.25
    assert config.head.redis_url == "rediss://h"
    assert (config.usage.node_hour, config.usage.gpu_hour) == ({"gpu": 3.0, "*": 0.5}, {"gpu": 0.7})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("[harvst]\n", r"user.toml: \[harvst\] is not known; did you mean harvest\?"),
        ("[harvest]\nmax_node = 1\n", r"user.toml: \[harvest\] max_node is not known; did you mean max_nodes\?"),
        ("[harvest]\nnice = 'x'\n", r"user.toml: \[harvest\] expected `int`, got `str` at `nice`"),
        ("[harvest]\nmax_pending = 0\n", r"\[harvest\] expected `int` >= 1 at `max_pending`"),
        ("[harvest]\nqos = '--wrap=x'\n", r"\[harvest\] expected `str` matching regex .* at `qos`"),
        ("[harvest]\naccount = 'a b'\n", r"\[harvest\] expected `str` matching regex .* at `account`"),
        ("[checkpoint]\npath = '~/x'\n", r"\[checkpoint\] expected `str` that begins with / at `path`"),
        ("[slurm]\npoll_interval_s = inf\n", r"\[slurm\] poll_interval_s must be finite"),
        ("[usage]\ngpu_hour = {gpu = inf}\n", r"\[usage\] gpu_hour must be finite"),
        ("[usage]\ngpu_hour = {gpu = -1}\n", r"\[usage\] expected `float` >= 0"),
        ("harvest = 3\n", "must be a section"),
        ("[harvest\n", "not valid TOML"),
        ("[membership]\nlease_s = 1\n", "less than three beats"),
        ("[checkpoint]\npath = 'scratch'\n", "at `path`"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    with pytest.raises(FallowError, match=message) as caught:
        load(tmp_path, user=text or "", **({"FALLOW_CONFIG": str(tmp_path / "gone.toml")} if text is None else {}))
    assert caught.value.code is Exit.CONFIG
    with pytest.raises(FallowError, match=r"FALLOW_HARVEST__NIZE: .*did you mean nice"):
        load(tmp_path, FALLOW_HARVEST__NIZE="1")


SITE_MAXIMA = """
[site]
max_nodes = 16
partition_nodes = {gpu = 4, cpu = 8}
max_pending = 8
max_minutes = 60
queries_per_min = 30
submits_per_min = 10
"""


def test_nobody_gets_more_than_the_sites_maxima_and_is_told(tmp_path: Path) -> None:
    untouched = load(tmp_path, SITE_MAXIMA)
    assert untouched.cut == (), "defaults are nobody's wish"
    for config in (
        untouched,
        load(
            tmp_path,
            SITE_MAXIMA,
            "[harvest]\nmax_nodes = 64\nmax_pending = 9\nmax_minutes = 61\npartition_nodes = {gpu = 5}\n"
            "[slurm]\nqueries_per_min = 31\nsubmits_per_min = 600\n",
        ),
        load(tmp_path, SITE_MAXIMA + "[harvest]\nmax_nodes = 16\n", FALLOW_HARVEST__MAX_NODES=""),
    ):
        harvest, slurm = config.harvest, config.slurm
        assert (harvest.max_nodes, harvest.max_pending, harvest.max_minutes) == (16, 8, 60)
        assert harvest.partition_nodes == {"gpu": 4, "cpu": 8}
        assert (slurm.queries_per_min, slurm.submits_per_min) == (30, 10)
    told = load(tmp_path, SITE_MAXIMA, "[harvest]\nmax_nodes = 64\npartition_nodes = {gpu = 5, fat = 2}\n").cut
    file = tmp_path / "system.toml"
    assert told == (
        f"[harvest] max_nodes = 64 is cut to 16, by [site] max_nodes in {file}",
        f"[harvest] partition_nodes.gpu = 5 is cut to 4, by [site] partition_nodes.gpu in {file}",
    )
    less = load(tmp_path, SITE_MAXIMA, "[harvest]\nmax_nodes = 0\npartition_nodes = {gpu = 1}\n")
    assert (less.harvest.max_nodes, less.harvest.partition_nodes["gpu"], less.cut) == (0, 1, ())
    with pytest.raises(FallowError, match=r"cut.* is not known"):
        load(tmp_path, user="cut = ['x']\n")


def test_what_the_administrators_allow_is_theirs_alone(tmp_path: Path) -> None:
    assert load(tmp_path, "[site]\nharvest_unseen = true\n").site.harvest_unseen
    assert not load(tmp_path).site.harvest_unseen
    with pytest.raises(FallowError, match=r"user.toml: \[site\] is the administrators'; it counts in .*system.toml"):
        load(tmp_path, user="[site]\nharvest_unseen = true\n")
    with pytest.raises(FallowError, match=r"\[site\] is the administrators'"):
        load(tmp_path, FALLOW_SITE__HARVEST_UNFAIR="true")
    with pytest.raises(FallowError, match="at `stop_file`"):
        load(tmp_path, "[site]\nstop_file = 'stop'\n")


def test_an_empty_variable_names_no_file(tmp_path: Path) -> None:
    environ = {"FALLOW_CONFIG": "", "XDG_CONFIG_HOME": str(tmp_path)}
    assert load_config(environ, tmp_path / "system.toml") == Config()


def test_a_file_that_was_named_must_exist_also_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FallowError, match=r"file/config\.toml: no such file"):
        load(tmp_path, FALLOW_CONFIG=str(tmp_path / "file" / "config.toml"))
    assert load_config({"XDG_CONFIG_HOME": str(tmp_path / "file")}, tmp_path / "system.toml") == Config()
