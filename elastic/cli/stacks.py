"""Where each rank is, with its Python stacks, for people and for programs."""

from __future__ import annotations

from typing import Any

from elastic.cli.formats import printable
from elastic.core.diagnosis import doing
from elastic.rpc.stacks import stack_lines, whereabouts_from_pb
from elastic.v1 import stacks_pb2 as pb


def stacks_document(reply: pb.JobStacks) -> dict[str, Any]:
    """As JSON."""
    return {"verdict": reply.verdict, "ranks": [_rank(one) for one in reply.ranks]}


def print_stacks(reply: pb.JobStacks) -> None:
    """For people: each rank with what it does in one line, and its stacks below."""
    for one in reply.ranks:
        where = whereabouts_from_pb(one.stacks, rank=one.rank, node=one.node)
        who = f"rank {one.rank}" if one.is_member else "no rank"
        step = f", step {where.committed}" if one.stacks.place else ""
        head = f"{who} (node {one.node}, worker {where.worker}){step}: {doing(where)}"
        print(printable(head))
        for line in stack_lines(one.stacks, indent="  "):
            print(printable(line))
        print()
    if reply.verdict:
        print(printable(reply.verdict))


def _rank(one: pb.RankStacks) -> dict[str, Any]:
    stacks = one.stacks
    where = whereabouts_from_pb(stacks, rank=one.rank, node=one.node)
    return {
        "rank": one.rank if one.is_member else None,
        "worker": stacks.worker,
        "node": one.node,
        "answer": where.answer.name.lower(),
        "place": where.place.name.lower(),
        "place_s": round(stacks.place_s, 3),
        "step": stacks.committed,
        "doing": doing(where),
        "processes": [_process(process) for process in stacks.processes],
    }


def _process(process: pb.ProcessStacks) -> dict[str, Any]:
    threads = [
        {
            "name": thread.name,
            "frames": [
                {"file": f.file, "line": f.line, "function": f.function} for f in thread.frames
            ],
            "left_out": thread.left_out,
        }
        for thread in process.threads
    ]
    return {"pid": process.pid, "name": process.name, "threads": threads}
