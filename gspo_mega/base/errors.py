"""The error family.

Every error a user can cause derives from `GspoMegaError`; its text says what is wrong, where, and what
would be valid. Commands print only the text; any other exception is a defect of gspo_mega and shows a traceback.
"""

from __future__ import annotations

from typing import NamedTuple


class Violation(NamedTuple):
    """A setting that is refused. `key`: dotted; `text`: what is wrong; `nearest`: the nearest valid values, in words,
    empty where there are none or where `text` names them.
    """

    key: str
    text: str
    nearest: str = ""


class GspoMegaError(Exception):
    """Base of all errors that are written for a person. `exit_code` is what the command returns."""

    exit_code = 1


class ConfigError(GspoMegaError):
    """The YAML file or an override is wrong. One line per problem: `file:line:column: key: what; what is valid`."""

    exit_code = 2


class PlanError(GspoMegaError):
    """The configuration is well formed and cannot run: an impossible layout or batch."""

    exit_code = 2


class FitError(PlanError):
    """The memory of a GPU or of a node does not suffice, exactly or by estimate; names the keys to change."""

    exit_code = 10


class ModelError(GspoMegaError):
    """A Hugging Face folder cannot be used: unknown architecture, an unsupported field, a bad shape."""

    exit_code = 2


class DataError(GspoMegaError):
    """A data file is malformed; names file and line."""

    exit_code = 2


class RewardError(GspoMegaError):
    """A reward function cannot be loaded. (A failure on one trajectory is recorded there instead.)"""

    exit_code = 2


class EpisodeError(GspoMegaError):
    """An episode function or a tool cannot be loaded, or more episodes failed than are allowed. (One episode's failure
    is recorded there instead.)
    """

    exit_code = 2


class RolloutError(GspoMegaError):
    """No server can serve, or servers gave more invalid answers than the retries allow."""

    exit_code = 3


class PublishError(GspoMegaError):
    """A weight update was not applied, or not verified, in full."""

    exit_code = 4


class NumericsError(GspoMegaError):
    """A non-finite number that would silently make training wrong; names the trajectory or tensor."""

    exit_code = 5


class CheckpointError(GspoMegaError):
    """A checkpoint is torn, damaged, of another model, or cannot be written."""

    exit_code = 6


class RankError(GspoMegaError):
    """A rank or server process of the run failed; carries its traceback."""

    exit_code = 7


class StuckError(RankError):
    """The watchdog found ranks that make no progress."""


class JournalError(GspoMegaError):
    """The rollout journal cannot be written, or lacks what a reader needs."""

    exit_code = 8


class FolderError(GspoMegaError):
    """The run folder, or a file in it that is neither checkpoint nor journal, cannot be written, or is damaged."""

    exit_code = 9
