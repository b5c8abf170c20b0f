"""Fits a small model with Lightning's Trainer, and prints what it has come to. Options are JSON."""

import json
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elastic
import elastic.lightning

warnings.filterwarnings("ignore", module="lightning")
options = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
PACE_S = options.get("pace_s", 0.0)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"width": 16})
        layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)]
        if options.get("batch_norm"):
            layers.insert(1, nn.BatchNorm1d(16))
        self.net = nn.Sequential(*layers)
        self.train_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.auroc = torchmetrics.AUROC(task="multiclass", num_classes=3)
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def training_step(self, batch):
        time.sleep(PACE_S)
        inputs, labels = batch
        outputs = self.net(inputs)
        loss = nn.functional.cross_entropy(outputs, labels)
        self.train_accuracy(outputs, labels)
        self.auroc.update(outputs.softmax(1), labels)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("count", float(len(labels)), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", outputs.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("accuracy", self.train_accuracy, on_step=True, on_epoch=True)
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, _):
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", torch.stack(norms).norm())

    def validation_step(self, batch):
        time.sleep(options.get("val_pace_s", 0.0))
        inputs, labels = batch
        outputs = self.net(inputs)
        self.val_accuracy(outputs, labels)
        self.log("val_loss", nn.functional.cross_entropy(outputs, labels))
        self.log("val_accuracy", self.val_accuracy)

    test_step = validation_step

    def predict_step(self, batch):
        return self.net(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        kind = options.get("scheduler", "step")
        if kind == "plateau":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
            }
        by_step = kind == "step"
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7 if by_step else 1, 0.9)
        interval = "step" if by_step else "epoch"
        return [optimizer], [{"scheduler": scheduler, "interval": interval}]


class Seen(pl.Callback):
    """Prints each step that rank 0 has seen committed, and each evaluation."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}", flush=True)

    def on_validation_start(self, trainer, _):
        if trainer.is_global_zero and not trainer.sanity_checking:
            print(f"evaluates after {trainer.global_step}", flush=True)

    def on_save_checkpoint(self, trainer, *_):
        time.sleep(options.get("save_pace_s", 0.0))
        if trainer.is_global_zero:
            print(f"saves after {trainer.global_step}", flush=True)


session = elastic.init()
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
generator = torch.Generator().manual_seed(1)
inputs = torch.randn(options.get("samples", 100), 6, generator=generator)
labels = (inputs[:, :3] + 0.5 * inputs[:, 3:]).argmax(1)
dataset = TensorDataset(inputs, labels)
files = Path(options.get("files", "."))
data = elastic.DataLoader(
    dataset,
    batch_size=options.get("batch_size", 2),
    global_batch=options.get("global_batch", 10),
    seed=3,
)
callbacks = [Seen()]
if "checkpoint" in options:
    callbacks.append(ModelCheckpoint(dirpath=options.get("dirpath"), **options["checkpoint"]))
if "early_stopping" in options:
    callbacks.append(EarlyStopping(**options["early_stopping"]))
if "timer" in options:
    callbacks.append(Timer(**options["timer"]))
if options.get("monitor_rate"):
    callbacks.append(LearningRateMonitor())
trainer = pl.Trainer(
    strategy=elastic.lightning.ElasticStrategy(session),
    accelerator="cpu",
    logger=CSVLogger(files, name="curves"),
    callbacks=callbacks,
    enable_checkpointing="checkpoint" in options,
    enable_model_summary=False,
    **{"max_epochs": 3, "log_every_n_steps": 1, "enable_progress_bar": False}
    | options.get("trainer", {}),
)
model = Model()
evaluated = DataLoader(TensorDataset(inputs[:33], labels[:33]), 8)
validation = evaluated if options.get("validates", True) else None
trainer.fit(model, data, validation)
if more := options.get("then_epochs"):
    trainer.fit_loop.max_epochs += more
    trainer.fit(model, data, validation)
result = {
    "rank": session.rank,
    "steps": trainer.global_step,
    "committed": session.committed,
    "epoch": trainer.current_epoch,
    "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
    "metrics": {k: v.item() for k, v in sorted(trainer.callback_metrics.items())},
    "weights": [w for p in model.parameters() for w in p.detach().reshape(-1).tolist()],
}
if "checkpoint" in options:
    result["best"] = str(trainer.checkpoint_callback.best_model_path)
if options.get("tests"):
    result["test"] = trainer.test(model, evaluated, verbose=False)
    result["predicted"] = torch.cat(trainer.predict(model, evaluated)).tolist()
with (files / f"result-{session.rank}.json").open("w") as file:
    json.dump(result, file)
