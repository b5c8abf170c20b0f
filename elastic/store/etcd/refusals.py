"""What a member said instead of an answer, sorted by what can be done about it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import grpc

from elastic.store.etcd.endpoints import Endpoint


class Refusal(enum.Enum):
    """What can be done about it."""

    UNREACHABLE = enum.auto()
    """Ask another member, or this one again."""
    HANDSHAKE = enum.auto()
    """The certificates do not fit; perhaps another member's do."""
    TOKEN = enum.auto()
    """Authenticate, and ask again."""
    PASSWORD = enum.auto()
    NO_AUTHENTICATION = enum.auto()
    PERMISSION = enum.auto()
    CERTIFICATE = enum.auto()
    """A coordinator's, whose store is for certificates of its job."""
    ONE_OF_SEVERAL = enum.auto()
    """A coordinator's, of which there can be one."""
    NOT_ETCD = enum.auto()
    NO_SPACE = enum.auto()
    LEASE_UNKNOWN = enum.auto()
    LEASE_EXISTS = enum.auto()
    OTHER = enum.auto()


ANOTHER_MAY_ANSWER = frozenset({Refusal.UNREACHABLE, Refusal.HANDSHAKE})

ONE_ENDPOINT = "it is in one coordinator's memory"
"""Words in a store's refusal that mean: ask another member."""

# etcd: api/v3rpc/rpctypes/error.go. One text comes with several codes, by version and by method.
_BY_TEXT = (
    ("invalid auth token", Refusal.TOKEN),
    ("revision of auth store is old", Refusal.TOKEN),
    ("user name is empty", Refusal.TOKEN),
    ("invalid user ID or password", Refusal.PASSWORD),
    ("authentication is not enabled", Refusal.NO_AUTHENTICATION),
    ("permission denied", Refusal.PERMISSION),
    ("database space exceeded", Refusal.NO_SPACE),
    ("requested lease not found", Refusal.LEASE_UNKNOWN),
    ("lease already exists", Refusal.LEASE_EXISTS),
    ("too many requests", Refusal.UNREACHABLE),
    ("for certificates of", Refusal.CERTIFICATE),  # elastic/rpc/admission.py
    (ONE_ENDPOINT, Refusal.ONE_OF_SEVERAL),
    ("SSL_ERROR_SSL", Refusal.HANDSHAKE),
    ("CERTIFICATE_VERIFY_FAILED", Refusal.HANDSHAKE),
    ("Peer name", Refusal.HANDSHAKE),  # gRPC: the certificate is for another host
    ("Hostname Verification", Refusal.HANDSHAKE),  # the same in newer ones
)

_BY_CODE = {
    grpc.StatusCode.UNAVAILABLE: Refusal.UNREACHABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: Refusal.UNREACHABLE,
    grpc.StatusCode.CANCELLED: Refusal.UNREACHABLE,
    grpc.StatusCode.ABORTED: Refusal.UNREACHABLE,
    grpc.StatusCode.INTERNAL: Refusal.UNREACHABLE,
    grpc.StatusCode.UNKNOWN: Refusal.UNREACHABLE,
    grpc.StatusCode.UNAUTHENTICATED: Refusal.TOKEN,
    grpc.StatusCode.UNIMPLEMENTED: Refusal.NOT_ETCD,
}


@dataclass(frozen=True, slots=True)
class Said:
    """The refusal in the member's own words."""

    kind: Refusal
    text: str


NO_ANSWER = Said(Refusal.UNREACHABLE, "no answer in time")


class Refused(Exception):
    """A member's refusal; never leaves this package.

    Raised outside of `except`: an exception that keeps gRPC's own, and with it the frames of the
    call, keeps a channel connecting long after it was closed.
    """

    def __init__(self, said: Said) -> None:
        super().__init__(said.text)
        self.said = said
        self.by: Endpoint | None = None


def status_said(code: grpc.StatusCode, details: str | None) -> Said:
    """What this status means."""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return NO_ANSWER
    text = details or code.name
    return Said(_kind(code, text), _shortened(text))


def _kind(code: grpc.StatusCode, text: str) -> Refusal:
    for fragment, kind in _BY_TEXT:
        if fragment in text:
            return kind
    return _BY_CODE.get(code, Refusal.OTHER)


def _shortened(text: str) -> str:
    """Without what gRPC puts around it: its introduction, the address again, an "OK"."""
    text = text.rpartition("last error: ")[2].removesuffix(": OK")
    return re.sub(r"^([A-Z_]+: )?ip(v4|v6):\S+: ", "", text)
