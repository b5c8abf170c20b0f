"""Classifies members' refusals by what can be done about them, and words the operators' errors."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from elastic.errors import ConfigurationError, ElasticError, TransientError
from elastic.store.etcd.endpoints import Endpoint
from elastic.store.interface import LeaseExists, LeaseLost


class Refusal(enum.Enum):
    """The kind of a refusal, which says what can be done about it."""

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
    """The endpoint is a coordinator, which serves only certificates of its job."""
    ONE_OF_SEVERAL = enum.auto()
    """The endpoint is a coordinator, which must be the only endpoint."""
    NOT_ETCD = enum.auto()
    NO_SPACE = enum.auto()
    LEASE_UNKNOWN = enum.auto()
    LEASE_EXISTS = enum.auto()
    OTHER = enum.auto()


ANOTHER_MAY_ANSWER = frozenset({Refusal.UNREACHABLE, Refusal.HANDSHAKE})

ONE_ENDPOINT = "it is in one coordinator's memory"
"""Words by which a store in memory refuses a client that has other endpoints."""

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
class RefusalReason:
    """A refusal: its kind, and the member's own words."""

    kind: Refusal
    text: str


NO_ANSWER = RefusalReason(Refusal.UNREACHABLE, "no answer in time")


class Refused(Exception):
    """A member's refusal; never leaves this package.

    Raise it outside of `except`: an exception that holds gRPC's own one also holds the frames of
    the call, and a channel then keeps connecting long after it was closed.
    """

    def __init__(self, reason: RefusalReason) -> None:
        super().__init__(reason.text)
        self.reason = reason
        self.by: Endpoint | None = None


def reason_of_status(code: grpc.StatusCode, details: str | None) -> RefusalReason:
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return NO_ANSWER
    text = details or code.name
    return RefusalReason(_kind(code, text), _shortened(text))


def _kind(code: grpc.StatusCode, text: str) -> Refusal:
    for fragment, kind in _BY_TEXT:
        if fragment in text:
            return kind
    return _BY_CODE.get(code, Refusal.OTHER)


def _shortened(text: str) -> str:
    """Remove what gRPC puts around the text: an introduction, the address again, an "OK"."""
    text = text.rpartition("last error: ")[2].removesuffix(": OK")
    return re.sub(r"^([A-Z_]+: )?ip(v4|v6):\S+: ", "", text)


_TO_MEND = {
    Refusal.TOKEN: "it requires a user and a password: give --etcd-user and --etcd-password-file",
    Refusal.PASSWORD: "the user or the password is wrong",
    Refusal.NO_AUTHENTICATION: (
        "a user is configured, but authentication is off there: run `etcdctl auth enable`, or "
        "configure no user"
    ),
    Refusal.PERMISSION: "the user needs a role that may read and write the keys of the job",
    Refusal.CERTIFICATE: "use a certificate of the job; if it has roles, one must allow this",
    Refusal.ONE_OF_SEVERAL: "give the address of the job's only coordinator as the only endpoint",
    Refusal.NOT_ETCD: (
        "something other than etcd 3 listens there: correct the endpoint; a coordinator answers as "
        "etcd only with --store memory"
    ),
    Refusal.HANDSHAKE: (
        "check the authority, the certificate and its key, and whether the server's certificate "
        "names its host (`elastic certs issue --host HOST` for a coordinator with --store memory)"
    ),
}

_NO_SPACE = (
    "etcd refuses writes until you compact and defragment it (`etcdctl compact`, "
    "`etcdctl defrag`) or raise --quota-backend-bytes, and then clear the alarm "
    "(`etcdctl alarm disarm`); start it with --auto-compaction-retention=1h, so that it does not "
    "keep every version of every key"
)


def unreachable(
    method: str, total_s: float, reasons: Mapping[Endpoint, RefusalReason]
) -> TransientError:
    """The error if no member has answered in time; names each and what it said."""
    within = f"{round(total_s, 1):g} s"  # the rest of a timeout has many digits
    return TransientError(
        f"etcd did not answer {method} within {within} "
        f"({_each(reasons) or 'no member was asked'}); "
        "check that most of its members run and can be reached from here, and that http or https "
        "is right"
    )


def handshake_failed(reasons: Mapping[Endpoint, RefusalReason]) -> ConfigurationError:
    """The error if no member's TLS handshake succeeds."""
    return ConfigurationError(
        f"TLS to etcd fails ({_each(reasons)}); {_TO_MEND[Refusal.HANDSHAKE]}"
    )


def refusal(method: str, refused: Refused) -> ElasticError:
    """The error for a member's refusal; its class says what the caller can do."""
    kind = refused.reason.kind
    text = f"etcd at {refused.by} refused {method}: {refused.reason.text}"
    if kind is Refusal.LEASE_UNKNOWN:
        return LeaseLost(f"{text}; it has expired or was revoked")
    if kind is Refusal.LEASE_EXISTS:
        return LeaseExists(text)
    if kind is Refusal.NO_SPACE:
        return TransientError(f"{text} (NOSPACE alarm); {_NO_SPACE}")
    if kind in _TO_MEND:
        return ConfigurationError(f"{text}; {_TO_MEND[kind]}")
    return TransientError(text)


def _each(reasons: Mapping[Endpoint, RefusalReason]) -> str:
    return "; ".join(f"{endpoint}: {reason.text}" for endpoint, reason in reasons.items())


def as_transient(error: ElasticError) -> ElasticError:
    """The error if the cluster has answered before: its operators changed something, and may change
    it back. A running job must outlive that, so a ConfigurationError becomes a TransientError.
    """
    return TransientError(str(error)) if isinstance(error, ConfigurationError) else error
