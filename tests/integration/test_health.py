"""grpc.health.v1 of a real coordinator says what its /readyz says."""

from __future__ import annotations

import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc as pb_grpc

from tests.etcd_cluster import EtcdCluster, free_ports
from tests.integration.loopback_job import LoopbackJob
from tests.integration.running import SCRIPTS, Place

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
CONTROL = "elastic.v1.Control"


def test_grpc_health_agrees_with_readyz_in_an_outage(place: Place, etcd: EtcdCluster) -> None:
    job = LoopbackJob(place, (SCRIPTS / "steady.py",), etcd=etcd.endpoints())
    (port,) = free_ports(1)
    (member,) = etcd.members
    try:
        job.start_coordinator("--http-address", f"127.0.0.1:{port}")
        job.wait(lambda: job.events("elected"), "a leader")
        with grpc.insecure_channel(job.address) as channel:
            stub = pb_grpc.HealthStub(channel)

            def says(status: int, ready: int) -> bool:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz") as answer:
                        found = answer.status
                except urllib.error.HTTPError as error:
                    with error:
                        found = error.code
                asked = [
                    stub.Check(pb.HealthCheckRequest(service=service), timeout=10).status
                    for service in ("", CONTROL)
                ]
                return (found, asked) == (ready, [status, status])

            job.wait(lambda: says(SERVING, 200), "health")
            watch = stub.Watch(pb.HealthCheckRequest(service=CONTROL))
            assert next(watch).status == SERVING
            member.freeze()
            assert next(watch).status == NOT_SERVING
            job.wait(lambda: says(NOT_SERVING, 503), "doubt")
            member.thaw()
            assert next(watch).status == SERVING
            job.wait(lambda: says(SERVING, 200), "health again")
            watch.cancel()
    finally:
        member.thaw()
        job.close()
