"""The health of each member of a real etcd."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from elastic.store.etcd.client import MemberHealth, members_health
from elastic.store.etcd.endpoints import etcd_options
from tests.etcd_cluster import EtcdCluster, free_ports
from tests.etcd_front import etcd_front


def health(endpoints: str, total_s: float = 5.0) -> list[MemberHealth]:
    options = dataclasses.replace(etcd_options(endpoints), total_timeout_s=total_s)
    return list(asyncio.run(members_health(options, "elastic/j/nodes/doctor")))


def test_each_member_reports_its_version_and_commit_times(shared_cluster: EtcdCluster) -> None:
    found = health(shared_cluster.endpoints())
    assert [one.endpoint for one in found] == shared_cluster.endpoints().split(",")
    for one in found:
        assert (one.version, one.error, one.errors) == ("3.5.1", "", ())
        assert len(one.commit_s) == 5
        assert one.size_bytes >= one.used_bytes > 0
        assert one.quota_bytes == 0, "only later versions tell"
    assert shared_cluster.ctl("get", "elastic/j/nodes/doctor") == "", "nothing is written"


def test_members_are_asked_without_the_proxy_of_the_environment(
    shared_cluster: EtcdCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    assert [one.error for one in health(shared_cluster.endpoints())] == ["", "", ""]


def test_a_member_that_does_not_answer_is_named_beside_one_that_does(
    shared_cluster: EtcdCluster,
) -> None:
    (port,) = free_ports(1)
    good, bad = health(f"{shared_cluster.members[0].address},127.0.0.1:{port}", total_s=0.5)
    assert good.version
    assert bad.error
    assert not bad.is_refusal


def test_the_commit_times_of_a_slow_member_show_its_delay(shared_cluster: EtcdCluster) -> None:
    with etcd_front(shared_cluster.members[0].address, delay_s=0.05) as address:
        (found,) = health(address)
    assert found.version == "3.5.23"
    assert min(found.commit_s) >= 0.05
