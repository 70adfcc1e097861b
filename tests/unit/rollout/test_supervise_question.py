"""A server that dies, or says nothing, at its first question after /health is started again like any that dies; one
whose Python lacks a package only once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gspo_mega.base.errors import RankError
from gspo_mega.base.run_folder import RunFolder
from gspo_mega.config import load_config
from gspo_mega.rollout.registration import ensure_secret, read_registrations
from gspo_mega.rollout.server import spec, supervise

CONFIG = Path(__file__).parents[3] / "configs/quickstart.yaml"
STAND_IN = """
import http.server, json, os, sys
spec = json.load(open(sys.argv[sys.argv.index("--spec") + 1]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/server_info":
            os._exit(9) if "dies" in sys.argv else None
        self.send_response(200 if self.path == "/health" else 503)
        self.end_headers()
http.server.ThreadingHTTPServer((spec["host"], spec["port"]), Handler).serve_forever()
"""


@pytest.mark.parametrize(("behaviour", "said"), [("dies", "ConnectionRefusedError"), ("busy", "JSONDecodeError")])
def test_it_is_a_cause_to_start_again(tmp_path, monkeypatch, behaviour, said):
    monkeypatch.setattr(spec, "_PAUSE_SECONDS", 0.2)
    attempt = RunFolder(tmp_path / "run").new_attempt()
    attempt.logs_dir.mkdir(parents=True, exist_ok=True)
    ensure_secret(attempt.api_key_file)
    config = load_config(CONFIG, ["server.dtype=bf16"]).config
    server = supervise.ServerSupervisor(config, attempt, 0, entry=(sys.executable, "-c", STAND_IN, behaviour))
    try:
        cause = server._serve_once()
    finally:
        server._end()
    assert "does not say what it computes in" in cause and said in cause


def test_a_server_that_answers_the_second_question_is_ready(monkeypatch):
    answers = iter([OSError("reset"), {"dtype": "bfloat16", "quantization": None, "kv_cache_dtype": "auto"}])

    def once(*_):
        answer = next(answers)
        if isinstance(answer, OSError):
            raise spec.RankError("does not say what it computes in")
        return answer

    monkeypatch.setattr(spec, "_server_info", once)
    monkeypatch.setattr(spec, "_PAUSE_SECONDS", 0.0)
    config = load_config(CONFIG, ["server.dtype=bf16"]).config
    assert spec.served_precision(config.server, config.precision, "http://x", Path("key")).startswith(
        "bf16 activations"
    )


DIES_OF = """
import sys
from pathlib import Path
starts = Path(sys.argv[1])
starts.write_text(starts.read_text() + "x")
number = len(starts.read_text())
raise {"lacking": ModuleNotFoundError("No module named 'cutlass'"),
       "others": ImportError(f"cannot import name {number}"),
       "not an import": ValueError("no")}[sys.argv[2]]
"""


@pytest.mark.parametrize(
    ("kind", "starts", "said"),
    [
        ("lacking", 2, "ModuleNotFoundError: No module named 'cutlass', at two starts in a row"),
        ("others", 4, "it was restarted 3 times already"),
        ("not an import", 4, "it was restarted 3 times already"),
    ],
)
def test_a_package_that_is_missing_twice_is_not_waited_for(tmp_path, monkeypatch, kind, starts, said):
    monkeypatch.setattr(supervise, "_FIRST_DELAY_SECONDS", 0.01)
    attempt = RunFolder(tmp_path / "run").new_attempt()
    (tmp_path / "starts").touch()
    config = load_config(CONFIG, ["server.max_restarts=3"]).config
    entry = (sys.executable, "-c", DIES_OF, str(tmp_path / "starts"), kind)
    server = supervise.ServerSupervisor(config, attempt, 0, entry=entry)
    for folder in (attempt.servers_dir, attempt.logs_dir):
        folder.mkdir(parents=True, exist_ok=True)
    ensure_secret(attempt.api_key_file)
    try:
        with pytest.raises(RankError, match=said):
            server._serve()
    finally:
        server._end()
    assert len((tmp_path / "starts").read_text()) == starts


# As SGLang: it starts, says which of its optional parts it goes without, serves, and is killed from outside.
SERVES_WITHOUT_A_PART = """
import http.server, json, os, signal, sys, threading
spec = json.load(open(sys.argv[sys.argv.index("--spec") + 1]))
print("[2026-01-01] Responses API disabled: init failed (ModuleNotFoundError: No module named 'harmony')", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        threading.Timer(0.5, die).start()
def die():
    if sys.argv[1] == "says why":
        print("MemoryError: out of it", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
http.server.ThreadingHTTPServer((spec["host"], spec["port"]), Handler).serve_forever()
"""


@pytest.mark.parametrize(("behaviour", "why"), [("says why", ": MemoryError: out of it"), ("says nothing", "")])
def test_a_server_that_was_ready_lacks_nothing(tmp_path, monkeypatch, behaviour, why):
    """What its log said of an optional part before it was ready is neither why it was killed nor a reason to give up."""
    monkeypatch.setattr(supervise, "_FIRST_DELAY_SECONDS", 0.01)
    attempt = RunFolder(tmp_path / "run").new_attempt()
    for folder in (attempt.servers_dir, attempt.logs_dir):
        folder.mkdir(parents=True, exist_ok=True)
    ensure_secret(attempt.api_key_file)
    config = load_config(CONFIG, ["server.max_restarts=2", f"model.path={tmp_path}"]).config
    entry = (sys.executable, "-c", SERVES_WITHOUT_A_PART, behaviour)
    server = supervise.ServerSupervisor(config, attempt, 0, entry=entry)
    try:
        with pytest.raises(RankError, match="it was restarted 2 times already"):
            server._serve()
    finally:
        server._end()
    (found,) = read_registrations(attempt.servers_dir)
    cause = f"SGLang killed by SIGKILL (see {attempt.server_log(0)}){why}"
    assert (found.generation, found.recent_failures) == (3, [cause, cause])
