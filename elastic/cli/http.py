"""Serves a daemon's page, metrics and health: chooses the addresses, and which clients may read."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastic.errors import ConfigurationError, ElasticError
from elastic.rpc.certificates import Role
from elastic.rpc.identity import missing_identity
from elastic.rpc.newest_certificate import NewestCertificate, warn_of_expiry
from elastic.rpc.security import Report, Security, Tls, no_report, on_this_loop, stays_here
from elastic.runtime.journal import Journal
from elastic.runtime.listening import address_of, listen_for_http
from elastic.runtime.off_loop import off_loop
from elastic.runtime.process_metrics import Directories, Watched
from elastic.settings.coordinator import CoordinatorSettings
from elastic.settings.node import NodeSettings
from elastic.settings.run import RunSettings
from elastic.settings.tls_files import TlsFiles

if TYPE_CHECKING:
    from elastic.runtime.http_server import HttpServer, Request

COORDINATOR_DEFAULT = "127.0.0.1:9400"
OFF = "off"
METRICS_OPTION = "--metrics-address"
_PAGE_OPTION = "--http-address"
_END_WITHIN_S = 1.0


def require_http_protection(
    address: str | None, security: Security, option: str = _PAGE_OPTION
) -> None:
    """Raises ConfigurationError if other machines could read the job's figures unprotected."""
    if address is None or address == OFF or stays_here(address):
        return
    if not isinstance(security, Tls) and not security.insecure:
        raise ConfigurationError(
            f"{option} {address} can be reached from other machines, and there is no "
            "certificate: anyone who reaches the port could read the job's figures; give --tls-ca, "
            "--tls-cert and --tls-key, or --insecure on a network where you trust everyone, or "
            "listen on 127.0.0.1"
        )


def checkpoint_directories(url: str | None, **others: str) -> Directories:
    """The local directories of a daemon, by purpose, whose free space is in the metrics."""
    if url is not None and "://" not in url:
        others["checkpoints"] = os.path.abspath(url)
    return Directories(others)


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpSite:
    """An address, and what is served there besides health checks."""

    address: str
    option: str = _PAGE_OPTION
    is_default: bool = False
    """No setting names this address, so the daemon goes on if it cannot listen there."""
    page: bool = False
    metrics: bool = True

    @property
    def parts(self) -> str:
        served = ["page"] * self.page + ["metrics"] * self.metrics
        return f"{', '.join(served)} and health checks" if served else "health checks"


def http_sites(
    settings: CoordinatorSettings | RunSettings | NodeSettings,
    security: Security,
    default: str | None = None,
) -> list[HttpSite]:
    """The sites that the settings ask for, the page's last. `default` is the page's address if they
    name none; the daemon goes on without the page if it cannot listen there.

    Raises ConfigurationError if other machines could read the job's figures unprotected.
    """
    address, metrics = settings.http_address or default or OFF, settings.metrics_address or OFF
    is_apart = settings.metrics_address not in (None, address)
    page = HttpSite(address=address, is_default=not settings.http_address, metrics=not is_apart)
    page = replace(page, page=not isinstance(settings, NodeSettings))
    sites = [HttpSite(address=metrics, option=METRICS_OPTION), page][not is_apart :]
    sites = [site for site in sites if site.address != OFF]
    for site in sites:
        require_http_protection(site.address, security, site.option)
    return sites


@contextlib.asynccontextmanager
async def watched_over_http(
    watched: Watched,
    sites: Sequence[HttpSite],
    journal: Journal,
    security: Security,
    *,
    tells_of_certificates: bool = False,
) -> AsyncIterator[str]:
    """Serve `watched` while the context is open; yield the page's address, empty if there is none.
    Meanwhile warn before the job's certificate expires.

    A loopback address is served in plain text, others with the job's certificates if it has any.
    tells_of_certificates: record when they are replaced or cannot be used; False if gRPC does so.

    Raises ConfigurationError, and TransientError if no name server answers.
    """
    newest: NewestCertificate | None = None
    if isinstance(security, Tls):
        told = on_this_loop(journal.record) if tells_of_certificates else no_report
        newest = NewestCertificate(security, Role.SERVER, told, coordinates=False)
        watched = replace(watched, parts=replace(watched.parts, certificate=newest))
    found = dict[str, str]()
    async with contextlib.AsyncExitStack() as ends:
        if newest is not None:
            warning = asyncio.ensure_future(warn_of_expiry(newest, journal.record))
            ends.callback(warning.cancel)
        for site in sites:
            server = await _server(site, watched, journal, security, newest)
            found[site.option] = await ends.enter_async_context(_running(server, journal))
        yield found.get(_PAGE_OPTION, "")


@contextlib.asynccontextmanager
async def _running(server: _Serving | None, journal: Journal) -> AsyncIterator[str]:
    """Run the server while the context is open; yield its address, empty if it does not run."""
    if server is None:
        yield ""
        return
    address = server.address
    try:
        server.start()
    except RuntimeError as error:  # no thread can be started
        _go_without(journal, error, server.site)
        address = ""
    try:
        yield address
    finally:
        with contextlib.suppress(RuntimeError):
            await off_loop(server.close)


async def _server(
    site: HttpSite,
    watched: Watched,
    journal: Journal,
    security: Security,
    newest: NewestCertificate | None,
) -> _Serving | None:
    wanted = site.address
    try:
        listener = await listen_for_http(wanted, site.option)
    except (ElasticError, RuntimeError, OSError) as error:
        if not site.is_default:
            raise
        _go_without(journal, error, site)
        return None
    secured = isinstance(security, Tls) and not stays_here(wanted)
    files = security.files if isinstance(security, Tls) and secured else None
    try:
        if newest is not None and secured:
            await off_loop(newest.get)
    except BaseException:
        listener.close()
        raise
    if not secured and not stays_here(wanted):
        message = (
            f"{wanted} serves {site.parts} of the job in plain text (--insecure): anyone who "
            "reaches it can read them"
        )
        journal.record("security_warning", message=message)
    at = f"{'https' if secured else 'http'}://{address_of(listener)}"
    journal.record("http_started", address=at, serves=site.parts)
    loop, report = asyncio.get_running_loop(), on_this_loop(journal.record)
    guard = Guard(is_known=_admission(security), is_local=stays_here(wanted))
    return _Serving(listener, at, site, watched, loop, guard, report, files, newest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Decides which requests are allowed; each check returns why not, or an empty text."""

    is_known: Callable[[Request], str]
    """Check the certificate of a request."""
    is_local: bool
    """The address is a loopback one."""

    def may_see(self, request: Request) -> str:
        """Check a request for the page or metrics. At a loopback address the Host must be an
        address or localhost: another site could resolve its own name to loopback, and so read
        them through a browser (DNS rebinding)."""
        if self.is_local and not _is_address(request.host):
            return (
                f"this is served at a loopback address, and the request names the host "
                f"{request.host!r}; use localhost or 127.0.0.1"
            )
        return self.is_known(request)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.lower() in ("localhost", "")
    return True


def _go_without(journal: Journal, error: Exception, site: HttpSite) -> None:
    message = f"{error}; {site.parts} are not served"
    journal.record("warning", source="http", message=message)


_SWITCH_S = 0.0005
"""Seconds that the event loop waits for the interpreter's lock while the server's thread writes an
answer. It waits several times between a message and its answer: with Python's default of 5 ms that
took 25 ms."""


class _Serving:
    """Runs the server in a thread that also imports it, which takes longest of all at a start."""

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        site: HttpSite,
        watched: Watched,
        loop: asyncio.AbstractEventLoop,
        guard: Guard,
        report: Report,
        files: TlsFiles | None,
        newest: NewestCertificate | None,
    ) -> None:
        self.address, self.site = address, site
        self._listener, self._watched, self._loop = listener, watched, loop
        self._guard, self._report = guard, report
        self._files, self._newest = files, newest
        self._lock = threading.Lock()
        self._server: HttpServer | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="elastic-http", daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()

    def close(self) -> None:
        """Stop the server; blocks for `_END_WITHIN_S` at most."""
        with self._lock:
            self._closed = True
            if self._server is not None:
                self._server.close()
        if self._thread.ident is None:  # it was never started
            self._listener.close()
        else:
            self._thread.join(_END_WITHIN_S)

    def _run(self) -> None:
        try:
            server = self._make()
            with self._lock:
                self._server = server
                if self._closed:
                    server.close()
            server.run()  # also if it is closed by now: run() frees what it holds
        except Exception as error:  # noqa: BLE001 - the daemon goes on without
            message = f"{self.site.parts} are not served: {type(error).__name__}: {error}"
            self._report("warning", source="http", message=message)
        finally:
            self._listener.close()

    def _make(self) -> HttpServer:
        from elastic.runtime.http_pages import WatcherPages
        from elastic.runtime.http_server import HttpServer, HttpTls
        from elastic.runtime.job_page import JobPage

        tls = None
        if self._files is not None and self._newest is not None:
            tls = HttpTls(files=self._files, newest=self._newest)
        watched, guard, site = self._watched, self._guard, self.site
        pages = WatcherPages(watched, self._loop, guard.may_see).by_path()
        if not site.metrics:
            del pages["/metrics"]
        farewell = None
        if site.page and watched.page is not None:
            page = JobPage(
                watched.page,
                self._loop,
                guard.may_see,
                has_metrics=site.metrics,
            )
            pages, farewell = pages | page.by_path(), page.farewell
        return HttpServer(self._listener, pages, report=self._report, tls=tls, farewell=farewell)


def _admission(security: Security) -> Callable[[Request], str]:
    """Over TLS, the page and metrics need a certificate of the job, with any role."""
    if not isinstance(security, Tls):
        return lambda _: ""
    job = security.job

    def refused(request: Request) -> str:
        expected = missing_identity(request.peer or (), job, "GetStatus")
        if request.peer is None or not expected:
            return ""
        found = ", ".join(request.peer) or "no certificate, or one without names"
        return f"this needs a certificate that names {expected}; found {found}"

    return refused
