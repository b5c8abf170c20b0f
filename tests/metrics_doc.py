"""Writes docs/METRICS.md: `python -m tests.metrics_doc`; the freshness test uses it too."""

from __future__ import annotations

from pathlib import Path

from elastic.agent import metrics as agent
from elastic.coordinator import metrics as coordinator
from elastic.runtime import process_metrics
from elastic.runtime.metrics import Catalog, Metric

CATALOGS = (coordinator.CATALOG, agent.CATALOG, process_metrics.CATALOG)
TARGET = Path(__file__).parent.parent / "docs" / "METRICS.md"
_HEAD = """\
# Metrics

Generated from the definitions by `python -m tests.metrics_doc`.

`elastic coordinator` serves `/metrics`, `/healthz` and `/readyz` at 127.0.0.1:9400 if that port is free; `elastic
agent` and `elastic run` serve them with `--http-address HOST:PORT`. `--metrics-address HOST:PORT` moves `/metrics` to an
address of its own, together with the two health paths and under the same rules; `--http-address` keeps the page and the
health paths. So scrapers can have access without the page. `/metrics` has Prometheus' text format, or
OpenMetrics if the scraper accepts it. `/` is [the page](GUIDE.md#the-page) of a coordinator or `elastic run`;
the data it reads under `/page/` changes with every version.

| path | 200 | 503, with the reason in one line |
|---|---|---|
| `/healthz` | the process lives. It checks neither etcd nor a coordinator nor training | never |
| `/readyz` of a coordinator | it leads or follows, and etcd answers | otherwise, or if its event loop stands still |
| `/readyz` of an agent | its node is registered, and a coordinator answers it | the same. Its workers may still train: use it to look, not to restart |
| `/readyz` of `elastic run` | its coordinator serves | its event loop stands still |
| `/metrics` | | its event loop has not answered since the start. Later it serves the last figures and the time at which they were taken |

Coordinators and `elastic run` also answer [gRPC's health checks](https://grpc.io/docs/guides/health-checking/), where
agents and operators reach them: `SERVING` while `/readyz` is 200, for `elastic.v1.Control` and for the whole server.
With certificates they need a certificate of the job, as all calls there do, so a kubelet cannot use them. Agents serve no
gRPC.

```sh
grpc_health_probe -addr 10.0.0.1:29400 -tls -tls-ca-cert ca.pem -tls-client-cert viewer.pem \\
    -tls-client-key viewer.key -tls-server-name digits.job.elastic
```

## Who may scrape

A loopback address has plain HTTP, for every user of the machine. Any other address needs the job's
certificates (`--tls-ca`, `--tls-cert`, `--tls-key`), or `--insecure`. With certificates it has HTTPS (TLS 1.2 or
newer) and shows the daemon's certificate; new connections use replaced files. This certificate must allow `serverAuth`,
which those limited to the role agent, operator or viewer do not ([SECURITY.md](SECURITY.md#roles)). `/metrics` then needs
a client certificate that the job's authority has signed and that names `JOB.job.elastic`; the role
`viewer` is enough. `/healthz` and `/readyz` need no certificate, so a kubelet can ask them. The certificates name the job,
not the host, so tell a scraper which name to expect:

```yaml
scrape_configs:
  - job_name: elastic
    honor_labels: true  # keep the label `job`, the name of the training job
    scheme: https
    tls_config:
      ca_file: /tls/ca.pem
      cert_file: /tls/viewer.pem
      key_file: /tls/viewer.key
      server_name: digits.job.elastic
    static_configs:
      - targets: ["10.0.0.1:9400", "10.0.0.2:9400"]
```

The server keeps at most 100 connections: the oldest makes room for a new one, and a connection without an answer for
10 s is closed. Up to 32 of them may be open pages, and no newer connection replaces these. The server refuses requests
of more than 16 KiB and methods other than GET and HEAD.

## How to read them

- Every metric except those of the process (`process_...`) has the label `job`.
- A standby coordinator serves `elastic_leader` 0 and the metrics under [Every daemon](#every-daemon). Only the
  leader serves the job's metrics, so `max without (instance)` and `sum without (instance)` give the job's figure.
- Counters and histograms of the job cover the whole run. The leader keeps them in etcd at every failure, change of the
  group and checkpoint, and otherwise every 10 s (less often in large jobs: it writes at most 200 bytes a second), and
  a new leader continues from there. Those of an agent, and of a daemon's process, start again with it.
- The label `reason` has the reasons of `generation_formed`, `kind` of failures those of `worker_failed` (docs/EVENTS.md).
- The label `kind` of `elastic_slot_seconds_total` has [the kinds of time](GUIDE.md#where-the-time-goes). A step is
  added within 5 s of its end, so a hang shows only afterwards; until then watch `elastic_last_commit_timestamp_seconds`.
- The script chooses the names of `elastic_script_value`, so it should report few. The first 100 are kept.
- Rules and alerts are in `deploy/prometheus`; [RUNBOOK.md](RUNBOOK.md) says what to do about each alert.
- Dashboards for Grafana 11.6 or newer are in `deploy/grafana`, for a job, its nodes and its control plane. Import the
  files, or put them into Grafana's provisioning directory. They use no recording rule.
- A daemon takes snapshots at most twice a second, beside training, and writes them on a separate thread.
"""


def text() -> str:
    return _HEAD + "".join(map(_section, CATALOGS))


def _section(catalog: Catalog) -> str:
    rows = "".join(map(_row, catalog.metrics))
    return f"\n## {catalog.title}\n\n| metric | type | labels | |\n|---|---|---|---|\n{rows}"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |\n"


if __name__ == "__main__":
    TARGET.write_text(text())
