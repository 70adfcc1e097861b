"""How often a server may be started again before it is given up.

Owns the count and how it decays, by a clock that only runs forward. It starts and watches nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_DELAY_SECONDS = 0.5
_LONGEST_DELAY_SECONDS = 30.0


class RestartBudget:
    """Restarts that count against a server: each adds one, and `forgiven_after_seconds` of serving in health take one
    away.

    A server that never becomes healthy has `max_restarts` of them; one that fails once a week has them for ever. Time
    spent starting, hanging or waiting forgives nothing.
    """

    def __init__(
        self, max_restarts: int, forgiven_after_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_restarts, self._forgiven_after_seconds, self._clock = max_restarts, forgiven_after_seconds, clock
        self._counted = 0.0
        self._healthy_since: float | None = None

    def healthy(self) -> None:
        """The server became ready now."""
        self._healthy_since = self._clock()

    def failed(self, last_healthy: float | None = None) -> float | None:
        """The server is gone: seconds to wait before it is started again, longer each time; None when it is to be given
        up.

        `last_healthy`: when, by the clock, it was last seen in health; now, by default.
        """
        if self._healthy_since is not None:
            healthy_seconds = (self._clock() if last_healthy is None else last_healthy) - self._healthy_since
            self._counted = max(0.0, self._counted - max(0.0, healthy_seconds) / self._forgiven_after_seconds)
            self._healthy_since = None
        self._counted += 1.0
        if self._counted > self._max_restarts:
            return None
        return min(_LONGEST_DELAY_SECONDS, _FIRST_DELAY_SECONDS * 2 ** (self._counted - 1))
