"""Holds a run folder in a process of its own: lease_holder.py FOLDER FLOCK HOST LEASE_SECONDS BEAT_SECONDS.

FLOCK: how locks behave here: `works`, `local` (each process has its own, as on another machine) or an errno's name.
HOST: empty for this machine, else another's name, whose processes are not to be seen from here. Prints "held", then
"lost TEXT" when it is; "refused TEXT". Ends when its standard input does.
"""

import dataclasses
import errno
import fcntl
import select
import sys
import time
from pathlib import Path

from gspo_mega.base.errors import ConfigError, FolderError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.launcher import lease

folder, how, host, lease_seconds, beat_seconds = sys.argv[1:]


def flock(_file, _operation):
    if how != "local":
        raise OSError(getattr(errno, how), how)


if how != "works":
    fcntl.flock = flock
if host:
    here = lease.Holder.this_process()
    other = dataclasses.replace(here, host=host, boot=f"boot of {host}")
    lease.Holder.this_process = classmethod(lambda cls: other)

try:
    with lease.hold(
        RunFolder(Path(folder)), lambda line: print("said", line, flush=True), float(lease_seconds), float(beat_seconds)
    ) as held:
        print("held", flush=True)
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            held.raise_if_lost()
            time.sleep(0.01)
except FolderError as error:
    print("lost", error, flush=True)
except ConfigError as error:
    print("refused", error, flush=True)
