"""What Prometheus scrapes: counters and histograms kept here, gauges read from the engine's last status."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from splash_trt.link import Frames, Status, SwitchReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SWITCHES = 1000
"""The latest that are kept."""

_TTFT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TPOT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """One registry of its own a frontend. It also keeps the switches' records."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        registry = self._registry
        layout = ["layout"]
        self._tokens = Counter("splash_tokens", "Tokens computed, prompt and output", layout, registry=registry)
        self._steps = Counter("splash_steps", "Steps completed", layout, registry=registry)
        self._step_seconds = Counter("splash_step_seconds", "Time that steps took", layout, registry=registry)
        ends = ["source", "target", "outcome"]
        self._switches = Counter("splash_switches", "Layout switches that ended", ends, registry=registry)
        help_text = "Bytes that switches planned to move between ranks (inside: within a rank)"
        self._switch_bytes = Counter("splash_switch_bytes", help_text, ["kind"], registry=registry)
        self._prompt_tokens = Counter("splash_prompt_tokens", "Tokens of requests' prompts", registry=registry)
        self._output_tokens = Counter("splash_output_tokens", "Tokens sent to clients", registry=registry)
        self._requests = Counter("splash_requests", "Requests that ended, by how", ["reason"], registry=registry)
        self._responses = Counter("splash_http_responses", "HTTP responses", ["path", "code"], registry=registry)
        self.ttft_s = Histogram(
            "splash_time_to_first_token_seconds", "From request to first token", buckets=_TTFT_S, registry=registry
        )
        self.tpot_s = Histogram(
            "splash_time_per_output_token_seconds", "Mean over a request", buckets=_TPOT_S, registry=registry
        )
        self.request_s = Histogram(
            "splash_request_seconds", "From request to last token", buckets=_REQUEST_S, registry=registry
        )
        self._records: dict[int, dict[str, object]] = {}
        self._counted_to = 0

    def watch(self, status: Callable[[], Status | None]) -> None:
        """Gauges are read from there when they are asked for."""
        self._registry.register(StatusCollector(status))

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)

    def switches(self) -> list[dict[str, object]]:
        """Records, newest first."""
        return [self._records[number] for number in sorted(self._records, reverse=True)]

    def on_restart(self) -> None:
        """Another engine numbers its switches from 1 again."""
        self._records.clear()
        self._counted_to = 0

    def on_frames(self, frames: Frames) -> None:
        if frames.num_tokens:
            layout = frames.status.layout
            self._tokens.labels(layout).inc(frames.num_tokens)
            self._steps.labels(layout).inc()
            self._step_seconds.labels(layout).inc(frames.seconds)

    def on_switch(self, report: SwitchReport) -> None:
        record = report.record
        self._records[report.number] = record
        while len(self._records) > MAX_SWITCHES:
            del self._records[min(self._records)]
        if not record.get("ended") or report.number <= self._counted_to:
            return
        self._counted_to = report.number
        # Without the reason of an abort, of which there are too many for a label.
        outcome = str(record.get("outcome")).partition(":")[0]
        self._switches.labels(str(record.get("source")), str(record.get("target")), outcome).inc()
        between = record.get("bytes_between_ranks")
        kinds = dict(between) if isinstance(between, dict) else {}
        for kind, num_bytes in {**kinds, "inside": record.get("bytes_inside_ranks")}.items():
            if isinstance(num_bytes, int):
                self._switch_bytes.labels(str(kind)).inc(num_bytes)

    def on_prompt(self, num_tokens: int) -> None:
        self._prompt_tokens.inc(num_tokens)

    def on_tokens(self, num_tokens: int) -> None:
        self._output_tokens.inc(num_tokens)

    def on_end(self, reason: str) -> None:
        self._requests.labels(reason).inc()

    def on_response(self, path: str, code: int) -> None:
        self._responses.labels(path, str(code)).inc()


class StatusCollector(Collector):
    """Gauges of how things stand. Before the first status there are none."""

    def __init__(self, status: Callable[[], Status | None]) -> None:
        self._status = status

    def collect(self) -> Iterator[GaugeMetricFamily]:
        status = self._status()
        if status is None:
            return
        yield GaugeMetricFamily("splash_running_requests", "Requests that have cache", value=status.running)
        yield GaugeMetricFamily("splash_waiting_requests", "Requests without cache yet, in total", value=status.waiting)
        yield _by_rank("splash_rank_running_requests", "Requests whose owner or home it is", status.running_by_rank)
        yield _by_rank("splash_rank_cache_used_tokens", "Cache tokens held, in whole pages", status.used_tokens)
        yield _by_rank("splash_rank_cache_total_tokens", "Cache tokens that fit", status.total_tokens)
        yield GaugeMetricFamily("splash_epoch", "Layout changes so far", value=status.epoch)
        current = GaugeMetricFamily("splash_layout", "1 for the layout that serves", labels=["layout", "mode"])
        current.add_metric([status.layout, status.mode], 1)
        yield current
        progress = GaugeMetricFamily("splash_switch_progress", "Share of rows moved", labels=["state", "target"])
        progress.add_metric([status.switch, status.switch_target or ""], status.switch_progress)
        yield progress


def _by_rank(name: str, help_text: str, values: tuple[int, ...]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=["rank"])
    for rank, value in enumerate(values):
        family.add_metric([str(rank)], value)
    return family
