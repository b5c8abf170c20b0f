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

`elastic coordinator` serves `/metrics`, `/healthz` and `/readyz` at 127.0.0.1:9400, where that is free; `elastic
agent` and `elastic run` serve them with `--http-address HOST:PORT`. With `--metrics-address HOST:PORT` `/metrics` is
there alone, with the two health paths, under the same rules, and no longer at `--http-address`, which keeps the page
and the health paths: so scrapers can be let in where the page is not. `/metrics` is Prometheus' text format, or
OpenMetrics where the scraper accepts it. `/` is [the page](GUIDE.md#the-page) of a coordinator or `elastic run`;
what it reads, under `/page/`, changes with every version.

| path | 200 | 503, with the reason in one line |
|---|---|---|
| `/healthz` | the process lives. Nothing else is asked: neither etcd nor a coordinator nor training | never |
| `/readyz` of a coordinator | it leads or follows, and etcd answers | otherwise, or if its event loop stands still |
| `/readyz` of an agent | its node is registered, and a coordinator answers it | the same. Its workers may train on all the same: use it to see, not to restart |
| `/readyz` of `elastic run` | its coordinator serves | its event loop stands still |
| `/metrics` | | its event loop has not answered since the start; later the last figures are served, with the time at which they were taken |

Coordinators, and `elastic run`, answer [gRPC's health checks](https://grpc.io/docs/guides/health-checking/) as well, where
agents and operators reach them: `SERVING` while `/readyz` is 200, for `elastic.v1.Control` and for the whole server.
With certificates it is for those of the job, as everything there, so not for a kubelet. Agents serve no gRPC.

```sh
grpc_health_probe -addr 10.0.0.1:29400 -tls -tls-ca-cert ca.pem -tls-client-cert viewer.pem \\
    -tls-client-key viewer.key -tls-server-name digits.job.elastic
```

## Who may scrape

On a loopback address it is plain HTTP, for every user of the machine. Any other address needs the job's
certificates (`--tls-ca`, `--tls-cert`, `--tls-key`), or `--insecure`. With certificates it is HTTPS (TLS 1.2 or
newer), which shows the daemon's own one; files that were replaced are used for new connections. `/metrics` then wants
a client certificate that the job's authority has signed and that names `JOB.job.elastic`; one limited to the role
`viewer` is enough. `/healthz` and `/readyz` want none, so that a kubelet can ask. The certificates name the job,
not the host, so a scraper must be told what to expect:

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

At most 100 connections are kept, the oldest makes room for a new one, and one on which nothing was answered for
10 s is cut. 32 of them may be pages that are open; no newer connection takes the place of one. Requests of more than 16 KiB, and other methods than GET and HEAD, are refused; with `--page-actions` the page has paths that are POSTed to.

## How to read them

- Every metric but those of the process (`process_...`) has the label `job`.
- A standby coordinator serves `elastic_leader` 0 and what stands under [Every daemon](#every-daemon). Only its
  leader tells of the job, so `max without (instance)` and `sum without (instance)` give the job's figure.
- Counters and histograms of the job are of the whole run: a new leader goes on from what the one before has kept in
  etcd, at every failure, change of the group and checkpoint, and every 10 s. Those of an agent, and of a daemon's
  process, begin anew with it.
- The label `reason` has the reasons of `generation_formed`, `kind` of failures those of `worker_failed` (docs/EVENTS.md).
- The label `kind` of `elastic_slot_seconds_total` has [the kinds of time](GUIDE.md#where-the-time-goes). A step is
  added within 5 s of its end, so a hang shows when it has ended; until then `elastic_last_commit_timestamp_seconds` tells.
- The names of `elastic_script_value` are the script's own: it should report few. 100 are kept.
- Rules and alerts are in `deploy/prometheus`; [RUNBOOK.md](RUNBOOK.md) says what to do about each alert.
- Dashboards for Grafana 11.6 or newer are in `deploy/grafana`, for a job, its nodes and its control plane: import the
  files, or put them where Grafana is provisioned from. They use no recording rule.
- Snapshots are taken at most twice a second, beside training, and written on a thread of their own.
"""


def text() -> str:
    """The whole document."""
    return _HEAD + "".join(map(_section, CATALOGS))


def _section(catalog: Catalog) -> str:
    rows = "".join(map(_row, catalog.metrics))
    return f"\n## {catalog.title}\n\n| metric | type | labels | |\n|---|---|---|---|\n{rows}"


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind.value} | {labels} | {metric.help} |\n"


if __name__ == "__main__":
    TARGET.write_text(text())
