"""Which agents are admitted beside others, and which of several agents has a node's name."""

from __future__ import annotations

import pytest

from elastic.coordinator.connected_agents import ConnectedAgents, name_of, node_id
from elastic.errors import ExitCode
from elastic.v1 import control_pb2 as pb
from elastic.version import __version__, release_of
from tests.unit.coordinator.agents import agent, kinds

TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"


def hello(node: str, token: str = TOKEN, **fields: str) -> pb.AgentHello:
    return agent(node, token, **fields).hello


def test_nodes_of_one_name_are_distinguished_by_their_start_tokens() -> None:
    assert node_id("n1", TOKEN) == "n1@01234567"
    assert node_id("n1", TOKEN) != node_id("n1", OTHER)
    assert node_id("n1", "") == "n1"
    for node in ("n1", "n1@01234567"):
        assert name_of(node) == "n1"


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"node": "n2"}, ""),
        ({"node": "n1"}, ""),  # the store gives a name to one agent at a time
        ({"node": "n1", "token": ""}, r"the node name 'n1' is taken; choose another"),
        ({"node": "n2", "version": __version__}, ""),
        ({"node": "n2", "version": release_of(__version__) + ".99"}, ""),
        ({"node": "n2", "version": "0.0.0"}, r"version 0\.0\.0.*install the same release"),
        ({"node": "n2@x/../y"}, "is not a valid node name"),
        ({"node": "n2", "command_digest": "e"}, r"'n2' runs a different command from node 'n1'"),
        (
            {"node": "n2", "isolation_timeout_s": 60.0},
            r"isolation-timeout-s 60, this coordinator 0:",
        ),
        (
            {"node": "n2", "run_id": "2"},
            r"belongs to run '2', but .* leads run 'default'; give both",
        ),
        ({"node": "n1", "command_digest": "e"}, ""),  # replaces the only other agent
    ],
)
def test_only_agents_that_fit_the_job_are_admitted(fields: dict[str, str], refused: str) -> None:
    nodes = ConnectedAgents()
    nodes.arrive(agent("n1", TOKEN))
    answer = nodes.refusal(hello(**fields))
    if refused:
        assert answer is not None
        assert answer.exit_code == ExitCode.REFUSED
        with pytest.raises(AssertionError, match=refused):
            raise AssertionError(answer.message)
    else:
        assert answer is None


def test_a_connected_node_is_found_until_it_leaves() -> None:
    nodes, stream = ConnectedAgents(), agent("n1", TOKEN)
    assert nodes.by_stream(stream) is None
    before, node = nodes.arrive(stream)
    assert before is None
    assert nodes.by_stream(stream) is node
    assert node.node == "n1@01234567"
    assert nodes.find("n1@01234567") is nodes.by_name("n1") is node
    assert nodes.find("n1") is None
    assert nodes.find("n1@fedcba98") is None
    assert [n.node for n in nodes] == ["n1@01234567"]
    assert nodes.leave(stream) is node
    assert nodes.leave(stream) is None
    assert nodes.by_name("n1") is None
    assert list(nodes) == []


def test_the_newest_agent_of_a_name_replaces_the_older_one() -> None:
    nodes, old, new = ConnectedAgents(), agent("n1", TOKEN), agent("n1", OTHER)
    nodes.arrive(old)
    before, _ = nodes.arrive(new)
    assert before is not None
    assert before.stream is old
    assert nodes.by_stream(old) is None
    assert nodes.leave(old) is None  # the end of its stream comes late and is ignored
    assert nodes.find("n1@01234567") is None
    assert nodes.find("n1@fedcba98") is nodes.by_stream(new)


def test_a_broadcast_reaches_all_connected_agents() -> None:
    nodes = ConnectedAgents()
    streams = [agent(name, TOKEN) for name in ("n1", "n2", "n3")]
    for stream in streams:
        nodes.arrive(stream)
    nodes.leave(streams[1])
    nodes.broadcast(job_ended=pb.JobEnded(exit_code=4))
    assert [kinds(s) for s in streams] == [["job_ended"], [], ["job_ended"]]


@pytest.mark.parametrize(
    ("coordinator", "node", "refused"),
    [
        (False, {"saves": True}, "'n1' has --checkpoint-dir, but this coordinator does not"),
        (True, {"saves": False}, "'n1' has no --checkpoint-dir, but this coordinator has one"),
        (True, {"saves": True}, ""),
        (False, {"saves": False}, ""),
        (True, {}, ""),  # an agent that does not say
        (True, {"saves": False, "classic": True}, ""),  # a torchrun script saves by itself
        (None, {"saves": True}, ""),
    ],
)
def test_an_agent_with_which_no_checkpoint_could_be_completed_is_refused(
    coordinator: bool | None, node: dict[str, bool], refused: str
) -> None:
    answer = ConnectedAgents(saves=coordinator).refusal(agent("n1", TOKEN, **node).hello)
    assert (answer is not None) == bool(refused)
    if answer is not None:
        assert refused in answer.message
        assert answer.exit_code == ExitCode.REFUSED


def test_an_agent_that_saves_unlike_the_coordinator_is_admitted_while_members_train() -> None:
    nodes = ConnectedAgents(may_train=lambda: True, saves=False)
    stream = agent("n1", TOKEN, saves=True)
    assert nodes.refusal(stream.hello) is None
    assert "cannot complete checkpoints" in nodes.checkpoint_mismatch(stream.hello)
