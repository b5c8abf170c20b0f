"""`elastic certs`: makes a certificate authority, and issues certificates that name a job and the
roles of their holders.

Keys are on the curve P-256. The certificates have the extensions that strict verification asks for
(RFC 5280, section 4.2.1): key identifiers, key usage, basic constraints.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elastic.cli.formats import say
from elastic.errors import ConfigurationError
from elastic.rpc.certificates import at
from elastic.rpc.identity import JobRole, job_identity, role_identity
from elastic.settings.limits import JOB_NAME, require_host

_AUTHORITY = "ca"
_OURS = "job.elastic"


def init(directory: Path, *, days: int) -> None:
    """Make an authority, and print what to do next. Raises ConfigurationError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the directory {directory}: {error.strerror}; choose another"
        ) from error
    _require_new(directory, _AUTHORITY, "choose another directory for another authority")
    signed = make_authority("elastic authority", days)
    certificate, key = _write(directory, _AUTHORITY, signed)
    until = at(signed.not_after.timestamp())
    say(f"{certificate}: the authority, for every machine; valid until {until}")
    say(f"{key}: its key; keep it here, because its holder can sign for every job")
    say(f"next: elastic certs issue {shlex.quote(str(directory))} --job JOB")


def issue(
    directory: Path,
    *,
    job: str,
    roles: Sequence[JobRole],
    hosts: Sequence[str],
    days: int,
    name: str | None,
) -> None:
    """Sign a certificate of the job with the authority in `directory`, and print how to use it.

    Raises ConfigurationError.
    """
    _check(job, hosts)
    name = name if name is not None else "-".join([job, *(r.value for r in roles), *hosts[:1]])
    if not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9._:]*", name) or name == _AUTHORITY:
        raise ConfigurationError(
            f"--name {name!r} is not allowed; expected letters, digits, and inner hyphens, dots "
            "and underscores, and not ca"
        )
    authority = _open(directory)
    _require_new(directory, name, "move them away, or choose other names with --name")
    signed = authority.sign(job, roles=list(dict.fromkeys(roles)), hosts=hosts, days=days)
    certificate, key = _write(directory, name, signed)
    may = " and ".join(role.value for role in roles) or "every role"
    say(f"{certificate}: job {job}, {may}; valid until {at(signed.not_after.timestamp())}")
    say(f"{key}: its key")
    pairs = {"CA": directory / "ca.pem", "CERT": certificate, "KEY": key}
    variables = " ".join(f"ELASTIC_TLS_{n}={shlex.quote(str(p))}" for n, p in pairs.items())
    say(f"next, on the machine that uses it, with its paths: export {variables}")


def _check(job: str, hosts: Sequence[str]) -> None:
    bounds = JOB_NAME.bounds
    if not re.fullmatch(bounds["pattern"].strip("^$"), job) or len(job) > bounds["max_length"]:
        raise ConfigurationError(f"--job {job!r} is not allowed; expected {JOB_NAME.text}")
    for host in hosts:
        require_host(host)
        if host.lower().endswith(_OURS):
            raise ConfigurationError(
                f"--host {host!r} would name a job; give the job with --job, and roles with --role"
            )


def _open(directory: Path) -> Authority:
    paths = _paths(directory, _AUTHORITY)
    try:
        certificate, key = (path.read_bytes() for path in paths)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"there is no authority in {directory} ({Path(error.filename).name} is missing); make "
            f"one with: elastic certs init {shlex.quote(str(directory))}"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"the authority in {directory} cannot be read: {error.strerror} ({error.filename})"
        ) from error
    try:
        return Authority(certificate, key)
    except ValueError as error:
        raise ConfigurationError(
            f"{paths[0]} and {paths[1]} are not an authority that can sign: {error}; make another "
            "one with `elastic certs init` in another directory"
        ) from error


def _require_new(directory: Path, name: str, advice: str) -> None:
    found = [str(path) for path in _paths(directory, name) if os.path.lexists(path)]
    if found:
        verb = "exists" if len(found) == 1 else "exist"
        raise ConfigurationError(
            f"{' and '.join(found)} {verb}, and nothing is overwritten; {advice}"
        )


def _paths(directory: Path, name: str) -> tuple[Path, Path]:
    return directory / f"{name}.pem", directory / f"{name}.key"


def _write(directory: Path, name: str, signed: Signed) -> tuple[Path, Path]:
    """Write both files, readable by this user alone, or neither."""
    certificate, key = _paths(directory, name)
    written: list[Path] = []
    try:
        for path, content in ((key, signed.key), (certificate, signed.certificate)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            written.append(path)
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(descriptor, 0o600)
                file.write(content)
                file.flush()
                os.fsync(descriptor)
    except OSError as error:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise ConfigurationError(
            f"cannot write {path}: {error.strerror}; choose another directory, or free some space"
        ) from error
    return certificate, key


_BACKDATED = datetime.timedelta(hours=1)  # clocks of machines differ
_MOST_COMMON_NAME = 64
_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signed:
    """A certificate and its key, both PEM."""

    certificate: bytes
    key: bytes
    not_after: datetime.datetime


def make_authority(name: str, days: int) -> Signed:
    """Make an authority that can sign certificates, but no further authorities."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _named(name)
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    builder = (
        _begun(subject, key.public_key(), _now() + datetime.timedelta(days=days))
        .issuer_name(subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(identifier, critical=False)
    )
    return _signed(builder, by=key, key=key)


class Authority:
    """An existing authority, from its files; it signs certificates."""

    def __init__(self, certificate: bytes, key: bytes) -> None:
        """Raises ValueError if they cannot be read, or are not an authority and its key."""
        self._certificate = x509.load_pem_x509_certificate(certificate)
        try:
            loaded = serialization.load_pem_private_key(key, password=None)
        except TypeError as error:
            raise ValueError("its key has a passphrase") from error
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("its key is not an elliptic-curve key")
        self._key = loaded
        if loaded.public_key() != self._certificate.public_key():
            raise ValueError("the key does not belong to the certificate")
        try:
            found = self._certificate.extensions.get_extension_for_class(x509.BasicConstraints)
            is_authority = found.value.ca
        except x509.ExtensionNotFound:
            is_authority = False
        if not is_authority:
            raise ValueError("the certificate is not a CA certificate")

    def sign(
        self, job: str, *, roles: Collection[JobRole] = (), hosts: Sequence[str] = (), days: int
    ) -> Signed:
        """Make a key and its certificate for the job, limited to `roles` if any are given.

        The certificate does not outlive the authority. Raises ConfigurationError if the authority
        has expired.
        """
        until = self._certificate.not_valid_after_utc
        if until <= _now():
            raise ConfigurationError(
                f"the authority expired at {until:%Y-%m-%d %H:%M:%S} UTC; make another one with "
                "`elastic certs init` in another directory, and copy its ca.pem to every machine"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        identities = [job_identity(job), *(role_identity(job, role) for role in roles)]
        names = [x509.DNSName(identity) for identity in identities]
        public, own = self._certificate.public_key(), key.public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)
        until = min(until, _now() + datetime.timedelta(days=days))
        subject = _named(" ".join([job, *(role.value for role in roles)]))
        authority_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(public)
        own_key = x509.SubjectKeyIdentifier.from_public_key(own)
        alternatives = x509.SubjectAlternativeName([*names, *map(_host_name, hosts)])
        builder = (
            _begun(subject, own, until)
            .issuer_name(self._certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage(_purposes(roles)), critical=False)
            .add_extension(alternatives, critical=False)
            .add_extension(own_key, critical=False)
            .add_extension(authority_key, critical=False)
        )
        return _signed(builder, by=self._key, key=key)


def _purposes(roles: Collection[JobRole]) -> list[x509.ObjectIdentifier]:
    """Only a coordinator is a server; it is also a client of other coordinators."""
    if roles and JobRole.COORDINATOR not in roles:
        return [ExtendedKeyUsageOID.CLIENT_AUTH]
    return [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


def _host_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _begun(
    subject: x509.Name, key: ec.EllipticCurvePublicKey, until: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _BACKDATED)
        .not_valid_after(until)
    )


def _signed(
    builder: x509.CertificateBuilder,
    *,
    by: ec.EllipticCurvePrivateKey,
    key: ec.EllipticCurvePrivateKey,
) -> Signed:
    certificate = builder.sign(by, hashes.SHA256())
    return Signed(
        certificate=certificate.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        not_after=certificate.not_valid_after_utc,
    )


def _usage(*names: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{usage: usage in names for usage in _USAGES})


def _named(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:_MOST_COMMON_NAME])])


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)
