"""However often peers are refused, few events tell of it, and none is lost from the count."""

from __future__ import annotations

from elastic.rpc.refusals import AT_ONCE, EVERY_S, SparingReport
from tests.unit.rpc.conversation import Reports


def test_a_flood_of_refusals_gives_few_events_that_count_the_others() -> None:
    now, reports = 100.0, Reports()
    sparing = SparingReport(reports, lambda: now)
    for number in range(6000):
        sparing("peer_refused", peer=str(number))
    assert [e["peer"] for e in reports.named("peer_refused")] == [str(n) for n in range(AT_ONCE)]
    now += EVERY_S
    sparing("message_refused", source="n1")
    sparing("message_refused", source="n1")
    assert reports.named("message_refused") == [{"source": "n1", "left_out": 6000 - AT_ONCE}]
    now += EVERY_S
    sparing("peer_refused", peer="x")
    assert reports.named("peer_refused")[-1] == {"peer": "x", "left_out": 1}


def test_after_a_quiet_time_several_refusals_are_reported_again() -> None:
    now, reports = 0.0, Reports()
    sparing = SparingReport(reports, lambda: now)
    for _ in range(50):
        sparing("peer_refused")
    now += 100 * AT_ONCE * EVERY_S
    for _ in range(50):
        sparing("peer_refused")
    assert len(reports.named("peer_refused")) == 2 * AT_ONCE
