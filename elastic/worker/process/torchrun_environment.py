"""What a script that was written for torchrun finds in its environment."""

from __future__ import annotations

import os

from elastic.core.membership import Generation, WorkerId

# Names and values as in torch.distributed.elastic.agent.server.local_elastic_agent (torch 2.13).
_ROLE = "default"


def torchrun_environment(
    generation: Generation, worker: WorkerId, *, job: str, error_file: str
) -> dict[str, str]:
    """The variables for a member of the generation.

    Ranks follow each other on a node, and so do local ranks, also where it has fewer members than
    slots: a script takes them for indices. error_file: where torch's `record` leaves exceptions.
    """
    nodes = list(dict.fromkeys(m.node for m in generation.members))
    rank = generation.rank_of(worker)
    if rank is None:
        raise ValueError(f"{worker} is no member of generation {generation.number}")
    node = generation.members[rank].node
    neighbours = [m.worker for m in generation.members if m.node == node]
    host, _, port = generation.store_endpoint.rpartition(":")
    world_size = str(generation.world_size)
    return {
        "LOCAL_RANK": str(neighbours.index(worker)),
        "RANK": str(rank),
        "GROUP_RANK": str(nodes.index(node)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": _ROLE,
        "LOCAL_WORLD_SIZE": str(len(neighbours)),
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(generation.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(generation.max_restarts),
        "TORCHELASTIC_RUN_ID": job,
        # Rank 0 finds a store at MASTER_ADDR, too, and does not make one of its own.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
