"""The readers of a stream return whole messages in order, and refuse everything else."""

from __future__ import annotations

import asyncio
import itertools
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.rpc import framing
from elastic.rpc.framing import BadFrame, FrameDecoder, encode, read_message
from elastic.v1 import local_pb2 as pb
from tests.fuzzed_documents import spliced
from tests.fuzzed_messages import messages

HELLO = pb.WorkerMessage(hello=pb.Hello(worker="local-1", pid=7))
TOO_LONG = struct.pack("!I", framing.MAX_FRAME_BYTES + 1)
GARBAGE = struct.pack("!I", 4) + b"\xff\xff\xff\xff"


def numbered(count: int) -> list[pb.WorkerMessage]:
    """Messages of different lengths, the first of them empty."""
    hellos = [pb.Hello(worker="w" * i, pid=i) for i in range(count)]
    return [pb.WorkerMessage(hello=h) if h.pid else pb.WorkerMessage() for h in hellos]


@given(cuts=st.lists(st.integers(min_value=0, max_value=200), max_size=8))
def test_a_stream_cut_anywhere_gives_the_same_messages(cuts: list[int]) -> None:
    messages = numbered(6)
    stream = b"".join(map(encode, messages))
    edges = sorted({0, *(min(c, len(stream)) for c in cuts), len(stream)})
    decoder = FrameDecoder(pb.WorkerMessage)
    found = []
    for start, stop in itertools.pairwise(edges):
        found += list(decoder.feed(stream[start:stop]))
    assert found == messages


def test_a_frame_fed_byte_by_byte_gives_its_message_at_the_end() -> None:
    decoder = FrameDecoder(pb.WorkerMessage)
    frame = encode(HELLO)
    found = [list(decoder.feed(bytes([byte]))) for byte in frame]
    assert found[-1] == [HELLO]
    assert not any(found[:-1])


@pytest.mark.parametrize("bad", [TOO_LONG, GARBAGE], ids=["too long", "garbage"])
def test_a_bad_frame_is_refused_after_the_good_ones(bad: bytes) -> None:
    decoder = FrameDecoder(pb.WorkerMessage)
    messages = decoder.feed(encode(HELLO) + bad)
    assert next(messages) == HELLO
    with pytest.raises(BadFrame):
        next(messages)


def test_the_longest_frame_passes_and_a_longer_one_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", HELLO.ByteSize())
    assert list(FrameDecoder(pb.WorkerMessage).feed(encode(HELLO))) == [HELLO]
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", HELLO.ByteSize() - 1)
    with pytest.raises(BadFrame):
        encode(HELLO)


def read_all(
    stream: bytes, kind: type[pb.WorkerMessage] = pb.WorkerMessage
) -> list[pb.WorkerMessage]:
    """The messages that an asyncio reader finds in the stream."""

    async def read() -> list[pb.WorkerMessage]:
        reader = asyncio.StreamReader()
        reader.feed_data(stream)
        reader.feed_eof()
        found = []
        while (message := await read_message(reader, kind)) is not None:
            found.append(message)
        return found

    return asyncio.run(read())


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 5])
def test_a_reader_takes_whole_messages_until_the_end(cut: int) -> None:
    """The stream ends after `cut` bytes of a further frame: its sender has died."""
    messages = numbered(3)
    stream = b"".join(map(encode, messages)) + encode(HELLO)[:cut]
    assert read_all(stream) == messages


@pytest.mark.parametrize("bad", [TOO_LONG, GARBAGE], ids=["too long", "garbage"])
def test_a_reader_refuses_bad_frames(bad: bytes) -> None:
    with pytest.raises(BadFrame):
        read_all(encode(HELLO) + bad)


async def test_a_reset_connection_counts_as_the_end_of_the_stream() -> None:
    reader = asyncio.StreamReader()
    reader.set_exception(ConnectionResetError())
    assert await read_message(reader, pb.WorkerMessage) is None


_KINDS = st.sampled_from([pb.WorkerMessage, pb.WorkerCommand, pb.ZygoteRequest, pb.ZygoteEvent])


@given(kind=_KINDS, data=st.data())
def test_any_bytes_are_messages_or_a_bad_frame(kind: type[pb.WorkerMessage], data: Any) -> None:
    """Both readers agree: neither raises another error, and neither waits for more bytes."""
    frame = encode(data.draw(messages(kind)))
    content = data.draw(st.binary(max_size=40) | spliced(frame) | spliced(frame * 2))
    by_decoder, refused = [], False
    try:
        by_decoder.extend(FrameDecoder(kind).feed(content))
    except BadFrame:
        refused = True
    if refused:
        with pytest.raises(BadFrame):
            read_all(content, kind)
    else:
        serialized = [m.SerializeToString(deterministic=True) for m in read_all(content, kind)]
        assert serialized == [m.SerializeToString(deterministic=True) for m in by_decoder]
