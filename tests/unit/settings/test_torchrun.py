"""torchrun's command line, as `elastic torchrun` takes it."""

from __future__ import annotations

import argparse
import os

import pytest
from torch.distributed.run import get_args_parser

from elastic.settings.torchrun import TABLE, Answer, Row, belongs_to_torchrun, options_of, parse

ROWS = {row.name: row for row in TABLE}
RUN = ["--nproc-per-node", "2", "train.py"]


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> dict[str, argparse.Action]:
    """The options of the installed torch, by name."""
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    actions = get_args_parser()._actions
    return {a.dest: a for a in actions if a.option_strings and a.dest != "help"}


def test_the_table_has_each_option_of_torch(torchs: dict[str, argparse.Action]) -> None:
    assert ROWS.keys() == torchs.keys()


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_an_option_is_that_of_torch(row: Row, torchs: dict[str, argparse.Action]) -> None:
    theirs = torchs[row.name]
    assert set(row.spellings) == set(theirs.option_strings)
    assert row.default == theirs.default
    assert (0 if row.switch else None) == theirs.nargs
    assert row.choices == (tuple(theirs.choices) if theirs.choices else None)
    assert row.in_environment == (type(theirs).__name__ in ("env", "check_env"))
    if not row.switch and theirs.type in (int, float, str):
        assert row.kind is theirs.type


def test_an_option_is_found_by_each_of_its_spellings() -> None:
    """Prefixes are argparse's: with two spellings of one option, older Pythons ask for more."""
    for words in (["--role", "a"], ["--role=a"], ["--rol", "a"], ["--ro=a"]):
        assert parse([*words, *RUN], {}).role == "a"
    for words in (["-m"], ["--module"], ["--modul"]):
        assert parse([*words, *RUN], {}).module
    for words in (["-r", "1"], ["-r1"], ["--redirects=1"], ["--redir", "1"]):
        assert parse([*words, *RUN], {}).redirects == 1
    for words in (["--max-restarts", "4"], ["--max_restarts=4"]):
        assert parse([*words, *RUN], {}).max_restarts == 4


def test_an_option_wins_over_its_variable() -> None:
    environment = {"PET_MAX_RESTARTS": "3", "PET_MODULE": "1", "PET_NO_PYTHON": "0"}
    assert parse(RUN, environment).max_restarts == 3
    assert parse(RUN, environment).module
    assert parse(["--max-restarts", "1", *RUN], environment).max_restarts == 1


def test_what_follows_the_script_belongs_to_it() -> None:
    options = parse(["train.py", "--nproc-per-node", "7", "--", "-m"], {})
    assert options.args == ("--nproc-per-node", "7", "--", "-m")
    assert (options.nproc_per_node, options.module) == ("1", False)


def test_the_defaults_are_those_of_torchrun_for_one_node() -> None:
    options = parse(["train.py"], {})
    assert (options.max_restarts, options.shutdown_timeout_s) == (0, 30)
    assert options.signals == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    assert (options.redirects, options.tee, options.shown) == (0, 0, frozenset())
    assert len(options.run_id) == 36
    assert options.notes == ()


def test_what_has_no_effect_is_told_once_each() -> None:
    given = ["--monitor-interval", "5", "--start-method", "fork", "--event-log-handler", "console"]
    given += ["--rdzv-conf", "timeout=3", "--signals-to-handle", "SIGTERM,SIGKILL,SIGNONE"]
    given += ["--duplicate-stdout-filters", "a", "--master-addr", "n1", "--rdzv-id", "x"]
    environment = {"TORCHELASTIC_HEALTH_CHECK_PORT": "80"}
    told = [
        note.partition(" has no effect")[0] for note in parse([*given, *RUN], environment).notes
    ]
    assert told == [
        "--monitor-interval 5.0",
        "--start-method fork",
        "--event-log-handler console",
        "TORCHELASTIC_HEALTH_CHECK_PORT",
        "--rdzv-conf timeout=3",
        "--master-addr n1",
        "--rdzv-id",
        "--signals-to-handle SIGKILL",
        "--signals-to-handle SIGNONE",
        "--duplicate-stdout-filters",
    ]


def test_each_option_without_effect_is_told_when_it_is_given() -> None:
    values = {"start_method": "fork", "monitor_interval": "9"}
    for row in TABLE:
        if row.answer is Answer.NO_EFFECT:
            value = values.get(row.name, "something")
            (note,) = parse([row.long, value, *RUN], {}).notes
            assert note.startswith(f"{row.long} "), row


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        (["--nnodes", "x"], {}, "expected N or MIN:MAX"),
        (["--nnodes", "3:2"], {}, "expected N or MIN:MAX"),
        (["--nnodes", "2", "--standalone"], {}, "leave one of them out"),
        (["--nnodes", "2", "--node-rank", "2"], {}, "the ranks 0 to 1"),
        (["--nnodes", "2", "--master-port", "0"], {}, "from 1 to 65535"),
        (["--nnodes", "2", "--rdzv-endpoint", "n1"], {}, "HOST:PORT"),
        (["--nnodes", "2", "--rdzv-backend", "c10d"], {}, "HOST:PORT"),
        (["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "n1:0"], {}, "port from 1"),
        (["--nnodes", "2", "--rdzv-backend", "etcd-v2"], {}, "c10d with --rdzv-endpoint"),
        (["--nnodes", "2", "--rdzv-backend", "zookeeper"], {}, "use c10d or static"),
        (["--nnodes", "2", "--rdzv-conf", "timeout"], {}, "NAME=VALUE"),
        (["--nnodes", "2", "--rdzv-conf", "timeout=soon"], {}, "number of seconds"),
        (
            [*["--nnodes", "2", "--rdzv-backend", "c10d"], "--rdzv-conf", "is_host=maybe"],
            {},
            "true or false",
        ),
        (["--node-rank", "1"], {}, "only rank 0"),
        (["--nproc-per-node", "xpu"], {}, "gpu, cpu or auto"),
        (["--nproc-per-node", "0"], {}, "at least 1"),
        (["--max-restarts", "-1"], {}, "0 or more"),
        (["--max-restarts", "many"], {}, "invalid int"),
        (["-m", "--no-python"], {}, "cannot be used together"),
        (["-r", "4"], {}, "0 to 3"),
        (["-t", "0:5"], {}, "0 to 3"),
        (["--local-ranks-filter", "a"], {}, "local ranks"),
        (["--rdzv-backend", "zookeeper"], {}, "leave it out"),
        (["--rdzv-endpoint", "host"], {}, "HOST:PORT"),
        (["--master-port", "70000"], {}, "a port"),
        (["--shutdown-timeout", "-1"], {}, "at least 0"),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, "at least 0"),
        (["--logs-specs", "mine"], {}, "--log-dir"),
        (["--numa-binding", "node"], {}, "numactl"),
        (["--start-method", "thread"], {}, "invalid choice"),
        ([], {"PET_STANDALONE": "yes"}, "0 or 1"),
        ([], {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}, "unset it"),
        (["--unknown"], {}, "unrecognized"),
    ],
)
def test_what_is_refused_is_a_usage_error_that_says_what_to_do(
    words: list[str], environment: dict[str, str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse([*words, "train.py"], environment)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meets", "run_id"),
    [
        (["--master-port", "29501"], ("127.0.0.1", 29501), "none"),
        (["--master-addr=n1", "--master-port=1", "--rdzv-id=x"], ("n1", 1), "x"),
        (["--rdzv-endpoint", "n1:77"], ("n1", 77), "none"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=n1:77", "--rdzv-id=x"], ("", None), "x"),
        (["--rdzv-backend=c10d", "--local-addr=n2"], ("n2", None), "none"),
    ],
)
def test_the_scripts_meet_where_torchrun_says(
    words: list[str], meets: tuple[str, int | None], run_id: str
) -> None:
    options = parse([*words, *RUN], {})
    assert (options.master_addr, options.master_port) == meets
    assert options.run_id == run_id


def test_standalone_ignores_the_other_rendezvous_options() -> None:
    given = ["--standalone", "--rdzv-id", "x", "--rdzv-backend", "etcd", "--master-port", "5"]
    options = parse([*given, *RUN], {})
    assert (options.master_port, len(options.run_id)) == (None, 36)
    assert len(options.notes) == 3


def test_other_commands_say_what_elastic_has_for_an_option_of_torchrun() -> None:
    for row in TABLE:
        for flag in row.spellings:
            assert "elastic torchrun" in str(belongs_to_torchrun(flag))
    assert "--console all" in str(belongs_to_torchrun("-t"))
    assert belongs_to_torchrun("--none") is None


def test_several_nodes_with_c10d_meet_at_the_endpoint() -> None:
    given = ["--nnodes=2:3", "--rdzv-backend=c10d", "--rdzv-endpoint=n1", "--rdzv-id=j"]
    conf = "join_timeout=9,last_call_timeout=2,is_host=n,heartbeat_timeout=3"
    options = parse([*given, "--rdzv-conf", conf, "--local-addr=10.0.0.2", *RUN], {})
    meets = options.rendezvous
    assert meets is not None
    assert (meets.least, meets.most, meets.host, meets.port) == (2, 3, "n1", 29400)
    assert (meets.node_rank, meets.is_host, meets.local_addr) == (None, False, "10.0.0.2")
    assert (meets.join_timeout_s, meets.last_call_s) == (9, 2)
    assert (options.master_addr, options.master_port, options.run_id) == ("", None, "j")
    assert options.notes == ("--rdzv-conf heartbeat_timeout has no effect with c10d",)


@pytest.mark.parametrize(
    ("words", "master", "port"),
    [
        ([], ("127.0.0.1", 29500), 30500),
        (["--master-addr=n1", "--master-port=40000"], ("n1", 40000), 41000),
        (["--rdzv-endpoint=n1:65000"], ("n1", 65000), 64000),
        (["--rdzv-endpoint=[fd00::1]:70"], ("fd00::1", 70), 1070),
    ],
)
def test_several_nodes_with_static_ranks_meet_at_a_port_that_all_derive(
    words: list[str], master: tuple[str, int], port: int
) -> None:
    for rank in (0, 1):
        options = parse(["--nnodes=2", f"--node-rank={rank}", *words, *RUN], {})
        meets = options.rendezvous
        assert meets is not None
        assert (options.master_addr, options.master_port) == master
        assert (meets.host, meets.port) == (master[0], port)
        assert (meets.node_rank, meets.is_host) == (rank, rank == 0)
        assert meets.join_timeout_s == 600


def test_static_ranks_need_the_most_nodes_as_in_torchrun() -> None:
    options = parse(["--nnodes=1:3", *RUN], {})
    assert options.rendezvous is not None
    assert (options.rendezvous.least, options.rendezvous.most) == (3, 3)
    assert "means 3" in options.notes[0]


def test_what_all_nodes_must_have_alike_is_known_whatever_the_node() -> None:
    same = {
        parse([*words, "--nnodes=2", "--max-restarts=1", *RUN], {}).rendezvous.same  # type: ignore[union-attr]
        for words in (["--node-rank=0"], ["--node-rank=1", "--rdzv-conf=timeout=5"])
    }
    assert same == {"--nnodes 2 --max-restarts 1 --rdzv-backend static --rdzv-id none"}


def test_what_a_program_fills_in_counts_as_if_it_were_given() -> None:
    """Ports as text and numbers as numbers, as `accelerate launch` leaves them."""
    given = get_args_parser().parse_args(["train.py", "--lr", "1"])
    given.nnodes, given.node_rank, given.nproc_per_node = 2, "1", 4
    given.master_addr, given.master_port, given.of_another = "n1", "29600", "program"
    given.tee = given.redirects = None
    options = options_of(given, {})
    meets = options.rendezvous
    assert meets is not None
    assert (meets.node_rank, meets.host, meets.port) == (1, "n1", 30600)
    assert (options.nproc_per_node, options.args, options.tee) == ("4", ("--lr", "1"), 0)
