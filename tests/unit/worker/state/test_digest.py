"""Digests are equal for equal tensors only, as the host and as a device compute them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.worker.state import digest
from elastic.worker.state.digest import ReadBefore, combined, digest_by_name, digest_of
from elastic.worker.state.tree import memory_of
from tests.unit.worker.trees import DTYPES, make_tensor


def on_host(*tensors: torch.Tensor) -> int:
    return digest_of(tensors)


def on_device(*tensors: torch.Tensor) -> int:
    """The digest by the weighted sums that a device computes."""
    sums = [int(digest._weighted_sum(digest.bytes_of(t))) for t in tensors]
    return hash(tuple(sums))


WAYS = pytest.mark.parametrize("way", [on_host, on_device])
Way = Callable[..., int]


def test_a_tensor_may_be_resized_after_its_digest() -> None:
    """torch forbids it once NumPy has seen the memory."""
    tensor = torch.arange(4.0)
    digest_of([tensor])
    assert tensor.resize_(2).tolist() == [0.0, 1.0]
    assert tensor.resize_(200).numel() == 200


@WAYS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_digest_changes_with_any_flipped_bit_only(way: Way, dtype: torch.dtype) -> None:
    tensor = make_tensor(dtype, (3, 5))
    before = way(tensor)
    assert way(tensor.clone()) == before
    raw = (
        tensor.reshape(-1).view(torch.uint8)
        if not dtype.is_complex
        else (torch.view_as_real(tensor).reshape(-1).view(torch.uint8))
    )
    bits = range(1) if dtype is torch.bool else range(8)
    for place in range(len(raw)):
        for bit in bits:
            raw[place] ^= 1 << bit
            assert way(tensor) != before, (place, bit)
            raw[place] ^= 1 << bit
    assert way(tensor) == before


@WAYS
def test_the_order_of_tensors_and_of_their_elements_matters(way: Way) -> None:
    left, right = torch.arange(6.0), torch.arange(6.0, 12.0)
    assert way(left, right) != way(right, left)
    assert way(left) != way(left.flip(0))
    assert way(torch.tensor([1.0, 2.0])) != way(torch.tensor([2.0, 1.0]))


@WAYS
def test_the_layout_of_memory_does_not_change_the_digest(way: Way) -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert way(tensor.t().contiguous().t()) == way(tensor)
    assert way(tensor[:, 1:3]) == way(tensor[:, 1:3].contiguous())


@WAYS
def test_a_parameter_is_read_without_its_graph(way: Way) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert way(parameter * 2) == way(torch.full((3,), 2.0))


@given(
    content=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=12),
    data=st.data(),
)
def test_swapped_or_changed_words_change_the_digest_on_a_device(
    content: list[int], data: st.DataObject
) -> None:
    other = data.draw(
        st.one_of(
            st.permutations(content),
            st.lists(
                st.integers(-(2**31), 2**31 - 1), min_size=len(content), max_size=len(content)
            ),
        )
    )
    pair = [torch.tensor(words, dtype=torch.int32) for words in (content, other)]
    assert (on_device(pair[0]) == on_device(pair[1])) is (content == other)


def test_a_tensor_that_a_device_sums_in_parts_has_the_same_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.arange(1000.0)
    whole = on_device(tensor)
    monkeypatch.setattr(digest, "_ON_DEVICE_ELEMENTS", 64)
    assert on_device(tensor) == whole


def test_a_digest_is_63_bits_and_never_0() -> None:
    """0 means that there is no digest."""
    found = [digest_of([], bytes([n])) for n in range(256)]
    assert len(set(found)) == 256
    assert all(0 < n < 2**63 for n in found)
    assert digest_of([torch.empty(0, 4)]) == digest_of([])
    assert digest_of([torch.zeros(1)], b"a") != digest_of([torch.zeros(1)], b"b")


@WAYS
def test_a_lazy_conjugate_or_negative_has_the_digest_of_its_resolved_value(way: Way) -> None:
    lazy = make_tensor(torch.complex64, (3, 5)).conj()
    assert way(lazy) == way(lazy.resolve_conj().clone())
    assert way(lazy.imag) == way(lazy.imag.resolve_neg().clone())


def test_a_zero_tensor_differs_from_a_shorter_one_on_the_host() -> None:
    assert on_host(torch.zeros(2)) != on_host(torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bool], ids=str)
def test_rows_without_a_place_of_their_own_count_as_those_of_a_copy(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest, "_COPIED_BYTES", 100)
    tensor = make_tensor(dtype, (7, 5, 3)).transpose(0, 1)
    for each in (tensor, tensor[1], tensor[:, :1].expand(5, 4, 3), tensor[:1, :1, :1]):
        assert digest_of([each]) == digest_of([each.clone(memory_format=torch.contiguous_format)])
    if dtype.is_complex:
        assert digest_of([tensor.conj()]) == digest_of([tensor.conj().resolve_conj().contiguous()])


def test_digests_by_name_of_parts_add_up_to_that_of_the_whole() -> None:
    tensors = {f"t{n}": torch.full((n,), float(n)) for n in range(5)}
    first = {name: tensors[name] for name in ("t3", "t0")}
    rest = {name: tensors[name] for name in ("t4", "t2", "t1")}
    whole = combined(digest_by_name(tensors))
    assert combined(digest_by_name(first), digest_by_name(rest)) == whole
    assert digest_by_name(dict(reversed(tensors.items()))) == digest_by_name(tensors)


def test_a_digest_by_name_changes_with_a_name_and_with_each_tensor() -> None:
    tensors = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    others = [
        {"a": tensors["b"], "b": tensors["a"]},
        {"a": tensors["a"], "c": tensors["b"]},
        {"a": tensors["a"]},
        {**tensors, "b": torch.tensor([3.5])},
    ]
    assert len({digest_by_name(each) for each in (tensors, *others)}) == 5


LARGE = 2**19  # elements: two megabytes


def read_before(*tensors: torch.Tensor) -> ReadBefore:
    """Return what has read these, to which nothing is known to write."""
    before = ReadBefore()
    before.unwritten = {memory_of(tensor) for tensor in tensors}
    digest_by_name(dict(zip("abc", tensors, strict=False)), before)
    return before


def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of the sizes of tensors that are read from now on."""
    sizes: list[int] = []
    read = digest._read
    monkeypatch.setattr(digest, "_read", lambda t, h: (sizes.append(t.numel()), read(t, h)))
    return sizes


def test_a_large_tensor_that_nothing_writes_to_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, small = torch.rand(LARGE), torch.rand(8)
    before = read_before(large, small)
    sizes = reads(monkeypatch)
    tensors = {"a": large, "b": small}
    again = digest_by_name(tensors, before)
    assert sizes == [8]
    assert again == digest_by_name(tensors)
    assert digest_by_name({"a": large.detach(), "b": small}, before) == again
    assert sizes == [8, LARGE, 8, 8]


def test_what_is_not_known_to_stay_as_it_is_is_read_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = torch.rand(LARGE)
    before = read_before(large)
    before.unwritten = ()
    sizes = reads(monkeypatch)
    digest_by_name({"a": large}, before)
    digest_by_name({"a": large}, before)
    assert sizes == [LARGE, LARGE]


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t[5].add_(1.0),
        lambda t: t.data.mul_(1.5),
        lambda t: t.numpy().__setitem__(slice(None), 2.0),
        lambda t: t.set_(torch.rand(LARGE)),
    ],
    ids=["a value in place", "through data", "through NumPy", "other memory"],
)
def test_a_write_is_seen_by_a_version_a_place_or_a_sample(write: Callable[..., object]) -> None:
    large = torch.rand(LARGE)
    before = read_before(large)
    write(large)
    assert digest_by_name({"a": large}, before) == digest_by_name({"a": large})


def test_what_is_filled_without_a_sign_is_read_again_once_that_is_said() -> None:
    large = torch.rand(LARGE)
    before = read_before(large)
    large.data[7] = 9.0
    assert digest_by_name({"a": large}, before) != digest_by_name({"a": large})
    before.forget()
    assert digest_by_name({"a": large}, before) == digest_by_name({"a": large})


def test_what_is_written_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.rand(LARGE)
    before = ReadBefore()
    before.unwritten = {memory_of(large)}
    read = digest._read

    def write_then_read(tensor: torch.Tensor, hasher: object) -> None:
        read(tensor, hasher)  # type: ignore[arg-type]
        tensor[3] += 1.0

    monkeypatch.setattr(digest, "_read", write_then_read)
    digest_by_name({"a": large}, before)
    monkeypatch.undo()
    assert digest_by_name({"a": large}, before) == digest_by_name({"a": large})


def test_names_tell_tensors_apart_also_where_they_are_not_read_again() -> None:
    first, second = torch.rand(LARGE), torch.rand(LARGE)
    before = read_before(first, second)
    swapped = {"a": second, "b": first}
    assert digest_by_name(swapped, before) == digest_by_name(swapped)


def test_the_scripts_generators_stay_as_they_are() -> None:
    python, host = random.getstate(), torch.get_rng_state()
    large = torch.zeros(LARGE)
    digest_by_name({"a": large}, read_before(large))
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), host)
