"""What `tokenizer_problem` says of tokenizers behind SGLang's own handlers, without the server around them.

python sglang_tokenizers.py OURS THEIRS ...       a line of JSON: the answer for each of THEIRS
"""

from __future__ import annotations

import asyncio
import json
import sys
from unittest import mock

import gspo_mega.rollout.server.entry  # noqa: F401  it prepares what SGLang imports, as in a server
from gspo_mega.data.chat import load_tokenizer
from gspo_mega.rollout.teacher_server import tokenizer_problem


class Handlers:
    """A `ServerClient` whose requests go to the handlers."""

    server_id = "teacher.url"

    def __init__(self, tokenizer) -> None:
        from sglang.srt.entrypoints.openai import protocol, serving_tokenize

        manager = mock.MagicMock(tokenizer=tokenizer)
        self._routes = {
            "/tokenize": (protocol.TokenizeRequest, serving_tokenize.OpenAIServingTokenize(manager)),
            "/detokenize": (protocol.DetokenizeRequest, serving_tokenize.OpenAIServingDetokenize(manager)),
        }

    async def call_object(self, path, body, deadline_seconds, *, what=None, method="POST"):
        if path == "/model_info":
            return {"model_path": "teacher"}
        form, handler = self._routes[path]
        request = form(**body)
        return (await handler._handle_non_streaming_request(request, request, mock.MagicMock())).model_dump()


if __name__ == "__main__":
    ours = load_tokenizer(sys.argv[1])
    theirs = [Handlers(load_tokenizer(folder)) for folder in sys.argv[2:]]
    print(json.dumps([asyncio.run(tokenizer_problem(one, ours, 1.0)) for one in theirs]))
