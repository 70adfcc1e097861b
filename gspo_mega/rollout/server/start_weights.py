"""The weights that a start of a server loads: the run's committed version, or the folder that the run began with."""

from __future__ import annotations

from pathlib import Path

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import Attempt, read_json
from gspo_mega.config.lora_rules import publishes_adapters
from gspo_mega.config.schema import Config
from gspo_mega.models.block_fp8 import served_layout
from gspo_mega.models.huggingface import read_stored


def current_weights(config: Config, attempt: Attempt, start_folder: str) -> tuple[int | None, str]:
    """The version and the folder of the weights that this start loads; the version is None where nobody in this
    attempt has committed one for that folder. A folder in another form than the run's servers hold is passed over.

    With `publish.lora: adapter` it is always the folder to start from: a version has adapters alone.

    The folder to start from has no version, not even 0: the trainer may begin with other weights (`model.weights`).
    What an earlier attempt committed has none either: this attempt gives the same numbers to other weights.
    """
    if publishes_adapters(config):  # versions hold no weights to start from
        return None, start_folder
    current_file = attempt.run_folder.current_weights_file
    committed = _modified(current_file)  # read before the content, which may be replaced in between
    current = read_json(current_file)
    if current is None:
        return None, start_folder
    try:
        version, path = int(current["weight_version"]), str(current["path"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{current_file}: needs weight_version and path: {error!r}") from error
    if read_stored(path) != served_layout(config):
        return None, start_folder
    # The attempt begins with its key. Both files are in the run folder, so that one clock wrote both times.
    began = _modified(attempt.api_key_file)
    is_of_this_attempt = committed is not None and began is not None and committed >= began
    return version if is_of_this_attempt else None, path


def _modified(path: Path) -> int | None:
    """Time of the last change, in nanoseconds; None where there is no such file."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
