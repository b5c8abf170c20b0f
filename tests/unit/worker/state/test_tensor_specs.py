"""Members compare descriptions of their tensors; differences are named."""

from __future__ import annotations

import json

import pytest
import torch

from elastic.errors import ConfigurationError
from elastic.worker.state.tensor_specs import (
    TensorSpec,
    describe,
    first_differences,
    from_table,
    signature,
    to_table,
)

TENSORS = {
    "weight": torch.zeros(2, 3),
    "bias": torch.zeros(3, dtype=torch.bfloat16),
    "step": torch.tensor(1),
}


def test_the_table_of_specs_does_not_depend_on_the_order_of_the_tensors() -> None:
    table = describe(TENSORS)
    assert [str(spec) for spec in table] == ["bfloat16[3]", "int64[]", "float32[2, 3]"]
    assert [spec.size_bytes for spec in table] == [6, 8, 24]
    assert describe(dict(reversed(TENSORS.items()))) == table


def test_the_signature_is_the_same_in_every_process() -> None:
    # A literal: another process, machine or version of Python must come to the same number.
    assert signature(describe(TENSORS)) == 4328528657289269150
    assert signature(tuple(reversed(describe(TENSORS)))) == signature(describe(TENSORS))


def test_a_table_comes_back_from_json_with_the_place_of_each_tensor() -> None:
    specs = describe(TENSORS | {"moment": torch.empty(2, device="meta")})
    back = from_table(json.loads(json.dumps(to_table(specs))))
    assert back == specs
    assert {s.name: s.place for s in back} == {
        "weight": "cpu",
        "bias": "cpu",
        "step": "cpu",
        "moment": "device",
    }


def test_the_place_of_a_tensor_makes_no_difference_between_members() -> None:
    on_host = describe({"w": torch.zeros(2)})
    elsewhere = describe({"w": torch.zeros(2, device="meta")})
    assert signature(on_host) == signature(elsewhere)
    assert not first_differences(on_host, elsewhere)


@pytest.mark.parametrize(
    "changed",
    [
        {"weight": torch.zeros(3, 2)},
        {"weight": torch.zeros(2, 3, dtype=torch.float64)},
        {"more": torch.zeros(1)},
    ],
)
def test_any_difference_changes_the_signature(changed: dict[str, torch.Tensor]) -> None:
    assert signature(describe(TENSORS | changed)) != signature(describe(TENSORS))


def test_differences_are_named() -> None:
    theirs = {"weight": torch.zeros(3, 3), "bias": TENSORS["bias"], "extra": torch.zeros(1)}
    assert first_differences(describe(TENSORS), describe(theirs)) == [
        "extra (float32[1]) is missing here",
        "step (int64[]) is only here",
        "weight is float32[2, 3] here and float32[3, 3] there",
    ]
    assert len(first_differences(describe(TENSORS), describe(theirs), limit=2)) == 2
    assert first_differences(describe(TENSORS), describe(TENSORS)) == []


def test_a_type_that_cannot_be_stored_is_named() -> None:
    spec = TensorSpec(name="w", dtype="float4", shape=(1,))
    with pytest.raises(ConfigurationError, match="w has elements of type float4"):
        _ = spec.size_bytes
