"""Checks each call before the server's code sees it: the job's identity, and the message size."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from cryptography import x509

from elastic.errors import ElasticError
from elastic.rpc.identity import job_identity, missing_identity
from elastic.rpc.security import Report, Security, Tls

MOST_BYTES = 8 * 2**20
"""The limit of one message of an agent's stream. An empty message in a message has two bytes, and
takes a hundred once it is parsed: the holder of one node's certificate could fill the memory."""
_MOST_BYTES_STORED = 2 * 2**20  # etcd's own default is 1.5 MiB
_MOST_BYTES_ASKED = 64 * 2**10
_STORE_METHODS = frozenset({"Txn", "Range"})


class MessageRefused(ElasticError):
    """A message that is too large or cannot be parsed; `code` is what the peer gets."""

    def __init__(self, text: str, code: grpc.StatusCode) -> None:
        super().__init__(text)
        self.code = code


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every method of the server in the checks, so that none can be forgotten."""

    def __init__(self, security: Security, report: Report) -> None:
        self._expected = job_identity(security.job) if isinstance(security, Tls) else None
        self._job = security.job if isinstance(security, Tls) else ""
        self._report = report

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the method, of whatever kind, in one that reads a stream: gRPC reads and parses the
        message of a unary call before it calls any code, but that of a stream when it is asked."""
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC answers that there is no such method
            return handler
        method = handler_call_details.method
        assert handler.response_streaming or not handler.request_streaming, f"{method}: not guarded"
        behavior = handler.stream_stream or handler.unary_stream or handler.unary_unary

        async def admitted(
            requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]
        ) -> None:
            await self._admit(method, context)
            messages = _parsed(requests, handler.request_deserializer, _most_bytes(method))
            try:
                if handler.request_streaming:
                    await _stream(behavior(messages, context), context)
                elif handler.response_streaming:
                    await _stream(behavior(await _only(messages), context), context)
                else:
                    await context.write(await behavior(await _only(messages), context))
            except MessageRefused as error:
                self._report("message_refused", source=context.peer(), reason=str(error))
                await context.abort(error.code, str(error))

        return grpc.stream_stream_rpc_method_handler(
            admitted, response_serializer=_accepting_bytes(handler.response_serializer)
        )

    async def _admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._expected is None:
            return
        names, called = peer_names(context), method.rpartition("/")[2]
        if not (expected := missing_identity(names, self._job, called)):
            return
        found = ", ".join(names) or "no DNS name"
        of_the_job = expected != self._expected
        self._report(
            "peer_refused", peer=context.peer(), method=called, expected=expected, found=found
        )
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            f"this is the coordinator of job {self._job!r}, {f'and {called} is ' * of_the_job}"
            f"for certificates of {expected}; the one shown names {found}",
        )


def peer_names(context: grpc.aio.ServicerContext[Any, Any]) -> tuple[str, ...]:
    """The DNS entries of the peer's certificate; empty without TLS."""
    return _dns_names(b"".join(context.auth_context().get("x509_pem_cert", ())))


@functools.lru_cache(maxsize=4096)
def _dns_names(certificate: bytes) -> tuple[str, ...]:
    """The DNS entries of a peer's certificate (PEM); empty if it has none, or cannot be read.

    gRPC's own list of them (`peer_dns`) cuts an entry at a NUL, so that
    `digits.job.elastic\\0.evil.example` would count as `digits.job.elastic`.
    """
    try:
        extensions = x509.load_pem_x509_certificate(certificate).extensions
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return ()
    return tuple(names.get_values_for_type(x509.DNSName))


def _accepting_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Pass bytes through: a message to all agents is serialized once."""
    return lambda message: message if isinstance(message, bytes) else serialize(message)


def _most_bytes(method: str) -> int:
    called = method.rpartition("/")[2]
    if called == "Attend":
        return MOST_BYTES
    return _MOST_BYTES_STORED if called in _STORE_METHODS else _MOST_BYTES_ASKED


async def _parsed(
    requests: AsyncIterator[bytes], parse: Callable[[bytes], Any] | None, most_bytes: int
) -> AsyncIterator[Any]:
    """Raises MessageRefused for a bad message: gRPC would only log an exception."""
    async for data in requests:
        if len(data) > most_bytes:
            text = f"a message of {len(data)} bytes; at most {most_bytes} are accepted"
            raise MessageRefused(text, grpc.StatusCode.RESOURCE_EXHAUSTED)
        try:
            message = data if parse is None else parse(data)
        except Exception as error:  # a decoder may raise anything for garbage
            text = f"a message that cannot be read: {error}"
            raise MessageRefused(text, grpc.StatusCode.INVALID_ARGUMENT) from error
        yield message


async def _only(messages: AsyncIterator[Any]) -> Any:
    """The message of a call that has one."""
    async for message in messages:
        return message
    raise MessageRefused("a call without its message", grpc.StatusCode.INVALID_ARGUMENT)


async def _stream(behavior: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Run a method that yields responses, or one that writes them to the context itself."""
    if not isinstance(behavior, AsyncIterator):
        await behavior
        return
    async with contextlib.aclosing(behavior) as responses:  # type: ignore[type-var]
        async for response in responses:
            await context.write(response)
