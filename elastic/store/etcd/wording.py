"""What operators read when etcd cannot do what was asked."""

from __future__ import annotations

from collections.abc import Mapping

from elastic.errors import ConfigurationError, ElasticError, TransientError
from elastic.store.etcd.endpoints import Endpoint
from elastic.store.etcd.refusals import Refusal, Refused, Said
from elastic.store.interface import LeaseExists, LeaseLost

_TO_MEND = {
    Refusal.TOKEN: "it wants a user and a password: configure them",
    Refusal.PASSWORD: "the user or the password is wrong",
    Refusal.NO_AUTHENTICATION: (
        "a user is configured, but everybody may do everything there: run `etcdctl auth enable`, "
        "or configure no user"
    ),
    Refusal.PERMISSION: "the user needs a role that may read and write the keys of the job",
    Refusal.CERTIFICATE: "show a certificate of the job, with a role that allows this, if any",
    Refusal.ONE_OF_SEVERAL: "give the address of the job's only coordinator as the only endpoint",
    Refusal.NOT_ETCD: (
        "something else than etcd 3 listens there: correct the endpoint; a coordinator answers as "
        "etcd only with --store memory"
    ),
    Refusal.HANDSHAKE: (
        "check the authority, the certificate and its key, and whether the one that is shown there "
        "names this host (`elastic certs issue --host HOST` for a coordinator with --store memory)"
    ),
}

_NO_SPACE = (
    "nothing can be written until somebody compacts and defragments it (`etcdctl compact`, "
    "`etcdctl defrag`) or raises --quota-backend-bytes, and then clears the alarm "
    "(`etcdctl alarm disarm`)"
)


def unreachable(method: str, total_s: float, said: Mapping[Endpoint, Said]) -> TransientError:
    """No member has answered in time; names each and what it said."""
    within = f"{round(total_s, 1):g} s"  # what is left of a time has many digits
    return TransientError(
        f"etcd did not answer {method} within {within} ({_each(said) or 'nobody was asked'}); "
        "are most of its members running, reachable from here, and is http or https right?"
    )


def handshake_failed(said: Mapping[Endpoint, Said]) -> ConfigurationError:
    """No member's TLS handshake succeeds."""
    return ConfigurationError(f"TLS to etcd fails ({_each(said)}); {_TO_MEND[Refusal.HANDSHAKE]}")


def refusal(method: str, refused: Refused) -> ElasticError:
    """A member answered, but not with what was asked for."""
    kind = refused.said.kind
    text = f"etcd at {refused.by} refused {method}: {refused.said.text}"
    if kind is Refusal.LEASE_UNKNOWN:
        return LeaseLost(f"{text}; it has expired or was revoked")
    if kind is Refusal.LEASE_EXISTS:
        return LeaseExists(text)
    if kind is Refusal.NO_SPACE:
        return TransientError(f"{text} (NOSPACE alarm); {_NO_SPACE}")
    if kind in _TO_MEND:
        return ConfigurationError(f"{text}; {_TO_MEND[kind]}")
    return TransientError(text)


def _each(said: Mapping[Endpoint, Said]) -> str:
    return "; ".join(f"{endpoint}: {each.text}" for endpoint, each in said.items())


def later(error: ElasticError) -> ElasticError:
    """Of a cluster that has answered before: its keepers changed something, and may change it back.

    A running job must outlive that, so nothing is a configuration error any more.
    """
    return TransientError(str(error)) if isinstance(error, ConfigurationError) else error
