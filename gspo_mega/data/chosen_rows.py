"""Prompts in an order that a function of the user chooses: `data.source`, for example a curriculum (docs/hooks.md).

The function is called once, `make(rows, seed=..., **options)`, and returns an object with

    next() -> int                       the number of the row to sample next
    observe(results)                    the groups of a step that was sampled, with their rewards
    state() -> JSON value               everything that `next` depends on besides `rows` and `seed`
    restore(state)                      continue from there

`ChosenRows` is the `PromptStream` around it. It asks `state` before every prompt and after every batch, because a run
may be killed at any time, and the state is part of the journal's records and of checkpoints.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from gspo_mega.base.errors import DataError
from gspo_mega.base.group_results import GroupResult
from gspo_mega.base.records import Prompt
from gspo_mega.base.user_functions import LoadedHook, load_hook
from gspo_mega.config.schema import UserFunction
from gspo_mega.data.prompts import PromptSource
from gspo_mega.data.stream import PromptStream

SOURCE_KEY = "data.source"
_METHODS = ("next", "observe", "state", "restore")
# So many rows in a row that are left out (too long) mean that nothing is left to choose.
_MOST_LEFT_OUT = 10_000


@dataclass(frozen=True)
class RowInfo:
    """What a function sees of a row: its number among the rows of all files, its id as in `GroupResult`, its source and
    its values by key.
    """

    number: int
    prompt_id: str
    source: str
    values: Mapping[str, Any]


class Rows(Sequence[RowInfo]):
    """The rows of all files of `data`, one file after the other. A row is read when it is asked for."""

    def __init__(self, sources: Sequence[PromptSource]) -> None:
        self._sources = list(sources)
        self._ends = list(accumulate(len(source) for source in self._sources))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def place(self, number: int) -> tuple[PromptSource, int]:
        """Return the source of a row, and its number there. Raises IndexError."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        which = bisect_right(self._ends, number)
        return self._sources[which], number - (self._ends[which - 1] if which else 0)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[k] for k in range(*number.indices(len(self)))]
        source, row = self.place(number if number >= 0 else number + len(self))
        return RowInfo(number % len(self), f"{source.name}:{row}", source.name, source.values(row))


def load_source(settings: UserFunction) -> LoadedHook:
    """Return `data.source`. Raises HookError if it cannot be loaded or called."""
    return load_hook(SOURCE_KEY, settings.function, settings.options, 1, seed=0)


class ChosenRows(PromptStream[Prompt]):
    """The prompts in the order of a user's object. Raises HookError if it fails or returns what it must not."""

    def __init__(
        self, sources: Sequence[PromptSource], hook: LoadedHook, *, seed: int, accept_changed: Sequence[str] = ()
    ) -> None:
        super().__init__(sources, [1.0] * len(sources), seed=seed, shuffle=True, accept_changed=accept_changed)
        self._rows, self._hook = Rows(sources), hook
        self._order = hook(self._rows, seed=seed)
        missing = [name for name in _METHODS if not callable(getattr(self._order, name, None))]
        if missing:
            raise hook.bad_result(
                f"{type(self._order).__name__} without {' and '.join(missing)}; an object with the methods"
                f" {', '.join(_METHODS)} was expected"
            )
        self._num_drawn = 0
        self._state()

    def next(self) -> Prompt:
        """The next prompt. Rows that are left out, because they are too long, are passed over: the object is asked for
        another.
        """
        for _ in range(_MOST_LEFT_OUT):
            number = self._call("next")
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self._rows):
                raise self._hook.bad_result(
                    f"from next() {number!r}; the number of a row was expected, from 0 to {len(self._rows) - 1}"
                )
            source, row = self._rows.place(number)
            if (prompt := source.item(row)) is not None:
                self._num_drawn += 1
                return prompt
        raise DataError(
            f"{SOURCE_KEY}: {self._hook.name} chose {_MOST_LEFT_OUT} times in a row a row that is left out because it"
            " is too long"
        )

    def observe(self, results: Sequence[GroupResult]) -> None:
        """Tell the object what became of the groups of a step."""
        self._call("observe", tuple(results))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"chosen": {"num_drawn": self._num_drawn, "state": self._state()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as `PromptStream.load_state_dict`. Raises DataError also for a state of a run without the object."""
        if "chosen" not in state:
            raise DataError(f"{SOURCE_KEY}: the run was saved without it, so its order cannot be continued")
        super().load_state_dict(state)
        self._num_drawn = state["chosen"]["num_drawn"]
        self._call("restore", json.loads(json.dumps(state["chosen"]["state"])))

    def _state(self) -> Any:
        """The object's state as JSON gives it back, so that later changes of the object do not change it."""
        state = self._call("state")
        try:
            return json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise self._hook.bad_result(f"from state() something that JSON cannot hold: {error}") from error

    def _call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self._order, name)
        return LoadedHook(self._hook.key, f"{self._hook.name}: {name}()", method, {})(*arguments)
