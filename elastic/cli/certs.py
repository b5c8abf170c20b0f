"""`elastic certs`: files of an authority, and of the certificates that it issues for a job."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from elastic.errors import ConfigurationError
from elastic.rpc.authority import Authority, Signed, make_authority
from elastic.rpc.certificates import at
from elastic.rpc.identity import JobRole
from elastic.settings.limits import JOB_NAME, require_host

_AUTHORITY = "ca"
_OURS = "job.elastic"


def init(directory: Path, *, days: int) -> None:
    """Make an authority, and say what comes next. Raises ConfigurationError."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the directory {directory}: {error.strerror}; choose another"
        ) from error
    _require_new(directory, _AUTHORITY, "choose another directory for another authority")
    signed = make_authority("elastic authority", days)
    certificate, key = _write(directory, _AUTHORITY, signed)
    print(f"{certificate}: the authority, for everybody; until {at(signed.not_after.timestamp())}")
    print(f"{key}: its key; it stays here, since its holder can sign for every job")
    print(f"next: elastic certs issue {shlex.quote(str(directory))} --job JOB")


def issue(
    directory: Path,
    *,
    job: str,
    roles: Sequence[JobRole],
    hosts: Sequence[str],
    days: int,
    name: str | None,
) -> None:
    """Sign a certificate of the job with the authority in `directory`, and say how it is used.

    Raises ConfigurationError.
    """
    _check(job, hosts)
    name = name if name is not None else "-".join([job, *(r.value for r in roles), *hosts[:1]])
    if not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9._:]*", name) or name == _AUTHORITY:
        raise ConfigurationError(
            f"--name {name!r} is no name for the files; expected letters, digits, and inner "
            "hyphens, dots and underscores, and not ca"
        )
    authority = _open(directory)
    _require_new(directory, name, "move them away, or choose other names with --name")
    signed = authority.sign(job, roles=list(dict.fromkeys(roles)), hosts=hosts, days=days)
    certificate, key = _write(directory, name, signed)
    may = " and ".join(role.value for role in roles) or "everything"
    print(f"{certificate}: job {job}, {may}; until {at(signed.not_after.timestamp())}")
    print(f"{key}: its key")
    pairs = {"CA": directory / "ca.pem", "CERT": certificate, "KEY": key}
    variables = " ".join(f"ELASTIC_TLS_{n}={shlex.quote(str(p))}" for n, p in pairs.items())
    print(f"next, where it is used, with the paths there: export {variables}")


def _check(job: str, hosts: Sequence[str]) -> None:
    bounds = JOB_NAME.bounds
    if not re.fullmatch(bounds["pattern"].strip("^$"), job) or len(job) > bounds["max_length"]:
        raise ConfigurationError(f"--job {job!r} is not allowed; expected {JOB_NAME.text}")
    for host in hosts:
        require_host(host)
        if host.lower().endswith(_OURS):
            raise ConfigurationError(
                f"--host {host!r} would be a name of a job; give the job with --job, and what the "
                "holder may do with --role"
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
            f"{paths[0]} and {paths[1]} are no authority that can sign: {error}; make another one "
            "with `elastic certs init` in another directory"
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
    """Both files, for this user alone, or none."""
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
            f"cannot write {path}: {error.strerror}; choose another directory, or make room"
        ) from error
    return certificate, key
