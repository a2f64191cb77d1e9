"""Drives a Kinference endpoint with the official Anthropic client for Python.

Usage: python anthropic_client.py URL MODEL
"""

import sys

import anthropic

from features import canonical, run

url, model = sys.argv[1:3]
client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0, timeout=30)
tool = {"name": "weather", "description": "tells it", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"], "additionalProperties": False}
picture = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def user(name):
    return [{"role": "user", "content": "script: " + name}]


def ask(name, **more):
    return client.messages.create(model=model, messages=more.pop("messages", None) or user(name), max_tokens=50, **more)


def streamed(name, **more):
    with client.messages.stream(model=model, messages=user(name), max_tokens=50, **more) as s:
        for _ in s:
            pass
        return s.get_final_message()


def texts(message):
    return "".join(b.text for b in message.content if b.type == "text")


def calls(message):
    return [canonical(b.name, b.input) for b in message.content if b.type == "tool_use"]


def chat():
    r = ask("chat")
    return {"text": texts(r), "stop": r.stop_reason}


def stream():
    r = streamed("chat")
    return {"text": texts(r), "stop": r.stop_reason}


def tools(name):
    first = ask(name, tools=[tool])
    results = [{"type": "tool_result", "tool_use_id": b.id, "content": [{"type": "text", "text": "sunny"}]} for b in first.content if b.type == "tool_use"]
    history = user(name) + [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    return {"calls": calls(first), "stop": first.stop_reason, "final": texts(ask(name, tools=[tool], messages=history))}


def stream_tools(name):
    r = streamed(name, tools=[tool])
    return {"calls": calls(r), "stop": r.stop_reason}


def json_schema():
    return texts(ask("schema", output_config={"format": {"type": "json_schema", "schema": schema}}))


def stop():
    r = ask("stop", stop_sequences=["three"])
    return {"text": texts(r), "stop": r.stop_reason, "sequence": r.stop_sequence}


def vision():
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    return texts(ask("", messages=[{"role": "user", "content": [{"type": "text", "text": "script: vision"}, {"type": "image", "source": source}]}]))


def counts(u):
    return {"input": u.input_tokens, "cached": u.cache_read_input_tokens, "output": u.output_tokens}


def usage():
    return {"whole": counts(ask("chat").usage), "stream": counts(streamed("chat").usage)}


def failure(call):
    try:
        call()
    except anthropic.APIStatusError as e:
        return {"class": type(e).__name__, "status": e.status_code, "type": e.body["error"]["type"], "id": bool(e.request_id)}


def errors():
    return {
        "model": failure(lambda: client.messages.create(model="nobody", max_tokens=5, messages=user("chat"))),
        "refused": failure(lambda: ask("no-such-script")),
        "too long": failure(lambda: ask("", messages=[{"role": "user", "content": "word " * 300_000}])),
    }


def retries():
    return texts(client.with_options(max_retries=2).messages.create(model=model, messages=user("retry anthropic-python"), max_tokens=5))


def abort():
    text = ""
    with client.messages.stream(model=model, messages=user("slow"), max_tokens=50) as s:
        for piece in s.text_stream:
            text += piece
            break
    return text


def thinking():
    on = {"type": "enabled", "budget_tokens": 1024}
    first = streamed("think", thinking=on)
    again = ask("", thinking=on, messages=user("think") + [{"role": "assistant", "content": first.content}] + user("think"))
    return {"thinking": "".join(b.thinking for b in first.content if b.type == "thinking"), "text": texts(first), "again": texts(again)}


def count_tokens():
    n = client.messages.count_tokens(model=model, system="Be terse.", messages=[{"role": "user", "content": "Hello there"}]).input_tokens
    u = client.messages.create(model=model, system="Be terse.", messages=[{"role": "user", "content": "Hello there"}], max_tokens=1).usage
    return n == u.input_tokens + u.cache_read_input_tokens


def models():
    return model in [m.id for m in client.models.list()] and client.models.retrieve(model).id == model


run({
    "chat": chat, "stream": stream, "tools": lambda: tools("tools"), "tools, stream": lambda: stream_tools("tools"), "parallel tools": lambda: tools("parallel"),
    "parallel tools, stream": lambda: stream_tools("parallel"), "JSON schema": json_schema, "stop": stop, "vision": vision, "usage": usage,
    "errors": errors, "retries": retries, "abort": abort, "thinking": thinking, "count_tokens": count_tokens, "models": models,
})
