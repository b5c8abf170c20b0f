"""Which job a certificate belongs to: the subjectAltName entry DNS:JOB.job.elastic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_PEER_DNS_NAMES = "peer_dns"  # gRPC's name for the DNS entries alone; no URI, address or mail


def job_identity(job: str) -> str:
    """The name that every certificate of the job bears."""
    return f"{job}.job.elastic"


def peer_names(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """The DNS names in the certificate of gRPC's peer; none without TLS."""
    return tuple(name.decode(errors="replace") for name in auth_context.get(_PEER_DNS_NAMES, ()))
