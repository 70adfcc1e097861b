"""`gspo-mega status RUN --stacks`: what every rank is doing now, a line each, and where the whole stacks are."""

from __future__ import annotations

from gspo_mega.base.errors import ConfigError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.launcher.attempt_state import read_state
from gspo_mega.launcher.stack_request import StackRequest


def ask_for_stacks(folder: RunFolder) -> list[str]:
    """The lines to show, after all ranks answered or had the time to. Raises ConfigError where no rank can answer."""
    attempt = folder.latest_attempt()
    state = None if attempt is None else read_state(attempt)
    if attempt is None or state is None or state.is_over:
        how = "has no attempt yet" if state is None else f"is {state.state}"
        raise ConfigError(
            f"gspo-mega status --stacks: {folder.path} {how}; only the ranks of a run that goes on answer"
        )
    cluster = load_config(attempt.config_file if attempt.config_file.exists() else folder.config_file).config.cluster
    try:
        request = StackRequest(attempt, cluster.num_nodes * cluster.ranks_per_node)
    except OSError as error:
        raise ConfigError(
            f"gspo-mega status --stacks: {attempt.stacks_request_file} cannot be written: {error.strerror}; who asks"
            " needs the right to write in the run's folder"
        ) from error
    request.wait()
    return [*request.places(), request.text()]
