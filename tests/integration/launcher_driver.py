"""`gspo-mega train CONFIG`, with stand-ins: launcher_driver.py CONFIG BEHAVIOURS STOP_GRACE [WORK].

With WORK the ranks are real ones whose work is that function of launcher_worker.py.
"""

import sys
from pathlib import Path

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.config import load_config
from gspo_mega.launcher.local import launch

STAND_IN = str(Path(__file__).with_name("launcher_stand_in.py"))
WORKER = str(Path(__file__).with_name("launcher_worker.py"))


def main():
    config, behaviours, grace, *work = sys.argv[1:]
    stand_in = (sys.executable, STAND_IN, behaviours)
    worker = (sys.executable, WORKER, *work) if work else stand_in
    try:
        code = launch(
            load_config(config, command="train"),
            "train",
            lambda line: print(line, flush=True),
            worker_command=worker,
            serve_command=stand_in,
            stop_grace_seconds=float(grace),
        )
    except GspoMegaError as error:
        print(error, *getattr(error, "__notes__", ()), sep="\n\n", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    main()
