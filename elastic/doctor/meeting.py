"""Connects this node's doctor with those of the other nodes, to compare the nodes stage by stage.

The doctors exchange JSON lines over TCP, or over the job's TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import json
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elastic.core.documents import Unreadable, parse, read
from elastic.doctor.findings import Peer
from elastic.errors import ConfigurationError
from elastic.rpc.identity import job_identity
from elastic.runtime.off_loop import off_loop
from elastic.settings.limits import PortRange
from elastic.settings.tls_files import TlsFiles
from elastic.timeouts import timeout

_CONNECT_S = 2.0
_ASK_S = 5.0
_AGAIN_S = 0.2
_CLOCK_ASKED = 5
_LEAST_PAUSE_S = 0.05
_MOST_ASKED_PER_S = 1000
_BARRIER_TIMEOUT_S = 20.0
"""Seconds to wait for the others to reach the same stage; the slowest still measures a disk."""


class Stage:
    """How far a doctor has come. Doctors wait for each other at every stage from MET on."""

    ASKING = 0
    MET = 1
    """It has asked all others, and written its file."""
    LOOKED = 2
    """It has looked for the files of the others."""
    DONE = 3


@dataclass(kw_only=True)
class _Met:
    """A peer, and what is known of it so far."""

    address: str
    host: str
    found: Peer
    reached_at: str = ""
    """The address that its name resolved to."""
    connection: Connection | None = None
    report: NodeReport | None = None


class Meeting:
    """This node's doctor among the others: `start` it, `meet` them, call `barrier` for each stage
    from MET on, and `close` it."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        own_address: str,
        node: str,
        job: str,
        elastic: str,
        torch: str,
        timeout_s: float,
        ports: PortRange | None,
        protection: Protection | None,
    ) -> None:
        self._host, _, port = own_address.rpartition(":")
        self._port = int(port)
        self._timeout_s = timeout_s
        self._ports = ports
        self._protection = protection
        self._peers = [self._peer(address) for address in addresses]
        self._ends: list[Callable[[], None]] = []
        self._report = NodeReport(
            identity=secrets.token_hex(8),
            node=node,
            job=job,
            elastic=elastic,
            torch=torch,
            worker_port=0,
            store_port=0,
            stage=Stage.ASKING,
        )

    # ---- what is known

    @property
    def peers(self) -> list[Peer]:
        return [one.found for one in self._peers]

    @property
    def others(self) -> list[NodeReport]:
        """The newest answer of each other node that was reached."""
        return [
            one.report for one in self._peers if one.report is not None and not one.found.is_self
        ]

    @property
    def own_address(self) -> str:
        """This node's address towards the first other node; empty if none was reached."""
        connections = [
            one.connection
            for one in self._peers
            if one.connection is not None and not one.found.is_self
        ]
        return connections[0].own_address if connections else ""

    def group(self) -> tuple[int, list[str], str, int] | str:
        """This node's rank, all identities, and the host and port of rank 0's store; or a text that
        says why there is no group."""
        strangers = [one.address for one in self._peers if one.found.error]
        if strangers:
            return f"some nodes cannot be reached: {', '.join(strangers)}"
        mine = self._report.met
        for report in self.others:
            if report.met != mine:
                return f"the doctor of {report.node} does not reach the same nodes as this one"
        hosts = {one.report.identity: one for one in self._peers if one.report is not None}
        rank = mine.index(self._report.identity)
        if rank == 0:
            return rank, list(mine), self.own_address, self._report.store_port
        first = hosts[mine[0]]
        assert first.report is not None
        return rank, list(mine), first.reached_at, first.report.store_port

    # ---- what is done

    async def start(self) -> None:
        """Listen. Raises ConfigurationError if the address cannot be used."""
        try:
            listener = _listener(self._host.strip("[]"), self._port)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen at --doctor-address {self._host}:{self._port}: {error.strerror}; "
                "is another `elastic doctor` running? Give another port, the same on all nodes"
            ) from error
        self._ends.append(await serve(listener, self._current_report, self._protection))
        worker_port, store_port = self._free_ports()
        self._ends.append((await asyncio.start_server(_hang_up, sock=worker_port)).close)
        self._report = dataclasses.replace(
            self._report, worker_port=worker_port.getsockname()[1], store_port=store_port
        )

    async def meet(self) -> None:
        """Ask all others, for `timeout_s` at most."""
        ends = time.monotonic() + self._timeout_s
        await asyncio.gather(*(self._meet(one, ends) for one in self._peers))

    async def barrier(self, stage: int, *, marker: str = "") -> None:
        """Tell the others that this doctor has reached `stage`, and wait for them, at most for
        `_BARRIER_TIMEOUT_S`. marker: the name of the file that was written for them.
        """
        met = [one.identity for one in self.others]
        self._report = dataclasses.replace(
            self._report,
            stage=stage,
            marker=marker or self._report.marker,
            met=tuple(sorted({self._report.identity, *met})),
        )
        reached = [
            one for one in self._peers if one.connection is not None and not one.found.is_self
        ]
        pause_s = max(_LEAST_PAUSE_S, len(reached) / _MOST_ASKED_PER_S)
        await asyncio.gather(*(_wait_for_stage(one, stage, pause_s) for one in reached))

    def check_markers(self, sees: Callable[[str], bool]) -> None:
        """Note for each other node whether the file that it wrote is seen here. Blocks."""
        for one in self._peers:
            if one.report is not None and one.report.marker and not one.found.is_self:
                seen = sees(one.report.marker)
                one.found = dataclasses.replace(one.found, sees_checkpoint=seen)

    async def close(self) -> None:
        for one in self._peers:
            if one.connection is not None:
                one.connection.close()
        for end in self._ends:
            end()

    # ---- inside

    def _peer(self, address: str) -> _Met:
        host, port = _split(address, self._port)
        return _Met(
            address=f"{host}:{port}" if ":" not in host else f"[{host}]:{port}",
            host=host,
            found=Peer(address=address),
        )

    def _current_report(self) -> NodeReport:
        return dataclasses.replace(self._report, unix_s=time.time())

    def _free_ports(self) -> tuple[socket.socket, int]:
        """A socket that listens like a worker, and the number of a free port for the store."""
        candidates = range(self._ports.first, self._ports.last + 1) if self._ports else (0, 0)
        found: list[socket.socket] = []
        for port in candidates:
            with contextlib.suppress(OSError):
                found.append(_listener(self._host.strip("[]"), port))
            if len(found) == 2:
                break
        if len(found) < 2:
            for one in found:
                one.close()
            raise ConfigurationError(
                f"--worker-port-range {self._ports}: {len(found)} of its ports are free, and a "
                "worker and its store need two; widen it, or stop what listens there"
            )
        port = int(found[1].getsockname()[1])
        found[1].close()
        return found[0], port

    async def _meet(self, one: _Met, ends: float) -> None:
        _, _, port = one.address.rpartition(":")
        while True:
            try:
                async with timeout(_CONNECT_S):
                    one.reached_at = await _resolved(one.host)
                    connection = await Connection.open(one.reached_at, int(port), self._protection)
                one.connection = connection
                async with timeout(_ASK_S):
                    report = await connection.ask()
                await self._compare(one, connection, report)
                return
            except UnexpectedPeer as error:
                one.found = dataclasses.replace(one.found, error=str(error), refused=True)
            except (socket.gaierror, UnicodeError) as error:
                why = error.strerror if isinstance(error, OSError) else error
                text = f"the name does not resolve ({why})"
                one.found = dataclasses.replace(one.found, error=text)
            except (asyncio.TimeoutError, TimeoutError):
                text = f"{one.address} does not answer within {_CONNECT_S:g} s"
                one.found = dataclasses.replace(one.found, error=text, refused=False)
            except OSError as error:
                refused = _is_refusal(error)
                text = f"{one.address}: {error.strerror or error}"
                text = f"nothing listens at {one.address}" if refused else text
                one.found = dataclasses.replace(one.found, error=text, refused=refused)
            if one.connection is not None:
                one.connection.close()
                one.connection = None
            if time.monotonic() + _AGAIN_S >= ends:
                return
            await asyncio.sleep(_AGAIN_S)

    async def _compare(self, one: _Met, connection: Connection, report: NodeReport) -> None:
        if report.identity == self._report.identity:
            one.report = report
            one.found = Peer(address=one.found.address, node=report.node, is_self=True)
            return
        if report.job != self._report.job:
            raise UnexpectedPeer(
                f"a doctor of job {report.job!r} answers, but the job here is {self._report.job!r}"
            )
        ahead_s, error_s = await _clock(connection)
        one.found = Peer(
            address=one.found.address,
            node=report.node,
            elastic=report.elastic,
            torch=report.torch,
            clock_ahead_s=ahead_s,
            clock_error_s=error_s,
            worker_port=report.worker_port,
            worker_port_error=await _reach(one.reached_at, report.worker_port),
        )
        one.report = report


def _is_refusal(error: OSError) -> bool:
    """For a name with several addresses asyncio raises one error without errno: read its text."""
    return isinstance(error, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(
        error
    )


def _listener(host: str, port: int) -> socket.socket:
    """Listen at `host` and `port`; at `::` on IPv4 too."""
    if ":" not in host:
        return socket.create_server((host, port))
    both = host == "::"
    return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=both)


async def _hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _clock(connection: Connection) -> tuple[float, float]:
    """Seconds by which the other clock is ahead, and half of the shortest round trip as the error:
    D. L. Mills, RFC 5905, section 8, with one instant at the other end."""
    best = (0.0, float("inf"))
    for _ in range(_CLOCK_ASKED):
        began, began_at = time.monotonic(), time.time()
        async with timeout(_ASK_S):
            report = await connection.ask()
        half_s = (time.monotonic() - began) / 2
        if half_s < best[1]:
            best = (report.unix_s - (began_at + half_s), half_s)
    return best


async def _resolved(host: str) -> str:
    """Resolve in a thread that nobody waits for after a time-out. asyncio would wait for its own
    threads at the end."""
    resolve = functools.partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
    found = await off_loop(resolve)
    return str(found[0][4][0])


async def _reach(host: str, port: int) -> str:
    """Why the port is not reached; empty if it is."""
    try:
        async with timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
    except (asyncio.TimeoutError, TimeoutError):
        return f"no answer within {_CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


async def _wait_for_stage(one: _Met, stage: int, pause_s: float) -> None:
    """Ask the peer until it reaches `stage`, is gone or silent, or `_BARRIER_TIMEOUT_S` is over."""
    ends = time.monotonic() + _BARRIER_TIMEOUT_S
    assert one.connection is not None
    with contextlib.suppress(OSError, UnexpectedPeer, asyncio.TimeoutError):
        while time.monotonic() < ends:
            async with timeout(_ASK_S):
                one.report = await one.connection.ask()
            if one.report.stage >= stage:
                return
            await asyncio.sleep(pause_s)


def _split(address: str, port: int) -> tuple[str, int]:
    """Split HOST or HOST:PORT, an IPv6 host in brackets; `port` is the default."""
    if address.startswith("["):
        host, _, rest = address[1:].partition("]")
        return host, int(rest.removeprefix(":") or port)
    host, separator, own = address.partition(":")
    return host, int(own) if separator else port


_FORMAT = 1
_MOST_LINE = 2**14
_MOST_AT_ONCE = 1024
"""Connections at once: enough for a few from each node of a large job."""
_PATIENCE_S = 60.0
"""Seconds until a connection that sends nothing is closed."""
_MOST = {
    **dict.fromkeys(("identity", "node", "job", "elastic", "torch", "marker", "met"), 300),
    **dict.fromkeys(("worker_port", "store_port", "stage"), 65535),
}
_HANDSHAKE_S = 5.0


class UnexpectedPeer(Exception):
    """Another program, or a doctor of another job, answers; the text says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """What a doctor tells the others about its node. `stage` never goes back."""

    identity: str
    """Random. A doctor that connects to itself recognises its own."""
    node: str
    job: str
    elastic: str
    torch: str
    worker_port: int
    store_port: int
    stage: int
    marker: str = ""
    """The name of a file in its checkpoint directory; empty: it has none."""
    met: tuple[str, ...] = ()
    """The identities of the nodes that it reaches and its own, sorted; empty while ASKING."""
    unix_s: float = 0.0
    """Its wall clock when it answered."""


def encode(report: NodeReport) -> bytes:
    return json.dumps({"format": _FORMAT, **dataclasses.asdict(report)}).encode() + b"\n"


def decode(line: bytes) -> NodeReport:
    """Raises UnexpectedPeer if the line is not a NodeReport of this format."""
    try:
        fields = parse(line)
    except Unreadable:
        raise UnexpectedPeer("something other than `elastic doctor` answers") from None
    if fields.get("format") != _FORMAT:
        raise UnexpectedPeer("`elastic doctor` of another version answers")
    try:
        report = read(NodeReport, fields, "the answer", added=("marker", "unix_s"), most=_MOST)
    except Unreadable as error:
        raise UnexpectedPeer(f"the answer is not valid: {error}") from None
    if "/" in report.marker:
        raise UnexpectedPeer("the answer is not valid")
    return report


@dataclass(frozen=True, kw_only=True, slots=True)
class Protection:
    """The job's TLS contexts, and the name that both ends require in the other's certificate."""

    server: ssl.SSLContext
    client: ssl.SSLContext
    name: str

    @classmethod
    def of(cls, files: TlsFiles, job: str) -> Protection:
        """Raises OSError (which ssl.SSLError is) or ValueError if the files cannot be used."""
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.check_hostname = False  # certificates name jobs, not hosts
            assert files.certificate is not None
            context.load_cert_chain(files.certificate, files.key)
            context.load_verify_locations(cafile=files.ca)
            context.verify_mode = ssl.CERT_REQUIRED
            contexts.append(context)
        return cls(server=contexts[0], client=contexts[1], name=job_identity(job))

    def admits(self, writer: asyncio.StreamWriter) -> bool:
        """Whether the other end has a certificate of the job."""
        shown: Any = writer.get_extra_info("peercert") or {}
        return ("DNS", self.name) in shown.get("subjectAltName", ())


async def serve(
    listener: socket.socket, report: Callable[[], NodeReport], protection: Protection | None
) -> Callable[[], None]:
    """Answer each line with what `report` returns then, until the returned function is called."""
    callers: set[asyncio.StreamWriter] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.add(writer)
        try:
            if len(callers) > _MOST_AT_ONCE or (protection and not protection.admits(writer)):
                return
            while True:
                async with timeout(_PATIENCE_S):
                    if not await reader.readline():
                        return
                    writer.write(encode(report()))
                    await writer.drain()
        except (OSError, ValueError, asyncio.TimeoutError):  # a line that is too long: ValueError
            return
        except asyncio.CancelledError:
            return  # the loop ends, and nobody awaits this task
        finally:
            callers.discard(writer)
            writer.close()

    server = await asyncio.start_server(
        answer,
        sock=listener,
        limit=_MOST_LINE,
        ssl=protection.server if protection else None,
        ssl_handshake_timeout=_HANDSHAKE_S if protection else None,
    )

    def close() -> None:
        server.close()
        for caller in [*callers]:
            caller.close()

    return close


class Connection:
    """A connection to another doctor."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, host: str, port: int, protection: Protection | None) -> Connection:
        """Raises OSError, which ssl.SSLError is, and UnexpectedPeer."""
        reader, writer = await asyncio.open_connection(
            host,
            port,
            limit=_MOST_LINE,
            ssl=protection.client if protection else None,
            ssl_handshake_timeout=_HANDSHAKE_S if protection else None,
        )
        if protection and not protection.admits(writer):
            writer.close()
            raise UnexpectedPeer(f"its certificate does not name {protection.name}")
        return cls(reader, writer)

    @property
    def own_address(self) -> str:
        """This node's address in the connection."""
        return str(self._writer.get_extra_info("sockname")[0])

    async def ask(self) -> NodeReport:
        """Raises OSError and UnexpectedPeer."""
        self._writer.write(b"\n")
        await self._writer.drain()
        try:
            line = await self._reader.readline()
        except ValueError as error:
            raise UnexpectedPeer("something other than `elastic doctor` answers") from error
        if not line:
            raise UnexpectedPeer(
                "it closes the connection at once: it is another program, only one end uses TLS, "
                "or a certificate is of another job or authority"
            )
        return decode(line)

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.close()
