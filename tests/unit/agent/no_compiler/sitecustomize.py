"""In the path of zygotes whose workers train no model: torch's compiler is a third of the start."""

import sys
import types

for name in ("torch._dynamo", "torch._dynamo.utils"):
    sys.modules[name] = types.ModuleType(name)
