"""Finds out why a connection to the coordinator fails, and whether a server takes connections, by
a connection with the `ssl` module.

gRPC says "Socket closed" for most problems with certificates. The probe speaks no HTTP/2: it looks
at how the handshake ends, and whether the server then sends anything.
"""

from __future__ import annotations

import asyncio
import ssl

from elastic.errors import ConfigurationError
from elastic.rpc.certificates import Role, load_certificate, verification_problem
from elastic.rpc.identity import coordinator_identity, job_identity
from elastic.rpc.security import Security, Tls, is_unix_socket
from elastic.timeouts import timeout

_HANDSHAKE_S = 3.0
_FIRST_WORD_S = 1.0  # an HTTP/2 server speaks at once
_SERVED_WITHIN_S = 5.0


async def explain(address: str, security: Security) -> str:
    """What the operator must repair; empty: the next attempt may succeed."""
    if isinstance(security, Tls):
        return await _explain_tls(address, security)
    return await _explain_plain_text(address)


async def is_served(address: str, security: Security) -> bool:
    """Whether this process's server at `address` takes connections: it sends something, or closes.
    True also if this process cannot try, because it has no descriptor left."""
    context, name = None, ""
    if isinstance(security, Tls):
        try:
            context, name = _context(security), _expected(security)
        except (OSError, ValueError):
            return True  # the files are being replaced
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with timeout(_SERVED_WITHIN_S):
            reader, writer = await _connect(address, context, name)
            try:
                await reader.read(1)
            finally:
                writer.close()
    except asyncio.TimeoutError:
        return False
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError)
    return True


async def _explain_tls(address: str, tls: Tls) -> str:
    try:
        context = _context(tls)
    except (OSError, ValueError):
        return ""  # the files are being replaced; loading them reports what is wrong
    try:
        name = _expected(tls)
        async with timeout(_HANDSHAKE_S):
            reader, writer = await _connect(address, context, name)
    except ssl.SSLCertVerificationError as error:
        return f"the coordinator's certificate is refused: {error.verify_message}; " + _advice(
            error.verify_message, tls
        )
    except ssl.SSLError as error:
        return f"the server there does not speak matching TLS ({error.reason}); " + (
            "is it the coordinator, and was it started with --tls-ca, --tls-cert and --tls-key?"
        )
    except (OSError, asyncio.TimeoutError):
        return ""
    try:
        async with timeout(_FIRST_WORD_S):
            heard = await reader.read(1)
    except asyncio.TimeoutError:
        return ""
    except OSError:
        heard = b""
    finally:
        writer.close()
    return "" if heard else _not_accepted(tls)


async def _explain_plain_text(address: str) -> str:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with timeout(_HANDSHAKE_S):
            _, writer = await _connect(address, context, "elastic")
    except (OSError, asyncio.TimeoutError):
        return ""
    writer.close()
    return "the coordinator expects TLS: give --tls-ca, --tls-cert and --tls-key"


def _context(tls: Tls) -> ssl.SSLContext:
    files = tls.files
    context = ssl.create_default_context(cafile=files.ca)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # Python 3.13's default, but not gRPC's
    assert files.certificate is not None
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["h2"])  # without it gRPC refuses
    return context


async def _connect(
    address: str, context: ssl.SSLContext | None, name: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if is_unix_socket(address):
        path = address.partition(":")[2]
        return await asyncio.open_unix_connection(path, ssl=context, server_hostname=name or None)
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(
        host.strip("[]"), int(port), ssl=context, server_hostname=name or None
    )


def _advice(why: str, tls: Tls) -> str:
    if "expired" in why or "not yet valid" in why:
        return "replace it there, or set the clock here"
    if "mismatch" in why:
        expected = _expected(tls)
        if expected != job_identity(tls.job):
            return (
                f"expected one for {expected}, since {tls.files.certificate} has a role: give the "
                "coordinator one that was issued with --role coordinator"
            )
        return f"expected one for {expected}; is this the address of another job's coordinator?"
    return f"expected one signed by an authority in {tls.files.ca}"


def _expected(tls: Tls) -> str:
    """The name that the coordinator's certificate must have."""
    try:
        own = load_certificate(tls.files, tls.job, Role.CLIENT).dns_names
    except ConfigurationError:  # loading it reports this
        own = ()
    return coordinator_identity(own, tls.job)


def _not_accepted(tls: Tls) -> str:
    """The text for a server that closed after the handshake: it refused the certificate."""
    problem = verification_problem(tls.files, Role.CLIENT)
    hint = f" (checked with {tls.files.ca}: {problem})" if problem else ""
    return (
        f"the coordinator does not accept the certificate {tls.files.certificate}{hint}; "
        "expected one that is valid by the coordinator's clock and signed by an authority in the "
        "coordinator's --tls-ca"
    )
