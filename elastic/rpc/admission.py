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

MOST_BYTES = 40 * 2**20
"""The limit of one message to the coordinator: more than a worker may send to its agent."""


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
        handler = await continuation(handler_call_details)
        if handler is None:  # gRPC answers that there is no such method
            return handler
        method = handler_call_details.method
        serializers = {
            "request_deserializer": _bounded(handler.request_deserializer),
            "response_serializer": _accepting_bytes(handler.response_serializer),
        }
        if handler.request_streaming:
            assert handler.response_streaming, f"{method}: a kind of method that nobody guards"
            attend = self._streaming(method, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(attend, **serializers)
        if handler.response_streaming:
            follow = self._following(method, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(follow, **serializers)
        ask = self._asking(method, handler.unary_unary)
        return grpc.unary_unary_rpc_method_handler(ask, **serializers)

    def _streaming(self, method: str, behavior: Any) -> Any:
        async def admitted(
            requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
        ) -> None:
            await self._admit(method, context)
            try:
                await _stream(behavior(_unwrapped(requests), context), context)
            except MessageRefused as error:
                self._report("message_refused", source=context.peer(), reason=str(error))
                await context.abort(error.code, str(error))

        return admitted

    def _following(self, method: str, behavior: Any) -> Any:
        async def admitted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await self._admit(method, context)
            await self._require_message(request, context)
            await _stream(behavior(request, context), context)

        return admitted

    def _asking(self, method: str, behavior: Any) -> Any:
        async def admitted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            await self._admit(method, context)
            await self._require_message(request, context)
            return await behavior(request, context)

        return admitted

    async def _require_message(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        if isinstance(request, MessageRefused):
            self._report("message_refused", source=context.peer(), reason=str(request))
            await context.abort(request.code, str(request))

    async def _admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if self._expected is None:
            return
        certificate = b"".join(context.auth_context().get("x509_pem_cert", ()))
        names, called = dns_names(certificate), method.rpartition("/")[2]
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


@functools.lru_cache(maxsize=4096)
def dns_names(certificate: bytes) -> tuple[str, ...]:
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


def _bounded(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any]:
    """Return a MessageRefused in place of a bad message: gRPC would only log an exception."""

    def bounded(data: bytes) -> Any:
        if len(data) > MOST_BYTES:
            text = f"a message of {len(data)} bytes; at most {MOST_BYTES} are accepted"
            return MessageRefused(text, grpc.StatusCode.RESOURCE_EXHAUSTED)
        try:
            return data if deserialize is None else deserialize(data)
        except Exception as error:  # noqa: BLE001 - a decoder may raise anything for garbage
            text = f"a message that cannot be read: {error}"
            return MessageRefused(text, grpc.StatusCode.INVALID_ARGUMENT)

    return bounded


async def _stream(behavior: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Run a method that yields responses, or one that writes them to the context itself."""
    if not isinstance(behavior, AsyncIterator):
        await behavior
        return
    async with contextlib.aclosing(behavior) as responses:  # type: ignore[type-var]
        async for response in responses:
            await context.write(response)


async def _unwrapped(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Raises the MessageRefused that stands in place of a bad message."""
    async for request in requests:
        if isinstance(request, MessageRefused):
            raise request
        yield request
