"""The `elastic` command: parses options, runs the command, and turns errors into exit codes.

Options are made from the settings, so that help, defaults and names have one source.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import io
import os
import re
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Optional, TypeVar

import typer
from typer.core import TyperCommand

from elastic.core.legible import printable
from elastic.errors import ConfigurationError, ElasticError, ExitCode
from elastic.rpc.identity import JobRole
from elastic.runtime.devices import hidden_gpus, usable_cpus, visible_gpus
from elastic.runtime.output import never_blocking
from elastic.settings.commands import belongs_elsewhere, every_option
from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.doctor import DoctorSettings, MachineSettings
from elastic.settings.fields import Option, options_of
from elastic.settings.node import NodeSettings
from elastic.settings.operator import DirectSettings, LocalSettings, OperatorSettings
from elastic.settings.run import RunSettings
from elastic.settings.sources import DeviceCounts, is_given, load_settings, script_of
from elastic.settings.torchrun import belongs_to_torchrun
from elastic.version import __version__

F = TypeVar("F", bound=Callable[..., Any])

_HELP_COLUMNS = 100  # at most; fewer on a narrower terminal
_FLAG_COLUMNS = 34  # longer flags have their own line
_NAMED = inspect.Parameter.KEYWORD_ONLY


def with_options(settings: type) -> Callable[[F], F]:
    """Replace `**options` in the signature by one option per setting of the class.

    An option's value is its text, or a bool for --flag/--no-flag; None: not given. `load_settings`
    checks it together with the other sources. Secrets have no option, and positional settings have
    parameters of their own.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        fixed = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        made = [_parameter(option) for option in options_of(settings) if _is_option(option)]
        parameters = [*fixed, *made]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__annotations__.update({p.name: p.annotation for p in made})
        return function

    return decorate


class SettingsCommand(TyperCommand):
    """A command whose help has a section for each group of settings, and whose error for a setting
    that it lacks names the command that has it.

    Use it as `app.command(cls=SettingsCommand)`.
    """

    def __init__(self, *given: Any, context_settings: Any = None, **named: Any) -> None:
        """Options may be written with underscores, as torchrun's are."""
        settings = {"token_normalize_func": lambda token: token.replace("_", "-")}
        super().__init__(*given, context_settings=settings | (context_settings or {}), **named)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Two columns: typer's own tables leave a quarter of a terminal's width to the texts."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            is_option = parameter.param_type_name == "option"
            section = getattr(parameter, "rich_help_panel", None)
            section = section or ("Options" if is_option else "Arguments")
            if record is not None:
                sections.setdefault(section, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl([_plain(*r) for r in records], col_max=_FLAG_COLUMNS)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as click does. Types and errors are click's, or those of typer's copy of click."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            flag = getattr(error, "option_name", None)
            unknown = hasattr(error, "possibilities")  # only click's NoSuchOption has it
            told = unknown and flag and _of_another_command(flag, f"`{ctx.command_path}`")
            if unknown and flag and not told and (meant := belongs_to_torchrun(flag)):
                told = f"{flag} {meant}"
            if not told:
                raise
            raise _UsageError(told, ctx) from None


def _plain(flags: str, text: str) -> tuple[str, str]:
    """Remove the parentheses that typer puts around a default given as text."""
    text = text.replace("[default: (required)]", "[required]")
    return flags, re.sub(r"\[default: \((.*)\)\]$", r"[default: \1]", text)


_UsageError: Any = typer.BadParameter.__mro__[1]


def _of_another_command(flag: str, command: str) -> str | None:
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    option = every_option().get(name)
    if option is not None and option.secret:
        return (
            f"there is no {flag}, since every process on this machine could read it; give "
            f"{flag}-file, or {option.variable} in the environment"
        )
    if option is not None and option.positional:
        return (
            f"there is no {flag}; give {option.positional} after the options, or "
            f"{option.variable} in the environment"
        )
    elsewhere = belongs_elsewhere(name, command)
    return elsewhere and f"{flag} {elsewhere}"


def _is_option(option: Option) -> bool:
    return not (option.secret or option.positional)


def _parameter(option: Option) -> inspect.Parameter:
    if option.is_switch:
        names = [f"{option.flag}/{option.flag.replace('--', '--no-')}"]
    else:
        names = [option.flag]
    if option.short:
        names.insert(0, option.short)
    default = option.shown_default if option.default is not None else False  # the help says it
    declared = typer.Option(
        *names,
        help=option.help,
        metavar=None if option.is_switch else option.name.upper(),
        show_default="required" if option.required else default,
        rich_help_panel=option.group or "Settings (also ELASTIC_* variables and --config)",
    )
    kind: Any = bool if option.is_switch else str
    return inspect.Parameter(
        option.name,
        _NAMED,
        default=None,
        annotation=Annotated[Optional[kind], declared],  # noqa: UP045 - read at run time by typer
    )


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"max_content_width": _HELP_COLUMNS},
    pretty_exceptions_enable=False,
    help="Keeps one data-parallel PyTorch job training while machines come and go.",
    epilog="Exit codes: 0 finished, 1 the script failed, 2 usage, 75 try again later, "
    "78 fix the configuration, 80 to 84 drained, in quarantine, stopped, refused, not saved, "
    "130 and 143 left after Ctrl-C and SIGTERM. docs/EVENTS.md says what to do about each.",
)


def _tell_version(asked: bool) -> None:  # typer passes it by position
    if asked:
        print(f"elastic {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option(
        "--version", help="Show the version and exit.", callback=_tell_version, is_eager=True
    ),
]


@app.callback()
def _main(*, version: _Version = False) -> None:
    del version  # its callback prints it


checkpoint_app = typer.Typer(no_args_is_help=True, help="List and verify checkpoints.")
app.add_typer(checkpoint_app, name="checkpoint")
certs_app = typer.Typer(no_args_is_help=True, help="Make certificates for jobs of many nodes.")
app.add_typer(certs_app, name="certs")


_Config = Annotated[
    Optional[Path],  # noqa: UP045 - read at run time by typer
    typer.Option(
        help="TOML file with a table of this command's name, and [job] for what commands share.",
        show_default="ELASTIC_CONFIG",
    ),
]
_OperatorConfig = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        help="TOML file with the tables [operator] and [job].", show_default="ELASTIC_CONFIG"
    ),
]


_Script = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        help="The training script; with -m a module.", show_default="ELASTIC_SCRIPT, or script"
    ),
]
_Arguments = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Argument(help="The script's own arguments.", show_default="ELASTIC_ARGS, or args"),
]


@app.command(cls=SettingsCommand, context_settings={"allow_interspersed_args": False})
@with_options(RunSettings)
def run(
    script: _Script = None, arguments: _Arguments = None, *, config: _Config = None, **options: Any
) -> None:
    """Train SCRIPT with several workers on this machine.

    When a worker is lost the others go on, and another one takes its place.

    The first Ctrl-C or SIGTERM saves a checkpoint at a step boundary and leaves; the second stops
    at once. A closed terminal has the effect of SIGTERM.
    """
    from elastic.cli.run import Command
    from elastic.cli.run import run as run_job

    with never_blocking(), _errors():
        given = options | _to_run(script, arguments)
        settings = load_settings(RunSettings, given, os.environ, config, _device_counts)
        _require_name("run", settings.script, options)
        raise typer.Exit(run_job(Command(settings=settings, argv=script_of(settings))))


class TorchrunCommand(TyperCommand):
    """Takes all arguments as they are: torchrun's have a parser of their own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.params = {"arguments": list(args)}
        return []


@app.command(cls=TorchrunCommand, add_help_option=False)
def torchrun(
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045 - read at run time by typer
        typer.Argument(metavar="[OPTIONS] SCRIPT [ARGUMENTS]", help="Those of torchrun."),
    ] = None,
) -> None:
    """Run a script written for torchrun, with torchrun's options.

    Output, logs and exit codes are torchrun's, too. `elastic torchrun --help` lists the options.
    """
    from elastic.cli.torchrun import torchrun as run_as_torchrun

    with never_blocking(), _errors():
        raise typer.Exit(run_as_torchrun(arguments or [], _device_counts))


@app.command(context_settings={"allow_interspersed_args": False})
def wrap(
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="COMMAND [ARGUMENTS]", help="Such as: accelerate launch train.py"),
    ] = None,
) -> None:
    """Run `accelerate launch` and the like with elastic as torchrun.

    The command must be a Python script that calls torch.distributed.run in its own process.
    """
    from elastic.cli.wrap import wrap as run_wrapped

    with _errors():
        run_wrapped(arguments or [], _device_counts)


@app.command(cls=SettingsCommand)
@with_options(CoordinatorSettings)
def coordinator(*, config: _Config = None, **options: Any) -> None:
    """Lead a job of many nodes, or stand by to lead it.

    The first Ctrl-C or SIGTERM makes way for another one; the job goes on.
    """
    from elastic.cli.coordinator import coordinate

    with never_blocking(), _errors():
        settings = load_settings(CoordinatorSettings, options, os.environ, config)
        raise typer.Exit(coordinate(settings))


@app.command(cls=SettingsCommand, context_settings={"allow_interspersed_args": False})
@with_options(NodeSettings)
def agent(
    script: _Script = None, arguments: _Arguments = None, *, config: _Config = None, **options: Any
) -> None:
    """Take part in a job of many nodes with this machine.

    Its workers run SCRIPT.

    The first Ctrl-C or SIGTERM makes this node leave at a step boundary; the second ends it at
    once. SIGRTMIN+1 ends only the agent: workers train on, and the next agent adopts them.
    """
    from elastic.cli.agent import NodeCommand, attend

    with never_blocking(), _errors():
        given = options | _to_run(script, arguments)
        settings = load_settings(NodeSettings, given, os.environ, config, _device_counts)
        _require_name("agent", settings.script, options)
        raise typer.Exit(attend(NodeCommand(settings=settings, argv=script_of(settings))))


_Address = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        help="HOST:PORT of the coordinator to ask, or unix:/PATH, without looking for it in etcd."
    ),
]
_Output = Annotated[str, typer.Option(help="table or json.")]


def _require_text(name: str, value: str) -> None:
    """Raise ConfigurationError for text that no message to the coordinator can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{name} {value!r} has bytes that are no UTF-8 text") from None


def _on_a_job(command: F) -> F:
    """Register a command on a running job. It declares its own arguments and options; the function
    of the same name in cli/operator.py runs it on the job that --address and the settings choose.
    """
    own = dict(inspect.signature(command, eval_str=True).parameters)

    @functools.wraps(command)
    def on_a_job(address: str | None, config: Path | None, **given: Any) -> None:
        from elastic.cli import operator

        wanted = {name: given.pop(name) for name in own}
        with _errors():
            for name, value in wanted.items():
                if isinstance(value, str):
                    _require_text(name, value)
            target = _target(address, config, given)
            raise typer.Exit(getattr(operator, command.__name__)(target, **wanted) or 0)

    address = inspect.Parameter("address", _NAMED, default=None, annotation=_Address)
    config = inspect.Parameter("config", _NAMED, default=None, annotation=_OperatorConfig)
    others = inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)
    ordered = sorted([*own.values(), address], key=lambda one: one.name == "output")
    on_a_job.__signature__ = inspect.Signature([*ordered, config, others])  # type: ignore[attr-defined]
    on_a_job.__annotations__.update(address=_Address, config=_OperatorConfig)
    app.command(cls=SettingsCommand)(with_options(OperatorSettings)(on_a_job))
    return command


@_on_a_job
def status(*, output: _Output = "table") -> None:
    """Show a running job: group, workers, progress, recoveries."""


@_on_a_job
def report(*, output: _Output = "table") -> None:
    """Show where the time of a job's slots went.

    It shows what was productive, and what the rest was lost to. docs/GUIDE.md explains the kinds.
    """


@_on_a_job
def nodes(
    *,
    clear: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Let this machine, or the one of this node, take part again."),
    ] = None,
    output: _Output = "table",
) -> None:
    """Show which nodes take part, leave or are kept out, and why."""


@_on_a_job
def stacks(
    of: Annotated[
        str,
        typer.Argument(
            metavar="[RANK|WORKER]", help="Show only this one.", show_default="all ranks"
        ),
    ] = "",
    *,
    output: _Output = "table",
) -> None:
    """Show where each rank of a job is, with its Python stacks.

    It shows the main threads of all ranks and who keeps the others waiting, or all threads of one
    rank. The job goes on.
    """


@_on_a_job
def incidents(*, output: _Output = "table") -> None:
    """Show the losses, hangs and failed saves of a job.

    Each is shown with its cost.
    """


@_on_a_job
def explain(
    incident: Annotated[
        Optional[int],  # noqa: UP045
        typer.Argument(
            metavar="[N]", help="Number of the incident.", min=1, show_default="the newest"
        ),
    ] = None,
    *,
    output: _Output = "table",
) -> None:
    """Show all that is known about an incident.

    It shows what failed, who noticed it, how long it took and what it cost. `elastic incidents`
    lists the numbers.
    """


@_on_a_job
def trace(
    file: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="The file to write; -: standard output.")
    ] = Path("trace.json"),
    *,
    steps: Annotated[
        int, typer.Option(help="Newest steps of each worker, at most this many.", min=1, max=1000)
    ] = 1000,
) -> None:
    """Write a job's last minutes as a trace, slot by slot.

    Open it at https://ui.perfetto.dev or chrome://tracing. It has steps, waits, recoveries by
    phase, what the coordinator decided, and arrows from a cause to its effects.
    """


@_on_a_job
def drain(
    node: Annotated[
        str, typer.Argument(help="Name of the node, or of its machine.", show_default=False)
    ],
    *,
    reason: Annotated[str, typer.Option(help="Reason, shown in events.")] = "",
    future: Annotated[
        bool, typer.Option("--future", help="Accept a node that is not known yet.")
    ] = False,
) -> None:
    """Make a node leave a job at a step boundary.

    It is kept out until it is cleared: `elastic nodes --clear`.
    """


@_on_a_job
def stop(
    *,
    reason: Annotated[
        str, typer.Option(help="Reason, shown in events.")
    ] = "stopped by an operator",
) -> None:
    """Save a job at a step boundary and end it.

    Its processes end with exit code 82.
    """


@_on_a_job
def events(
    *,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with new events.")] = False,
    output: _Output = "table",
) -> None:
    """Show what happened to a job: failures, groups, checkpoints."""


@app.command(cls=SettingsCommand)
@with_options(OperatorSettings)
def jobs(*, output: _Output = "table", config: _OperatorConfig = None, **options: Any) -> None:
    """Show the runs of --job, or of all jobs in etcd.

    It shows who leads them, or how they ended; without --etcd, the jobs of this machine.
    """
    from elastic.cli import operator

    with _errors():
        is_one = is_given("job", OperatorSettings, options, os.environ, config)
        if not is_given("etcd", OperatorSettings, options, os.environ, config):
            local = load_settings(
                LocalSettings, options, os.environ, config, part_of=OperatorSettings
            )
            if operator.local_jobs(only=local.job if is_one else None, output=output):
                return
        settings = load_settings(OperatorSettings, options, os.environ, config)
        operator.jobs(settings, only=settings.job if is_one else None, output=output)


@app.command(cls=SettingsCommand)
@with_options(OperatorSettings)
def forget(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="The run's --run-id.")] = "default",
    *,
    config: _OperatorConfig = None,
    **options: Any,
) -> None:
    """Remove all that etcd stores about a run of --job.

    The run can then be trained again. Checkpoints stay: the next training goes on from the newest
    one.
    """
    from elastic.cli import operator

    with _errors():
        settings = load_settings(OperatorSettings, options, os.environ, config)
        operator.forget(settings, run_id)


@app.command(cls=SettingsCommand)
@with_options(DoctorSettings)
def doctor(*, output: _Output = "table", config: _Config = None, **options: Any) -> None:
    """Check whether this node is fit for a job.

    It looks at versions, names, ports, clocks, etcd, disks, GPUs. Start it on all nodes at once,
    with --peers, to check the network, clocks and shared directories between them. docs/DOCTOR.md
    says what to do about each fault. Exit code 78: something must be fixed; 75: the fault may go
    away without a change.
    """
    from elastic.cli.doctor import doctor as examine

    with _errors():
        with_etcd = is_given("etcd", DoctorSettings, options, os.environ, config)
        settings = load_settings(
            DoctorSettings if with_etcd else MachineSettings,
            options,
            os.environ,
            config,
            _device_counts,
            part_of=DoctorSettings,
        )
        raise typer.Exit(examine(settings, output=output))


@app.command(name="files")
def carried_files(
    pattern: Annotated[
        Optional[str],  # noqa: UP045 - read at run time by typer
        typer.Argument(
            metavar="[FILE|FOLDER]", help="Only these; may contain * and ?.", show_default="all"
        ),
    ] = None,
    *,
    to: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="DIRECTORY", help="Copy them into this directory, and list them."),
    ] = None,
    output: _Output = "table",
) -> None:
    """List the files that come with elastic, or copy them.

    These are systemd units, the Helm chart, alert rules, protos and documents.
    """
    from elastic.cli import files

    with _errors():
        files.carried_files(pattern, to=to, output=output)


@app.command()
def new(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The script to write.")] = Path(
        "train.py"
    ),
) -> None:
    """Write a script to start from.

    It trains a small network, evaluates it, and goes on when a worker is lost.
    """
    from elastic.cli.new import write_script

    with _errors():
        write_script(file)


@app.command()
def export(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIRECTORY",
            help="Checkpoint directory: path or fsspec URL.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("model.safetensors"),
    step: Annotated[
        Optional[int],  # noqa: UP045 - read at run time by typer
        typer.Option(help="Checkpoint of this step.", show_default="the newest intact one"),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Only what the script tracked under this name, for load_state_dict.",
            show_default="all, with their names in front",
        ),
    ] = None,
) -> None:
    """Write a checkpoint's tensors as a plain safetensors file.

    `elastic export ckpt --name model` writes those of the model that the script tracked as
    `model`, as its own state_dict() names them.
    """
    from elastic.cli import files

    with _errors():
        files.export_weights(directory, out=out, step=step, name=name)


@checkpoint_app.command("ls")
def checkpoint_ls(
    directory: Annotated[str, typer.Argument(help="Path or fsspec URL.")],
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """List the committed checkpoints, newest first.

    It also lists saves that were left unfinished.
    """
    from elastic.cli import files

    with _errors():
        files.list_checkpoints(directory, output=output)


@checkpoint_app.command("verify")
def checkpoint_verify(
    directory: Annotated[str, typer.Argument(help="Path or fsspec URL.")],
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Only this step.", show_default="all"),
    ] = None,
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Read every file of the checkpoints and compare digests.

    Exit code 1 if any is damaged, 78 if there is no checkpoint.
    """
    from elastic.cli import files

    with _errors():
        raise typer.Exit(files.verify_checkpoints(directory, step=step, output=output))


_Directory = Annotated[
    Path, typer.Argument(metavar="DIRECTORY", help="Directory of the authority's files.")
]


@certs_app.command("init")
def certs_init(
    directory: _Directory,
    *,
    days: Annotated[int, typer.Option(help="Days that it is valid.", min=1, max=36500)] = 3650,
) -> None:
    """Make an authority that signs certificates of jobs.

    It is written to ca.pem and ca.key in DIRECTORY.
    """
    from elastic.cli import certs

    with _errors():
        certs.init(directory, days=days)


@certs_app.command("issue")
def certs_issue(
    directory: _Directory,
    *,
    job: Annotated[
        str, typer.Option(help="Job that the certificate names.", show_default="required")
    ],
    role: Annotated[
        Optional[list[JobRole]],  # noqa: UP045 - read at run time by typer
        typer.Option(
            help="Limit its holder to this role; may be given several times.", show_default="all"
        ),
    ] = None,
    host: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(help="Name a host or address too; elastic checks it only for --store memory."),
    ] = None,
    days: Annotated[int, typer.Option(help="Days that it is valid.", min=1, max=36500)] = 90,
    name: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Name of the files.", show_default="JOB, its roles and first host"),
    ] = None,
) -> None:
    """Sign a certificate of a job.

    It uses the authority in DIRECTORY, and writes JOB.pem and JOB.key there.
    """
    from elastic.cli import certs

    with _errors():
        certs.issue(directory, job=job, roles=role or [], hosts=host or [], days=days, name=name)


def main() -> None:
    """Entry point of the console script."""
    # gRPC reads both when it is imported. It would log every failed handshake between our lines.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Its own resolver asks name servers even for hosts in /etc/hosts: 13 s if they are silent.
    os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
    app(prog_name="elastic")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Turn errors meant for people into one message and their exit code, without a traceback.

    Tracebacks of other errors are written here, while standard error may still be the non-blocking
    one of `never_blocking`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # paths may have bytes that are not text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
    except typer.Exit:
        raise
    except BrokenPipeError as error:
        if not _nobody_reads():
            raise _report_error(error) from None
        raise  # as after `| head`: typer ends the command silently
    except ElasticError as error:
        for line in str(error).splitlines():
            print(printable(f"elastic: {line}"), file=sys.stderr)
        raise typer.Exit(int(error.exit_code)) from None
    except Exception as error:  # noqa: BLE001 - nobody else would report it
        raise _report_error(error) from None


def _report_error(error: Exception) -> typer.Exit:
    """Print the error; return the exit for it."""
    refused = _refused_by_the_system(error)
    if refused is None:
        traceback.print_exc()
        return typer.Exit(1)
    print(printable(f"elastic: {refused}"), file=sys.stderr)
    _silence_python()
    return typer.Exit(int(ExitCode.TEMPORARY))


def _nobody_reads() -> bool:
    """Whether standard output is a pipe whose reader has gone."""
    try:
        looked = select.poll()
        looked.register(sys.stdout, 0)
        return isinstance(sys.stdout, io.TextIOWrapper) and bool(looked.poll(0))
    except (OSError, ValueError):  # it is closed, or has no descriptor
        return False


def _silence_python() -> None:
    """Silence Python, which would complain when it destroys half-made objects, such as an event
    loop without its pipe. The error itself is already printed.
    """
    sys.unraisablehook = lambda _: None
    warnings.simplefilter("ignore")


def _refused_by_the_system(error: Exception) -> str | None:
    """The error as a message if the system is its cause: too few descriptors, threads, memory or
    storage, or no permission; else None. It names the line of code, since nothing else may do so.
    """
    if isinstance(error, OSError) and error.strerror:
        about = f" ({error.filename})" if error.filename else ""
        what = f"{error.strerror}{about}"
    elif isinstance(error, MemoryError):
        what = os.strerror(errno.ENOMEM)
    elif isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        what = f"{os.strerror(errno.EAGAIN)} (a thread)"  # Python does not say why
    else:
        return None
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}elastic{os.sep}" in frame.filename] or frames
    place = f"{Path(own[-1].filename).name}, line {own[-1].lineno}"
    return f"the system refused a call: {what}, at {place}; fix the cause, or try again later"


def _to_run(script: str | None, arguments: list[str] | None) -> dict[str, Any]:
    """Both as settings. Without arguments, those in the environment or the file apply."""
    return {"script": script, "args": arguments or None}


def _require_name(command: str, script: Path | None, options: dict[str, Any]) -> None:
    """Exit with a usage error for -m if no source names a module."""
    if script is None and options["module"]:
        print(
            "elastic: -m needs the name of a module: "
            f"elastic {command} [options] -m MODULE [arguments]",
            file=sys.stderr,
        )
        raise typer.Exit(int(ExitCode.USAGE))


def _target(address: str | None, config: Path | None, options: dict[str, Any]) -> Any:
    """The coordinator at `address`; else a job in etcd if etcd is given, else one of `elastic run`
    on this machine.
    """
    from elastic.cli.operator import Target

    if address is not None:
        settings = load_settings(
            DirectSettings, options, os.environ, config, part_of=OperatorSettings
        )
        return Target(address=address, direct=settings)
    if not is_given("etcd", OperatorSettings, options, os.environ, config):
        local = load_settings(LocalSettings, options, os.environ, config, part_of=OperatorSettings)
        is_named = is_given("job", OperatorSettings, options, os.environ, config)
        return Target(job=local.job if is_named else None, local=local)
    return Target(settings=load_settings(OperatorSettings, options, os.environ, config))


def _device_counts() -> DeviceCounts:
    return DeviceCounts(gpu=visible_gpus(), cpu=usable_cpus(), hidden=hidden_gpus())
