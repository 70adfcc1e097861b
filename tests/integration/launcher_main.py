"""The command itself, `gspo-mega train CONFIG`, with stand-ins for ranks and servers: launcher_main.py CONFIG
BEHAVIOURS.
"""

import functools
import sys
from pathlib import Path

from gspo_mega.cli import train
from gspo_mega.cli.main import main

if __name__ == "__main__":
    config, behaviours = sys.argv[1:]
    stand_in = (sys.executable, str(Path(__file__).with_name("launcher_stand_in.py")), behaviours)
    train.launch = functools.partial(train.launch, worker_command=stand_in, serve_command=stand_in)
    sys.exit(main(["train", config]))
