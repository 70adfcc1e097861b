"""The errors that a user can cause, and the exit code of each.

All of them derive from `GspoMegaError`. The text of an error says what is wrong, where, and what would be valid.
Commands print only that text. Any other exception is a defect of gspo_mega and shows a traceback.
"""

from __future__ import annotations

from typing import NamedTuple


class Violation(NamedTuple):
    """A setting that is refused.

    `key` is the dotted key and `text` says what is wrong. `nearest` gives the nearest valid values in words. It is
    empty if there are none, or if `text` already names them.
    """

    key: str
    text: str
    nearest: str = ""


class GspoMegaError(Exception):
    """Base of all errors that are written for a person. A command that fails with one returns its `exit_code`."""

    exit_code = 1


class ConfigError(GspoMegaError):
    """The YAML file or an override is wrong.

    The text has one line per problem: `file:line:column: key: what is wrong; what is valid`.
    """

    exit_code = 2


class PlanError(GspoMegaError):
    """The configuration is well formed but cannot run, because its layout or batch is impossible."""

    exit_code = 2


class FitError(PlanError):
    """A GPU or a node has too little memory, by an exact count or by an estimate. The text names the keys to change."""

    exit_code = 10


class ModelError(GspoMegaError):
    """A Hugging Face folder cannot be used: unknown architecture, an unsupported field, a bad shape."""

    exit_code = 2


class DataError(GspoMegaError):
    """A data file is malformed. The text names the file and the line."""

    exit_code = 2


class RewardError(GspoMegaError):
    """A reward function cannot be loaded. (If it fails on one trajectory, that trajectory records the failure.)"""

    exit_code = 2


class HookError(GspoMegaError):
    """A function of the user that takes the place of a built-in part cannot be loaded, failed, or returned something
    else than it must.
    """

    exit_code = 2


class EpisodeError(GspoMegaError):
    """An episode function or a tool cannot be loaded, or more episodes failed than are allowed.

    (If one episode fails, that episode records the failure.)
    """

    exit_code = 2


class RolloutError(GspoMegaError):
    """No server can serve, or the servers gave more invalid answers than the retries allow."""

    exit_code = 3


class PublishError(GspoMegaError):
    """A weight update was not applied in full, or not verified in full."""

    exit_code = 4


class NumericsError(GspoMegaError):
    """A number that is not finite would silently make training wrong. The text names the trajectory or tensor."""

    exit_code = 5


class CheckpointError(GspoMegaError):
    """A checkpoint is incomplete, damaged or of another model, or it cannot be written."""

    exit_code = 6


class RankError(GspoMegaError):
    """A rank or a server process of the run failed. The text carries its traceback."""

    exit_code = 7


class StuckError(RankError):
    """The watchdog found ranks that made no progress."""


class JournalError(GspoMegaError):
    """The rollout journal cannot be written, or lacks what a reader needs."""

    exit_code = 8


class FolderError(GspoMegaError):
    """The run folder cannot be written, or a file in it that is neither checkpoint nor journal is damaged or cannot be
    written.
    """

    exit_code = 9
