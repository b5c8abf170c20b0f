"""Defines the settings that locate the job's etcd and log in to it, shared by every command."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from elastic.errors import ConfigurationError
from elastic.settings.fields import Naming, Relation, about, flag_of, setting
from elastic.settings.limits import ENDPOINTS, FILE, PEM_FILE, TEXT, one_of


class StoreKind(enum.Enum):
    """What stores the job's state."""

    ETCD = "etcd"
    MEMORY = "memory"
    """The job's only coordinator stores it in its own memory."""


def _certificate_and_key(values: Mapping[str, Any], naming: Naming) -> Iterator[str]:
    given = [name for name, value in values.items() if value is not None]
    if len(given) == 1:
        (missing,) = values.keys() - given
        yield f"{naming.name(given[0])} also needs {naming.name(missing)}"


def _user_and_password(values: Mapping[str, Any], naming: Naming) -> Iterator[str]:
    user, *sources = values
    given = [naming.name(source) for source in sources if values[source] is not None]
    if len(given) == 2:
        yield f"{given[0]} and {given[1]} cannot be used together; remove one"
    elif given and values[user] is None:
        yield f"{given[0]} also needs {naming.name(user)}"
    elif values[user] is not None and not given:
        yield f"{naming.name(user)} also needs {' or '.join(map(naming.name, sources))}"


def _etcd_or_memory(values: Mapping[str, Any], naming: Naming) -> Iterator[str]:
    del naming
    if values["store"] is StoreKind.ETCD and not values["etcd"]:
        yield (
            "etcd is missing: give --etcd on the command line, ELASTIC_ETCD in the environment, or "
            "etcd below [coordinator] or [job] in the file of --config; or give --store memory, "
            "for a job of one coordinator without etcd"
        )


_ETCD = about(
    "Members of the etcd cluster as HOST:PORT or URL, separated by commas; or the one coordinator "
    "of --store memory.",
    ENDPOINTS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSettings:
    """How to reach etcd; the function `etcd_password` returns the password from either source."""

    relations: ClassVar[tuple[Relation, ...]] = (
        Relation(("etcd_cert", "etcd_key"), _certificate_and_key),
        Relation(("etcd_user", "etcd_password_file", "etcd_password"), _user_and_password),
    )

    etcd: tuple[str, ...] = field(metadata=_ETCD)
    etcd_ca: Path | None = setting(
        None,
        "PEM file of the authorities that sign etcd's certificates. If this and the next two are "
        "unset, https:// uses the files of --tls-ca, --tls-cert and --tls-key, or else the "
        "system's authorities.",
        PEM_FILE,
    )
    etcd_cert: Path | None = setting(None, "PEM file of the certificate to show to etcd.", PEM_FILE)
    etcd_key: Path | None = setting(None, "PEM file of its key, without a passphrase.", PEM_FILE)
    etcd_user: str | None = setting(None, "User of etcd.", TEXT)
    etcd_password_file: Path | None = setting(None, "File with that user's password.", FILE)
    etcd_password: str | None = field(
        default=None,
        repr=False,
        metadata=about("That user's password, instead of the file.", TEXT, secret=True),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorStoreSettings(StoreSettings):
    """The same for a coordinator, which uses none of etcd's settings with `--store memory`."""

    relations: ClassVar[tuple[Relation, ...]] = (
        *StoreSettings.relations,
        Relation(("store", "etcd"), _etcd_or_memory),
    )

    etcd: tuple[str, ...] = field(default=(), metadata=_ETCD)
    store: StoreKind = setting(
        StoreKind.ETCD,
        "What keeps the job's state. memory: the job's only coordinator, in its own memory, "
        "without etcd; agents and operators give its address, with the port of --listen, as "
        "--etcd. While it is gone, training goes on, but no other coordinator can replace it.",
        one_of(StoreKind),
    )


def etcd_password(settings: StoreSettings) -> str | None:
    """Return the password, read from its file if there is one, without the newline at the end.

    Raises ConfigurationError, which names the file, if it cannot be read or has no password.
    """
    file = settings.etcd_password_file
    if file is None:
        return settings.etcd_password
    try:
        password = file.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        # The text of a decoding error would show a part of the password.
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise _unusable(file, reason) from None
    if not password:
        raise _unusable(file, "it is empty")
    return password


def _unusable(file: Path, reason: object) -> ConfigurationError:
    return ConfigurationError(
        f"the password file {file} ({flag_of('etcd_password_file')}) cannot be used: {reason}; "
        "expected a file with the password as its only line"
    )
