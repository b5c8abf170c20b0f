"""Names in a checkpoint directory are composed, read back, and told from other names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.checkpoint import layout


def test_names_are_those_of_the_documentation() -> None:
    assert layout.step_directory_name(1200) == "step-000001200"
    group = layout.group_name(7, "5fa5c435c28b4c3aadb485691a529ecb")
    assert group == "g7-5fa5c435"
    assert layout.shard_name(0, 4, group) == "shard-00000-of-00004-g7-5fa5c435.safetensors"
    assert layout.structure_name(group) == "structure-g7-5fa5c435.json"
    assert layout.path_in_step(7, layout.MANIFEST) == "step-000000007/manifest.json"


@given(st.integers(min_value=0, max_value=10**12))
def test_step_names_are_read_back(step: int) -> None:
    assert layout.parse_step_directory_name(layout.step_directory_name(step)) == step


@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))))
def test_shard_names_are_read_back(shard: tuple[int, int]) -> None:
    assert layout.parse_shard_name(layout.shard_name(*shard, "g7-5fa5c435")) == shard


@given(st.integers(1, 10**9), st.text())
def test_names_of_any_run_are_recognised(generation: int, run: str) -> None:
    group = layout.group_name(generation, run)
    assert layout.parse_shard_name(layout.shard_name(1, 2, group)) == (1, 2)
    assert layout.is_structure_name(layout.structure_name(group))


def test_names_of_format_version_1_are_recognised() -> None:
    assert layout.parse_shard_name("shard-00003-of-00004.safetensors") == (3, 4)
    assert layout.is_structure_name("structure.json")


@pytest.mark.parametrize("name", ["manifest.json", ".structure.json.partial", "structure-g.json"])
def test_other_names_are_not_structures(name: str) -> None:
    assert not layout.is_structure_name(name)


@pytest.mark.parametrize(
    "name", ["step-1200", "step-0000001200", "step-00000120x", "step-٠٠٠٠٠١٢٠٠", "lost+found", ""]
)
def test_other_names_are_not_steps(name: str) -> None:
    assert layout.parse_step_directory_name(name) is None


@pytest.mark.parametrize(
    "name",
    [
        "shard-00004-of-00004.safetensors",
        "shard-0-of-4.safetensors",
        "shard-0000003-of-00004.safetensors",
        "shard-00003-of-00004-.safetensors",
        "shard-00003-of-00004-g7-../x.safetensors",
        ".shard-00000-of-00004.safetensors.partial",
        "structure.json",
    ],
)
def test_other_names_are_not_shards(name: str) -> None:
    assert layout.parse_shard_name(name) is None
