"""What a server counts, for Prometheus, and a line of JSON in the log for each request."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .orders import OrderTaker

LOG = logging.getLogger("fxplug.serving.requests")
SECONDS = (0.1, 0.3, 1, 3, 10, 30, 100, 300)
KIND = "text/plain; version=0.0.4; charset=utf-8"


class EngineCollector(Collector):
    """What is read from engines and a folder of adapters whenever somebody asks."""

    def __init__(self, service: OrderTaker) -> None:
        self.service = service

    def collect(self) -> Iterator[Metric]:
        """Yield the values of now."""
        calls, rows = self.service.count_denoiser_calls()
        yield CounterMetricFamily("fxplug_calls", "Calls of denoisers, joint ones and others", value=calls)
        yield CounterMetricFamily("fxplug_rows", "Samples in these calls", value=rows)
        queued, running = self.service.count_requests()
        yield GaugeMetricFamily("fxplug_running", "Requests taken in and not finished", value=running)
        yield GaugeMetricFamily("fxplug_queue", "Requests that wait to be taken in", value=queued)
        adapters = GaugeMetricFamily("fxplug_adapters", "Adapters of the folder", labels=["state"])
        infos = self.service.store.list() if self.service.store is not None else []
        states = {"slot": 0, "folder": 0, "broken": 0}
        for info in infos:
            states["broken" if info.error else "slot" if info.in_slot else "folder"] += 1
        for state, count in states.items():
            adapters.add_metric([state], count)
        yield adapters
        yield GaugeMetricFamily("fxplug_replicas", "Engines that make pictures", value=self.service.count_replicas())
        routed = CounterMetricFamily(
            "fxplug_routed", "Orders by whether their replica held all of their adapters: in slots, in host memory, or not",
            labels=["held"],
        )  # fmt: skip
        for held, number in self.service.routed.items():
            routed.add_metric([held], number)
        yield routed


class Metrics:
    """The counters of a server."""

    def __init__(self, service: OrderTaker) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(service))
        make: Any = {"registry": self.registry}
        self.requests = Counter("fxplug_requests", "Requests by how they ended", ["outcome"], **make)
        self.waiting = Histogram("fxplug_waiting_seconds", "Seconds until a request was taken in", buckets=SECONDS, **make)
        self.whole = Histogram("fxplug_request_seconds", "Seconds until a request ended", buckets=SECONDS, **make)

    def note(self, outcome: str, seconds: float, waited: float | None = None) -> None:
        """Count a request.

        Args:
            outcome: How it ended: done, failed, cancelled or refused.
            seconds: How long it took.
            waited: How long it waited to be taken in; None if it was not.
        """
        self.requests.labels(outcome).inc()
        if outcome != "refused":
            self.whole.observe(seconds)
        if waited is not None:
            self.waiting.observe(waited)

    def render(self) -> bytes:
        """Return the text for Prometheus."""
        return generate_latest(self.registry)


def log_request(**fields: Any) -> None:
    """Write a line about a request to the log.

    Args:
        **fields: What it says, of plain values.
    """
    LOG.info("%s", json.dumps(fields, default=str))
