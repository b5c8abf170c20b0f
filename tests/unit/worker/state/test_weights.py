"""Checkpoints are exported as safetensors that other tools read, and models load such files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from elastic.checkpoint.directory import open_directory
from elastic.cli import files
from elastic.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    ConfigurationError,
    ElasticError,
    StepMisused,
)
from elastic.worker.control import LocalControl
from elastic.worker.session import Session
from elastic.worker.state.shards import load
from elastic.worker.state.tree import unflatten
from elastic.worker.training import Training
from tests.unit.worker.saving import save
from tests.unit.worker.training_together import numbers


class Tied(nn.Module):
    """Has a buffer, a tied weight and a tensor of another type."""

    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, out)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.first.weight
        self.small = nn.Parameter(torch.randn(2).bfloat16())
        self.register_buffer("seen", torch.tensor(7))


def saved(directory: Path, *steps: int) -> dict[int, Tied]:
    """Checkpoints of these steps, each of a model of its own with its optimizer."""
    models = {}
    for step in steps:
        torch.manual_seed(step)
        model = models[step] = Tied()
        optimizer = torch.optim.Adam(model.parameters())
        model.last(torch.ones(4)).sum().backward()
        optimizer.step()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "session.state": {"table": torch.ones(3)},
        }
        save(open_directory(str(directory)), step, state, count=3)
    return models


def test_an_exported_model_is_that_of_the_newest_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models, out = saved(tmp_path / "ckpt", 2, 4), tmp_path / "model.safetensors"
    files.export_weights(str(tmp_path / "ckpt"), out=out, step=None, name="model")
    assert capsys.readouterr().out == f"{out}: 6 tensors of the checkpoint of step 4\n"
    plain = Tied()
    plain.load_state_dict(load_file(out))
    for name, tensor in models[4].state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor), name
    with safe_open(out, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [out.name]


def test_all_that_was_tracked_is_exported_by_its_name(tmp_path: Path) -> None:
    models, out = saved(tmp_path / "ckpt", 2, 4), tmp_path / "all.safetensors"
    files.export_weights(str(tmp_path / "ckpt"), out=out, step=2, name=None)
    tensors = load_file(out)
    assert torch.equal(tensors["model.last.weight"], models[2].last.weight)
    assert tensors["optimizer.state.2.exp_avg"].shape == (3, 4)
    assert {name.split(".")[0] for name in tensors} == {"model", "optimizer"}


def test_an_export_passes_over_a_damaged_checkpoint_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ckpt, out = tmp_path / "ckpt", tmp_path / "model.safetensors"
    saved(ckpt, 2, 4)
    shard = next(ckpt.glob("step-000000004/*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    files.export_weights(str(ckpt), out=out, step=None, name=None)
    skipped, written = capsys.readouterr().out.splitlines()
    assert skipped.startswith("skipped: ")
    assert shard.name in skipped
    assert "of step 2" in written
    with pytest.raises(CheckpointDamaged):
        files.export_weights(str(ckpt), out=tmp_path / "other", step=4, name=None)


def test_exports_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    ckpt, there, out = tmp_path / "ckpt", tmp_path / "there", tmp_path / "out"
    saved(ckpt, 2)
    there.touch()

    def refusal(url: Path, file: Path, step: int | None = None, name: str | None = None) -> str:
        with pytest.raises(ElasticError) as told:
            files.export_weights(str(url), out=file, step=step, name=name)
        assert told.value.exit_code == 78
        return str(told.value)

    assert "there exists already" in refusal(ckpt, there)
    assert "no committed checkpoint of step 3" in refusal(ckpt, out, step=3)
    assert "found: 2" in refusal(ckpt, out, step=3)
    assert "tracked as 'net'; it has model, optimizer" in refusal(ckpt, out, name="net")
    assert "does not exist" in refusal(tmp_path / "nope", out)
    assert "there is no checkpoint in" in refusal(tmp_path, out)
    assert "cannot write" in refusal(ckpt, tmp_path / "nope" / "out")
    assert not out.exists()


# ---- loading


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    """A directory with a checkpoint of step 2. No optimizer may step later in a session."""
    saved(tmp_path / "ckpt", 2)
    return tmp_path / "ckpt"


def right(ckpt: Path) -> dict[str, torch.Tensor]:
    """The state of that checkpoint's model."""
    found = load(open_directory(str(ckpt)), 2)
    state: dict[str, torch.Tensor] = unflatten(found.structure.skeleton, found.tensors)["model"]
    return state


@pytest.fixture
def session(ckpt: Path) -> Iterator[Session]:
    assert ckpt.is_dir()
    session = Session(Training(LocalControl()))
    yield session
    session.close()


@pytest.mark.parametrize("form", ["checkpoint", "all", "one", "plain"])
def test_a_model_is_loaded_from_each_kind_of_source(
    session: Session, ckpt: Path, tmp_path: Path, form: str
) -> None:
    source = ckpt
    if form in ("all", "one"):
        name = None if form == "all" else "model"
        files.export_weights(str(source), out=(out := tmp_path / "w"), step=None, name=name)
        source = out
    elif form == "plain":
        source = tmp_path / "w"
        save_file({n: t.clone().float() for n, t in right(ckpt).items()}, source)
    model = session.distribute(Tied())
    assert session.load(source, model=model) == []
    for name, tensor in right(ckpt).items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert model.module.first.weight is model.module.again.weight  # type: ignore[union-attr]


def test_what_does_not_fit_is_named_with_shapes_or_left_as_it_is(
    session: Session, ckpt: Path
) -> None:
    model = Tied(out=5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointMismatch) as told:
        session.load(ckpt, model=model)
    assert "last.weight is tensor[5, 4] here and tensor[3, 4] there" in str(told.value)
    assert "strict=False" in str(told.value)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert session.load(ckpt, strict=False, model=model) == [
        "model.last.weight",
        "model.last.bias",
    ]
    assert torch.equal(model.first.weight, right(ckpt)["first.weight"])
    assert torch.equal(model.last.weight, before["last.weight"])
    with pytest.raises(CheckpointMismatch, match=r"nothing in .* fits model"):
        session.load(ckpt, strict=False, model=nn.Linear(9, 9))


class Language(nn.Module):
    """Has its layers in `model`, its head tied to the embedding, and what few models have."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "layer": nn.Linear(3, 3)})
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.model["embedding"].weight  # type: ignore[assignment]
        self.phases = nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
        self.register_buffer("none", torch.empty(0, 3))


@pytest.mark.parametrize("name", ["model", "net"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_file_of_a_model_whose_names_begin_as_the_one_to_load_is_read(
    session: Session, tmp_path: Path, name: str, strict: bool
) -> None:
    """As those of most language models: without tied weights, too."""
    right, file = Language(), tmp_path / "w"
    entries = {n: t for n, t in right.state_dict().items() if n != "head.weight"}
    entries["phases"] = torch.view_as_real(entries["phases"])  # as checkpoints are exported
    save_file(entries, file)
    model = Language()
    assert session.load(file, strict=strict, **models(name, model)) == []
    for key, tensor in right.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    del entries["model.layer.weight"]
    save_file(entries, file)
    with pytest.raises(CheckpointMismatch, match=r"model\.layer\.weight .* is only here"):
        session.load(file, **models(name, model))
    kept = [f"{name}.model.layer.weight"]
    assert session.load(file, strict=False, **models(name, model)) == kept


def models(name: str, model: nn.Module) -> Any:
    return {name: model}


def header(entries: object, content: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + content


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty": b"",
    "text": b"import torch\n" * 9,
    "cut": header({"w": ENTRY}, b"1234"),
    "list": header([1, 2]),
    "negative": header({"w": {**ENTRY, "shape": [-1, -2]}}, bytes(8)),
    "type": header({"w": {**ENTRY, "dtype": "F4"}}, bytes(8)),
    "fields": header({"w": 3}, bytes(8)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_safetensors_is_refused(
    session: Session, tmp_path: Path, name: str
) -> None:
    (file := tmp_path / "w").write_bytes(BROKEN[name])
    with pytest.raises(ConfigurationError, match=r"not a whole safetensors file .*torch\.load"):
        session.load(file, model=nn.Linear(1, 1))


def test_loading_is_refused_where_it_cannot_work(session: Session, tmp_path: Path) -> None:
    model = session.distribute(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="name what to load"):
        session.load(tmp_path)
    with pytest.raises(ConfigurationError, match=r"load\(optimizer=\.\.\.\): a SGD is no module"):
        session.load(tmp_path, optimizer=optimizer)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no checkpoint in"):
        session.load(tmp_path, model=model)
    with pytest.raises(ConfigurationError, match=r"nope\.safetensors does not exist"):
        session.load(tmp_path / "nope.safetensors", model=model)
    session.track(model=model)
    assert list(session.steps(numbers(4), epochs=0)) == []
    with pytest.raises(StepMisused, match="above the first loop"):
        session.load(tmp_path, model=model)
