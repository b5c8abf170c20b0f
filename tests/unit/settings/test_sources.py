"""The sources of a run's settings, which of them wins, and the errors for wrong values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from elastic.errors import ConfigurationError
from elastic.settings.fields import options_of
from elastic.settings.limits import NodeRange
from elastic.settings.run import OutputMode, RunSettings
from elastic.settings.shared import Console
from elastic.settings.sources import DeviceCounts, load_settings


def load(
    command_line: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    config_file: Path | None = None,
    devices: DeviceCounts | None = None,
) -> RunSettings:
    def device_counts() -> DeviceCounts:
        assert devices is not None, "devices were counted without need"
        return devices

    return load_settings(
        RunSettings, command_line or {}, environment or {}, config_file, device_counts
    )


def problems(*sources: object) -> list[str]:
    with pytest.raises(ConfigurationError) as raised:
        load(*sources)  # type: ignore[arg-type]
    return str(raised.value).splitlines()


def problem(*sources: object) -> str:
    (line,) = problems(*sources)
    return line


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    return tmp_path / "elastic.toml"


# Precedence


def test_settings_that_no_source_gives_are_the_defaults() -> None:
    assert load() == RunSettings()


def test_command_line_wins_over_environment_over_file_over_default(toml: Path) -> None:
    toml.write_text("[run]\nspares = 11\nmax-restarts = 12\nseed = 13\n")
    environment = {"ELASTIC_SPARES": "21", "ELASTIC_MAX_RESTARTS": "22"}
    settings = load({"spares": 31}, environment, toml)
    assert (settings.spares, settings.max_restarts, settings.seed) == (31, 22, 13)
    assert settings.keep_checkpoints == RunSettings().keep_checkpoints


def test_none_on_the_command_line_counts_as_not_given() -> None:
    assert load({"spares": None}, {"ELASTIC_SPARES": "4"}).spares == 4


def test_the_environment_can_name_the_file(toml: Path, tmp_path: Path) -> None:
    toml.write_text("[run]\nspares = 3\n")
    other = tmp_path / "other.toml"
    other.write_text("[run]\nspares = 5\n")
    assert load(None, {"ELASTIC_CONFIG": str(toml)}).spares == 3
    assert load(None, {"ELASTIC_CONFIG": str(toml)}, other).spares == 5


def test_a_value_that_another_source_overrides_is_not_checked() -> None:
    assert load({"spares": 2}, {"ELASTIC_SPARES": "many"}).spares == 2


def test_the_environment_of_this_process_does_not_leak_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options_of(RunSettings):
        monkeypatch.setenv(option.variable, "7")
    monkeypatch.setenv("ELASTIC_CONFIG", "/nowhere")
    monkeypatch.setenv("ELASTIC_TYPO", "7")
    assert load() == RunSettings()


def test_variables_of_other_programs_are_no_settings() -> None:
    assert load(None, {"ELASTIC_WORKER_SOCKET": "/run/s", "PATH": "/bin"}) == RunSettings()


# Values


def test_settings_of_every_type_are_read_from_text() -> None:
    settings = load(
        None,
        {
            "ELASTIC_NPROC_PER_NODE": "2",
            "ELASTIC_NNODES": "1:4",
            "ELASTIC_HANG_FACTOR": "2.5",
            "ELASTIC_CHECKPOINT_DIR": "s3://bucket/run",
            "ELASTIC_LEDGER": "ledger.jsonl",
            "ELASTIC_CONSOLE": "all",
            "ELASTIC_OUTPUT": "json",
            "ELASTIC_LISTEN": "[::1]:29400",
        },
    )
    assert settings == RunSettings(
        nproc_per_node=2,
        nnodes=NodeRange(1, 4),
        hang_factor=2.5,
        checkpoint_dir="s3://bucket/run",
        ledger=Path("ledger.jsonl"),
        console=Console.ALL,
        output=OutputMode.JSON,
        listen="[::1]:29400",
    )


def test_values_of_their_type_pass_unchanged(tmp_path: Path) -> None:
    settings = load({"log_dir": tmp_path, "console": Console.NONE, "stop_grace_s": 1})
    assert (settings.log_dir, settings.console) == (tmp_path, Console.NONE)
    assert isinstance(settings.stop_grace_s, float)


def test_checkpoint_every_without_a_directory_is_fine() -> None:
    assert load({"checkpoint_every": 5}).checkpoint_dir is None


@pytest.mark.parametrize(("text", "nodes"), [("1:4", (1, 4)), ("3", (3, 3)), (2, (2, 2))])
def test_nnodes_is_read_as_torchrun_writes_it(text: object, nodes: tuple[int, int]) -> None:
    settings = load({"nnodes": text})
    assert settings.nnodes == nodes


@pytest.mark.parametrize(
    ("word", "gpu", "cpu", "count"),
    [("auto", 8, 64, 8), ("auto", 0, 64, 64), ("gpu", 8, 64, 8), ("cpu", 8, 64, 64)],
)
def test_processes_are_counted_as_torchrun_does(word: str, gpu: int, cpu: int, count: int) -> None:
    settings = load({"nproc_per_node": word}, devices=DeviceCounts(gpu, cpu))
    assert settings.nproc_per_node == count


def test_asking_for_gpus_without_any_is_refused() -> None:
    line = problem({"nproc_per_node": "gpu"}, None, None, DeviceCounts(gpu=0, cpu=4))
    assert line.startswith("--nproc-per-node (command line): 'gpu' finds no such device")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nproc_per_node", "0"),
        ("nproc_per_node", "tpu"),
        ("nnodes", "4:1"),
        ("nnodes", "0:1"),
        ("nnodes", "1:"),
        ("nnodes", "-1"),
        ("nnodes", "1:2:3"),
        ("nnodes", "1" * 5000),
        ("min_workers", "0"),
        ("spares", "-1"),
        ("max_restarts", "many"),
        ("max_restarts", "1.5"),
        ("max_restarts", "-1"),
        ("restart_window_s", "0"),
        ("restart_window_s", "nan"),
        ("checkpoint_dir", ""),
        ("checkpoint_every", "-1"),
        ("keep_checkpoints", "0"),
        ("ledger", ""),
        ("log_dir", ""),
        ("console", "rank1"),
        ("output", "yaml"),
        ("listen", "29400"),
        ("listen", "host:"),
        ("listen", "host:65536"),
        ("listen", "::1:29400"),
        ("listen", "http://host:1"),
        ("job", "Job"),
        ("job", "-job"),
        ("job", "job-"),
        ("job", "job\n"),
        ("job", "j" * 201),
        ("seed", "-1"),
        ("start_timeout_s", "0"),
        ("join_timeout_s", "-1"),
        ("join_timeout_s", "inf"),
        ("gather_timeout_s", "-1"),
        ("keep_logs", "0"),
        ("keep_logs", "0GB"),
        ("keep_logs", "-1"),
        ("keep_logs", "1.5"),
        ("keep_logs", "5,6"),
        ("keep_logs", "1GB,2GB"),
        ("keep_logs", "5 GBit"),
        ("keep_logs", "many"),
        ("keep_logs", "10,"),
        ("hang_timeout_s", "-0.5"),
        ("silence_timeout_s", "-1"),
        ("first_step_timeout_s", "-1"),
        ("hang_factor", "0.5"),
        ("hang_factor", "inf"),
        ("stop_grace_s", "soon"),
    ],
)
def test_a_bad_value_names_setting_source_value_and_what_is_allowed(name: str, value: str) -> None:
    variable = "ELASTIC_" + name.upper()
    line = problem(None, {variable: value})
    assert line.startswith(f"{variable} (environment): {repr(value)[:300]}")
    assert " is not allowed; expected " in line
    flag = "--" + name.replace("_", "-")
    line = problem({name: value})
    assert line.startswith(f"{flag} (command line): {repr(value)[:300]}")
    assert " is not allowed; expected " in line


def test_toml_truth_values_are_not_numbers(toml: Path) -> None:
    toml.write_text("[run]\nkeep-checkpoints = true\n")
    assert problem(None, None, toml) == (
        f"keep-checkpoints ({toml}, [run]): True is not allowed; "
        "expected a whole number, at least 1, at most 2147483647"
    )


def test_every_problem_has_its_line(toml: Path) -> None:
    toml.write_text("[run]\nsparse = 1\nseed = -1\n")
    lines = problems({"console": "nobody"}, {"ELASTIC_JOB": "J", "ELASTIC_NODES": "2"}, toml)
    assert [line.split(" ")[0] for line in lines] == [
        "sparse",
        "ELASTIC_NODES",
        "seed",
        "ELASTIC_JOB",
        "--console",
    ]


# Names


@pytest.mark.parametrize("key", ["checkpoint-dir", "checkpoint_dir"])
def test_file_keys_may_have_hyphens_or_underscores(toml: Path, key: str) -> None:
    toml.write_text(f'[run]\n{key} = "/c"\n')
    assert load(None, None, toml).checkpoint_dir == "/c"


def test_both_spellings_of_one_key_in_a_file_are_refused(toml: Path) -> None:
    toml.write_text("[run]\nmax-restarts = 1\nmax_restarts = 2\n")
    assert "given twice, also as max-restarts" in problem(None, None, toml)


def test_the_error_for_a_misspelt_key_suggests_the_nearest(toml: Path) -> None:
    toml.write_text("[run]\nmax_restart = 1\n")
    assert problem(None, None, toml) == (
        f"max_restart ({toml}, [run]): unknown setting; did you mean max-restarts?"
    )


def test_the_error_for_a_misspelt_variable_suggests_the_nearest() -> None:
    assert problem(None, {"ELASTIC_CHECKPOINT_DIRECTORY": "/c"}) == (
        "ELASTIC_CHECKPOINT_DIRECTORY (environment): unknown setting; "
        "did you mean ELASTIC_CHECKPOINT_DIR?"
    )
    assert problem(None, {"ELASTIC_CONFIGS": "x"}).endswith("did you mean ELASTIC_CONFIG?")


def test_a_variable_of_another_program_is_ignored() -> None:
    """Kubernetes and other programs set ELASTIC_ variables too."""
    load(None, {"ELASTIC_PASSWORD": "hunter2", "ELASTIC_SERVICE_HOST": "10.0.0.1"})


@pytest.mark.parametrize(
    "variable",
    [
        "ELASTIC_USER",
        "ELASTIC_USERNAME",
        "ELASTIC_HOST",
        "ELASTIC_URL",
        "ELASTIC_API_KEY",
        "ELASTIC_COORDINATOR_SERVICE_HOST",
        "ELASTIC_COORDINATOR_PORT",
        "ELASTIC_COORDINATOR_PORT_29400_TCP_ADDR",
        "ELASTIC_SERVICE_PORT_GRPC",
        "ELASTIC_JOBS_SERVICE_HOST",
        "ELASTIC_PORT",
        "ELASTIC_WORKER_SPARES",
    ],
)
def test_names_that_other_programs_use_are_not_taken_for_misspelt(variable: str) -> None:
    """Elasticsearch's clients, Kubernetes and other software with workers use these names."""
    assert load(None, {variable: "hunter2"}) == RunSettings()


def test_the_value_of_a_misspelt_variable_is_not_shown() -> None:
    assert "hunter2" not in problem(None, {"ELASTIC_CHECKPOINT_DIRS": "hunter2"})


def test_the_error_for_a_key_outside_of_the_table_names_the_table(toml: Path) -> None:
    toml.write_text("max-restarts = 1\n[runs]\n")
    misplaced, misspelt = problems(None, None, toml)
    assert misplaced == f"max-restarts ({toml}): is outside any table; move it below [run]"
    assert misspelt.endswith("did you mean run?")


def test_an_unknown_name_from_the_command_line_is_a_programming_error() -> None:
    with pytest.raises(AssertionError):
        load({"max-restarts": 1})


# The file


def test_a_syntax_error_names_file_and_line(toml: Path) -> None:
    toml.write_text("[run]\n\nspares = = 1\n")
    assert problem(None, None, toml).startswith(f"{toml}, line 3: not valid TOML: ")
    toml.write_text('[run]\njob = """\n\n')
    assert problem(None, None, toml).startswith(f"{toml}, line 3: not valid TOML: ")


def test_run_must_be_a_table(toml: Path) -> None:
    toml.write_text("run = 3\n")
    assert problem(None, None, toml) == f"run ({toml}): 3 is not allowed; expected a table"


def test_the_error_for_an_unreadable_file_names_the_setting_that_gave_it(toml: Path) -> None:
    assert problem(None, None, toml) == (
        f"--config (command line): cannot read '{toml}': No such file or directory"
    )
    toml.write_bytes(b"\xff\xfe")
    assert problem(None, {"ELASTIC_CONFIG": str(toml)}).startswith(
        f"ELASTIC_CONFIG (environment): cannot read '{toml}': "
    )


# Relations


def test_more_min_workers_than_there_can_be_are_refused() -> None:
    assert problem({"min_workers": 5, "nproc_per_node": 3}) == (
        "--min-workers 5 can never be reached: --nproc-per-node 3 x --nnodes 1:1 gives at most "
        "3 workers; lower --min-workers or raise --nproc-per-node or --nnodes"
    )


def test_the_error_of_a_relation_uses_the_spelling_of_each_source(toml: Path) -> None:
    toml.write_text("[run]\nmin-workers = 9\n")
    line = problem({"nnodes": "1:2"}, {"ELASTIC_NPROC_PER_NODE": "4"}, toml)
    assert line == (
        f"min-workers ({toml}, [run]) 9 can never be reached: ELASTIC_NPROC_PER_NODE 4 x "
        "--nnodes 1:2 gives at most 8 workers; "
        "lower min-workers or raise ELASTIC_NPROC_PER_NODE or --nnodes"
    )


def test_as_many_min_workers_as_there_can_be_are_accepted() -> None:
    assert load({"min_workers": 6, "nproc_per_node": 3, "nnodes": "1:2"}).min_world_size == 6


def test_relations_of_a_bad_value_are_not_checked() -> None:
    assert problem({"min_workers": 5, "nproc_per_node": "x"}).startswith("--nproc-per-node")


def test_a_file_of_something_else_gets_a_short_answer(toml: Path) -> None:
    toml.write_text("".join(f"key{n} = 1\n" for n in range(2000)))
    told = problems(None, None, toml)
    assert len(told) == 21
    assert "1980" in told[-1]


def test_a_long_value_is_not_repeated_whole(toml: Path) -> None:
    toml.write_text(f'spares = "{"x" * 100_000}"\n')
    assert len(problem(None, None, toml)) < 1000
