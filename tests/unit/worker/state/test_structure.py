"""A structure document is read as it was written, or is damage."""

from __future__ import annotations

from hypothesis import given

from elastic.errors import CheckpointDamaged
from elastic.worker.state.structure import Structure, from_json, to_json
from elastic.worker.state.tensor_specs import describe
from elastic.worker.state.tree import flatten, unflatten
from tests.fuzzed_documents import documents, may_be_refused, thoroughly
from tests.unit.worker.saving import make_state

STATE = flatten({"trained": make_state(1), "options": ({1, 2}, 1j, b"ab", None, float("inf"))})
STRUCTURE = Structure(
    specs=describe(STATE.tensors), skeleton=STATE.skeleton, extra={"ledger": [{"step": 1}]}
)
CONTENT = to_json(STRUCTURE)


def test_round_trip() -> None:
    assert from_json(CONTENT, "s") == STRUCTURE


@thoroughly
@given(content=documents(CONTENT))
def test_any_bytes_are_a_structure_or_damage(content: bytes) -> None:
    """One that is read is put together, or refused, by what comes next."""
    with may_be_refused(CheckpointDamaged, naming="root/structure.json"):
        found = from_json(content, "root/structure.json")
        with may_be_refused(CheckpointDamaged, naming="the stored state"):
            unflatten(found.skeleton, STATE.tensors)
