"""Lightning's Trainer keeps its loop, and recovers in process when a worker is lost.

import elastic.lightning
session = elastic.init()
data = elastic.DataLoader(dataset, batch_size=64, global_batch=256)
trainer = Trainer(strategy=elastic.lightning.ElasticStrategy(session), ...)
trainer.fit(module, data)

docs/LIGHTNING.md says what is refused, and what differs.
"""

from __future__ import annotations

try:
    import lightning.pytorch  # noqa: F401 - an optional dependency
except ModuleNotFoundError as error:
    if error.name != "lightning":
        raise
    raise ImportError(
        "elastic.lightning needs Lightning 2.6: pip install 'elastic-ddp[lightning]'"
    ) from error

from elastic.lightning.strategy import ElasticStrategy

__all__ = ["ElasticStrategy"]
