"""An agent that knows the policy as an address and nothing of gspo_mega: it works out sums with a tool, in one of three
protocols.
"""

import json
import os
import re
import sys
import urllib.request

from openai import OpenAI

client = OpenAI()
with open(os.environ["GSPO_MEGA_TASK_FILE"], encoding="utf-8") as file:
    task = json.load(file)
asked = {"model": os.environ["OPENAI_MODEL"], "tools": task["metadata"]["tools"]}


def whole(messages):
    return client.chat.completions.create(messages=messages, **asked).choices[0].message


def streamed(messages):
    """The message put together from its pieces."""
    content, calls = "", {}
    for chunk in client.chat.completions.create(messages=messages, stream=True, **asked):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                function = {"name": call.function.name, "arguments": call.function.arguments}
                calls[call.index] = {"id": call.id, "type": "function", "function": function}
    message = {"role": "assistant", "content": content}
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def in_messages(messages):
    """The message, asked for as a client of Anthropic's does: the history is written in its form."""
    history = []
    for message in messages:
        if message["role"] == "tool":
            result = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            if history[-1]["role"] == "assistant":
                history.append({"role": "user", "content": []})
            history[-1]["content"].append(result)
        elif message["role"] == "assistant":
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            calls = [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in message.get("tool_calls", ())
            ]
            history.append({"role": "assistant", "content": [*text, *calls]})
        else:
            history.append(message)
    functions = [tool["function"] for tool in asked["tools"]]
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]} for one in functions
    ]
    body = {"model": os.environ["ANTHROPIC_MODEL"], "max_tokens": 64, "messages": history, "tools": tools}
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "content-type": "application/json"}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        blocks = json.load(answer)["content"]
    content = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [
        {"id": one["id"], "function": {"name": one["name"], "arguments": json.dumps(one["input"])}}
        for one in blocks
        if one["type"] == "tool_use"
    ]
    return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})


previous = None


def in_responses(messages):
    """The message, asked for by the id of the response before it and what is new since."""
    global previous
    tools = [{"type": "function", **tool["function"]} for tool in asked["tools"]]
    new = list(messages)
    if previous is not None:
        last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
        new = [
            {"type": "function_call_output", "call_id": one["tool_call_id"], "output": one["content"]}
            for one in messages[last + 1 :]
        ]
    response = client.responses.create(model=asked["model"], input=new, tools=tools, previous_response_id=previous)
    previous = response.id
    calls = [
        {"id": one.call_id, "function": {"name": one.name, "arguments": one.arguments}}
        for one in response.output
        if one.type == "function_call"
    ]
    return {"role": "assistant", "content": response.output_text} | ({"tool_calls": calls} if calls else {})


def calculate(expression):
    if not re.fullmatch(r"\d+([-+*]\d+)*", expression):
        return "error: no sum"
    return str(eval(expression))  # digits and three operators


messages = task["messages"]
while True:
    message = {"stream": streamed, "messages": in_messages, "responses": in_responses}.get(sys.argv[1], whole)(messages)
    messages.append(message)
    calls = message.get("tool_calls") if isinstance(message, dict) else message.tool_calls
    if not calls:
        break
    for call in calls:
        call = call if isinstance(call, dict) else call.model_dump()
        result = calculate(json.loads(call["function"]["arguments"])["expression"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
