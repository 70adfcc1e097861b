"""Tell somebody when a run fails, collapses, stands still or leaves its mismatch budget: `alerts` of the configuration.

`AlertSender` decides when to alert and about what. It uses threads of the supervisor's process, which read
metrics.jsonl and make the calls, so neither ranks nor the supervisor wait. Each cause is told at most once per attempt:

    failure    the attempt failed; `restarts` says whether the supervisor starts it again
    stall      the watchdog found no progress, or no line of metrics came for alerts.stall_seconds
    collapse   the reward lost a third of its highest mean, and of what had been learnt, by more than chance
               (`metrics/trends.py`): at most 1 % of runs of 2000 steps in which nothing happened get this alert
    budget     the engines' log-probs differ by more than mismatch.budget, and the run warns of it: the ratio contains
               this (old_log_probs: rollout), or it is larger than precisions explain

`call_command` and `call_url` make one call: a command that gets the JSON on its standard input, or a URL to which it is
posted. Each returns its outcome in words, within a deadline.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

from gspo_mega.base.errors import GspoMegaError, StuckError
from gspo_mega.base.run_folder import Attempt
from gspo_mega.base.untrusted import open_regular, parse_json
from gspo_mega.config.clip_range import must_warn
from gspo_mega.config.schema import Config
from gspo_mega.launcher.attempt_state import one_line
from gspo_mega.metrics.trends import trend_of

logger = logging.getLogger(__name__)
Cause = Literal["failure", "stall", "collapse", "budget"]
_POLL_SECONDS = 2.0
# A collapse is judged by at most this many steps, so that a check stays cheap in a run of weeks.
_MOST_STEPS = 1_000
_MOST_OUTPUT = 2000


class AlertSender:
    """The alerts of one attempt, from its beginning until `close`. `say` shows the user a line."""

    def __init__(
        self, config: Config, attempt: Attempt, say: Callable[[str], None], poll_seconds: float = _POLL_SECONDS
    ) -> None:
        self._settings, self._budget, self._name = config.alerts, config.mismatch.budget, config.run.name
        self._old_log_probs = config.old_log_probs
        self._attempt, self._say, self._poll_seconds = attempt, say, poll_seconds
        self._metrics = _NewLines(attempt)
        self._told: set[Cause] = set()
        self._calls: list[threading.Thread] = []
        self._lock, self._over = threading.Lock(), threading.Event()
        self._watch: threading.Thread | None = None
        url = self._settings.url
        if url is not None and resolved_url(url, os.environ) is None:
            say(f"warning  alerts.url: {url}: the environment has no such variable; no alert will be sent there")
        if (self._settings.command or url) and not {"stall", "collapse", "budget"}.isdisjoint(self._settings.on):
            self._watch = threading.Thread(target=self._check_often, name="alerts", daemon=True)
            self._watch.start()

    def failed(self, error: GspoMegaError, restarts: bool, why: str | None = None) -> None:
        """Alert that the attempt ended with `error`. `restarts`: whether another attempt begins, and `why` or why
        not.
        """
        stuck = isinstance(error, StuckError) or isinstance(error.__cause__, StuckError)
        more = {"restarts": restarts} | ({} if why is None else {"decision": why})
        self._tell("stall" if stuck else "failure", one_line(error), **more)

    def close(self) -> None:
        """Stop watching, and wait for the calls in progress; each has its deadline."""
        self._over.set()
        if self._watch is not None:
            self._watch.join()
        for call in self._calls:
            call.join()

    # --- while the attempt runs --------------------------------------------------------------------------------

    def _check_often(self) -> None:
        while not self._over.wait(self._poll_seconds):
            self.check_metrics()

    def check_metrics(self) -> None:
        """Read the new lines of metrics.jsonl and send the alerts that follow from them."""
        new = self._metrics.read()
        rewards = self._metrics.rewards
        for line in new:
            share = line.get("mismatch/budget_share")
            k3 = line.get("mismatch/k3")
            if share is not None and share > self._budget and must_warn(self._old_log_probs, k3):
                size = f"{share:.2f} of the clip range (mismatch.budget {self._budget:g}) in step {line['step']}"
                if self._old_log_probs == "trainer":
                    size = (
                        f"k3 {k3:.2g} nats per token, more than precisions explain, in step {line['step']}"
                        " (old_log_probs: trainer keeps this out of the ratio)"
                    )
                self._tell("budget", f"the engines' log-probs differ by {size}")
        if new and rewards:
            trend = trend_of(*zip(*rewards, strict=True))
            if trend.kind == "collapsed":
                self._tell(
                    "collapse",
                    f"reward/mean fell from {trend.peak:.3f} (step {trend.peak_step}) to {trend.end:.3f}; the fall"
                    f" began at step {trend.since}",
                )
        bound = self._settings.stall_seconds
        if bound is not None and (still := time.monotonic() - self._metrics.last_news) > bound:
            self._tell("stall", f"no line of metrics for {still:.0f} s (alerts.stall_seconds {bound:g})")

    # --- calls -------------------------------------------------------------------------------------------------

    def _tell(self, cause: Cause, text: str, **more: Any) -> None:
        settings = self._settings
        with self._lock:
            if cause not in settings.on or cause in self._told or not (settings.command or settings.url):
                return
            self._told.add(cause)
        body = {
            "cause": cause,
            "text": text,
            "name": self._name,
            "run": str(self._attempt.run_folder.path),
            "attempt": self._attempt.number,
            "step": self._metrics.step,
            "time": round(time.time(), 3),
            **more,
        }
        call = threading.Thread(target=self._call, args=(cause, body), name=f"alert {cause}", daemon=True)
        call.start()
        self._calls.append(call)

    def _call(self, cause: Cause, body: dict[str, Any]) -> None:
        settings = self._settings
        if settings.command is not None:
            self._say(f"alert    {cause}: {call_command(settings.command, body, settings.deadline_seconds)}")
        if settings.url is not None and (url := resolved_url(settings.url, os.environ)) is not None:
            self._say(f"alert    {cause}: {call_url(url, body, settings.deadline_seconds)}")


class _NewLines:
    """Reads the lines of metrics.jsonl as they come. `rewards`: (step, reward, its standard error if known) of the last
    steps, including those of earlier attempts. `last_news`: when the last line came, by the monotonic clock.
    """

    def __init__(self, attempt: Attempt) -> None:
        self._path = attempt.run_folder.metrics_file
        self._offset = 0
        self._is_first = True
        self.rewards: list[tuple[int, float, float | None]] = []
        self.step: int | None = None
        self.last_news = time.monotonic()

    def read(self) -> list[dict[str, Any]]:
        """The lines written since the last call; none on the first call. A file that became shorter, because the run
        started from an older checkpoint, is read again from its beginning.
        """
        try:
            if self._path.stat().st_size < self._offset:
                self._offset, self.rewards, self._is_first = 0, [], True
            with open_regular(self._path) as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:
            self._is_first = False  # there is no file yet, so every line that comes is new
            return []
        self._offset += len(whole) + len(newline)
        lines = [line for text in whole.splitlines() if (line := _line(text)) is not None]
        for line in lines:
            self.step = line["step"]
            if line.get("reward/mean") is not None:
                self.rewards.append((line["step"], line["reward/mean"], line.get("reward/standard_error")))
        del self.rewards[:-_MOST_STEPS]
        if lines:
            self.last_news = time.monotonic()
        new, self._is_first = ([] if self._is_first else lines), False
        return new


def _line(text: bytes) -> dict[str, Any] | None:
    """One line of metrics; None if it is damaged (the run's report names such lines)."""
    try:
        found = parse_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and type(found.get("step")) is int else None


def call_command(command: Sequence[str], body: Mapping[str, Any], seconds: float) -> str:
    """Run `command` in a session of its own and return in words how it ended. After `seconds` it is killed with all
    processes of its session. What it prints goes to supervisor.log.
    """
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        return f"{command[0]} could not be started: {error.strerror}"
    late = False
    try:
        output, _ = process.communicate(json.dumps(body).encode() + b"\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    if output:
        logger.info("%s printed: %s", command[0], output[-_MOST_OUTPUT:].decode("utf-8", errors="replace").rstrip())
    if late:
        return f"{command[0]} was killed after {seconds:g} s (alerts.deadline_seconds)"
    code = process.returncode
    return f"{command[0]} exited with code {code}" if code >= 0 else f"{command[0]} was killed by signal {-code}"


def call_url(url: str, body: Mapping[str, Any], seconds: float) -> str:
    """Post `body` to `url` and return the answer in words. They name only the host, because a path often has a
    token.
    """
    host = urlsplit(url).hostname or "its host"
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return f"{host} answered {answer.status}"
    except urllib.error.HTTPError as error:
        return f"{host} answered {error.code}"
    except (OSError, ValueError) as error:  # URLError is an OSError
        return f"{host} could not be reached: {getattr(error, 'reason', None) or error}"


def resolved_url(url: str, environment: Mapping[str, str]) -> str | None:
    """`url`, or the value of the variable if `url` is `$NAME`; None if there is no such variable."""
    return environment.get(url[1:]) if url.startswith("$") else url
