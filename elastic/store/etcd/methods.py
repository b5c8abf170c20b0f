"""The methods of etcd's API that are called, by their paths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from elastic.store.etcd import v3_pb2 as pb

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ResponseT]):
    """One method: what it takes and answers."""

    name: str
    request: type[RequestT]
    response: type[ResponseT]

    @property
    def path(self) -> str:
        """As it is on the wire."""
        return f"/etcdserverpb.{self.name}"


RANGE = Method("KV/Range", pb.RangeRequest, pb.RangeResponse)
TXN = Method("KV/Txn", pb.TxnRequest, pb.TxnResponse)
LEASE_GRANT = Method("Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE = Method("Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
LEASE_KEEP_ALIVE = Method(
    "Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse
)
WATCH = Method("Watch/Watch", pb.WatchRequest, pb.WatchResponse)
AUTHENTICATE = Method("Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)
STATUS = Method("Maintenance/Status", pb.StatusRequest, pb.StatusResponse)

READS = frozenset(method.name for method in (RANGE, WATCH, STATUS))
