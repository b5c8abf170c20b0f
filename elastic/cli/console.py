"""Shows events and workers' output: with a live line on a terminal, as JSON lines elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from elastic.cli.report import ending_lines
from elastic.core.legible import printable
from elastic.runtime.journal import Entry, JsonLines
from elastic.settings.shared import Console

PROGRESS_EVERY_S = 5.0
_PRINT_EVERY_S = 0.1
ENDS = ("job_finished", "job_ended")
_MOST_LINES = 200  # printed at once: far more than a terminal's height


class JsonDisplay:
    """Writes events as JSON lines to stderr, workers' lines to stdout: with a prefix, or as JSON.

    origin: the `origin` of workers' lines, see Entry.
    """

    def __init__(
        self,
        choice: Console,
        *,
        origin: Mapping[str, Any] | None = None,
        out: TextIO | None = None,
        err: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choice = choice
        self._out = out if out is not None else sys.stdout
        self._origin = origin or {}
        self._write = JsonLines(err if err is not None else sys.stderr)
        self._write_output = JsonLines(self._out) if choice is Console.JSON else None
        self._clock = clock
        self._progress_at: float | None = None

    def entry(self, entry: Entry) -> None:
        """Write the entry; progress, often several a second, only every `PROGRESS_EVERY_S`."""
        if entry.name == "progress":
            now = self._clock()
            if self._progress_at is not None and now - self._progress_at < PROGRESS_EVERY_S:
                return
            self._progress_at = now
        self._write(entry)

    def output(self, rank: int | None, worker: str, line: str) -> None:
        if self._write_output is not None:
            fields = {"worker": worker, "rank": rank, "stream": "output", "line": line}
            self._write_output(
                Entry(unix_s=time.time(), name="worker_output", fields=fields, origin=self._origin)
            )
        elif _is_shown(self._choice, rank, worker):
            self._out.write(prefix(rank, worker) + printable(line, colours=True) + "\n")
            self._out.flush()

    def close(self) -> None:
        """There is nothing to close here; LiveDisplay needs it."""


class LiveDisplay:
    """Keeps one line up to date, with events and workers' lines above it.

    A separate thread lays the lines out, because that takes far longer than handing them over. If
    more lines come than anybody could read, it shows the newest and the number of the others.
    """

    def __init__(self, choice: Console) -> None:
        self._choice = choice
        self._console = RichConsole(stderr=True, highlight=False)
        self._lock = threading.Lock()
        self._waiting: deque[Text | str] = deque(maxlen=_MOST_LINES)
        self._passed_over = 0
        self._closing = threading.Event()
        self._facts: dict[str, Any] = {}
        self._recovery_s: float | None = None
        self._live = Live(
            console=self._console, refresh_per_second=8, transient=True, get_renderable=self._line
        )
        self._live.start()
        self._printer = threading.Thread(target=self._print, name="elastic-display", daemon=True)
        self._printer.start()

    def entry(self, entry: Entry) -> None:
        """Show progress in the live line, and print other events above it."""
        if entry.name == "progress":
            self._facts = dict(entry.fields)
            return
        if entry.name == "recovered":
            self._recovery_s = entry.fields["total_s"]
        text = describe(entry)
        if text is not None:
            self._show(Text(printable(text), style=_style(entry)))
        if entry.name in ENDS:
            for line in ending_lines(entry.fields):
                self._show(Text(printable(line), style="dim"))

    def output(self, rank: int | None, worker: str, line: str) -> None:
        if _is_shown(self._choice, rank, worker):
            self._show(prefix(rank, worker) + printable(line, colours=True))

    def close(self) -> None:
        """Print the waiting lines, and remove the live line."""
        self._closing.set()
        self._printer.join()
        self._live.stop()

    def _show(self, line: Text | str) -> None:
        with self._lock:
            self._passed_over += len(self._waiting) == _MOST_LINES
            self._waiting.append(line)

    def _print(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(_PRINT_EVERY_S)
            with self._lock:
                lines, passed_over = list(self._waiting), self._passed_over
                self._waiting.clear()
                self._passed_over = 0
            if passed_over:
                self._console.print(Text(f"[{passed_over} lines are only in the logs]", "dim"))
            if lines:
                texts = [Text.from_ansi(t) if isinstance(t, str) else t for t in lines]
                self._console.print(Text("\n").join(texts))

    def _line(self) -> Text:
        facts = self._facts
        if not facts:
            return Text("starting...", style="dim")
        parts = [
            f"step {facts['step']}",
            f"epoch {facts['epoch']}",
            *(f"{name} {value:.4g}" for name, value in facts["reported"].items()),
            f"{facts['samples_per_s']:.0f} samples/s",
            f"world {facts['world_size']}",
            f"generation {facts['generation']}",
        ]
        if self._recovery_s is not None:
            parts.append(f"last recovery {self._recovery_s * 1000:.0f} ms")
        return Text(printable(" | ".join(parts)), style="bold")


def prefix(rank: int | None, worker: str) -> str:
    return f"[rank {rank}] " if rank is not None else f"[{worker}] "


def _is_shown(choice: Console, rank: int | None, worker: str) -> bool:
    if choice is Console.ALL:
        return True
    if choice is Console.NONE:
        return False
    return rank == 0 or (rank is None and worker.endswith("-1"))


_STYLES = {"error": "red", "warning": "yellow"}


def _style(entry: Entry) -> str:
    if entry.name in ("recovered", "job_finished"):
        return "green"
    return _STYLES.get(entry.severity, "dim")


def describe(entry: Entry) -> str | None:
    """The entry as text for people; None if only machines need it."""
    form = _FORMS.get(entry.name)
    return form({**entry.fields, **entry.fields.get("details", {})}) if form is not None else None


def _because(fields: Mapping[str, Any]) -> str:
    message = fields.get("message")
    return f": {message}" if message else ""


def _left_out(fields: Mapping[str, Any]) -> str:
    left_out = fields.get("left_out", 0)
    return f" ({left_out} other refusals before it)" if left_out else ""


def _goodput(fields: Mapping[str, Any]) -> str:
    goodput = fields.get("goodput")
    return f", goodput {goodput:.1%}" if goodput is not None else ""


def _place(fields: Mapping[str, Any]) -> str:
    machine, node = fields["machine"], f"node {fields['node']}"
    return f"machine {machine} ({node})" if machine else node


_FORMS: dict[str, Callable[[dict[str, Any]], str]] = {
    "job_started": lambda f: f"job {f['job']}: logs in {f['log_dir']}",
    "generation_formed": lambda f: (
        f"generation {f['generation']} ({f['reason'].replace('_', ' ')}): {f['world_size']} workers"
    ),
    "node_lost": lambda f: (
        f"node {f['node']} has left"
        if f.get("as_wanted")
        else f"lost contact with the agent of node {f['node']}"
    ),
    "node_refused": lambda f: f"node {f['node']} was refused: {f['reason']}",
    "coordinator_awaited": lambda _: (
        "no coordinator leads this job yet; if one runs, check that it has the same --job and "
        "--etcd as this agent"
    ),
    "admission_awaited": lambda f: f"not accepted yet: {f['reason']}",
    "coordinator_lost": lambda f: f"lost contact with the coordinator: {f['reason']}",
    "coordinator_found": lambda f: f"in contact with the coordinator at {f['address']}",
    "worker_failed": lambda f: f"worker {f['worker']} {f['message']}",
    "newcomers_refused": lambda f: f["message"],
    "peers_unreachable": lambda f: f["message"],
    "recovered": lambda f: f"recovered in {f['total_s'] * 1000:.0f} ms at step {f['committed']}",
    "step_was_slow": lambda f: (
        f"step {f['step']} lasted {f['lasted_s']:.1f} s, usually {f['usual_s'] * 1000:.0f} ms"
    ),
    "slow_step": lambda f: (
        f"step {f['step']} lasts {f['lasts_s']:.1f} s, usually {f['usual_s'] * 1000:.0f} ms: "
        f"{f['verdict']}"
    ),
    "hang": lambda f: f"hang: {f['verdict']}",
    "incident": lambda f: f"incident {f['number']}: {f['summary']} ({f['explain']})",
    "loss_not_finite": lambda f: f"{f['name']} is {f['value']} at step {f['step']}",
    "straggler": lambda f: (
        f"slow: {f['verdict']}" + ("; it is replaced" if f["action"] == "replace" else "")
    ),
    "straggler_over": lambda f: f"rank {f['rank']} is no longer slow: {f['reason']}",
    "state_restored": lambda f: f"state from {f['source']}, step {f['committed']}",
    "state_received": lambda f: (
        f"worker {f['worker']} received the state: {f['bytes'] / 1e6:.1f} MB in {f['sync_s']:.2f} s"
    ),
    "checkpoint_committed": lambda f: f"checkpoint of step {f['step']} committed",
    "checkpoints_set_aside": lambda f: (
        f"the job has gone on from step {f['from_step']}: later checkpoints do not count, and are "
        f"removed (steps {', '.join(map(str, f['steps']))})"
    ),
    "checkpoint_abandoned": lambda f: f"the save of step {f['step']} was given up: {f['message']}",
    "state_differed": lambda f: (
        f"worker {f['worker']} had a different state at step {f['step']} and takes over the state "
        f"of the others: {f['names']}"
    ),
    "step_copies_state": lambda f: (
        f"every step copies {f['names']} ({int(f['bytes']) / 1e6:.1f} MB of tensors, "
        f"{f['copy_ms']} ms): {f['advice']}"
    ),
    "untracked_state": lambda f: f"not tracked: {f['names']}; {f['advice']}",
    "report_failed": lambda f: f"a report of worker {f['worker']} failed: {f['message']}",
    "left_early": lambda f: (
        f"the job stops, and worker {f['worker']} was given up after {f['lasts_s']} s in "
        f"{f['within']} step {f['step']}, at {f['place']}: "
        + (
            "what it had changed there is undone, and does not count"
            if f["undone"] == "true"
            else "that cannot be undone, so others have to save"
        )
    ),
    "failed_at_end": lambda f: (
        f"worker {f['worker']} failed as it ended: {f['message']}; what it saves at its end may be "
        "missing"
    ),
    "script_ended": lambda f: (
        f"failed (exitcode: {f['exit_code']}) local_rank: {f['local_rank']} (pid: {f['pid']})"
    ),
    "output_lost": lambda f: (
        f"the log of worker {f['worker']} cannot be written: {f['reason']}; its newest output "
        "waits in memory"
    ),
    "variables_ignored": lambda f: f["message"],
    "notice": lambda f: (
        f"a worker of node {f['node']} reports {f['name']}, which this version does not know"
    ),
    "checkpoint_damaged": lambda f: f"checkpoint of step {f['step']} is damaged: {f['reason']}",
    "ledger_failed": lambda f: (
        f"the ledger {f['path']} cannot be written: {f['reason']}; the job goes on without it and "
        "retries"
    ),
    "ledger_continued": lambda f: f"the ledger {f['path']} is written again",
    "curve_failed": lambda f: (
        f"the curve {f['path']} cannot be written: {f['reason']}; the job goes on without it and "
        "retries"
    ),
    "curve_continued": lambda f: f"the curve {f['path']} is written again",
    "http_started": lambda f: f"{f['serves']} at {f['address']}",
    "stop_requested": lambda f: f"the job stops at the next step boundary: {f['reason']}",
    "save_retried": lambda f: (
        f"the last save, of step {f['step']}, failed and is retried: {f['message']}"
    ),
    "logs_removed": lambda f: (
        f"removed the logs of {f['directories']} earlier runs, {f['bytes'] / 1e6:.1f} MB"
    ),
    "zygote_lost": lambda f: f["reason"],
    "run_directory_lost": lambda f: (
        f"the run's directory was removed, and cannot be created again: {f['reason']}; new workers "
        "cannot connect to the agent"
    ),
    "run_directory_made_anew": lambda f: (
        f"the run's directory was removed; it was created again: {f['path']}"
    ),
    "job_finished": lambda f: f"finished after {f['committed']} steps{_goodput(f)}{_because(f)}",
    "job_ended": lambda f: f"ended after {f['committed']} steps{_goodput(f)}{_because(f)}",
    # ---- jobs of many nodes
    "already_ended": lambda f: f["message"],
    "agent_started": lambda f: f"node {f['node']} of job {f['job']}: logs in {f['log_dir']}",
    "agent_ended": lambda f: f"{f['meaning']} (exit code {f['exit_code']}){_because(f)}",
    "worker_not_started": lambda f: f"worker {f['worker']} could not be started: {f['reason']}",
    "worker_adopted": lambda f: f"adopted worker {f['worker']} of an earlier agent",
    "registration_waiting": lambda f: (
        f"the node's name is taken by {f['owner']}; the agent waits up to {f['at_most_s']:g} s for "
        "its lease to end"
    ),
    "registration_held": lambda _: "this node is registered in the store",
    "registration_suspect": lambda _: "the store does not answer: the registration may be lost",
    "registration_gone": lambda _: "the registration in the store is lost",
    "cut_off": lambda f: f"no contact with store and coordinator for {f['silent_s']:g} s",
    "preempted": lambda f: f"this machine is about to be taken away: {f['reason']}",
    "released": lambda f: f"this node has left: {f['reason']}",
    "handing_over": lambda f: (
        f"the agent ends ({f['reason']}); its workers wait {f['grace_s']:g} s for another agent"
    ),
    "coordinator_started": lambda f: f"coordinator of job {f['job']} at {f['address']}",
    "campaigning": lambda f: f"{f['address']} waits for its election",
    "standing_by": lambda f: (
        f"{f['leader']} leads run {f['run_id']}; {f['address']} waits for {f['waits_for']}"
    ),
    "elected": lambda f: f"{f['address']} leads, from generation {f['generation']} on",
    "store_rolled_back": lambda f: (
        f"the store has lost generations {f['stored'] + 1} to {f['generation']}, which the agents "
        "know: it was emptied or restored from a backup"
    ),
    "stray_group_ended": lambda f: (
        f"workers of node {f['node']} were in a group that the store had lost; they are ended, "
        "since the job has started again without it"
    ),
    "deposed": lambda f: f"this coordinator no longer leads: {f['reason']}",
    "leadership_in_doubt": lambda f: f"this coordinator may lose the leadership: {f['reason']}",
    "leadership_confirmed": lambda _: "this coordinator still leads",
    "serving_after_end": lambda f: (
        f"the run has ended with exit code {f['exit_code']}; the coordinator stays until it gets a "
        "signal"
    ),
    "leaving": lambda f: f"this coordinator makes way for another one: {f['reason']}",
    "node_vanished": lambda f: f"the registration of node {f['node']} is lost",
    "node_leaving": lambda f: f"node {f['node']} leaves: {f['reason']}",
    "node_left_group": lambda f: f"node {f['node']} has left the group",
    "leave_timed_out": lambda f: (
        f"node {f['node']} did not leave within {f['waited_s']:g} s ({f['reason']}); its workers "
        "are killed"
    ),
    "not_saved": lambda f: (
        f"not saved: {f['reason']}; the newest checkpoint is of step {f['checkpoint']}, and node "
        f"{f['node']} had committed {f['committed']} steps"
    ),
    "node_drained": lambda f: f"{_place(f)} is drained and kept out: {f['reason']}",
    "node_quarantined": lambda f: f"{_place(f)} is in quarantine: {f['reason']}",
    "node_cleared": lambda f: f"{_place(f)} may take part again",
    # ---- connections
    "security_warning": lambda f: f"warning: {f['message']}",
    "warning": lambda f: f"warning: {f['message']}",
    "certificates_reloaded": lambda f: (
        f"new connections use {f['certificate']}, valid until {f['expires']}"
    ),
    "certificates_refused": lambda f: f["reason"],
    "certificate_expires": lambda f: (
        f"the certificate {f['certificate']} expires at {f['expires']}; replace the files before, "
        "no restart is needed"
    ),
    "peer_refused": lambda f: (
        f"{f['peer']} was refused: its certificate names {f['found']}, not {f['expected']}"
        f"{_left_out(f)}"
    ),
    "connection_refused": lambda f: f"a connection to {f['path']} was refused: {f['reason']}",
    "loop_paused": lambda f: (
        f"warning: this process stood still for {f['pause_s']:g} s; {f['where'].splitlines()[-1]}"
    ),
    "process_stopped": lambda f: (
        f"warning: this process did not run for {f['stopped_s']:g} s: it was stopped, or its "
        "machine was paused"
    ),
    "message_refused": lambda f: (
        f"a message from {f['source']} was refused: {f['reason']}{_left_out(f)}"
    ),
    "message_dropped": lambda f: f"a message was not sent: {f['reason']}",
}
