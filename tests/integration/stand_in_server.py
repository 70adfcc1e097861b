"""Stands in for an SGLang process: says /health as told by the file `behaviour` beside the attempt, spawns a child."""

from __future__ import annotations

import argparse
import http.server
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--behaviour", type=Path)
parser.add_argument("--spec", type=Path)
parser.add_argument("--parent", type=int)
args = parser.parse_args()
spec = json.loads(args.spec.read_text())
behaviour = args.behaviour.read_text().split()
print(
    "stand-in",
    behaviour,
    "serves",
    spec["model_path"],
    "version",
    spec["weight_version"],
    "seed",
    spec["seed"],
    "head",
    os.getpid(),
    flush=True,
)
child = subprocess.Popen(
    [sys.executable, "-c", "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
)
print("child", child.pid, flush=True)
if "shared_memory" in behaviour:
    # As SGLang's scheduler does; its name is known to nobody but it.
    segment = f"/dev/shm/sglang_loads_{os.urandom(6).hex()}_0.shm"
    mapped = mmap.mmap(os.open(segment, os.O_CREAT | os.O_RDWR, 0o600), 0 if os.truncate(segment, 4096) else 4096)
    print("segment", segment, flush=True)
if "proxied" in behaviour:
    # SGLang's warm-up is a request of `requests` to itself, which reads the environment as this does.
    import urllib.request

    print("own address by", urllib.request.getproxies(), flush=True)
if "traceback" in behaviour:
    raise RuntimeError("the reason \x1b[2J of the end")
if "exit" in behaviour:
    print("the reason of the end", flush=True)
    sys.exit(3)
if "lose_weights" in behaviour and Path(spec["model_path"]).parent.name == "weights":
    shutil.rmtree(spec["model_path"])  # as a publish that went on meanwhile
    sys.exit(2)
if "refuse" in behaviour:
    sys.stderr.write("server.options.x: no such argument\n")
    sys.exit(2)
if "ignore_term" in behaviour:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
num_probes = 0
num_open = 2 if "busy" in behaviour else 0


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global num_probes
        num_probes += self.path == "/health_generate"
        healthy = "never_healthy" not in behaviour and not (self.path == "/health_generate" and "wedged" in behaviour)
        self.send_response(200 if healthy else 503)
        self.end_headers()
        if self.path.startswith("/v1/loads") and "busy" in behaviour:
            asked = self.headers["Authorization"] or "no key"
            print("asked what is open by", "a key" if asked.startswith("Bearer ") else asked, flush=True)
            self.wfile.write(json.dumps({"loads": [{"num_running_reqs": num_open, "num_waiting_reqs": 0}]}).encode())
        if "die_after_probes" in behaviour and num_probes == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def do_POST(self):
        global num_open
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        print("posted", self.path, json.dumps(body), flush=True)
        if "stubborn" not in behaviour:
            num_open = 0
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Quiet."""


if "die_later" in behaviour:
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.7)
http.server.ThreadingHTTPServer((spec["host"], spec["port"]), Handler).serve_forever()
