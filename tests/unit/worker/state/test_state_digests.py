"""Large state that no block writes early is read later, and what all of it adds up to is one
digest, whatever a member has learnt."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from elastic.worker.state import digest, state_digests
from elastic.worker.state.digest import ReadBefore, combined, digest_by_name
from elastic.worker.state.state_digests import StateDigests
from tests.unit.worker.state.undoing import (
    Script,
    add,
    layer,
    learnt,
    nothing,
    step_of,
    trained,
)


@pytest.fixture
def digests() -> Iterator[StateDigests]:
    found = StateDigests()
    yield found
    found.forget()


def read(digests: StateDigests, script: Script, *, at_begin: bool = True) -> None:
    digests.forget()
    digests.begin(script.state, script.undo, at_begin=at_begin)


def test_a_part_is_left_unread_at_first_and_the_whole_is_the_states_digest(
    digests: StateDigests,
) -> None:
    _, script = learnt()
    script.undo.begin()
    read(digests, script)
    commit, begin, unread = digests.digests(whole=False)
    assert unread
    assert commit == begin != script.state.digest()
    assert digests.digests(whole=True) == (*[script.state.digest()] * 2, False)
    assert combined(begin, digests.rest()) == script.state.digest()


def test_all_is_read_at_once_while_it_is_not_known_what_blocks_change(
    digests: StateDigests,
) -> None:
    script = Script(model=layer())
    script.block()
    read(digests, script)
    assert digests.digests(whole=False) == (*[script.state.digest()] * 2, False)


def test_what_blocks_change_before_their_reductions_is_read_at_once(digests: StateDigests) -> None:
    changed, kept = layer(), layer()
    script = Script(changed=changed, kept=kept)
    script.learn(before=add(changed))
    assert [t.data_ptr() for t in script.undo.unwritten()] == [
        t.data_ptr() for t in kept.parameters()
    ]
    read(digests, script)
    early = digests.digests(whole=False)
    rest = digests.rest()
    add(changed)()
    read(digests, script)
    assert digests.digests(whole=False)[1] != early[1]
    assert digests.rest() == rest
    add(kept)()
    read(digests, script)
    digests.digests(whole=False)
    assert digests.rest() != rest


def test_what_an_optimizer_trains_is_read_later(digests: StateDigests) -> None:
    net, optimizer, script = trained(torch.optim.Adam)
    script.learn(after=step_of(optimizer, net))
    read(digests, script)
    assert digests.digests(whole=False)[2]
    before = digests.rest()
    with torch.no_grad():
        optimizer.state[net.weight]["exp_avg"][3, 5] += 1
    read(digests, script)
    digests.digests(whole=False)
    assert digests.rest() != before


def test_a_member_without_the_begin_mark_reads_all_at_once(digests: StateDigests) -> None:
    _, script = learnt()
    read(digests, script, at_begin=False)
    assert digests.digests(whole=False) == (script.state.digest(), 0, False)


def test_code_below_a_lost_block_waits_to_write_until_all_is_read(
    digests: StateDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = layer()
    script = Script(model=net)
    script.undo = type(script.undo)(
        script.state,
        device=torch.device("cpu"),
        wait_for_device=nothing,
        on_costly=script.costly,
        on_slow=lambda *_: None,
        before_write=digests.wait,
    )
    script.learn()
    goes_on, reads = threading.Event(), threading.Event()

    def slowly(tensors: dict[str, torch.Tensor], *_: ReadBefore) -> int:
        if any(t.numel() > 1000 for t in tensors.values()):
            reads.set()
            assert goes_on.wait(30.0)
        return digest_by_name(tensors)

    monkeypatch.setattr(state_digests, "digest_by_name", slowly)
    script.undo.begin()
    right = script.state.digest()
    read(digests, script)
    _, begin, unread = digests.digests(whole=False)
    assert unread
    assert reads.wait(30.0)
    script.undo.keep_for_retry()
    threading.Timer(0.05, goes_on.set).start()
    add(net)()
    assert goes_on.is_set(), "it was written to while it was read"
    assert combined(begin, digests.rest()) == right
    assert script.undo.put_back_for_retry()


def test_an_error_of_the_reading_is_raised_where_a_digest_is_asked_for(
    digests: StateDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, script = learnt()
    error = RuntimeError("out of memory")

    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr(state_digests, "digest_by_name", fails)
    read(digests, script)
    with pytest.raises(RuntimeError, match="out of memory"):
        digests.digests(whole=False)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_module_with_a_sparse_buffer_that_is_not_stored_is_read(
    digests: StateDigests, layout: torch.layout
) -> None:
    net = layer()
    adjacency = torch.eye(4).to_sparse(layout=layout)
    net.register_buffer("adjacency", adjacency, persistent=False)
    script = Script(model=net)
    script.learn()
    script.undo.begin()
    read(digests, script)
    assert digests.digests(whole=True)[0] == script.state.digest()


def test_large_state_that_nothing_writes_to_is_not_read_again(
    digests: StateDigests, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = layer(600)
    script = Script(model=net)
    script.learn()
    read(digests, script)
    rest = digests.rest()
    read_now: list[int] = []
    before = digest._read
    monkeypatch.setattr(digest, "_read", lambda t, h: (read_now.append(t.numel()), before(t, h)))
    read(digests, script)
    assert digests.rest() == rest
    assert net.weight.numel() not in read_now
    assert digests.rest_now(script.state) == rest
    assert net.weight.numel() in read_now
    read_now.clear()
    digests.another_state_comes()
    read(digests, script)
    assert digests.rest() == rest
    assert net.weight.numel() in read_now


def test_what_an_optimizer_trains_is_read_each_time(digests: StateDigests) -> None:
    """A fused step moves no version, and may change few of the values."""
    net, optimizer, script = trained(torch.optim.SGD, 600)
    script.learn(after=step_of(optimizer, net))
    assert script.undo.unwritten()
    assert not script.undo.untouched()
    read(digests, script)
    rest = digests.rest()
    net.weight.data[0, 0] += 1
    read(digests, script)
    assert digests.rest() != rest
