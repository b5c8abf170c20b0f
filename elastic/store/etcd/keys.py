"""The store's keys, entries and guarded writes in etcd's messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.store.etcd import v3_pb2 as pb
from elastic.store.interface import Change, Entry, Guard

_ALL_KEYS = b"\0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a request: was it done, what does the key hold now, does the guard hold?"""

    done: bool
    entry: Entry | None
    guarded: bool


class Keys:
    """All below `namespace`, of which those who use the store know nothing."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace.encode()

    def encode(self, key: str) -> bytes:
        """One key."""
        return self._namespace + key.encode()

    def below(self, prefix: str) -> tuple[bytes, bytes]:
        """The range of keys that start with `prefix`: the first, and the first after them."""
        start = self.encode(prefix)
        return start or _ALL_KEYS, _after_prefix(start)

    def entry(self, kv: pb.KeyValue) -> Entry:
        """What is stored."""
        return Entry(
            key=self._decode(kv.key),
            value=kv.value,
            created=kv.create_revision,
            modified=kv.mod_revision,
            lease=kv.lease,
        )

    def change(self, event: pb.Event) -> Change:
        """What has happened."""
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

        Because of `expected`, a request that was sent twice, or that a frozen member carries out
        when its sender has long gone on, changes nothing the second time.
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
        """A write for `request`."""
        return pb.RequestOp(
            request_put=pb.PutRequest(key=self.encode(key), value=value, lease=lease)
        )

    def delete(self, key: str) -> pb.RequestOp:
        """A write for `request`."""
        return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=self.encode(key)))

    def outcome(self, guard: Guard | None, response: pb.TxnResponse) -> Outcome:
        """What became of a `request`."""
        if response.succeeded:
            return Outcome(done=True, entry=self._found(response.responses[-1]), guarded=True)
        entry, *guards = (self._found(found) for found in response.responses)
        return Outcome(done=False, entry=entry, guarded=guard is None or guard.holds(guards[0]))

    def _found(self, found: pb.ResponseOp) -> Entry | None:
        kvs = found.response_range.kvs
        return self.entry(kvs[0]) if kvs else None

    def _decode(self, key: bytes) -> str:
        """Others may write keys below ours that are no text; they must not end who follows them."""
        return key[len(self._namespace) :].decode(errors="backslashreplace")


def _after_prefix(prefix: bytes) -> bytes:
    """The first key after all that start with `prefix`; 0 is etcd's word for "to the end"."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else _ALL_KEYS


def _range(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))
