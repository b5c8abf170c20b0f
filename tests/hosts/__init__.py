"""Hosts in miniature: network namespaces with links that can be cut. See docs/TESTING.md."""

from __future__ import annotations

from tests.hosts.ability import require_hosts
from tests.hosts.host import Host
from tests.hosts.network import Network, network

__all__ = ["Host", "Network", "network", "require_hosts"]
