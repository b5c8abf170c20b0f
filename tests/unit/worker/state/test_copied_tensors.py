"""Copies of tensors use their memory again as long as the tensors are what and where they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from elastic.worker.state.copied_tensors import CopiedTensors
from elastic.worker.state.tree import same_tensor


def tensors() -> list[torch.Tensor]:
    """Of each kind that takes another way: joined ones, large ones, and some that fit no block."""
    return [
        torch.rand(64),
        torch.rand(3, 5),
        torch.tensor(7),
        torch.tensor(2.0),
        torch.rand(100, 100),
        torch.rand(6, 4).t(),
        torch.rand(0),
        torch.rand(1).expand(9),
        torch.rand(5).to(torch.bfloat16),
        torch.rand(3, dtype=torch.complex64),
        torch.tensor([True, False]),
        torch.rand(4, 8).to_sparse(),
    ]


def assert_same(copied: CopiedTensors, wanted: list[torch.Tensor]) -> None:
    assert len(copied.content) == len(wanted)
    for copy, tensor in zip(copied.content, wanted, strict=True):
        assert copy.shape == tensor.shape
        dense = (t.to_dense() if t.is_sparse else t for t in (copy, tensor))
        assert same_tensor(*dense)


def test_a_copy_has_the_values_of_all_kinds_and_memory_of_its_own() -> None:
    live = [t for t in tensors() if not t.is_sparse]
    then = [t.clone() for t in live]
    copied = CopiedTensors(live)
    assert_same(copied, then)
    for tensor in live[:6]:
        tensor.fill_(1)
    assert_same(copied, then)
    copied.put_back()
    assert all(map(same_tensor, live, then))


def test_the_memory_is_used_again() -> None:
    live = [t for t in tensors() if not t.is_sparse]
    copied = CopiedTensors(live)
    places = [t.data_ptr() for t in copied.content]
    live[0].mul_(2)
    live[4].data.mul_(3)
    live[2] += 1
    again = copied.fill(live)
    assert again is copied
    assert [t.data_ptr() for t in again.content] == places
    assert_same(again, live)


def other_shape(live: list[torch.Tensor]) -> None:
    live[1].data = live[1].data.view(5, 3)


def other_strides(live: list[torch.Tensor]) -> None:
    live[4].data = live[4].data.t()


def other_dtype(live: list[torch.Tensor]) -> None:
    live[0].data = live[0].data.to(torch.float64)


def a_scalar(live: list[torch.Tensor]) -> None:
    live[0].data = live[0].data[0]


def another_dimension(live: list[torch.Tensor]) -> None:
    live[0].unsqueeze_(0)


def a_vector(live: list[torch.Tensor]) -> None:
    live[2].resize_(1)


def gaps(live: list[torch.Tensor]) -> None:
    live[0].data = live[0].data[::2]


def smaller(live: list[torch.Tensor]) -> None:
    live[0].resize_(32)


def other_dtype_of_a_tensor(live: list[torch.Tensor]) -> None:
    live[3] = live[3].to(torch.float64)


def one_more(live: list[torch.Tensor]) -> None:
    live.append(torch.rand(2))


def one_less(live: list[torch.Tensor]) -> None:
    del live[5]


def test_tensors_that_replace_others_of_their_kind_use_their_memory_and_are_put_back() -> None:
    """A script may assign a buffer in each step, and other memory to a parameter's `.data`."""
    live = [t for t in tensors() if not t.is_sparse]
    copied = CopiedTensors(live)
    places = [t.data_ptr() for t in copied.content]
    live[3], live[4] = live[3] + 1, live[4] + 1
    live[0].data = torch.rand(64)
    again = copied.fill(live)
    assert [t.data_ptr() for t in again.content] == places
    then = [t.clone() for t in live]
    assert_same(again, then)
    for tensor in live[:5]:
        tensor.zero_()
    again.put_back()
    assert all(map(same_tensor, live, then))


@pytest.mark.parametrize(
    "change",
    [
        *(other_shape, other_strides, other_dtype),
        *(
            a_scalar,
            a_vector,
            another_dimension,
            gaps,
            smaller,
            other_dtype_of_a_tensor,
            one_more,
            one_less,
        ),
    ],
)
def test_what_has_changed_in_more_than_values_is_copied_afresh(
    change: Callable[[list[torch.Tensor]], None],
) -> None:
    live = [t for t in tensors() if not t.is_sparse]
    before = CopiedTensors(live)
    then = [t.clone() for t in before.content]
    change(live)
    after = before.fill(live)
    assert after is not before
    assert_same(after, live)
    assert_same(before, then)


def test_sparse_tensors_are_copied_each_time() -> None:
    live = [torch.rand(4, 8).to_sparse(), torch.rand(3)]
    copied = CopiedTensors(live)
    live[1] += 1
    assert_same(copied.fill(live), live)


def test_tensors_of_inference_mode_are_copied_and_put_back() -> None:
    with torch.inference_mode():
        live = [torch.rand(8), torch.rand(90, 90)]
        then = [t.clone() for t in live]
    copied = CopiedTensors(live)
    copied = copied.fill(live)
    with torch.inference_mode():
        live[0].zero_()
        live[1].zero_()
    copied.put_back()
    assert all(map(torch.equal, live, then))


def test_copies_on_the_host_are_not_taken_for_copies_beside_the_tensors() -> None:
    live = [torch.rand(3)]
    on_host = CopiedTensors(live, on_host=True)
    assert on_host.fill(live) is not on_host
