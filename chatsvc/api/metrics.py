"""The service in numbers, read from the parts at the moment somebody asks (Prometheus' pull model).

Names start with ``chatsvc_``; nothing here has a user, a conversation or a text in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from chatsvc.api.sse import Streams
from chatsvc.limits import TierName
from chatsvc.scheduler import Scheduler
from chatsvc.streamlog.hub import Hub


class _PartsCollector(Collector):
    def __init__(
        self, scheduler: Scheduler, hub: Hub, streams: Streams, regional: Mapping[tuple[str, str], int]
    ) -> None:
        self._scheduler = scheduler
        self._hub = hub
        self._streams = streams
        self._regional = regional

    def collect(self) -> Iterable[Metric]:
        yield from self._runs()
        yield from self._replicas()
        yield from self._readers()
        yield from self._engine_loads()
        yield from self._pressure()
        yield from self._regions()

    def _runs(self) -> Iterator[Metric]:
        dispatcher = self._scheduler.dispatcher
        yield GaugeMetricFamily("chatsvc_runs_active", "Replies this process is writing.", dispatcher.active_count)
        yield GaugeMetricFamily("chatsvc_runs_waiting", "Replies waiting in this process.", dispatcher.waiting_count)
        ended = CounterMetricFamily("chatsvc_runs_ended", "Replies this process ended.", labels=["model", "status"])
        for (model, status), count in self._scheduler.ended.items():
            ended.add_metric([model, status], count)
        yield ended
        yield CounterMetricFamily(
            "chatsvc_runs_abandoned", "Replies stopped because nobody read them.", self._scheduler.abandoned
        )
        folds = CounterMetricFamily("chatsvc_folds_ended", "Folds this process ended.", labels=["model", "status"])
        for (model, status), count in self._scheduler.folded.items():
            folds.add_metric([model, status], count)
        yield folds
        warmed = CounterMetricFamily(
            "chatsvc_prefixes_warmed", "Prefixes read before anybody waited.", labels=["model", "how"]
        )
        for (model, how), count in self._scheduler.warming.ended.items():
            warmed.add_metric([model, how], count)
        yield warmed
        tokens = CounterMetricFamily("chatsvc_tokens", "Tokens of ended replies.", labels=["model", "kind"])
        for (model, kind), count in self._scheduler.tokens.items():
            tokens.add_metric([model, kind], count)
        yield tokens

    def _replicas(self) -> Iterator[Metric]:
        replicas = self._scheduler.replicas
        yield GaugeMetricFamily("chatsvc_replicas_known", "Other processes heard of lately.", replicas.known)
        routed = CounterMetricFamily(
            "chatsvc_runs_routed", "Replies for which a replica was chosen here, by what decided.", labels=["by"]
        )
        for why, count in replicas.routed.items():
            routed.add_metric([why.value], count)
        yield routed
        heard = CounterMetricFamily(
            "chatsvc_runs_heard",
            "Waiting replies posted elsewhere, by what told of them first. All but poster is made up for lost news.",
            labels=["by"],
        )
        for source, count in replicas.heard.items():
            heard.add_metric([source.value], count)
        yield heard
        came = CounterMetricFamily(
            "chatsvc_runs_came",
            "Replies begun here: at home here, stolen, or left by a home that is gone.",
            labels=["how"],
        )
        for how, count in replicas.came.items():
            came.add_metric([how], count)
        yield came

    def _readers(self) -> Iterator[Metric]:
        hub = self._hub
        yield GaugeMetricFamily("chatsvc_streams_open", "Readers attached to replies.", hub.subscribers)
        yield GaugeMetricFamily("chatsvc_logs_followed", "Replies followed through the stream log.", hub.followed)
        yield CounterMetricFamily("chatsvc_stream_deliveries", "Events handed to readers.", hub.delivered)
        yield CounterMetricFamily("chatsvc_streams_cut", "Readers cut for being too slow.", self._streams.cut)
        yield GaugeMetricFamily(
            "chatsvc_stream_buffered_bytes", "Bytes held back for slow readers.", self._streams.buffered
        )
        yield GaugeMetricFamily("chatsvc_tasks", "Tasks of the event loop.", len(asyncio.all_tasks()))

    def _pressure(self) -> Iterator[Metric]:
        pressure = self._scheduler.pressure
        step = GaugeMetricFamily("chatsvc_degradation_step", "0: nothing is given up.", labels=["model"])
        for model, number in pressure.steps().items():
            step.add_metric([model], number)
        yield step
        delay = GaugeMetricFamily(
            "chatsvc_queue_delay_seconds", "Median wait of replies, at the last look.", labels=["model", "tier"]
        )
        for model, delays in pressure.delays.items():
            for tier in TierName:
                delay.add_metric([model, tier.value], delays.get(tier, 0.0))
        yield delay
        load = GaugeMetricFamily(
            "chatsvc_load_a_step_lower",
            "Share of the engines that would be taken without the last step; 0: not known. Above 1 the step is kept.",
            labels=["model"],
        )
        for model, share in pressure.loads_below.items():
            load.add_metric([model], share)
        yield load
        degraded = CounterMetricFamily(
            "chatsvc_degraded", "Replies for which something was given up.", labels=["model", "tier", "what"]
        )
        for (model, tier, what), count in pressure.degraded.items():
            degraded.add_metric([model, tier.value, what], count)
        yield degraded
        refused = CounterMetricFamily(
            "chatsvc_refused", "Messages refused for want of places, budget or time.", labels=["tier", "code"]
        )
        for (tier, code), count in pressure.refused.items():
            refused.add_metric([tier.value, code], count)
        yield refused

    def _regions(self) -> Iterator[Metric]:
        asked = CounterMetricFamily(
            "chatsvc_region_requests", "Requests for replies of other regions.", labels=["region", "outcome"]
        )
        for labels, count in self._regional.items():
            asked.add_metric(labels, count)
        yield asked

    def _engine_loads(self) -> Iterator[Metric]:
        running = GaugeMetricFamily("chatsvc_engine_running", "Sequences being generated.", labels=["model"])
        waiting = GaugeMetricFamily("chatsvc_engine_waiting", "Sequences in the engine's own queue.", labels=["model"])
        ready = GaugeMetricFamily("chatsvc_engine_ready", "1 when the engine takes work.", labels=["model"])
        health = self._scheduler.health()
        for model, engine in self._scheduler.engines.items():
            load = engine.load()
            running.add_metric([model], load.running)
            waiting.add_metric([model], load.waiting)
            ready.add_metric([model], float(model in health and health[model].ready))
        yield running
        yield waiting
        yield ready


def create_registry(
    scheduler: Scheduler, hub: Hub, streams: Streams, regional: Mapping[tuple[str, str], int] | None = None
) -> CollectorRegistry:
    """A registry of our own: the library's global one is shared with every other user of it in the process.

    Memory, file descriptors and CPU time of the process are in it under their usual names (``process_…``).
    ``regional`` counts requests for other regions by region and outcome.
    """
    registry = CollectorRegistry()
    registry.register(_PartsCollector(scheduler, hub, streams, {} if regional is None else regional))
    ProcessCollector(registry=registry)
    return registry
