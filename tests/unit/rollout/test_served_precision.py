"""A server that computes in another precision than was asked for is refused, by what it says itself."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from collector_support import collector_config

from gspo_mega.base.errors import ConfigError, RankError
from gspo_mega.rollout.registration import ensure_secret
from gspo_mega.rollout.server.spec import served_precision


@pytest.fixture
def ask(tmp_path):
    """What `served_precision` makes of a configuration's `server` and of a server's answer."""
    key = ensure_secret(tmp_path / "key")
    answers: list[tuple[int, object]] = []
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            status, content = answers[-1]
            if self.headers["Authorization"] != f"Bearer {key}":
                status = 401
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_):
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def asking(answer: object, status: int = 200, **keys: str) -> str:
        config = collector_config()
        config = config.model_copy(update={"precision": "fp32", "server": config.server.model_copy(update=keys)})
        answers.append((status, answer))
        return served_precision(
            config.server, config.precision, f"http://127.0.0.1:{server.server_port}", tmp_path / "key"
        )

    asking.asked = asked
    yield asking
    server.shutdown()
    server.server_close()


SAID = {"dtype": "float32", "quantization": "fp8", "kv_cache_dtype": "fp8_e4m3", "port": 1}


def test_a_server_says_what_it_was_asked_for(ask):
    text = ask(SAID, quantization="fp8_block", kv_cache="fp8")
    assert text == "fp32 activations, e4m3 weights in 128 x 128 blocks, quantized by the trainer, e4m3 cache"
    assert ask.asked == ["/server_info"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"quantization": None}, "quantization 'fp8' and says that it has None"),
        ({"kv_cache_dtype": "auto"}, "kv_cache_dtype 'fp8_e4m3' and says that it has 'auto'"),
        ({"dtype": "bfloat16"}, "dtype 'float32' and says that it has 'bfloat16'"),
    ],
)
def test_a_server_in_another_precision_is_refused(ask, change, named):
    with pytest.raises(ConfigError, match=f"was started with {named}; see server.dtype"):
        ask(SAID | change, quantization="fp8", kv_cache="fp8")


def test_a_server_that_does_not_say_is_no_server(ask):
    with pytest.raises(RankError, match="does not say what it computes in: /server_info answers 500"):
        ask(SAID, status=500, dtype="bf16")
    with pytest.raises(RankError, match="does not say what it computes in: /server_info answers 200"):
        ask([], dtype="bf16")


def test_a_server_of_the_defaults_is_not_asked(ask):
    assert ask({}) == "fp32 activations, fp32 weights, fp32 cache" and ask.asked == []
