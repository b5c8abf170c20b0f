"""How long is waited for what is awaited: `async with timeout(seconds):`.

Not `asyncio.wait_for`: before Python 3.12 it returns, and forgets that it was cancelled, where the
work ends at that moment. A caller that cancels a task and waits for its end would then wait for
ever.
"""

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout
else:
    from async_timeout import timeout

__all__ = ["timeout"]
