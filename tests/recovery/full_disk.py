"""A replayed run on a file system that is too small, again and again with a little more room: `full_disk.py FOLDER`.

Runs in a mount name space of its own, where it may mount a small file system (`unshare --map-root-user --mount`).
Prints one JSON
object: `ends`, [bytes that were free, exit code, error's text, whether it is one for people] of every start; `same`:
whether the end is an uninterrupted run's; `left`: what lies about in the run folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from recovery_support import Ranks, leftovers, make_recording, outcome

from gspo_mega.base.errors import GspoMegaError

KIB = 1024
# A start needs some 20 KiB, a step's journal 8, an export 300, a save 1 MiB and, by rule, 16 MiB more.
FREE = [KIB * size for size in (0, 8, 16, 20, 24, 28, 32, 36, 40, 64, 256, 512, 2048, 17 * KIB, 19 * KIB, 256 * KIB)]


def main(folder: Path) -> dict:
    ranks = Ranks(make_recording(folder))
    small = ranks.runs / "small"
    small.mkdir(parents=True)
    try:
        assert ranks.train("straight") == [0], ranks.log("straight")
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", small], check=True)
        ends = [[free, *start(ranks, small, free)] for free in FREE]
        found, want = outcome(ranks.folder("small")), outcome(ranks.folder("straight"))
        return {"ends": ends, "same": found == want, "left": leftovers(ranks.folder("small"))}
    finally:
        ranks.close()


def start(ranks: Ranks, small: Path, free: int) -> tuple[int, str | None, bool]:
    seen = os.statvfs(small)
    size = (seen.f_blocks - seen.f_bfree) * seen.f_bsize + free
    subprocess.run(["mount", "-o", f"remount,size={max(size, 4 * KIB)}", small], check=True)
    try:
        (code,) = ranks.train("small")
    except GspoMegaError as error:  # before a rank was started
        return error.exit_code, str(error), True
    try:
        record = ranks.error("small") if code else {"text": None, "is_user_error": True}
        return code, record["text"], record["is_user_error"]
    except FileNotFoundError:
        return code, None, True  # no room for the record either


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
