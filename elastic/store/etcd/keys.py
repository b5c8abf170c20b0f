"""Converts the store's keys, entries and guarded writes to etcd's messages, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.store.etcd import v3_pb2 as pb
from elastic.store.interface import Change, Entry, Guard

_ALL_KEYS = b"\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of a request: whether it was done, the key's entry, whether the guard holds."""

    done: bool
    entry: Entry | None
    guarded: bool


class Keys:
    """Converts keys below `namespace`, a prefix that the store's users do not see."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace.encode()

    def encode(self, key: str) -> bytes:
        return self._namespace + key.encode()

    def below(self, prefix: str) -> tuple[bytes, bytes]:
        """The range of keys that start with `prefix`: the first, and the first after them."""
        start = self.encode(prefix)
        return start or _ALL_KEYS, _after_prefix(start)

    def entry(self, kv: pb.KeyValue) -> Entry:
        return Entry(
            key=self._decode(kv.key),
            value=kv.value,
            created=kv.create_revision,
            modified=kv.mod_revision,
            lease=kv.lease,
        )

    def change(self, event: pb.Event) -> Change:
        removed = event.type == pb.Event.DELETE
        return Change(
            key=self._decode(event.kv.key),
            revision=event.kv.mod_revision,
            entry=None if removed else self.entry(event.kv),
        )

    def request(
        self, key: str, *, expected: int, guard: Guard | None, writes: Sequence[pb.RequestOp]
    ) -> pb.TxnRequest:
        """Do `writes` if `key` was last modified at `expected` (0: is absent) and the guard holds.

        Because of `expected`, a request that is carried out twice changes nothing the second time,
        even if a frozen member does that long after the sender has gone on.
        """
        name = self.encode(key)
        unchanged = pb.Compare(target=pb.Compare.MOD, key=name, mod_revision=expected)
        compare, look = [unchanged], [_range(name)]
        if guard is not None:
            guard_name = self.encode(guard.key)
            compare += [
                pb.Compare(target=pb.Compare.CREATE, key=guard_name, create_revision=guard.created),
                pb.Compare(target=pb.Compare.LEASE, key=guard_name, lease=guard.lease),
            ]
            look.append(_range(guard_name))
        return pb.TxnRequest(compare=compare, success=[*writes, _range(name)], failure=look)

    def put(self, key: str, value: bytes, lease: int) -> pb.RequestOp:
        return pb.RequestOp(
            request_put=pb.PutRequest(key=self.encode(key), value=value, lease=lease)
        )

    def delete(self, key: str) -> pb.RequestOp:
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=self.encode(key)))

    def outcome(self, guard: Guard | None, response: pb.TxnResponse) -> Outcome:
        """The result of a `request` with this guard."""
        if response.succeeded:
            return Outcome(done=True, entry=self._found(response.responses[-1]), guarded=True)
        entry, *guards = (self._found(found) for found in response.responses)
        return Outcome(done=False, entry=entry, guarded=guard is None or guard.holds(guards[0]))

    def _found(self, found: pb.ResponseOp) -> Entry | None:
        kvs = found.response_range.kvs
        return self.entry(kvs[0]) if kvs else None

    def _decode(self, key: bytes) -> str:
        """Other programs may write keys here that are not UTF-8: these must not break a watch."""
        return key[len(self._namespace) :].decode(errors="backslashreplace")


def _after_prefix(prefix: bytes) -> bytes:
    """The first key after all that start with `prefix`; for etcd a zero byte means "to the end"."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else _ALL_KEYS


def _range(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))
