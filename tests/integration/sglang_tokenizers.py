"""What `tokenizer_problem` says of tokenizers behind SGLang's own handlers, without the server around them.

python sglang_tokenizers.py OURS THEIRS ...       a line of JSON: the answer for each of THEIRS
"""

from __future__ import annotations

import asyncio
import json
import sys
from unittest import mock

from gspo_mega.cpu import sglang_hooks

sglang_hooks.activate()

from sglang.srt.entrypoints.openai import protocol, serving_tokenize  # noqa: E402

from gspo_mega.data.chat import load_tokenizer  # noqa: E402
from gspo_mega.rollout.teacher_server import tokenizer_problem  # noqa: E402


class Handlers:
    """A `ServerClient` whose requests go to the handlers."""

    server_id = "teacher.url"

    def __init__(self, tokenizer) -> None:
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
