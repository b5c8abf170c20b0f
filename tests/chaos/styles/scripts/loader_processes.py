"""Two loader processes a worker; samples are nested dicts with strings, collated by hand."""

import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

import elastic
from tests.chaos.styles import tasks


class Records(Dataset):
    def __init__(self) -> None:
        self.inputs, self.targets = tasks.regression().tensors

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict:
        halves = self.inputs[index].split(4)
        return {
            "name": f"sample-{index}",
            "inputs": {"left": halves[0], "rest": (halves[1], torch.tensor(index))},
            "target": self.targets[index],
        }


def collate(samples: list[dict]) -> dict:
    batch = default_collate(samples)
    batch["weights"] = torch.tensor([1.0 + len(s["name"]) / 100 for s in samples]).double()
    return batch


def main(epochs: int) -> None:
    session = elastic.init()
    model = session.distribute(tasks.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    session.track(model=model, optimizer=optimizer)
    data = elastic.DataLoader(
        Records(),
        batch_size=8,
        global_batch=8,
        seed=3,
        num_workers=2,
        prefetch_factor=2,
        collate_fn=collate,
    )
    for step in session.steps(data, epochs=epochs):
        with step:
            for batch in step.batches():
                nested = batch["inputs"]
                outputs = model(torch.cat([nested["left"], nested["rest"][0]], dim=1))
                losses = F.mse_loss(outputs, batch["target"], reduction="none").squeeze(1)
                step.backward((losses * batch["weights"]).mean())
            optimizer.step()
            optimizer.zero_grad()
