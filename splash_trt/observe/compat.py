"""Our metrics under the names that dashboards for vLLM and sglang query, where these mean the same.

They are made from our metrics at each scrape; nothing is counted twice. Names for which we have no true value are left
out: those about prefix caches, speculation, adapters and swapping, and the page size, which is of no use to a client.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample


@dataclass(frozen=True)
class Alias:
    """The family `source` under the name `name`. Samples are summed over labels that are not in `labels`.

    Family names of counters are without "_total", as in prometheus_client.
    """

    name: str
    source: str
    labels: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    """{our value: theirs} of renamed labels, where they differ."""
    only: dict[str, str] = field(default_factory=dict)
    """{label: value}: samples with other values are left out."""


_FINISHED = {"cancelled": "abort"}
_TTFT = "splash_time_to_first_token_seconds"
_ITL = "splash_inter_token_seconds"

ALIASES = (
    # https://docs.vllm.ai/en/stable/usage/metrics/ and vLLM's Grafana example; both older and newer names.
    Alias("vllm:num_requests_running", "splash_running_requests"),
    Alias("vllm:num_requests_waiting", "splash_waiting_requests"),
    Alias("vllm:kv_cache_usage_perc", "splash_cache_usage_ratio"),
    Alias("vllm:gpu_cache_usage_perc", "splash_cache_usage_ratio"),
    Alias("vllm:num_preemptions", "splash_preemptions"),
    Alias("vllm:prompt_tokens", "splash_prompt_tokens"),
    Alias("vllm:generation_tokens", "splash_output_tokens"),
    Alias("vllm:iteration_tokens_total", "splash_step_tokens"),
    Alias("vllm:request_success", "splash_requests", {"reason": "finished_reason"}, _FINISHED),
    Alias("vllm:request_prompt_tokens", "splash_request_prompt_tokens"),
    Alias("vllm:request_generation_tokens", "splash_request_output_tokens"),
    Alias("vllm:time_to_first_token_seconds", _TTFT),
    Alias("vllm:inter_token_latency_seconds", _ITL),
    Alias("vllm:time_per_output_token_seconds", _ITL),
    Alias("vllm:request_time_per_output_token_seconds", "splash_time_per_output_token_seconds"),
    Alias("vllm:e2e_request_latency_seconds", "splash_request_seconds"),
    Alias("vllm:request_queue_time_seconds", "splash_request_queue_seconds"),
    Alias("vllm:request_prefill_time_seconds", "splash_request_prefill_seconds"),
    Alias("vllm:request_decode_time_seconds", "splash_request_decode_seconds"),
    Alias("vllm:request_inference_time_seconds", "splash_request_inference_seconds"),
    # https://docs.sglang.io/references/production_metrics.html and sglang's Grafana example.
    Alias("sglang:num_running_reqs", "splash_running_requests"),
    Alias("sglang:num_queue_reqs", "splash_waiting_requests"),
    Alias("sglang:token_usage", "splash_cache_usage_ratio"),
    Alias("sglang:gen_throughput", "splash_output_tokens_per_second"),
    Alias("sglang:prompt_tokens", "splash_prompt_tokens"),
    Alias("sglang:generation_tokens", "splash_output_tokens"),
    Alias("sglang:num_requests", "splash_requests"),
    Alias("sglang:num_aborted_requests", "splash_requests", only={"reason": "cancelled"}),
    Alias("sglang:num_retracted_requests", "splash_preemptions"),
    Alias("sglang:time_to_first_token_seconds", _TTFT),
    Alias("sglang:inter_token_latency_seconds", _ITL),
    Alias("sglang:e2e_request_latency_seconds", "splash_request_seconds"),
    Alias("sglang:queue_time_seconds", "splash_request_queue_seconds"),
)


class CompatNames(Collector):
    """Collects the metrics of `registry` under the names of ALIASES, with a label model_name."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        families = {family.name: family for family in self._registry.collect()}
        for alias in ALIASES:
            if alias.source in families:
                yield self._renamed(alias, families[alias.source])

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that a registry does not call `collect` on registration."""
        return ()

    def _renamed(self, alias: Alias, family: Metric) -> Metric:
        metric = Metric(alias.name, family.documentation, family.type)
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            if sample.name.endswith("_created") or any(sample.labels.get(k) != v for k, v in alias.only.items()):
                continue
            labels = {"model_name": self._model_name}
            for label, value in sample.labels.items():
                if label in alias.labels:
                    labels[alias.labels[label]] = alias.values.get(value, value)
                elif label == "le":
                    labels["le"] = value
            key = (alias.name + sample.name.removeprefix(family.name), tuple(labels.items()))
            sums[key] = sums.get(key, 0.0) + sample.value
        metric.samples = [Sample(name, dict(labels), value) for (name, labels), value in sums.items()]
        return metric
