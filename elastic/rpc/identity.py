"""Which job a certificate belongs to, and what its holder may do there, by its subjectAltName.

DNS:JOB.job.elastic is the job's. DNS:ROLE.JOB.job.elastic beside it limits the certificate to that
role; one that names no role may do everything. A job's name that is longer than a label of a DNS
name is cut into several.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

_PEER_DNS_NAMES = "peer_dns"  # gRPC's name for the DNS entries alone; no URI, address or mail


_LONGEST_LABEL = 63  # RFC 1035, section 2.3.4


class JobRole(enum.Enum):
    """What a certificate can be limited to."""

    AGENT = "agent"
    COORDINATOR = "coordinator"
    OPERATOR = "operator"
    VIEWER = "viewer"


_WRITERS = frozenset(JobRole) - {JobRole.VIEWER}
_MAY_CALL = {
    "Attend": frozenset({JobRole.AGENT}),
    "GetStatus": frozenset(JobRole),
    "FollowEvents": frozenset(JobRole),
    "GetIncidents": frozenset(JobRole),
    "GetTimeline": frozenset(JobRole),
    "Check": frozenset(JobRole),  # of health, as "Watch" below
    # Of a coordinator that serves the job's store (--store memory): etcd's methods.
    "Range": frozenset(JobRole),
    "Watch": frozenset(JobRole),
    "Status": frozenset(JobRole),
    "Txn": _WRITERS,
    "LeaseGrant": _WRITERS,
    "LeaseRevoke": _WRITERS,
    "LeaseKeepAlive": _WRITERS,
    "Authenticate": _WRITERS,
}
_OPERATORS = frozenset({JobRole.OPERATOR})


def job_identity(job: str) -> str:
    """The name that every certificate of the job bears."""
    labels = [job[at : at + _LONGEST_LABEL] for at in range(0, len(job), _LONGEST_LABEL)]
    return f"{'.'.join(labels)}.job.elastic"


def role_identity(job: str, role: JobRole) -> str:
    """The name that limits a certificate of the job to a role."""
    return f"{role.value}.{job_identity(job)}"


def roles_named(names: Iterable[str], job: str) -> frozenset[JobRole]:
    """The roles that a certificate with these names is limited to; none: it is not."""
    found = frozenset(names)
    return frozenset(role for role in JobRole if role_identity(job, role) in found)


def roles_allowed(method: str) -> frozenset[JobRole]:
    """Who may call a method of the coordinator."""
    return _MAY_CALL.get(method, _OPERATORS)


def missing_identity(names: Iterable[str], job: str, method: str) -> str:
    """What a certificate with these names would have to name for its holder to call a method of the
    job's coordinator; empty: it lets them."""
    found = frozenset(names)
    if job_identity(job) not in found:
        return job_identity(job)
    allowed, roles = roles_allowed(method), roles_named(found, job)
    if not roles or roles & allowed:
        return ""
    return " or ".join(sorted(role_identity(job, role) for role in allowed))


def coordinator_identity(own_names: Iterable[str], job: str) -> str:
    """The name to expect of the coordinator: its role too, where one's own certificate has one."""
    if roles_named(own_names, job):
        return role_identity(job, JobRole.COORDINATOR)
    return job_identity(job)


def peer_names(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The DNS names in the certificate of gRPC's peer; none without TLS."""
    return tuple(name.decode(errors="replace") for name in auth_context.get(_PEER_DNS_NAMES, ()))
