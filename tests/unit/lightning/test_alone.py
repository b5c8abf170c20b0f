"""Lightning's Trainer with ElasticStrategy in a job of one worker: as without it, or refused."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning_utilities.core import rank_zero
from torch import nn
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import TensorDataset

import elastic.lightning
from elastic.errors import ConfigurationError
from elastic.worker.control import LocalControl
from elastic.worker.data_loader import DataLoader
from elastic.worker.session import Session
from elastic.worker.training import Training

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on loaders and loggers

SAMPLES, BATCH = 23, 6


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(Training(LocalControl()))
    yield session
    session.close()
    rank_zero.rank_zero_only.rank = 0  # type: ignore[attr-defined]
    if dist.is_initialized():
        dist.destroy_process_group()


class Model(pl.LightningModule):
    """Logs in every way, and notes what its forward pass computes with."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
        kinds = {"task": "multiclass", "num_classes": 3}
        self.accuracy = torchmetrics.Accuracy(**kinds)
        self.several = torchmetrics.MetricCollection(
            {"precision": torchmetrics.Precision(**kinds), "recall": torchmetrics.Recall(**kinds)}
        )
        self.auroc = torchmetrics.AUROC(**kinds)
        self.held = torchmetrics.Accuracy(**kinds)
        self.computes_in: set[torch.dtype] = set()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        inputs, labels = batch
        outputs = self.net(inputs.to(self.net[0].weight.dtype))
        self.computes_in.add(outputs.dtype)
        loss = nn.functional.cross_entropy(outputs, labels)
        self.accuracy(outputs, labels)
        self.several.update(outputs, labels)
        self.auroc.update(outputs.softmax(1), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("count", float(len(labels)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("least", outputs.min(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, _: Any) -> None:
        self.log("norm", torch.stack([p.grad.norm() for p in self.parameters()]).norm())

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("mean_loss", outputs["loss"], on_epoch=True)

    def validation_step(self, batch: Any, _: int) -> None:
        outputs = self.net(batch[0].to(self.net[0].weight.dtype))
        self.held(outputs, batch[1])
        self.log("held", self.held)
        self.log("held_loss", nn.functional.cross_entropy(outputs, batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


def numbers() -> TensorDataset:
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)).double()
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


def data(**options: Any) -> DataLoader:
    return DataLoader(
        numbers(), **{"batch_size": 4, "global_batch": BATCH, "shuffle": False} | options
    )


def trainer(session: Session | None, **options: Any) -> pl.Trainer:
    if session is not None:
        options["strategy"] = elastic.lightning.ElasticStrategy(session)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    plain = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
    return pl.Trainer(accelerator="cpu", devices=1, **quiet | plain | options)


def fitted(
    session: Session | None, directory: Path, **options: Any
) -> tuple[pl.Trainer, Model, list[dict[str, str]]]:
    """Fit the model; return also the rows of its log."""
    model = Model()
    logger = CSVLogger(directory, name="curves")
    fits = trainer(session, logger=logger, log_every_n_steps=1, **options)
    loader = data() if session is not None else TorchLoader(numbers(), BATCH)
    fits.fit(model, loader, TorchLoader(numbers(), 5))
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").open()))
    return fits, model, [{k: v for k, v in row.items() if v} for row in rows]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_epochs": 3, "gradient_clip_val": 0.3}, id="clipped"),
        pytest.param({"max_steps": 9, "max_epochs": -1, "val_check_interval": 2}, id="steps"),
        pytest.param({"max_epochs": 2, "overfit_batches": 2}, id="overfit"),
        pytest.param({"max_epochs": 4, "check_val_every_n_epoch": 2}, id="seldom evaluated"),
    ],
)
def test_a_fit_is_that_of_lightning_itself(
    session: Session, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Micro-batches are smaller than a batch: what is logged must be the batch's all the same."""
    ours, model, rows = fitted(session, tmp_path / "ours", **options)
    plain, expected, wanted = fitted(None, tmp_path / "plain", **options)
    assert [sorted(row) for row in rows] == [sorted(row) for row in wanted]
    for row, other in zip(rows, wanted, strict=True):
        assert {k: float(v) for k, v in row.items()} == pytest.approx(
            {k: float(v) for k, v in other.items()}, abs=1e-6
        )
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-10, rtol=0)
    assert (ours.global_step, ours.current_epoch) == (plain.global_step, plain.current_epoch)
    assert ours.optimizers[0].param_groups[0]["lr"] == plain.optimizers[0].param_groups[0]["lr"]
    assert session.committed == ours.global_step


def test_mixed_precision_computes_in_half_precision(session: Session) -> None:
    model = Model(torch.float32)
    trainer(session, max_epochs=1, precision="bf16-mixed").fit(model, data())
    assert model.computes_in == {torch.bfloat16}


def test_gradients_are_scaled_and_unscaled_in_half_precision(session: Session) -> None:
    """There is no float16 on CPUs: a scaler in front of bfloat16 shows its part."""
    plugin = MixedPrecision("bf16-mixed", "cpu")
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    model, expected = Model(torch.float32), Model(torch.float32)
    trainer(session, max_epochs=1, plugins=plugin, gradient_clip_val=0.5).fit(model, data())
    assert plugin.scaler.get_scale() == 1024.0 * 2**2
    plain = trainer(None, max_epochs=1, precision="bf16-mixed", gradient_clip_val=0.5)
    plain.fit(expected, TorchLoader(numbers(), BATCH))
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=0.02, rtol=0)


def test_fit_after_fit_goes_on_and_evaluations_stand_between(session: Session) -> None:
    fits, model = trainer(session, max_epochs=1), Model()
    fits.validate(model, TorchLoader(numbers(), 5), verbose=False)
    fits.fit(model, data())
    fits.validate(model, TorchLoader(numbers(), 5), verbose=False)
    fits.fit_loop.max_epochs = 3
    fits.fit(model, data())
    assert (fits.current_epoch, fits.global_step, session.committed) == (3, 12, 12)
    again = trainer(session, max_epochs=1)
    again.fit(model, data())
    assert (again.global_step, session.committed) == (4, 16)


def test_early_stopping_and_checkpoints_are_those_of_lightning(
    session: Session, tmp_path: Path
) -> None:
    def stops() -> list[Any]:
        return [
            callbacks.EarlyStopping("held_loss", mode="max", patience=2),
            callbacks.ModelCheckpoint(monitor="held_loss", save_top_k=2, every_n_train_steps=3),
            callbacks.LearningRateMonitor(),
        ]

    more = {"max_epochs": 9, "enable_checkpointing": True}
    ours, _, rows = fitted(session, tmp_path / "ours", callbacks=stops(), **more)
    plain, _, wanted = fitted(None, tmp_path / "plain", callbacks=stops(), **more)
    assert (ours.global_step, len(rows)) == (plain.global_step, len(wanted))
    names = [
        sorted(path.name for path in (tmp_path / which).rglob("*.ckpt"))
        for which in ("ours", "plain")
    ]
    assert names[0] == names[1] != []


def of_steps(**hooks: Callable[..., Any]) -> type[Model]:
    return type("Changed", (Model,), hooks)


def two_optimizers(self: Model) -> Any:
    return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


MANUAL = of_steps(automatic_optimization=property(lambda _: False))
REFUSED: dict[str, tuple[dict[str, Any], type[Model], Callable[[], Any], str]] = {
    "accumulation": ({"accumulate_grad_batches": 2}, Model, data, "accumulate_grad_batches=2"),
    "manual": ({}, MANUAL, data, "automatic_optimization=False"),
    "loader": ({}, Model, lambda: TorchLoader(numbers(), 8), "batch_size=8"),
    "no global batch": ({}, Model, lambda: DataLoader(numbers(), 4), "without global_batch"),
    "clock": (
        {"val_check_interval": datetime.timedelta(1)},
        Model,
        data,
        "val_check_interval=86400.0 s",
    ),
    "reloads": (
        {"reload_dataloaders_every_n_epochs": 2},
        Model,
        data,
        "reload_dataloaders_every_n_epochs=2",
    ),
    "batch norm": ({"sync_batchnorm": True}, Model, data, "sync_batchnorm=True"),
    "several": ({}, of_steps(configure_optimizers=two_optimizers), data, "several optimizers"),
    "none": ({}, of_steps(configure_optimizers=lambda _: None), data, "returned None"),
    "LBFGS": (
        {},
        of_steps(configure_optimizers=lambda self: torch.optim.LBFGS(self.parameters())),
        data,
        "LBFGS",
    ),
    "backward": ({}, of_steps(backward=lambda *_: None), data, "backward()"),
    "None": ({}, of_steps(training_step=lambda *_: None), data, "training_step() returned None"),
    "skips": ({}, of_steps(on_train_batch_start=lambda *_: -1), data, "returned -1"),
    "never steps": ({}, of_steps(optimizer_step=lambda *given: given[4]()), data, "without a step"),
    "gathers": (
        {},
        of_steps(training_step=lambda self, batch, _: self.all_gather(self.net(batch[0])).mean()),
        data,
        "all_gather()",
    ),
    "averages": (
        {"callbacks": [callbacks.StochasticWeightAveraging(1e-2)]},
        Model,
        data,
        "StochasticWeightAveraging",
    ),
    "several loaders": ({}, Model, lambda: [data(), data()], "builtins.list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_train_wrong_is_refused_with_a_remedy(session: Session, name: str) -> None:
    options, kind, loader, told = REFUSED[name]
    with pytest.raises(ConfigurationError, match="ElasticStrategy: ") as caught:
        trainer(session, max_epochs=2, **options).fit(kind(), loader())
    assert told in str(caught.value)
    assert ";" in str(caught.value) or "," in str(caught.value)
    assert session.committed == 0


def test_a_checkpoint_of_lightnings_is_no_place_to_resume_from(session: Session) -> None:
    with pytest.raises(ConfigurationError, match=r"best\.ckpt.*--checkpoint-dir"):
        trainer(session, max_epochs=2).fit(Model(), data(), ckpt_path="best.ckpt")


def test_another_module_is_refused(session: Session) -> None:
    trainer(session, max_epochs=1).fit(Model(), data())
    with pytest.raises(ConfigurationError, match="another module"):
        trainer(session, max_epochs=1).fit(Model(), data())


def test_a_metric_that_cannot_be_carried_on_is_refused(session: Session) -> None:
    class Correlates(Model):
        def __init__(self) -> None:
            super().__init__()
            self.correlation = torchmetrics.PearsonCorrCoef()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = super().training_step(batch, _)
            self.correlation.update(batch[0][:, 0].float(), batch[1].float())
            return loss

    with pytest.raises(ConfigurationError, match="PearsonCorrCoef"):
        trainer(session, max_epochs=1).fit(Correlates(), data())


def test_prepare_data_is_called_and_the_loader_may_be_the_modules(session: Session) -> None:
    class Prepares(Model):
        prepared = 0

        def prepare_data(self) -> None:
            Prepares.prepared += 1

        def train_dataloader(self) -> Any:
            return data()

    fits = trainer(session, max_epochs=1)
    fits.fit(Prepares())
    assert (Prepares.prepared, fits.global_step) == (1, 4)
