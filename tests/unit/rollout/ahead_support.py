"""A trainer that publishes and takes batches, over servers whose every response follows from its sample's name."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "soak"))

from chaos_faults import changed
from chaos_server import EOS, ChaosServer, sample_of
from collector_support import SPEC, Stream, collector_config

from gspo_mega.agents.driver import EpisodeDriver
from gspo_mega.agents.session import Conversation
from gspo_mega.agents.turn import Limits
from gspo_mega.base.errors import PublishError
from gspo_mega.config.derived import on_publish
from gspo_mega.config.schema import Train
from gspo_mega.rollout.admission import Admission
from gspo_mega.rollout.arrival_order import CompletionQueue, Formed
from gspo_mega.rollout.collector import Collector
from gspo_mega.rollout.pool import ServerPool
from gspo_mega.train.servers import paused

__all__ = ["Ahead", "sample_of"]


class Ahead:
    """A run over `servers` fakes. `train_seconds`: of each step. `settings`: as for `collector_config`."""

    def __init__(
        self, attempt, servers: int = 2, token_seconds: float = 0.002, train_seconds: float = 0.02, **settings
    ):
        settings = {"max_new_tokens": 24, "prompts_per_step": 4, "progress_deadline_seconds": 2.0, **settings}
        self.num_steps = settings.pop("num_steps", 6)
        config = collector_config(**settings)
        self.config = config.model_copy(update={"train": Train(num_steps=self.num_steps)})
        self.train_seconds, self.token_seconds = train_seconds, token_seconds
        self.said: list[str] = []
        self.servers = [ChaosServer(f"server-{i}", attempt.servers_dir) for i in range(servers)]
        for server in self.servers:
            server.token_seconds = token_seconds
        self.pool = ServerPool(self.config.rollout, SPEC, attempt)
        self.pool.wait_ready(servers, 60)
        self.pool.tell = self.said.append
        self.stream, self.version, self.batches, self.admitted = Stream(), -1, [], {}
        self.num_open: list[int] = []
        self.collector = Collector(
            self.config,
            self.pool,
            self.stream,
            EpisodeDriver(Conversation(str), Limits(1, 16 + self.config.rollout.max_new_tokens)),
            self.score,
            [EOS],
            snapshot=lambda: len(self.stream.drawn),
        )

    def stand_still_until_a_publish(self) -> None:
        """What is not of the first batch is still open when the second publish begins, most of it behind a token."""
        num_publishes, hold = [], self.pool.hold

        def note(holds: bool) -> None:
            hold(holds)
            num_publishes.extend([1] * holds)

        def stands(request_id: str, num_tokens: int) -> bool:
            name = request_id.rpartition(".")[0]
            is_later = int(re.findall(r"-g(\d+)-", name)[0]) >= self.config.batch.prompts_per_step
            return is_later and num_tokens == min(1, len(sample_of(name)[0]) - 1) and len(num_publishes) < 2

        self.pool.hold = note
        for server in self.servers:
            server.holds = stands

    async def score(self, episode) -> None:
        episode.reward = float(len(episode.episode_id) + episode.num_sampled_tokens % 7)

    def admit(self, number, prompt, weight_version) -> None:
        assert number not in self.admitted or not self.config.rollout.max_staleness
        self.admitted[number] = weight_version

    def publish(self, during=lambda: None) -> None:
        """The next version, to every server."""
        with paused(self.pool, on_publish(self.config.rollout)) as pause:
            self.num_open.append(pause.num_open)
            during()
            self.version += 1
            held = []
            for control in self.pool.controls():
                with contextlib.suppress(PublishError):  # it gets no work
                    control.update_from_disk("/w", self.version, deadline_seconds=60)
                    held.append((control.server_id, control.generation))
            self.pool.announce(self.version)
            self.pool.commit(self.version, held)

    def step(self, step: int, on_wait=lambda: None):
        self.publish()
        self.collector.start(step, admit=self.admit)
        self.batches.append(self.collector.take(step, on_wait))
        time.sleep(self.train_seconds)
        return self.batches[-1]

    def inject(self, num_faults: int, seed: int, share: float) -> Counter:
        """Let `share` of all requests go wrong until `num_faults` did, in equal parts of every kind. Returns how many
        of each kind, filled while the run goes on.
        """
        rng, done, lock = random.Random(seed), Counter(), threading.Lock()
        kinds = ("reset", "stall", "truncated", "not json", "same twice", "wrong version", 500, "slow")

        def fault(server):
            def choose(call, ids):
                with lock:
                    if sum(done.values()) >= num_faults or rng.random() >= share:
                        return None
                    kind = kinds[sum(done.values()) % len(kinds)]
                    done[str(kind)] += 1
                if kind == "wrong version":
                    return changed(
                        weight_version="77",
                        weight_versions=lambda a: [{"version": "77", "start": 0, "end": len(a["output_ids"])}],
                    )
                if kind == "slow":
                    usual, server.token_seconds = self.token_seconds, 20 * self.token_seconds
                    threading.Timer(0.2, lambda: setattr(server, "token_seconds", usual)).start()
                    return None
                return kind

            return choose

        for server in self.servers:
            server.fault = fault(server)
        return done

    def run(self):
        for step in range(self.num_steps):
            self.step(step)
        return self

    @property
    def episodes(self):
        return [episode for batch in self.batches for episode in batch.episodes]

    def broken(self) -> dict[str, str]:
        """Which promises a complete run did not keep, with what was found. `lost`, `doubled`: samples that were begun.
        `biased`: the lengths that were trained are not those that were sampled. `changed`: tokens or log-probs.
        `stale`: older than the bound. `order`: of the prompts, in order of admission.
        """
        found: dict[str, str] = {}
        asked, names = set(self.asked()), [episode.episode_id for episode in self.episodes]
        whole = self.num_steps * self.config.batch.prompts_per_step * self.config.batch.group_size
        if asked - set(names) or len(set(names)) != whole:
            found["lost"] = f"{len(asked - set(names))} samples; {len(set(names))} of {whole} were trained"
        if len(set(names)) < len(names) or set(names) - asked:
            found["doubled"] = f"{len(names) - len(set(names))} samples, {len(set(names) - asked)} of no request"
        trained = Counter(episode.num_sampled_tokens for episode in self.episodes)
        sampled = Counter(len(sample_of(name)[0]) for name in asked)
        if trained != sampled:
            means = [sum(n * c for n, c in lengths.items()) / lengths.total() for lengths in (trained, sampled)]
            found["biased"] = f"{means[0]:.2f} tokens are trained and {means[1]:.2f} sampled per response"
        bound = self.config.rollout.max_staleness
        for step, batch in enumerate(self.batches):
            for episode in batch.episodes:
                (turn,) = episode.turns
                if (turn.token_ids, turn.log_probs) != sample_of(episode.episode_id):
                    found["changed"] = episode.episode_id
                versions, admitted = turn.weight_versions, self.admitted[episode.group_id]
                if versions != sorted(versions) or min(versions) < admitted or step > admitted + bound:
                    found["stale"] = f"{episode.episode_id}: admitted at {admitted}, trained in step {step}: {versions}"
                if not step - bound <= min(versions) <= max(versions) <= step:
                    found["stale"] = f"{episode.episode_id}: trained in step {step}: {versions}"
        prompts = [group.prompt.prompt_id for batch in self.batches for group in batch.groups]
        if self.config.rollout.order == "admission" and prompts != [p.prompt_id for p in self.stream.drawn]:
            found["order"] = f"{prompts[:9]}..."
        return found

    def asked(self) -> list[str]:
        """Every sample for training that was asked of a server, once."""
        rids = {body["rid"].rpartition(".")[0] for s in self.servers for path, body in s.calls if path == "/generate"}
        return sorted(rid for rid in rids if not rid.startswith("eval"))

    def versions_of(self) -> dict[str, list[int]]:
        """By sample: the version of each token as the server knows it that sampled the token last."""
        found: dict[str, list[int]] = {}
        for _, rid, start, versions in sorted(request for s in self.servers for request in s.sampled):
            name = rid.rpartition(".")[0]
            found[name] = [*found.get(name, [])[:start], *map(int, versions)]
        return found

    def close(self) -> None:
        self.collector.close()
        self.pool.close()
        for server in self.servers:
            server.close()


class Discarding(Admission):
    """What others do: the first groups to complete are trained, and what is still open then is thrown away."""

    def formed(self):
        done = sorted((a for a in self._arrivals.values() if not a.is_open), key=lambda a: a.place)
        if len(done) < self.wanted:
            return None
        return Formed(tuple(sorted(a.number for a in done[: self.wanted])), ())

    def consume(self, formed):
        super().consume(formed)
        self._gone = getattr(self, "_gone", set()) | {a.number for a in self._arrivals.values() if a.is_open}
        for number in [n for n, a in self._arrivals.items() if a.is_open]:
            del self._arrivals[number]
        self._completion = CompletionQueue(self.wanted, self.allowed)
        for arrival in self._arrivals.values():
            self._completion.add(arrival)
        for arrival in sorted(self._arrivals.values(), key=lambda a: a.place):
            self._completion.complete(arrival)

    def complete(self, number, is_kept):
        if number in self._arrivals:
            super().complete(number, is_kept)
