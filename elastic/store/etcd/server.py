"""Serves a store in memory over etcd's API, as far as EtcdStore calls it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import grpc
import grpc.aio

from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.connection import (
    AUTHENTICATE,
    ENDPOINTS,
    LEASE_GRANT,
    LEASE_KEEP_ALIVE,
    LEASE_REVOKE,
    RANGE,
    STATUS,
    TXN,
    WATCH,
    Method,
    RequestT,
    ResponseT,
)
from elastic.store.etcd.refusals import ONE_ENDPOINT
from elastic.store.interface import Change, Entry, LeaseExists, LeaseLost, WatchCompacted
from elastic.store.memory import MemoryStore

VERSION_PREFIX = "elastic "
"""The start of the version that such a store returns for Status."""

_TO_THE_END = b"\0"  # for etcd, as the end of a range
_LEADER = 1  # a member id; any will do
_MOST_OPERATIONS = 128  # in a transaction, as in etcd: each may return a large value
# Of clients with limited rights, so that one cannot fill the coordinator's memory:
_MOST_REGISTERED = 10_000  # nodes, and leases
_LONGEST_REGISTRATION = 16 * 2**10


class Rights(NamedTuple):
    """What a client with limited rights may write: keys in `folder`, under leases of its own.

    All may be read: nothing in a store is secret. Clients with the same `hosts`, the host names in
    their certificates, count as one.
    """

    folder: str
    hosts: frozenset[str]


class EtcdService:
    """Generic handlers for a gRPC server, which must run on the event loop of the store.

    Supports only the requests of `EtcdStore`: comparisons for equality, one watch per stream, no
    users. But the client's certificate can limit its rights: see `Rights`.
    """

    def __init__(
        self,
        store: MemoryStore,
        *,
        version: str,
        rights_of: Callable[[grpc.aio.ServicerContext[Any, Any]], Rights | None] = lambda _: None,
    ) -> None:
        """rights_of: the rights of a call's client; None: it may do everything."""
        self._store = store
        self._version = f"{VERSION_PREFIX}{version}"
        self._rights_of = rights_of
        self._owners: dict[int, frozenset[str]] = {}
        """The hosts of the client that was granted each lease. Those of the coordinator itself are
        not among them, so no client with limited rights can end its leadership."""

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        methods = {
            **self._unary(RANGE, lambda request, _: self._range(request)),
            **self._unary(TXN, self._transact),
            **self._unary(LEASE_GRANT, self._grant),
            **self._unary(LEASE_REVOKE, self._revoke),
            **self._unary(STATUS, lambda request, _: self._status(request)),
            **self._unary(AUTHENTICATE, lambda request, _: self._authenticate(request)),
            **self._stream(LEASE_KEEP_ALIVE, self._keep_alive),
            **self._stream(WATCH, lambda requests, _: self._watch(requests)),
        }
        services = {path.split("/")[1] for path in methods}
        return [
            grpc.method_handlers_generic_handler(
                service,
                {p.split("/")[2]: m for p, m in methods.items() if p.split("/")[1] == service},
            )
            for service in sorted(services)
        ]

    # ---- keys

    async def _range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        kvs = [_kv(entry) for entry in await self._entries(request)]
        return pb.RangeResponse(header=self._header(), kvs=kvs)

    async def _entries(self, request: pb.RangeRequest) -> Sequence[Entry]:
        span = _Span(request.key, request.range_end)
        if not span.end:
            entry = await self._store.get(_text(span.start))
            return [entry] if entry is not None else []
        return [entry for entry in await self._store.list("") if span.has(entry.key)]

    async def _transact(self, request: pb.TxnRequest, rights: Rights | None) -> pb.TxnResponse:
        asked = (len(request.compare), len(request.success), len(request.failure))
        if max(asked) > _MOST_OPERATIONS:
            raise _Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                "etcdserver: too many operations in txn request",
            )
        holds = all([await self._holds(compare) for compare in request.compare])
        operations = request.success if holds else request.failure
        if rights is not None:
            for operation in operations:
                await self._require_own(operation, rights)
        self._require_leases(operations)
        responses = [await self._operate(operation) for operation in operations]
        return pb.TxnResponse(header=self._header(), succeeded=holds, responses=responses)

    async def _holds(self, compare: pb.Compare) -> bool:
        entry = await self._store.get(_text(compare.key))
        if compare.target == pb.Compare.CREATE:
            return (entry.created if entry else 0) == compare.create_revision
        if compare.target == pb.Compare.MOD:
            return (entry.modified if entry else 0) == compare.mod_revision
        if compare.target == pb.Compare.LEASE:
            return (entry.lease if entry else 0) == compare.lease
        raise _Refused(grpc.StatusCode.UNIMPLEMENTED, "this comparison is not supported")

    async def _require_own(self, operation: pb.RequestOp, rights: Rights) -> None:
        """Allow to write only keys in the client's folder that live as long as a lease of its own,
        and only if they are absent or already do."""
        kind = operation.WhichOneof("request")
        if kind == "request_range":
            return
        key = _text(getattr(operation, kind).key) if kind is not None else ""
        entry = await self._store.get(key)
        if (
            kind != "request_put"
            or not key.startswith(rights.folder)
            or not self._is_own(operation.request_put.lease, rights)
            or (entry is not None and not self._is_own(entry.lease, rights))
        ):
            raise _Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"{key!r} is for certificates of coordinators and operators; this one may only "
                f"register its own node in {rights.folder}",
            )
        put = operation.request_put
        is_long = len(put.key) + len(put.value) > _LONGEST_REGISTRATION
        if is_long or (
            entry is None
            and len((await self._store.list(rights.folder)).entries) >= _MOST_REGISTERED
        ):
            raise _Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{rights.folder} has room for {_MOST_REGISTERED} nodes of "
                f"{_LONGEST_REGISTRATION} bytes",
            )

    def _is_own(self, lease: int, rights: Rights | None) -> bool:
        """Whether the client may use the lease: a lease of a client without hosts is anyone's."""
        return rights is None or self._owners.get(lease) in (frozenset(), rights.hosts)

    def _require_own_lease(self, lease: int, rights: Rights | None) -> None:
        if self._store.has_lease(lease) and not self._is_own(lease, rights):
            raise _Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"lease {lease} is for certificates of those who were granted it",
            )

    def _require_leases(self, operations: Iterable[pb.RequestOp]) -> None:
        """Check leases before the first write, so that all operations happen or none."""
        for operation in operations:
            lease = operation.request_put.lease
            if lease and not self._store.has_lease(lease):
                raise LeaseLost(f"lease {lease}")

    async def _operate(self, operation: pb.RequestOp) -> pb.ResponseOp:
        kind = operation.WhichOneof("request")
        if kind == "request_range":
            return pb.ResponseOp(response_range=await self._range(operation.request_range))
        if kind == "request_put":
            put = operation.request_put
            await self._store.put(_text(put.key), put.value, lease=put.lease)
            return pb.ResponseOp(response_put=pb.PutResponse(header=self._header()))
        if kind == "request_delete_range":
            deleted = await self._store.delete(_text(operation.request_delete_range.key))
            response = pb.DeleteRangeResponse(header=self._header(), deleted=int(deleted))
            return pb.ResponseOp(response_delete_range=response)
        raise _Refused(
            grpc.StatusCode.UNIMPLEMENTED, "this operation is not supported in a transaction"
        )

    # ---- leases

    async def _grant(
        self, request: pb.LeaseGrantRequest, rights: Rights | None
    ) -> pb.LeaseGrantResponse:
        if request.ttl <= 0:
            raise _Refused(grpc.StatusCode.OUT_OF_RANGE, "the TTL of a lease must be at least 1 s")
        self._owners = {k: hosts for k, hosts in self._owners.items() if self._store.has_lease(k)}
        if rights is not None and len(self._owners) >= _MOST_REGISTERED:
            raise _Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "there are too many leases")
        lease = await self._store.grant(float(request.ttl), name=request.id)
        self._owners[lease] = rights.hosts if rights is not None else frozenset()
        return pb.LeaseGrantResponse(header=self._header(), id=lease, ttl=request.ttl)

    async def _revoke(
        self, request: pb.LeaseRevokeRequest, rights: Rights | None
    ) -> pb.LeaseRevokeResponse:
        self._require_own_lease(request.id, rights)
        if not self._store.has_lease(request.id):
            raise LeaseLost(f"lease {request.id}")
        await self._store.revoke(request.id)
        return pb.LeaseRevokeResponse(header=self._header())

    async def _keep_alive(
        self, requests: AsyncIterator[pb.LeaseKeepAliveRequest], rights: Rights | None
    ) -> AsyncIterator[pb.LeaseKeepAliveResponse]:
        async for request in requests:
            self._require_own_lease(request.id, rights)
            ttl = 1  # clients only look whether it is positive
            try:
                await self._store.renew(request.id)
            except LeaseLost:
                ttl = 0
            yield pb.LeaseKeepAliveResponse(header=self._header(), id=request.id, ttl=ttl)

    # ---- watches

    async def _watch(
        self, requests: AsyncIterator[pb.WatchRequest]
    ) -> AsyncIterator[pb.WatchResponse]:
        """Serve the watch of the first request; each later request asks for its progress.

        A client that does not read lags until the changes that it lacks are compacted.
        """
        first = await anext(requests, None)
        if first is None or not first.HasField("create_request"):
            raise _Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the first request of a stream must create a watch",
            )
        asked = first.create_request
        span = _Span(asked.key, asked.range_end)
        start = asked.start_revision or self._store.revision + 1
        yield pb.WatchResponse(header=self._header(), created=True)
        changes = self._store.watch("", after=start - 1)
        change = asyncio.ensure_future(anext(changes))
        request = asyncio.ensure_future(anext(requests, None))
        try:
            while True:
                await asyncio.wait({change, request}, return_when=asyncio.FIRST_COMPLETED)
                if request.done():
                    if (message := request.result()) is None:
                        return
                    if message.HasField("create_request"):
                        raise _Refused(
                            grpc.StatusCode.UNIMPLEMENTED, "a stream can have only one watch"
                        )
                    request = asyncio.ensure_future(anext(requests, None))
                    yield pb.WatchResponse(header=self._header())
                if change.done():
                    happened = change.result()
                    change = asyncio.ensure_future(anext(changes))
                    if span.has(happened.key):
                        yield pb.WatchResponse(header=self._header(), events=[_event(happened)])
        except WatchCompacted as error:
            yield pb.WatchResponse(
                header=self._header(),
                canceled=True,
                compact_revision=error.revision,
                cancel_reason=str(error),
            )
        finally:
            for waiting in (change, request):
                waiting.cancel()
            await asyncio.gather(change, request, return_exceptions=True)
            await changes.aclose()

    # ---- the rest

    async def _status(self, request: pb.StatusRequest) -> pb.StatusResponse:
        del request
        return pb.StatusResponse(header=self._header(), version=self._version, leader=_LEADER)

    async def _authenticate(self, request: pb.AuthenticateRequest) -> pb.AuthenticateResponse:
        del request
        raise _Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            "authentication is not enabled: a store in a coordinator's memory has no users, the "
            "job's certificates protect it",
        )

    def _header(self) -> pb.Header:
        return pb.Header(revision=self._store.revision)

    def _unary(
        self,
        method: Method[RequestT, ResponseT],
        answer: Callable[[RequestT, Rights | None], Awaitable[ResponseT]],
    ) -> dict[str, grpc.RpcMethodHandler]:
        async def served(
            request: RequestT, context: grpc.aio.ServicerContext[Any, Any]
        ) -> ResponseT:
            try:
                _require_no_others(context)
                return await answer(request, self._rights_of(context))
            except (_Refused, LeaseLost, LeaseExists) as error:
                await context.abort(*_status_of(error))
            raise AssertionError("abort raises")

        handler = grpc.unary_unary_rpc_method_handler(
            served,
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
        return {method.path: handler}

    def _stream(
        self,
        method: Method[RequestT, ResponseT],
        answer: Callable[[AsyncIterator[RequestT], Rights | None], AsyncIterator[ResponseT]],
    ) -> dict[str, grpc.RpcMethodHandler]:
        async def served(
            requests: AsyncIterator[RequestT], context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[ResponseT]:
            try:
                _require_no_others(context)
                async for response in answer(requests, self._rights_of(context)):
                    yield response
            except _Refused as error:
                await context.abort(*_status_of(error))

        handler = grpc.stream_stream_rpc_method_handler(
            served,
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
        return {method.path: handler}


class _Span(NamedTuple):
    """The keys from `start` to before `end`, or only the key `start` if `end` is empty."""

    start: bytes
    end: bytes

    def has(self, key: str) -> bool:
        name = key.encode()
        if not self.end:
            return name == self.start
        return name >= self.start and (self.end == _TO_THE_END or name < self.end)


class _Refused(Exception):
    """A refusal with its gRPC status code."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


def _status_of(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The status for an error, in etcd's words if it has some, since clients know those."""
    if isinstance(error, _Refused):
        return error.code, str(error)
    if isinstance(error, LeaseExists):
        return grpc.StatusCode.FAILED_PRECONDITION, "etcdserver: lease already exists"
    return grpc.StatusCode.NOT_FOUND, "etcdserver: requested lease not found"


def _require_no_others(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Refuse a client with several endpoints: two coordinators, each with its own store, would each
    lead a group."""
    for name, value in context.invocation_metadata() or ():
        if name == ENDPOINTS and value != "1":
            raise _Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this store must be the only endpoint, since {ONE_ENDPOINT} (--store memory)",
            )


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise _Refused(grpc.StatusCode.INVALID_ARGUMENT, f"a key must be UTF-8: {error}") from error


def _kv(entry: Entry) -> pb.KeyValue:
    return pb.KeyValue(
        key=entry.key.encode(),
        value=entry.value,
        create_revision=entry.created,
        mod_revision=entry.modified,
        lease=entry.lease,
    )


def _event(change: Change) -> pb.Event:
    if change.entry is not None:
        return pb.Event(type=pb.Event.PUT, kv=_kv(change.entry))
    gone = pb.KeyValue(key=change.key.encode(), mod_revision=change.revision)
    return pb.Event(type=pb.Event.DELETE, kv=gone)
