"""What a journal must not say, whatever became of its run."""

from __future__ import annotations

from gspo_mega.data.journal.frames import FrameFile
from gspo_mega.data.journal.journal import Journal


def check_log(journal: Journal) -> None:
    """No sample that was recorded is recorded with other tokens in a later file from which the same group goes on.

    Groups of a run that samples ahead are numbered through; those of one that does not begin at 0 in each file.
    """
    tokens: dict[tuple[int, int], list[int]] = {}
    goes_on = False
    for step in journal.steps():
        if not goes_on:
            tokens.clear()
        for values, arrays in FrameFile(journal.file(step)).frames():
            if values["kind"] == "episode":
                sample, found = (values["group_id"], int(values["episode_id"][-3:])), arrays["token_ids"].tolist()
                assert tokens.setdefault(sample, found) == found, f"{values['episode_id']} was sampled again"
            elif values["kind"] == "batch":
                goes_on = "tickets" in values["prompts"]
