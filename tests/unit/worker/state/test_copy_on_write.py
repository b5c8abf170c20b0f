"""Memory is copied when something writes to it, whatever the operation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from elastic.worker.state.copy_on_write import CopyOnWrite
from tests.unit.worker.state.undoing import (
    Script,
    add,
    both,
    gradients,
    layer,
    learnt,
    step_of,
    trained,
    write_data,
)
from tests.unit.worker.trees import same


@pytest.fixture
def writes() -> Iterator[CopyOnWrite]:
    found = CopyOnWrite()
    yield found
    found.end()
    assert _get_current_dispatch_mode() is None


def fused(weight: torch.Tensor) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], fused=True).step()


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda w: w.mul_(2),
    "a view": lambda w: w[0].fill_(3.0),
    "an index": lambda w: w.__setitem__([0, 2], 3.0),
    "out": lambda w: torch.add(w, 1, out=w),
    "data": lambda w: w.data.add_(1),
    "foreach": lambda w: torch._foreach_add_([torch.zeros(2), w], 1.0),
    "fused optimizer": fused,
    "inference mode": lambda w: torch.inference_mode()(lambda: w.add_(1))(),
    "init": nn.init.normal_,
    "copy": lambda w: w.copy_(torch.ones_like(w)),
    "set, then a write to what it had": lambda w: (v := w.view(-1), w.set_(), v.zero_()),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_a_write_replaces_is_put_back(writes: CopyOnWrite, write: str) -> None:
    weight = torch.arange(12.0).view(3, 4).t().clone().t()
    alias, before = weight.detach(), weight.clone()
    held = writes.hold([weight])
    writes.begin()
    with torch.no_grad():
        WRITES[write](weight)
    writes.end()
    assert not torch.equal(alias, before)
    assert not writes.has_missed()
    held.put_back()
    assert torch.equal(alias, before)


def test_only_what_is_written_to_is_copied(writes: CopyOnWrite) -> None:
    tensors = [torch.zeros(3) for _ in range(4)]
    writes.hold(tensors)
    writes.begin()
    (tensors[0] + tensors[1]).mul_(2)
    tensors[2].add_(1)
    tensors[2].add_(1)
    assert len(writes._copies) == 1


def test_a_write_after_the_end_is_not_undone(writes: CopyOnWrite) -> None:
    weight = torch.zeros(3)
    held = writes.hold([weight])
    writes.begin()
    writes.end()
    weight.add_(1)
    assert writes.has_missed()
    held.put_back()
    assert weight.tolist() == [1, 1, 1]


class Counting(TorchDispatchMode):
    """A mode of the script's own, as a counter of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.seen += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", ["ends inside", "begins inside", "around", "within"])
def test_modes_of_the_script_begin_and_end_in_any_order(order: str) -> None:
    weight, writes, mode = torch.zeros(3), CopyOnWrite(), Counting()
    held = writes.hold([weight])
    steps = {
        "ends inside": [mode.__enter__, writes.begin, leave(mode), weight.zero_, writes.end],
        "begins inside": [writes.begin, mode.__enter__, weight.zero_, writes.end, leave(mode)],
        "around": [mode.__enter__, writes.begin, weight.zero_, writes.end, leave(mode)],
        "within": [writes.begin, mode.__enter__, weight.zero_, leave(mode), writes.end],
    }
    weight.add_(1)
    for step in steps[order]:
        step()
    assert _get_current_dispatch_mode() is None
    assert not writes.has_missed()
    held.put_back()
    assert weight.tolist() == [1, 1, 1]
    seen = mode.seen
    assert seen == (order != "ends inside")
    weight.add_(1)
    assert mode.seen == seen
    assert weight.tolist() == [2, 2, 2]


def leave(mode: TorchDispatchMode) -> Callable[[], object]:
    return lambda: mode.__exit__(None, None, None)


def moved_and_written(net: nn.Module) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()
        parameter.data.add_(1)
    add(net)()


def converted(net: nn.Module) -> None:
    net.to(torch.bfloat16)
    net.load_state_dict({name: 0 * value for name, value in net.state_dict().items()})


def shared(net: nn.Module) -> None:
    net.share_memory()
    write_data(net)()


def aliased(net: nn.Module) -> None:
    torch.from_numpy(net.weight.detach().numpy()).add_(1)  # type: ignore[arg-type]


def grown(net: nn.Module) -> None:
    net.weight.data.resize_(500, 500).fill_(1)  # type: ignore[union-attr]


@pytest.mark.parametrize("change", [moved_and_written, converted, shared, aliased, grown])
def test_memory_that_moves_below_a_void_block_is_put_back(
    change: Callable[[nn.Module], None],
) -> None:
    net, script = learnt()
    assert script.lost()
    script.below_void_block(lambda: change(net))


@pytest.mark.parametrize("write", ["numpy", "another thread"])
def test_a_write_that_no_operation_of_the_thread_shows_is_found_in_a_sample(write: str) -> None:
    net, script = learnt()

    def change() -> None:
        net.weight.detach().numpy()[:] += 1

    assert script.lost()
    script.undo.keep_for_retry()
    if write == "numpy":
        change()
    else:
        thread = threading.Thread(target=write_data(net))
        thread.start()
        thread.join()
    assert script.undo.put_back_for_retry() is False


def test_only_what_is_tracked_of_a_storage_is_put_back(writes: CopyOnWrite) -> None:
    whole = torch.zeros(6)
    held = writes.hold([whole[:3]])
    writes.begin()
    whole.add_(1)
    writes.end()
    held.put_back()
    assert whole.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_look_at_the_commit_mark_on_another_thread_is_no_missed_write() -> None:
    net, optimizer, script = trained(torch.optim.SGD, momentum=0.9)
    step = step_of(optimizer, net)
    for _ in range(2):  # the next block learns, so the mark has everything
        script.block(after=step)
        add(net)()
    assert script.lost()
    at_begin = script.everything()
    script.undo.keep_for_retry()
    add(net)()

    def read() -> None:
        with script.undo.as_of_commit():
            script.state.digest()

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert script.undo.put_back_for_retry()
    assert same(script.everything(), at_begin)


def test_tensors_without_memory_of_their_own_can_be_held(writes: CopyOnWrite) -> None:
    odd = [torch.empty(0), torch.zeros(3, device="meta"), torch.eye(3).to_sparse()]
    held = writes.hold(odd)
    writes.begin()
    odd[0].add_(1)
    writes.end()
    assert not writes.has_missed()
    held.put_back()


def test_other_memory_and_other_shapes_are_put_back_below_a_void_block() -> None:
    net, script = learnt()
    before = net.weight
    assert script.lost()

    def replace() -> None:
        net.weight.data = torch.ones(2, 2)
        net.bias = nn.Parameter(torch.zeros(3))

    script.below_void_block(replace)
    assert net.weight is before
    script.block()


def test_an_optimizers_first_step_below_a_void_block_is_undone() -> None:
    net, optimizer, script = trained(torch.optim.Adam)
    script.learn()
    assert script.lost()
    script.below_void_block(step_of(optimizer, net))
    assert not optimizer.state
    script.below_void_block(both(lambda: gradients(net), step_of(optimizer, net), add(net)))


def test_compiled_code_runs_below_a_void_block_and_what_it_changes_is_found_out() -> None:
    net, script = learnt()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def double(weight: torch.Tensor) -> None:
        weight.mul_(2)

    assert script.lost()
    at_begin = script.everything()
    script.undo.keep_for_retry()
    with torch.no_grad():
        double(net.weight.detach())
    assert not same(script.everything(), at_begin)
    whole = script.undo.put_back_for_retry()
    assert whole is same(script.everything(), at_begin)


def test_what_a_copy_on_write_misses_below_a_void_block_is_told() -> None:
    net, script = learnt()
    assert script.lost()
    script.undo.keep_for_retry()
    script.undo._writes.end()  # stands for a kernel of compiled code
    add(net)()
    assert script.undo.put_back_for_retry() is False


def test_what_is_known_to_change_between_blocks_is_copied_whatever_changes_it() -> None:
    average = layer()
    script = Script(average=average)
    for _ in range(20):
        script.block()
        add(average)()
    assert script.lost()
    at_begin = script.everything()
    script.undo.keep_for_retry()
    script.undo._writes.end()  # stands for a kernel of compiled code
    add(average)()
    assert script.undo.put_back_for_retry() is True
    assert same(script.everything(), at_begin)
