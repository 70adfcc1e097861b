"""Rules of the sections by which a run is watched from outside: metrics, profile, alerts."""

from __future__ import annotations

from collections.abc import Iterator

from gspo_mega.base.addresses import address_problem
from gspo_mega.base.errors import Violation
from gspo_mega.config.schema import Alerts, Config


def watching_violations(config: Config) -> Iterator[Violation]:
    """What of these sections cannot be meant."""
    prometheus = config.metrics.prometheus
    if prometheus is not None and (problem := address_problem(prometheus.host)) is not None:
        yield Violation("metrics.prometheus.host", problem)
    yield from _profile(config)
    yield from _alerts(config)


def _profile(config: Config) -> Iterator[Violation]:
    steps, ranks = config.profile.steps, config.profile.ranks
    if steps is not None and steps[0] > steps[1]:
        yield Violation("profile.steps", f"[{steps[0]}, {steps[1]}] has its last step before its first")
    world = config.cluster.num_nodes * config.cluster.ranks_per_node
    if max(ranks) >= world:
        yield Violation("profile.ranks", f"there is no rank {max(ranks)}; valid: 0 to {world - 1}")


def _alerts(config: Config) -> Iterator[Violation]:
    alerts = config.alerts
    if alerts != Alerts() and alerts.command is None and alerts.url is None:
        yield Violation("alerts", "tells nobody; give command, url or both")
    if alerts.url is not None and not alerts.url.startswith(("http://", "https://", "$")):
        yield Violation("alerts.url", "must begin with http:// or https://, or be $NAME of an environment variable")
