"""Does a server compute in the precision that the configuration asks for? Asked of the server itself, once per start.

SGLang falls back silently in some places: a checkpoint's own configuration or a model's default may change what an
argument says. Owns the question and the comparison; SGLang's names are `server_spec.py`'s.
"""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path

from gspo_mega.base.errors import ConfigError, RankError
from gspo_mega.config.schema import Config
from gspo_mega.config.server_precision import describe_server_precision
from gspo_mega.rollout.secret import read_secret
from gspo_mega.rollout.server.server_spec import precision_arguments

_ANSWER_SECONDS = 15.0
_TRIES = 3
_PAUSE_SECONDS = 1.0


def served_precision(config: Config, address: str, api_key_file: Path) -> str:
    """What the server at `address` computes in, in words. Raises ConfigError where it is not what was asked for, and
    RankError where the server does not say: it has died, or did not answer repeatedly.

    Where nothing was asked for (`dtype: auto` and neither quantization nor an FP8 cache), it is not asked.
    """
    server = config.server
    if (server.dtype, server.quantization, server.kv_cache) != ("auto", "none", "auto"):
        said = _asked_repeatedly(address, api_key_file)
        for name, wanted in precision_arguments(config).items():
            if said.get(name) != wanted:
                raise ConfigError(
                    f"the server at {address} was started with {name} {wanted!r} and says that it has"
                    f" {said.get(name)!r}; see server.dtype, server.quantization, server.kv_cache"
                )
    return describe_server_precision(config)


def _asked_repeatedly(address: str, api_key_file: Path) -> dict[str, object]:
    """A server that has just become healthy may be busy."""
    for _ in range(_TRIES - 1):
        try:
            return _server_info(address, api_key_file)
        except RankError:
            time.sleep(_PAUSE_SECONDS)
    return _server_info(address, api_key_file)


def _server_info(address: str, api_key_file: Path) -> dict[str, object]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=_ANSWER_SECONDS)
    try:
        connection.request("GET", "/server_info", headers={"Authorization": f"Bearer {read_secret(api_key_file)}"})
        answer = connection.getresponse()
        said = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise RankError(f"the server at {address} does not say what it computes in: {error!r}") from error
    finally:
        connection.close()
    if answer.status != 200 or not isinstance(said, dict):
        raise RankError(
            f"the server at {address} does not say what it computes in: /server_info answers {answer.status}"
        )
    return said
