"""A `scontrol` that answers from a table, and configurations to ask it about."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gspo_mega.config import load_config
from gspo_mega.launcher.slurm.size import Site

REPOSITORY = Path(__file__).parents[3]
CONFIG = REPOSITORY / "configs/quickstart.yaml"

SCONTROL = r"""#!/usr/bin/env python3
import re, sys
words = sys.argv[1:]
def names(text):
    found = re.fullmatch(r"(\w+?)\[(\d+)-(\d+)\]", text)
    return [found[1] + str(n) for n in range(int(found[2]), int(found[3]) + 1)] if found else text.split(",")
if words[:2] == ["show", "hostnames"]:
    print("\n".join(names(words[2])))
elif words[:2] == ["show", "node"]:
    for name in names(words[3]):
        print(f"NodeName={name} Arch=x CPUTot=8 NodeAddr=10.0.0.{name[1:]} NodeHostName={name}")
elif words[:2] == ["show", "job"] and words[3] == "7":
    from datetime import datetime, timedelta
    end = (datetime.now() + timedelta(seconds=200)).isoformat(timespec="seconds")
    print(f"JobId=7 JobState=RUNNING TimeLimit=00:10:00 EndTime={end} ReqNodeList=(null) ExcNodeList=n9 NodeList=n[1-2] BatchHost=n1")
    print("JobId=8 HetJobId=7 JobState=RUNNING TimeLimit=UNLIMITED EndTime=2099-01-01T00:00:00 NodeList=(null)")
elif words[:2] == ["show", "job"] and words[3] == "6":
    print("JobId=6 JobState=RUNNING TimeLimit=UNLIMITED EndTime=Unknown NodeList=n1")
else:
    sys.exit(f"Invalid job id specified")
"""


@pytest.fixture(autouse=True)
def scontrol(tmp_path, monkeypatch):
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(SCONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def loaded(*overrides):
    return load_config(CONFIG, [*overrides, "publish.verify=replicas"])  # which any server.tensor may have


def site(**variables):
    return Site.read({"GSPO_GPUS_PER_NODE": "8", **variables})
