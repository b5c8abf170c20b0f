"""A message of an agent, however malformed, ends its own stream at most, never the coordinator."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.coordinator.daemon import CoordinatorDaemon
from elastic.coordinator.leadership import lead
from elastic.coordinator.operators import Operators
from elastic.runtime.journal import RecentEntries
from elastic.runtime.loop_watch import LoopPauses
from elastic.store.memory import MemoryStore
from elastic.v1 import control_pb2 as pb
from tests.fuzzed_messages import messages
from tests.unit.coordinator.agents import Diary, agent, options


@settings(max_examples=3 * settings.default.max_examples)
@given(st.lists(st.tuples(st.sampled_from(["n1", "n2"]), messages(pb.AgentMessage)), max_size=12))
async def test_no_message_breaks_the_coordinator(said: list[tuple[str, pb.AgentMessage]]) -> None:
    store, diary = MemoryStore(), Diary()
    leadership = await lead(store, job="job", candidate="c")
    daemon = CoordinatorDaemon(options(max_workers=4), store, leadership, diary.journal)
    streams = {name: agent(name, "0123") for name in ("n1", "n2")}
    for stream in streams.values():
        daemon.agent_connected(stream)
    for name, message in said:
        message = pb.AgentMessage.FromString(message.SerializeToString())
        try:
            daemon.agent_said(streams[name], message)
        except ValueError:  # the message makes no sense: gRPC ends its stream
            daemon.agent_lost(streams[name])
            streams[name] = agent(name, "0123")
            daemon.agent_connected(streams[name])
        for _ in range(5):
            await asyncio.sleep(0)
        if daemon.ended.done():
            assert daemon.ended.exception() is None, message
            break
    Operators(daemon, LoopPauses(), RecentEntries()).status().SerializeToString()
    for entry in diary.entries:
        entry.to_json()
    await daemon.close()
