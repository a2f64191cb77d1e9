"""Drives a Kinference endpoint with the official OpenAI client for Python.

Usage: python openai_client.py URL MODEL
"""

import sys

import openai

from features import canonical, run

url, model = sys.argv[1:3]
client = openai.OpenAI(base_url=url + "/v1", api_key="unused", max_retries=0, timeout=30)
tool = {"type": "function", "function": {"name": "weather", "description": "tells it", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
schema = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"], "additionalProperties": False}
picture = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def ask(name, **more):
    messages = more.pop("messages", None) or [{"role": "user", "content": "script: " + name}]
    return client.chat.completions.create(model=model, messages=messages, max_tokens=50, **more)


def chat():
    r = ask("chat")
    return {"text": r.choices[0].message.content, "stop": r.choices[0].finish_reason}


def stream():
    text, stop = "", None
    for chunk in ask("chat", stream=True):
        text += chunk.choices[0].delta.content or ""
        stop = chunk.choices[0].finish_reason or stop
    return {"text": text, "stop": stop}


def tools(name):
    first = ask(name, tools=[tool])
    message = first.choices[0].message
    history = [{"role": "user", "content": "script: " + name}, message.model_dump(exclude_none=True)]
    for c in message.tool_calls:
        history.append({"role": "tool", "tool_call_id": c.id, "content": "sunny"})
    last = ask(name, tools=[tool], messages=history)
    return {"calls": [canonical(c.function.name, c.function.arguments) for c in message.tool_calls], "stop": first.choices[0].finish_reason, "final": last.choices[0].message.content}


def stream_tools(name):
    with client.chat.completions.stream(model=model, messages=[{"role": "user", "content": "script: " + name}], max_tokens=50, tools=[tool]) as s:
        for _ in s:
            pass
        choice = s.get_final_completion().choices[0]
    return {"calls": [canonical(c.function.name, c.function.arguments) for c in choice.message.tool_calls], "stop": choice.finish_reason}


def json_schema():
    return ask("schema", response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}).choices[0].message.content


def logprobs():
    return ask("logprobs", logprobs=True).choices[0].logprobs.content[0].logprob


def n():
    return [c.message.content for c in ask("n", n=2).choices]


def stop():
    r = ask("stop", stop=["three"])
    return {"text": r.choices[0].message.content, "stop": r.choices[0].finish_reason}


def vision():
    return ask("", messages=[{"role": "user", "content": [{"type": "text", "text": "script: vision"}, {"type": "image_url", "image_url": {"url": picture}}]}]).choices[0].message.content


def counts(u):
    return {"input": u.prompt_tokens, "cached": u.prompt_tokens_details.cached_tokens, "output": u.completion_tokens}


def usage():
    last = None
    for chunk in ask("chat", stream=True, stream_options={"include_usage": True}):
        last = chunk.usage or last
    return {"whole": counts(ask("chat").usage), "stream": counts(last)}


def failure(call):
    try:
        call()
    except openai.APIStatusError as e:
        return {"class": type(e).__name__, "status": e.status_code, "code": e.code, "id": bool(e.request_id)}


def errors():
    return {
        "model": failure(lambda: client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])),
        "refused": failure(lambda: ask("no-such-script")),
        "too long": failure(lambda: ask("", messages=[{"role": "user", "content": "word " * 300_000}])),
    }


def retries():
    retrying = client.with_options(max_retries=2)
    return retrying.chat.completions.create(model=model, messages=[{"role": "user", "content": "script: retry openai-python"}], max_tokens=5).choices[0].message.content


def abort():
    s = ask("slow", stream=True)
    text = ""
    for chunk in s:
        text += chunk.choices[0].delta.content or ""
        if text:
            break
    s.close()
    return text


def thinking():
    message = ask("think").choices[0].message
    return {"thinking": message.reasoning, "text": message.content}


def responses():
    r = client.responses.create(model=model, input="script: chat", max_output_tokens=50)
    return {"text": r.output_text, "status": r.status, "input": r.usage.input_tokens, "cached": r.usage.input_tokens_details.cached_tokens, "output": r.usage.output_tokens}


def responses_stream():
    with client.responses.stream(model=model, input="script: think") as s:
        for _ in s:
            pass
        r = s.get_final_response()
    thoughts = [c.text for i in r.output if i.type == "reasoning" for c in i.content]
    return {"text": r.output_text, "status": r.status, "thinking": "".join(thoughts)}


def responses_tools():
    flat = {"type": "function", **tool["function"]}
    ask = [{"role": "user", "content": "script: parallel"}]
    with client.responses.stream(model=model, input=ask, tools=[flat]) as s:
        for _ in s:
            pass
        first = s.get_final_response()
    calls = [i for i in first.output if i.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": c.call_id, "output": "sunny"} for c in calls]
    last = client.responses.create(model=model, input=ask + [c.model_dump(exclude={"parsed_arguments"}) for c in calls] + results, tools=[flat])
    return {"calls": [canonical(c.name, c.arguments) for c in calls], "final": last.output_text}


def embeddings():
    return [list(e.embedding) for e in client.embeddings.create(model=model, input=["a", "b"]).data]


def models():
    return model in [m.id for m in client.models.list()]


run({
    "chat": chat, "stream": stream, "tools": lambda: tools("tools"), "tools, stream": lambda: stream_tools("tools"), "parallel tools": lambda: tools("parallel"),
    "parallel tools, stream": lambda: stream_tools("parallel"), "JSON schema": json_schema, "logprobs": logprobs, "n": n, "stop": stop, "vision": vision, "usage": usage,
    "errors": errors, "retries": retries, "abort": abort, "thinking": thinking, "responses": responses, "responses, stream": responses_stream, "responses, tools": responses_tools, "embeddings": embeddings, "models": models,
})
