"""In the path of jobs that use transformers: the process from which workers are forked imports it,
so that a worker starts in a tenth of the time."""

import sys

if "elastic.worker.process.zygote" in sys.orig_argv:
    import peft  # noqa: F401
    import transformers.models.gpt2.modeling_gpt2  # noqa: F401
    from transformers import Trainer  # noqa: F401
