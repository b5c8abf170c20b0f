"""The Python stacks of this process, as the link's thread tells them."""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType

from elastic.v1 import stacks_pb2 as pb

_MOST_THREADS, _MOST_FRAMES, _LONGEST_NAME = 64, 60, 500


def own_stacks(*, brief: bool) -> pb.ProcessStacks:
    """The main thread first; brief: it alone. Takes no lock, which a script's thread may hold."""
    running = sys._current_frames()
    main = threading.main_thread().ident or 0
    names = {ident: thread.name for ident, thread in list(threading._active.items())}  # type: ignore[attr-defined]
    idents = [main] if brief else [main, *(i for i in running if i != main)]
    threads = [
        _thread(names.get(ident, f"thread {ident}"), running[ident])
        for ident in idents[:_MOST_THREADS]
        if ident in running
    ]
    return pb.ProcessStacks(pid=os.getpid(), name=_text(sys.argv[0]), threads=threads)


def _thread(name: str, frame: FrameType | None) -> pb.ThreadStack:
    frames: list[pb.Frame] = []
    left_out = 0
    while frame is not None:
        if len(frames) < _MOST_FRAMES:
            code = frame.f_code
            frames.append(
                pb.Frame(
                    file=_text(code.co_filename),
                    line=max(frame.f_lineno or 0, 0),
                    function=_text(code.co_name),
                )
            )
        else:
            left_out += 1
        frame = frame.f_back
    return pb.ThreadStack(name=_text(name), frames=frames, left_out=left_out)


def _text(name: str) -> str:
    """As protobuf takes it: paths may be no text."""
    return name.encode(errors="replace").decode()[-_LONGEST_NAME:]
