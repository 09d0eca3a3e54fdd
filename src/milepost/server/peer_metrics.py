"""Metrics of what peers are given."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from milepost.server.collectors import Families
from milepost.server.peer_app import PeerApp
from milepost.stores.peer_protocol import TRANSPORTS


class PeerCollector(Collector):
    """Reads counters that the threads of the peers write."""

    def __init__(self, app: PeerApp, labels: tuple[str, str]) -> None:
        self._app = app
        self._families = Families(labels)

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        make, counts = self._families, self._app.counts
        yield make.counters(
            "milepost:peer_segments",
            "Segments sent to peers, or staged for them.",
            "transport",
            dict(counts.num_segments),
            TRANSPORTS,
        )
        yield make.counters(
            "milepost:peer_bytes", "Bytes of these.", "transport", dict(counts.num_bytes), TRANSPORTS
        )
        yield make.counter(
            "milepost:peer_refused", "Requests of peers that did not know the secret.", counts.num_refused
        )
        yield make.counter(
            "milepost:peer_late_leases",
            "Staged segments whose peer did not say in time that it has read them.",
            counts.num_late_leases,
        )
        yield make.gauge("milepost:peer_staged_bytes", "Bytes on their way to peers.", self._app.staged_bytes)
