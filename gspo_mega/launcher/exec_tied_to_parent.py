"""Run a command to which the kernel sends a signal when the process that started it ends.

    python -I -S exec_tied_to_parent.py PARENT SIGNAL COMMAND...

Asks the kernel to send this process SIGNAL when its parent ends, however it ends, and becomes COMMAND; the request
survives exec. This module runs as a file, without site packages, so that it costs some 15 ms; it imports nothing of the
project.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, number, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit("exec_tied_to_parent: the process that started this one has already ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
