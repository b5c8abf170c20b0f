"""Writes that happen only while the world is as the writer knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.store.etcd import v3_pb2 as pb
from elastic.store.etcd.keys import Keys
from elastic.store.interface import Entry, Guard


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a request: was it done, what does the key hold now, does the guard hold?"""

    done: bool
    entry: Entry | None
    guarded: bool


def request(
    keys: Keys, key: str, *, expected: int, guard: Guard | None, writes: Sequence[pb.RequestOp]
) -> pb.TxnRequest:
    """Do `writes` if `key` was last modified at `expected` (0: is absent) and the guard holds.

    Because of `expected`, a request that was sent twice, or that a frozen member carries out when
    its sender has long gone on, changes nothing the second time.
    """
    name = keys.encode(key)
    unchanged = pb.Compare(target=pb.Compare.MOD, key=name, mod_revision=expected)
    compare, look = [unchanged], [_range(name)]
    if guard is not None:
        guard_name = keys.encode(guard.key)
        compare += [
            pb.Compare(target=pb.Compare.CREATE, key=guard_name, create_revision=guard.created),
            pb.Compare(target=pb.Compare.LEASE, key=guard_name, lease=guard.lease),
        ]
        look.append(_range(guard_name))
    return pb.TxnRequest(compare=compare, success=[*writes, _range(name)], failure=look)


def put(keys: Keys, key: str, value: bytes, lease: int) -> pb.RequestOp:
    """A write for `request`."""
    return pb.RequestOp(request_put=pb.PutRequest(key=keys.encode(key), value=value, lease=lease))


def delete(keys: Keys, key: str) -> pb.RequestOp:
    """A write for `request`."""
    return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=keys.encode(key)))


def outcome(keys: Keys, guard: Guard | None, response: pb.TxnResponse) -> Outcome:
    """What became of a `request`."""
    if response.succeeded:
        return Outcome(done=True, entry=_entry(keys, response.responses[-1]), guarded=True)
    entry, *guards = (_entry(keys, found) for found in response.responses)
    return Outcome(done=False, entry=entry, guarded=guard is None or guard.holds(guards[0]))


def _range(key: bytes) -> pb.RequestOp:
    return pb.RequestOp(request_range=pb.RangeRequest(key=key))


def _entry(keys: Keys, found: pb.ResponseOp) -> Entry | None:
    kvs = found.response_range.kvs
    return keys.entry(kvs[0]) if kvs else None
