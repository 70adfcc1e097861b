"""`gspo-mega train` or `sft` on one machine whose ranks, servers and trial of inputs are forks of processes that have
imported what they need (`forked_workers.py`): forked_command.py COMMANDS WORD ..., for tests of what a run computes.

COMMANDS is JSON: the commands of the trial, and of a rank and a server unless these start as they always do. How they
start and end is shown by runs without forks.
"""

import functools
import json
import sys

if __name__ == "__main__":
    try:
        from gspo_mega.cli.main import main
        from gspo_mega.launcher import local, trial_process
    except KeyboardInterrupt:  # as `gspo_mega/__main__.py`
        sys.exit(130)
    commands = json.loads(sys.argv[1])
    trial_process._COMMAND = tuple(commands["trial"])
    if "rank" in commands:
        # Before the commands import it. As these are the product's own ranks, the inputs are tried for them.
        local.WORKER_COMMAND = tuple(commands["rank"])
        local.launch = functools.partial(
            local.launch, worker_command=local.WORKER_COMMAND, serve_command=commands["server"]
        )
    sys.exit(main(sys.argv[2:]))
