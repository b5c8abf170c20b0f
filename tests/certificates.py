"""Makes an authority for tests, and certificates that it signs, with openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from elastic.settings.tls_files import TlsFiles

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


@dataclass(frozen=True)
class Certificates:
    """`ca.pem`, and NAME.pem with NAME.key for each name, in `directory`."""

    directory: Path

    @property
    def ca(self) -> Path:
        return self.directory / "ca.pem"

    def certificate(self, name: str) -> Path:
        return self.directory / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.directory / f"{name}.key"

    def etcd_flags(self) -> tuple[str, ...]:
        """Mutual TLS with the certificate "server"."""
        return (
            f"--cert-file={self.certificate('server')}",
            f"--key-file={self.key('server')}",
            f"--trusted-ca-file={self.ca}",
            "--client-cert-auth",
        )


def make_certificates(directory: Path, *names: str) -> Certificates:
    """A new authority, and a certificate for 127.0.0.1 for each name."""
    made = Certificates(directory)
    directory.mkdir()
    subject = ("-x509", "-days", "30", "-subj", "/CN=test authority")
    subject += ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 asks for it
    openssl("req", *_NEW_KEY, *subject, "-keyout", _ca_key(made), "-out", made.ca)
    for name in names:
        sign(made, name)
    return made


def sign(
    made: Certificates,
    name: str,
    *,
    days: int = 2,
    names: str = "IP:127.0.0.1,DNS:localhost",
    purpose: str | None = None,
) -> None:
    """Sign another certificate with the same authority, or replace the one of this name.

    days: it is valid for so many; -1: it has expired. names: its subjectAltName entries. purpose:
    its extended key usage, if any.
    """
    request = made.directory / f"{name}.csr"
    subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName={names}"]
    if purpose is not None:
        subject += ["-addext", f"extendedKeyUsage={purpose}"]
    openssl("req", *_NEW_KEY, *subject, "-keyout", made.key(name), "-out", request)
    authority = ("-CA", made.ca, "-CAkey", _ca_key(made), "-CAcreateserial")
    how = ("-days", str(days), "-copy_extensions", "copyall")
    openssl("x509", "-req", "-in", request, *authority, *how, "-out", made.certificate(name))


def sign_for_job(made: Certificates, job: str, *, days: int = 2) -> TlsFiles:
    """A certificate of the job, in files named after it."""
    sign(made, job, days=days, names=f"DNS:{job}.job.elastic")
    return TlsFiles(ca=made.ca, certificate=made.certificate(job), key=made.key(job))


def _ca_key(made: Certificates) -> Path:
    return made.directory / "ca.key"


def openssl(*arguments: str | Path) -> None:
    """Run openssl. Raises AssertionError with its stderr if it fails."""
    command = ["openssl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
