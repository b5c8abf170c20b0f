"""The channel of a client: made anew for the next call when the certificates were replaced."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from elastic.rpc.certificates import OwnCertificate, Role
from elastic.rpc.identity import coordinator_identity
from elastic.rpc.newest_certificate import NewestCertificate
from elastic.rpc.security import Report, Security, Tls, on_this_loop, require_protection

Options = Sequence[tuple[str, Any]]


class _Channel:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.grpc = channel
        self.users = 0


class Channels:
    """Opens nothing before the first call. Raises ConfigurationError for an unprotected address."""

    def __init__(self, address: str, security: Security, report: Report, options: Options) -> None:
        require_protection(address, security, report)
        self._address = address
        self._options = options
        self._channel: _Channel | None = None
        self._certificate: NewestCertificate | None = None
        if isinstance(security, Tls):
            self._certificate = NewestCertificate(security, Role.CLIENT, on_this_loop(report))
            self._job = security.job
        self._shown: OwnCertificate | None = None

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """For one call. A channel that another has replaced is closed after its last call.

        Raises ConfigurationError if there is no certificate that can be used.
        """
        newest = await self._look()
        replaced = self._channel
        used = self._showing(newest)
        used.users += 1
        if replaced is not None and replaced is not used and replaced.users == 0:
            await replaced.grpc.close()
        try:
            yield used.grpc
        finally:
            used.users -= 1
            if used is not self._channel and used.users == 0:
                await used.grpc.close()

    async def close(self) -> None:
        """Cancel what is going on."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.grpc.close()

    async def _look(self) -> OwnCertificate | None:
        """The newest certificate. Its files are read beside the loop."""
        if self._certificate is None:
            return None
        return await asyncio.to_thread(self._certificate.get)

    def _showing(self, newest: OwnCertificate | None) -> _Channel:
        if self._channel is None or newest is not self._shown:
            self._channel, self._shown = _Channel(self._open(newest)), newest
        return self._channel

    def _open(self, certificate: OwnCertificate | None) -> grpc.aio.Channel:
        if certificate is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=certificate.contents.ca,
            private_key=certificate.contents.key,
            certificate_chain=certificate.contents.certificate,
        )
        name = coordinator_identity(certificate.dns_names, self._job)
        options = [*self._options, ("grpc.ssl_target_name_override", name)]
        return grpc.aio.secure_channel(self._address, credentials, options=options)
