"""Runs a ServerSupervisor over the stand-in server; a process of its own, for it takes signals."""

from __future__ import annotations

import sys
from pathlib import Path

from gspo_mega.base.errors import GspoMegaError
from gspo_mega.base.run_folder import Attempt
from gspo_mega.config.schema import Config
from gspo_mega.rollout.server import supervise

attempt, config_json = Path(sys.argv[1]), sys.argv[2]
supervise._PROBE_SECONDS = 0.3
entry = [sys.executable, str(Path(__file__).with_name("stand_in_server.py")), "--behaviour", str(attempt / "behaviour")]
try:
    sys.exit(supervise.ServerSupervisor(Config.model_validate_json(config_json), Attempt(attempt), 1, entry).run())
except GspoMegaError as error:
    sys.stderr.write(f"{error}\n")
    sys.exit(error.exit_code)
