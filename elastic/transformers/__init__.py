"""Hugging Face's Trainer keeps its own loop, and recovers in process when a worker is lost.

import elastic
from elastic.transformers import attach

session = elastic.init()
trainer = Trainer(model=..., args=..., train_dataset=...)  # as usual; also a subclass of Trainer
attach(trainer, session)
trainer.train()
"""

from elastic.transformers.attached import attach

__all__ = ["attach"]
