"""An agent with nothing but the standard library: it asks in OpenAI's protocol and then in Anthropic's, tries what is
refused, repeats a request as a client does after a lost answer, and says itself what it earned.
"""

import json
import os
import urllib.error
import urllib.request
import zlib


def ask(messages, **more):
    """(status, body)"""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    if "key" in more:
        headers["Idempotency-Key"] = more.pop("key")
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **more}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def said(messages, **more):
    status, body = ask(messages, **more)
    assert status == 200, body
    return body["choices"][0]["message"]


def answered(messages):
    """The text that answers a history in Anthropic's Messages."""
    headers = {"Content-Type": "application/json", "x-api-key": os.environ["ANTHROPIC_API_KEY"]}
    body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 64, "messages": messages}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return "".join(block["text"] for block in json.load(answer)["content"])


def main():
    with open(os.environ["GSPO_MEGA_TASK_FILE"], encoding="utf-8") as file:
        messages = json.load(file)["messages"]
    status, body = ask(messages, temperature=0.25)  # not the run's
    assert (status, body["error"]["code"]) == (400, "sampling_differs"), body
    first = said(messages, key="first")
    assert said(messages, key="first") == first, "a retry is answered, not sampled"
    second = answered([*messages, first, {"role": "user", "content": "1+1="}])
    reward = earned(first["content"], second)
    with open(os.environ["GSPO_MEGA_RESULT_FILE"], "w", encoding="utf-8") as file:
        json.dump({"reward": reward, "parts": {"first": float(len(first["content"]))}}, file)


def earned(first, second):
    """Of any two answers another number, so that groups have a signal."""
    return zlib.crc32(f"{first}|{second}".encode()) % 1000 / 1000


if __name__ == "__main__":
    main()
