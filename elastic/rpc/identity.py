"""Decides which job a certificate belongs to and what its holder may do, by its subjectAltName.

DNS:JOB.job.elastic names the job. DNS:ROLE.JOB.job.elastic beside it limits the certificate to that
role; a certificate without such an entry may do everything, and an unknown role may do nothing. If
a job's name is longer than a DNS label, it is cut into several labels. Upper and lower case are the
same, as in every DNS name.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from collections.abc import Iterable

_OURS = "job.elastic"
_LONGEST_LABEL = 63  # RFC 1035, section 2.3.4


class JobRole(enum.Enum):
    """A role that a certificate can be limited to."""

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
    "Check": frozenset(JobRole),  # of grpc.health.v1, like "Watch" below
    # etcd's methods, for a coordinator that serves the job's store (--store memory).
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
    """The name that every certificate of the job has."""
    labels = [job[at : at + _LONGEST_LABEL] for at in range(0, len(job), _LONGEST_LABEL)]
    return f"{'.'.join(labels)}.{_OURS}"


def role_identity(job: str, role: JobRole) -> str:
    """The name that limits a certificate of the job to a role."""
    return f"{role.value}.{job_identity(job)}"


def roles_named(names: Iterable[str], job: str) -> frozenset[JobRole] | None:
    """The roles that a certificate with these names is limited to; None: it has no limit.

    An entry for a role that does not exist is a limit as well, so a slip grants nothing.
    """
    limits = _limits(names, job)
    known = {role.value: role for role in JobRole}
    return frozenset(known[limit] for limit in limits & known.keys()) if limits else None


def unknown_roles(names: Iterable[str], job: str) -> list[str]:
    """The entries of a certificate that name a role that does not exist."""
    unknown = _limits(names, job) - {role.value for role in JobRole}
    return sorted(f"{limit}.{job_identity(job)}" for limit in unknown)


def _limits(names: Iterable[str], job: str) -> frozenset[str]:
    """What stands before the job's identity in names. It is part of another job's name if that one
    was cut into labels."""
    end = f".{job_identity(job)}"
    before = (name.lower().removesuffix(end) for name in names if name.lower().endswith(end))
    return frozenset(b for b in before if any(len(x) < _LONGEST_LABEL for x in b.split(".")))


def registers_only(names: Iterable[str], job: str) -> frozenset[str] | None:
    """The host names in a certificate whose holder may write to a coordinator's store only to
    register its own node. None: it may write everything."""
    roles = roles_named(names, job)
    if roles is None or roles & {JobRole.OPERATOR, JobRole.COORDINATOR}:
        return None
    return frozenset(name.lower() for name in names if not name.lower().endswith(f".{_OURS}"))


def roles_allowed(method: str) -> frozenset[JobRole]:
    return _MAY_CALL.get(method, _OPERATORS)


def missing_identity(names: Iterable[str], job: str, method: str) -> str:
    """The name that a certificate with these names lacks to call a method of the job's coordinator;
    empty: the call is allowed."""
    found = [name.lower() for name in names]
    if job_identity(job) not in found:
        return job_identity(job)
    allowed, roles = roles_allowed(method), roles_named(found, job)
    if roles is None or roles & allowed:
        return ""
    return " or ".join(sorted(role_identity(job, role) for role in allowed))


def coordinator_identity(own_names: Iterable[str], job: str) -> str:
    """The name to expect of the coordinator: with its role, if one's own certificate has a role."""
    if roles_named(own_names, job) is not None:
        return role_identity(job, JobRole.COORDINATOR)
    return job_identity(job)


def start_token_of(secret: str) -> str:
    """The token by which others know an agent's starts; only the agent itself knows the secret."""
    return hashlib.sha256(secret.encode()).hexdigest()


def proves_start(token: str, secret: str) -> bool:
    """Whether an agent may take the place of the one that started with this token.

    Anyone who reads the store knows the token. Those of agents' directories that an earlier version
    made are no digests, and are shorter: they prove nothing.
    """
    is_digest = len(token) == len(start_token_of(""))
    return not is_digest or hmac.compare_digest(start_token_of(secret), token)
