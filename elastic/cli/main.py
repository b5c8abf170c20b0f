"""The `elastic` command: parses, builds, and turns errors into messages and exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from elastic.cli.options import with_run_options
from elastic.errors import ElasticError
from elastic.settings.sources import DeviceCounts, load_run_settings

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps one data-parallel PyTorch job training while machines come and go.",
    epilog="Exit codes: 0 finished, 1 the script failed, 2 usage, 75 try again later, "
    "78 mend the configuration, 130 and 143 left after Ctrl-C and SIGTERM.",
)
checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints.")
app.add_typer(checkpoint_app, name="checkpoint")


@app.command(context_settings={"allow_interspersed_args": False})
@with_run_options
def run(
    script: Annotated[Path, typer.Argument(help="The training script.", show_default=False)],
    arguments: Annotated[
        Optional[list[str]],  # noqa: UP045 - read at run time by typer
        typer.Argument(help="The script's own arguments.", show_default=False),
    ] = None,
    *,
    config: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="TOML file with a \\[run] table.", show_default="ELASTIC_CONFIG"),
    ] = None,
    **options: Any,
) -> None:
    """Train SCRIPT with several workers on this machine, through lost workers.

    The first Ctrl-C or SIGTERM saves a checkpoint at a step boundary and leaves; the second stops
    at once.
    """
    from elastic.cli.run import Command
    from elastic.cli.run import run as run_job

    with _errors():
        settings = load_run_settings(options, os.environ, config, _device_counts)
        argv = [str(script), *(arguments or [])]
        raise typer.Exit(run_job(Command(settings=settings, argv=argv)))


@app.command()
def status(
    job: Annotated[Optional[str], typer.Option(help="Name of the job.")] = None,  # noqa: UP045
    address: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="HOST:PORT of its coordinator, instead of looking on this machine."),
    ] = None,
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Show a running job: its group, its workers, its progress and its recoveries."""
    from elastic.cli.status import show_status

    with _errors():
        show_status(job=job, address=address, output=output)


@checkpoint_app.command("ls")
def checkpoint_ls(
    directory: Annotated[str, typer.Argument(help="Path or fsspec URL.")],
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """List the committed checkpoints, newest first, and what saves have left unfinished."""
    from elastic.cli.checkpoints import list_them

    with _errors():
        list_them(directory, output=output)


@checkpoint_app.command("verify")
def checkpoint_verify(
    directory: Annotated[str, typer.Argument(help="Path or fsspec URL.")],
    step: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Only this step.", show_default="all"),
    ] = None,
    output: Annotated[str, typer.Option(help="table or json.")] = "table",
) -> None:
    """Read every file of the checkpoints and compare digests. Exit code 1 if any is damaged."""
    from elastic.cli.checkpoints import verify_them

    with _errors():
        raise typer.Exit(verify_them(directory, step=step, output=output))


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="elastic")


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Errors meant for people end in one message and their exit code, not in a traceback."""
    try:
        yield
    except ElasticError as error:
        for line in str(error).splitlines():
            print(f"elastic: {line}", file=sys.stderr)
        raise typer.Exit(int(error.exit_code)) from None


def _device_counts() -> DeviceCounts:
    """Devices of this machine. GPUs by their device files: torch takes seconds to import."""
    gpus = len([d for d in os.listdir("/dev") if d.removeprefix("nvidia").isdigit()])
    return DeviceCounts(gpu=gpus, cpu=len(os.sched_getaffinity(0)))
