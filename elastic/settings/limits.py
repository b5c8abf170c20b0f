"""Defines the limits of values: each as a phrase for people and as a check."""

from __future__ import annotations

import enum
import ipaddress
import re
import shlex
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from elastic.errors import ConfigurationError
from elastic.settings.fields import Limits

JOB_NAME_MAX_LENGTH = 200
NODE_NAME_MAX_LENGTH = 253
RUN_NAME_MAX_LENGTH = 253
EVERY_INTERFACE = "[::]"
"""The host to listen at for every interface, IPv4 included."""
MAX_COUNT = 2**31 - 1
"""The largest count: the fields of messages hold no more."""
MAX_SECONDS = 1_000_000_000
"""Thirty years: threads and sockets cannot wait for much longer."""
SHORTEST_LEASE_S = 2
"""etcd grants no shorter lease with its default election timeout."""

_AT_MOST, _AT_MOST_S = f", at most {MAX_COUNT}", f", at most {MAX_SECONDS}"
_FINITE_S = {"le": MAX_SECONDS, "allow_inf_nan": False}
_HOST = r"(\[[^\s\[\]]+\]|[^\s:/\[\],@?#]+)"
_HOST_AND_PORT = re.compile(rf"{_HOST}:([0-9]{{1,5}})")
_ENDPOINT = re.compile(rf"(?:https?://)?{_HOST}(?::([0-9]{{1,5}}))?/?")
_NAME = r"[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?"
_HOST_NAME = re.compile(_NAME)
_MOST_PORT = 65535
_PORT_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_COUNT_OR_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]i?B)?", re.IGNORECASE)
_BYTES = {
    **{unit: 1000 ** (n + 1) for n, unit in enumerate(("KB", "MB", "GB", "TB"))},
    **{unit: 1024 ** (n + 1) for n, unit in enumerate(("KIB", "MIB", "GIB", "TIB"))},
}
_NODE_RANGE = re.compile(r"([0-9]+)(?::([0-9]+))?")


class NodeRange(NamedTuple):
    """How many nodes a job may have, written like torchrun's `--nnodes`: "N" or "MIN:MAX"."""

    minimum: int
    maximum: int

    def __str__(self) -> str:
        return f"{self.minimum}:{self.maximum}"


class PortRange(NamedTuple):
    """A range of TCP ports, both ends included, written as FIRST-LAST."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    @property
    def size(self) -> int:
        return self.last - self.first + 1


class KeptLogs(NamedTuple):
    """How many runs' logs to keep, and how many bytes in all; None: no limit."""

    runs: int | None = None
    size_bytes: int | None = None
    text: str = ""
    """The value as the user wrote it."""

    def __str__(self) -> str:
        return self.text


def integer(at_least: int) -> Limits:
    return Limits(
        f"a whole number, at least {at_least}{_AT_MOST}", {"ge": at_least, "le": MAX_COUNT}
    )


def number(at_least: int) -> Limits:
    return Limits(
        f"a number, at least {at_least}{_AT_MOST}",
        {"ge": at_least, "le": MAX_COUNT, "allow_inf_nan": False},
    )


def one_of(choices: type[enum.Enum]) -> Limits:
    return Limits("one of " + ", ".join(choice.value for choice in choices))


def port_of(address: str) -> str:
    """Return the port of HOST:PORT; empty for a host alone."""
    match = _HOST_AND_PORT.fullmatch(address)
    return match[2] if match else ""


def is_wildcard(address: str) -> bool:
    """Return whether HOST of HOST:PORT means every address: others cannot connect to it."""
    found = _ip_address(address.rpartition(":")[0].strip("[]"))
    return found is not None and found.is_unspecified


def _check_address(value: str) -> str:
    match = _HOST_AND_PORT.fullmatch(value)
    if not match or int(match[2]) > 65535:
        raise ValueError
    return value


def _check_listening(value: str) -> str:
    return _check_address(f"{EVERY_INTERFACE}{value}" if value.startswith(":") else value)


def is_address(value: str) -> bool:
    try:
        return bool(_check_address(value))
    except ValueError:
        return False


def _check_reachable(value: str) -> str:
    """Check HOST or HOST:PORT."""
    with_port = value if _HOST_AND_PORT.fullmatch(value) else f"{value}:1"
    if is_wildcard(_check_address(with_port)) or int(with_port.rpartition(":")[2]) == 0:
        raise ValueError
    return value


def _check_host(value: str) -> str:
    """Check a name or an address as sockets take it: IPv6 without brackets."""
    address = _ip_address(value)
    if not _HOST_NAME.fullmatch(value) if address is None else address.is_unspecified:
        raise ValueError
    return value


def _ip_address(value: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(value)
    except ValueError:
        return None


def _check_endpoint(value: str) -> str:
    match = _ENDPOINT.fullmatch(value)
    if not match or int(match[2] or 0) > 65535:
        raise ValueError
    return value


def _parse_node_range(value: object) -> NodeRange:
    if isinstance(value, NodeRange):
        return value
    match = _NODE_RANGE.fullmatch(str(value))
    if not match:
        raise ValueError
    minimum = int(match[1])
    nodes = NodeRange(minimum, int(match[2]) if match[2] else minimum)
    if not 1 <= nodes.minimum <= nodes.maximum:
        raise ValueError
    return nodes


def _parse_port_range(value: object) -> PortRange:
    if isinstance(value, PortRange):
        return value
    match = _PORT_RANGE.fullmatch(str(value))
    if not match:
        raise ValueError
    ports = PortRange(int(match[1]), int(match[2]))
    if not 1 <= ports.first <= ports.last <= _MOST_PORT:
        raise ValueError
    return ports


def _parse_kept_logs(value: object) -> KeptLogs:
    if isinstance(value, KeptLogs):
        return value
    runs = size_bytes = None
    for part in str(value).split(","):
        match = _COUNT_OR_SIZE.fullmatch(part.strip())
        if not match:
            raise ValueError
        if match[2] is None and "." not in match[1] and runs is None:
            runs = int(match[1])
        elif match[2] is not None and size_bytes is None:
            size_bytes = int(float(match[1]) * _BYTES[match[2].upper()])
        else:
            raise ValueError
    if 0 in (runs, size_bytes) or max(runs or 0, (size_bytes or 0) >> 30) > MAX_COUNT:
        raise ValueError
    return KeptLogs(runs, size_bytes, str(value))


def _split_commas(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


def _split_words(value: object) -> object:
    return shlex.split(value) if isinstance(value, str) else value


def _several(item: Any, split: Any) -> Any:
    """Return the type of a non-empty tuple that is written as one text or as a TOML array."""
    return Annotated[tuple[item, ...], BeforeValidator(split), Field(min_length=1)]


_TEXT = Annotated[str, Field(min_length=1)]

DURATION = Limits(f"a number of seconds above 0{_AT_MOST_S}", {"gt": 0, **_FINITE_S})
DURATION_OR_ZERO = Limits(f"a number of seconds, at least 0{_AT_MOST_S}", {"ge": 0, **_FINITE_S})
LEASE = Limits(
    f"a number of seconds, at least {SHORTEST_LEASE_S}{_AT_MOST_S}",
    {"ge": SHORTEST_LEASE_S, **_FINITE_S},
)
YES_OR_NO = Limits("true or false")
FILE = Limits("a file")
PEM_FILE = Limits("a PEM file")
DIRECTORY = Limits("a directory, not empty text")
TEXT = Limits("text that is not empty")
NODES = Limits(
    "N or MIN:MAX nodes, with MIN at least 1 and at most MAX",
    accepts=Annotated[NodeRange, PlainValidator(_parse_node_range)],
)
PORTS = Limits(
    f"a range of ports as FIRST-LAST, from 1 to {_MOST_PORT}, FIRST not above LAST",
    accepts=Annotated[PortRange, PlainValidator(_parse_port_range)],
)
KEPT_LOGS = Limits(
    "a number of runs, at least 1, a size such as 500MB or 2.5GiB, or both with a comma between",
    accepts=Annotated[KeptLogs, PlainValidator(_parse_kept_logs)],
)
PROCESSES = Limits(
    f"a whole number, at least 1{_AT_MOST}, or one of auto, gpu, cpu",
    accepts=Annotated[int, Field(ge=1, le=MAX_COUNT)] | Literal["auto", "gpu", "cpu"],
)
LISTENING_ADDRESS = Limits(
    "HOST:PORT, or :PORT for every interface, with a port of at most 65535, an IPv6 host in "
    "brackets",
    accepts=Annotated[str, AfterValidator(_check_listening)],
)
HTTP_ADDRESS = Limits(
    f"{LISTENING_ADDRESS.text}; or off",
    accepts=Literal["off"] | Annotated[str, AfterValidator(_check_listening)],
)
REACHABLE_ADDRESS = Limits(
    "HOST or HOST:PORT of this machine, an IPv6 host in brackets, the host not a wildcard such as "
    "0.0.0.0, the port from 1 to 65535",
    accepts=Annotated[str, AfterValidator(_check_reachable)],
)
HOST = Limits(
    "a name or an address of this machine without a port, not a wildcard such as 0.0.0.0",
    accepts=Annotated[str, AfterValidator(_check_host)],
)
ENDPOINTS = Limits(
    "HOST:PORT, http://HOST:PORT or https://HOST:PORT, several separated by commas",
    accepts=_several(Annotated[str, AfterValidator(_check_endpoint)], _split_commas),
)
PEERS = Limits(
    "HOST or HOST:PORT, an IPv6 host in brackets, not a wildcard such as 0.0.0.0, several "
    "separated by commas",
    accepts=_several(Annotated[str, AfterValidator(_check_reachable)], _split_commas),
)
COMMAND = Limits(
    "a command and its arguments, quoted as for a shell",
    accepts=_several(_TEXT, _split_words),
)
ARGUMENTS = Limits(
    "arguments quoted as for a shell, or an array of texts",
    accepts=Annotated[tuple[str, ...], BeforeValidator(_split_words)],
    may_be_empty=True,
    may_hold_secrets=True,
)
JOB_NAME = Limits(
    f"at most {JOB_NAME_MAX_LENGTH} lower-case letters, digits and inner hyphens",
    {"pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "max_length": JOB_NAME_MAX_LENGTH},
)
NODE_NAME = Limits(
    f"at most {NODE_NAME_MAX_LENGTH} letters, digits and inner hyphens, dots and underscores",
    {"pattern": rf"^{_NAME}$", "max_length": NODE_NAME_MAX_LENGTH},
)
RUN_NAME = Limits(
    f"at most {RUN_NAME_MAX_LENGTH} letters, digits and inner hyphens, dots and underscores",
    {"pattern": rf"^{_NAME}$", "max_length": RUN_NAME_MAX_LENGTH},
)


def is_ip_address(host: str) -> bool:
    """Return whether it is an address, not a name; IPv6 without brackets."""
    return _ip_address(host) is not None


def require_host(host: str) -> None:
    """Raise ConfigurationError unless `host` is a host's name or address."""
    try:
        _check_host(host)
    except ValueError:
        raise ConfigurationError(
            f"{host!r} is not a valid host; expected a name or an address without a port"
        ) from None


def require_node_name(name: str, of: str = "node") -> None:
    """Raise ConfigurationError unless a node, or a machine (`of`), can have this name.

    Use it for names that do not come from the settings, such as those that peers send.
    """
    if len(name) > NODE_NAME_MAX_LENGTH or not _HOST_NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name[:NODE_NAME_MAX_LENGTH]!r} is not a valid {of} name; expected {NODE_NAME.text}"
        )
