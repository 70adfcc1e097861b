"""A run that samples ahead of its training, over a journal, without servers: groups are numbers, and a kill may come at
any of its events.
"""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace

from gspo_mega.base.episodes import Group, RolloutBatch, one_turn_episode
from gspo_mega.base.records import Prompt
from gspo_mega.data.journal.journal import Journal
from gspo_mega.rollout.arrival_order import Freshness
from gspo_mega.train.rollouts import open_numbers
from gspo_mega.train.sources import JournalledSource

STEPS, AHEAD, PROMPTS, SIZE = 6, 2, 2, 2


class Killed(BaseException):
    """The process is gone: nobody closes anything."""


class World:
    """What outlives a kill. `sampled`: the tokens of every episode by its group and number, as often as it was kept."""

    def __init__(self, seed: int, kill_after: int | None = None) -> None:
        self.random, self.kill_after = random.Random(seed), kill_after
        self.sampled: dict[tuple[int, int], list[int]] = {}
        self.num_tokens = 0

    def event(self) -> None:
        if self.kill_after is not None:
            self.kill_after -= 1
            if self.kill_after < 0:
                raise Killed


def is_dropped(number: int) -> bool:
    return number % 5 == 3


class Ahead:
    """Groups 0, 1, 2, ... of which every fifth is dropped. Admits `AHEAD` steps ahead and completes in any order, also
    between two batches.
    """

    def __init__(self, world: World) -> None:
        self.world, self.first, self.done = world, 0, set()
        self.groups: dict[int, Group] = {}
        self.next, self.behind = 0, {"position": 0, "tickets": {"first": 0, "done": []}}
        self.keep = None

    def state_dict(self):
        return self.behind

    def load_state_dict(self, state):
        tickets = state["tickets"]
        self.first, self.done = tickets["first"], set(tickets["done"])
        self.next, self.behind = self.first, state

    def made_by(self, step):
        return {"rewards": "r"}

    def prompt(self, number):
        return Prompt(f"train:{number}", "train", (number,), "text")

    def due(self, step, numbers):
        return {number: self.prompt(number) for number in open_numbers(self.behind, numbers)}

    def take(self, step, weight_version, on_wait, known, keep, admit):
        if self.keep is None:
            self.known = {number: list(group.episodes) for number, group in known.items()}
        assert self.keep is None or not known, "records are taken over once"
        self.step, self.version, self.keep, self.admit, self.formed = step, weight_version, keep, admit, step
        while len(batch := self.next_batch()) < PROMPTS:
            self.progress()
        self.formed = step + 1
        for group in batch:
            self.done.add(group.group_id)
        while self.first in self.done or (self.complete(self.first) and is_dropped(self.first)):
            self.done.discard(self.first)
            self.first += 1
        # As the real one: taken when the batch is formed, though the sampling goes on.
        done = sorted(n for n in self.done if n > self.first)
        self.behind = {"position": self.first, "tickets": {"first": self.first, "done": done}}
        self.train()
        return RolloutBatch(step, batch)

    def complete(self, number):
        return number in self.groups and len(self.groups[number].episodes) == SIZE

    def next_batch(self):
        batch = []
        for number in range(self.first, self.next):
            if number in self.done or is_dropped(number):
                continue
            if not self.complete(number) or len(batch) == PROMPTS:
                break
            batch.append(self.groups[number])
        return batch

    def train(self):
        for _ in range(self.world.random.randrange(5)):
            self.progress()

    def progress(self):
        waiting = [n for n in range(self.first, self.next) if n not in self.done and not self.complete(n)]
        num_open = sum(n not in self.done and not is_dropped(n) for n in range(self.first, self.next))
        may_start = num_open < (self.version + AHEAD + 1 - self.formed) * PROMPTS
        if may_start and (not waiting or self.world.random.random() < 0.4):
            number, self.next = self.next, self.next + 1
            if number not in self.done:
                self.world.event()
                self.admit(number, self.prompt(number), self.version)
                self.groups[number] = Group(number, self.prompt(number), self.known.pop(number, []))
            return
        if not waiting:
            return
        group = self.groups[self.world.random.choice(waiting)]
        have = {int(one.episode_id[-3:]) for one in group.episodes}
        sample = self.world.random.choice([k for k in range(SIZE) if k not in have])
        self.world.num_tokens += 1
        self.world.event()
        tokens = [self.world.num_tokens, 7]
        name = f"step{self.step:06d}-g{group.group_id:05d}-s{sample:03d}"
        one = one_turn_episode(name, group.group_id, group.prompt, tokens, [-0.5, -1.0], [self.version] * 2, "stop")
        one.reward = float(sample)
        self.keep(one)
        self.world.sampled.setdefault((group.group_id, sample), []).append(tokens[0])
        group.episodes.append(one)
        group.episodes.sort(key=lambda one: one.episode_id[-4:])


class Run:
    """Starts and restarts. `trained`: what each step trained on, by what was checkpointed."""

    def __init__(self, folder, world, *, staleness=AHEAD, keep_last=None):
        self.folder, self.world, self.staleness, self.keep_last = folder, world, staleness, keep_last
        self.state = SimpleNamespace(prompts={}, history="", step=0)
        self.trained: dict[int, list] = {}
        self.said: list[str] = []

    def around(self, source):
        """The journal around `source`, behind what was checkpointed."""
        batches = JournalledSource(
            Journal(self.folder),
            source,
            SIZE,
            say=self.said.append,
            freshness=Freshness(self.staleness),
            keep_last=self.keep_last,
            first_weights=lambda: "f",
        )
        batches.restore(self.state)
        return batches

    def start(self, num_steps=STEPS):
        source = Ahead(self.world)
        batches = self.around(source)
        for step in range(self.state.step, num_steps):
            batch = batches.take(step, step, lambda: None)
            found = content(batch)
            assert self.trained.setdefault(step, found) == found, "what was trained on is trained on again"
            for one in batch.episodes:
                assert all(step - AHEAD <= v <= step for v in one.turns[0].weight_versions)
            if source.keep is not None:
                source.train()
            if self.world.random.random() < 0.4 or step + 1 == num_steps:
                state = SimpleNamespace(step=step + 1)
                batches.save_position(state)
                self.state = copy.deepcopy(state)
        batches.close()
        return batches


def content(batch):
    return [[one.turns[0].token_ids for one in group.episodes] for group in batch.groups]
