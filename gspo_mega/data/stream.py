"""An endless, resumable order over the rows of several sources.

`PromptStream` decides which row comes next; the items may be prompts or demonstrations, and each source reads and
encodes its own rows. The order is a function of only the seed, the source's name and the epoch, computed by a hash of
our own, so it is the same on every machine and with every release of NumPy. The state of a stream is a few counters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from gspo_mega.base.errors import DataError

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)


# What a saved state says of rows that are left out for their answers; absent if there are none.
_LEFT_OUT = ("num_unreadable", "unreadable_digest")


def _left_out(source: Any) -> dict[str, Any]:
    if not getattr(source, "num_unreadable", 0):
        return {}
    return {key: getattr(source, key) for key in _LEFT_OUT}


class ItemSource(Protocol[Item_co]):
    """A source that a stream draws from. `path` is for messages; `fingerprint` tells whether the content is the
    same.
    """

    name: str
    path: str
    fingerprint: str

    def __len__(self) -> int: ...

    def item(self, row: int) -> Item_co | None:
        """The item of a row, or None if the row is left out."""
        ...


def epoch_order(num_rows: int, *, seed: int, source: str, epoch: int) -> np.ndarray:
    """The order of one epoch: a permutation of 0 to num_rows - 1, [num_rows] int64, sorted by a 64-bit hash of the
    row's number (splitmix64).
    """
    key = hashlib.blake2b(f"{seed}/{epoch}/{source}".encode(), digest_size=8, person=b"gspo_mega order").digest()
    # splitmix64 is defined on unsigned arithmetic modulo 2^64.
    values = np.arange(1, num_rows + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
        int.from_bytes(key, "big")
    )
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(values ^ (values >> np.uint64(31)), kind="stable").astype(np.int64)


@dataclass
class _Cursor:
    """The place of a stream in one source: `position` rows of epoch `epoch` are used up.

    `progress` grows by 1 / weight with each item delivered.
    """

    epoch: int = 0
    position: int = 0
    progress: float = 0.0


class PromptStream(Generic[Item]):
    """Draws items from sources for ever: every row once per epoch, a new order in each epoch, sources mixed by weight.

    Each draw takes from the source that lags furthest behind its share, so that after any number of draws a source's
    count differs from its share by less than one item per source. Rows that their source leaves out are skipped and use
    up no share.
    """

    def __init__(
        self,
        sources: Sequence[ItemSource[Item]],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
        accept_changed: Sequence[str] = (),
    ) -> None:
        """`weights`: one positive number per source, relative to each other. `accept_changed`: beginnings of the
        fingerprints of files that may replace those that a saved state names (`data.accept_changed`).

        Raises ValueError if there are no sources, the weights do not match them, or two sources have one name.
        """
        if not sources or len(weights) != len(sources) or min(weights) <= 0:
            raise ValueError(f"{len(sources)} sources need as many positive weights, not {list(weights)}")
        if len({source.name for source in sources}) != len(sources):
            raise ValueError(f"two sources have one name: {[source.name for source in sources]}")
        self._sources = list(sources)
        self._weights = list(weights)
        self._seed = seed
        self._shuffle = shuffle
        self._accept_changed = tuple(accept_changed)
        self._cursors = [_Cursor() for _ in sources]
        self._orders: list[tuple[int, np.ndarray] | None] = [None] * len(self._sources)

    def next(self) -> Item:
        """The next item. Raises DataError if its source leaves out every row."""
        after = [cursor.progress + 1 / weight for cursor, weight in zip(self._cursors, self._weights)]
        chosen = after.index(min(after))
        item = self._draw(chosen)
        self._cursors[chosen].progress = after[chosen]
        return item

    def observe(self, results: Sequence[Any]) -> None:
        """Does nothing: the order does not depend on what became of the items."""

    def state_dict(self) -> dict[str, Any]:
        """The place of the stream and the data that it draws from, as plain values for JSON."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "sources": {
                source.name: {
                    "num_rows": len(source),
                    "fingerprint": source.fingerprint,
                    "epoch": cursor.epoch,
                    "position": cursor.position,
                    "progress": cursor.progress,
                }
                | _left_out(source)
                for source, cursor in zip(self._sources, self._cursors)
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly after the last item that was drawn before `state_dict()`.

        Other weights are allowed and count from here on. So is a changed file that the user has accepted by its
        fingerprint: which row comes next depends on the number of rows and not on their content, so a repaired row
        leaves the order as it was.

        Raises DataError, and changes nothing, if the stream cannot continue: there are other sources, a file changed
        without being accepted or has more or fewer rows, or the seed or the shuffling is another.
        """
        for key, now in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != now:
                raise DataError(f"the order of the data cannot be continued: {key} was {state[key]} and is now {now}")
        saved = state["sources"]
        names = [source.name for source in self._sources]
        if set(saved) != set(names):
            raise DataError(
                f"the order of the data cannot be continued: its sources were {sorted(saved)} and are now"
                f" {sorted(names)}"
            )
        for source in self._sources:
            then = saved[source.name]
            if then["num_rows"] != len(source):
                raise DataError(
                    f"{source.path}: changed since the run was saved: it had {then['num_rows']} rows and has"
                    f" {len(source)} now"
                )
            if then["fingerprint"] != source.fingerprint and not source.fingerprint.startswith(
                self._accept_changed or ("none",)
            ):
                raise DataError(
                    f"{source.path}: changed since the run was saved: the number of rows is the same, their content is"
                    " not. If that is a repair, continue with"
                    f" 'data.accept_changed={json.dumps([*self._accept_changed, source.fingerprint[:12]])}'"
                )
            # If the file is the same, a version that reads other answers would draw other rows.
            was = {key: value for key, value in then.items() if key in _LEFT_OUT}
            now = _left_out(source)
            if then["fingerprint"] == source.fingerprint and was != now:
                raise DataError(
                    f"{source.path}: other rows are left out for their answers (data.unreadable_answers: drop) than"
                    f" when the run was saved: {was.get('num_unreadable', 0)} were, {now.get('num_unreadable', 0)} are."
                    " Continue with the version and the rewards that the run began with"
                )
        self._cursors = [
            _Cursor(epoch=then["epoch"], position=then["position"], progress=then["progress"])
            for then in (saved[name] for name in names)
        ]

    def _draw(self, index: int) -> Item:
        source, cursor = self._sources[index], self._cursors[index]
        # A draw may begin in the middle of an epoch, so only two epochs in a row are certain to contain every row.
        for _ in range(2 * len(source)):
            row = int(self._order(index)[cursor.position])
            cursor.position += 1
            if cursor.position == len(source):
                cursor.epoch, cursor.position = cursor.epoch + 1, 0
            item = source.item(row)
            if item is not None:
                return item
        raise DataError(f"{source.path}: all {len(source)} rows are left out; nothing is left to draw")

    def _order(self, index: int) -> np.ndarray:
        source, epoch = self._sources[index], self._cursors[index].epoch
        held = self._orders[index]
        if held is None or held[0] != epoch:
            if self._shuffle:
                order = epoch_order(len(source), seed=self._seed, source=source.name, epoch=epoch)
            else:
                order = np.arange(len(source), dtype=np.int64)
            held = self._orders[index] = (epoch, order)
        return held[1]
