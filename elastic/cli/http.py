"""Serves a daemon's page, metrics and health: on which address, and for which clients."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elastic.errors import ConfigurationError, ElasticError
from elastic.rpc.certificates import Role
from elastic.rpc.identity import job_identity
from elastic.rpc.newest_certificate import NewestCertificate
from elastic.rpc.security import Report, Security, Tls, no_report, on_this_loop, stays_here
from elastic.runtime.journal import Journal
from elastic.runtime.listening import address_of, listen_for_http
from elastic.runtime.off_loop import off_loop
from elastic.runtime.process_metrics import Directories, Watched
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
    """Raises ConfigurationError where others could read what nothing protects."""
    if address is None or address == OFF or stays_here(address):
        return
    if not isinstance(security, Tls) and not security.insecure:
        raise ConfigurationError(
            f"{option} {address} is reached from other machines, and there is no "
            "certificate: anyone who reaches the port could read the job's figures; give --tls-ca, "
            "--tls-cert and --tls-key, or --insecure on a network where you trust everybody, or "
            "listen on 127.0.0.1"
        )


def checkpoint_directories(url: str | None, **others: str) -> Directories:
    """The directories of a daemon whose space can be told, by what they are for."""
    if url is not None and "://" not in url:
        others["checkpoints"] = os.path.abspath(url)
    return Directories(others)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Site:
    """What is served at one address, besides health."""

    watched: Watched
    option: str = _PAGE_OPTION
    """That names the address."""
    scrapes: bool = True
    """The metrics are here."""

    @property
    def parts(self) -> str:
        """In words."""
        served = ["page"] * (self.watched.page is not None) + ["metrics"] * self.scrapes
        return f"{', '.join(served)} and health checks" if served else "health checks"


@contextlib.asynccontextmanager
async def watched_over_http(
    watched: Watched,
    address: str | None,
    journal: Journal,
    security: Security,
    *,
    default: str | None = None,
    metrics_address: str | None = None,
    tells_of_certificates: bool = False,
) -> AsyncIterator[str]:
    """Within, it is served, the page at the address that this gives; empty: nowhere.

    default: where, if nothing is wanted; it may be had by another.
    metrics_address: where the metrics are, if not with the page.
    tells_of_certificates: when they are replaced or cannot be used; else gRPC does.

    On a loopback address in plain text; elsewhere with the job's certificates, if it has any.
    Raises ConfigurationError, and TransientError where no name server answers.
    """
    newest: NewestCertificate | None = None
    if isinstance(security, Tls):
        told = on_this_loop(journal.record) if tells_of_certificates else no_report
        newest = NewestCertificate(security, Role.SERVER, told, coordinates=False)
        watched = replace(watched, parts=replace(watched.parts, certificate=newest))
    site, wanted = _Site(watched=watched), address or default
    async with contextlib.AsyncExitStack() as ends:
        if metrics_address not in (None, wanted):
            site = replace(site, scrapes=False)
            metrics = _Site(watched=replace(watched, page=None), option=METRICS_OPTION)
            # First: the page's address may be a default, which it goes without.
            server = await _server(metrics, metrics_address, journal, security, newest)
            await ends.enter_async_context(_running(server, journal))
        server = await _server(site, wanted, journal, security, newest, is_default=address is None)
        yield await ends.enter_async_context(_running(server, journal))


@contextlib.asynccontextmanager
async def _running(server: _Serving | None, journal: Journal) -> AsyncIterator[str]:
    """Within, it serves, at the address that this gives; empty: nowhere."""
    if server is None:
        yield ""
        return
    address = server.address
    try:
        server.start()
    except RuntimeError as error:  # there is no thread to be had
        _go_without(journal, error, server.site)
        address = ""
    try:
        yield address
    finally:
        with contextlib.suppress(RuntimeError):
            await off_loop(server.close)


async def _server(
    site: _Site,
    wanted: str | None,
    journal: Journal,
    security: Security,
    newest: NewestCertificate | None,
    *,
    is_default: bool = False,
) -> _Serving | None:
    """is_default: nobody has asked for this address."""
    if wanted is None or wanted == OFF:
        return None
    require_http_protection(wanted, security, site.option)
    try:
        listener = await listen_for_http(wanted, site.option)
    except (ElasticError, RuntimeError, OSError) as error:
        if not is_default:
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
            "reaches it reads them"
        )
        journal.record("security_warning", message=message)
    at = f"{'https' if secured else 'http'}://{address_of(listener)}"
    journal.record("http_started", address=at, serves=site.parts)
    loop, report = asyncio.get_running_loop(), on_this_loop(journal.record)
    guard = Guard(may_scrape=_admission(security), is_local=stays_here(wanted))
    return _Serving(listener, at, site, loop, guard, report, files, newest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Who may see what; each says why not, empty: one may."""

    may_scrape: Callable[[Request], str]
    is_local: bool
    """Only this machine reaches it."""

    def may_see(self, request: Request) -> str:
        """The page. A site elsewhere could have its own name lead a browser to a loopback address,
        and read what is served there: so that has to be asked for as what it is."""
        if self.is_local and not _is_address(request.host):
            return (
                f"this page is at a loopback address, and was asked for as {request.host!r}: ask "
                "for localhost or 127.0.0.1"
            )
        return self.may_scrape(request)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.lower() in ("localhost", "")
    return True


def _go_without(journal: Journal, error: Exception, site: _Site) -> None:
    message = f"{error}; {site.parts} are not served"
    journal.record("warning", source="http", message=message)


class _Serving:
    """The server's thread, which also imports it: that takes longer than all else of a start."""

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        site: _Site,
        loop: asyncio.AbstractEventLoop,
        guard: Guard,
        report: Report,
        files: TlsFiles | None,
        newest: NewestCertificate | None,
    ) -> None:
        self.address, self.site = address, site
        self._listener, self._loop = listener, loop
        self._guard, self._report = guard, report
        self._files, self._newest = files, newest
        self._lock = threading.Lock()
        self._server: HttpServer | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="elastic-http", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; blocks for a short time at most."""
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
                if self._closed:
                    return
                self._server = server
            server.run()
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
        watched, guard = self.site.watched, self._guard
        pages = WatcherPages(watched, self._loop, guard.may_scrape).by_path()
        if not self.site.scrapes:
            del pages["/metrics"]
        farewell = None
        if watched.page is not None:
            page = JobPage(watched.page, self._loop, guard.may_see, has_metrics=self.site.scrapes)
            pages, farewell = pages | page.by_path(), page.farewell
        return HttpServer(self._listener, pages, report=self._report, tls=tls, farewell=farewell)


def _admission(security: Security) -> Callable[[Request], str]:
    """Over TLS, metrics are for certificates of the job, whatever role they are limited to."""
    if not isinstance(security, Tls):
        return lambda _: ""
    expected = job_identity(security.job)

    def refused(request: Request) -> str:
        if request.peer is None or expected in request.peer:
            return ""
        found = ", ".join(request.peer) or "no certificate, or one that names nothing"
        return f"this is for certificates that name {expected}; shown was {found}"

    return refused
