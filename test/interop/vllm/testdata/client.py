"""Drives a Kinference endpoint with the official OpenAI client for Python and prints what came back as one JSON object.

Usage: python client.py BASE_URL MODEL TOKENS
TOKENS is a JSON list of ids of which tool calls are made: a model whose weights are noise is pushed towards those.
"""
import asyncio
import json
import sys

import openai

base_url, model, tokens = sys.argv[1:]
client = openai.OpenAI(base_url=base_url, api_key="unused", max_retries=5, timeout=60)
messages = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": "Name three colours. 你好 👍🏽"}]
tools = [{"type": "function", "function": {"name": "paint", "description": "Paints.", "strict": True, "parameters": {
    "type": "object", "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}}, "required": ["colour"], "additionalProperties": False}}}]
out = {"version": openai.__version__}

out["models"] = sorted(m.id for m in client.models.list())
whole = client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0)
out["chat"] = {"content": whole.choices[0].message.content, "finish": whole.choices[0].finish_reason, "usage": whole.usage.to_dict(), "model": whole.model}


def read(stream):
    got = {"content": "", "chunks": 0, "usageChunks": 0, "usage": None, "finish": None, "call": {"name": "", "arguments": ""}}
    for chunk in stream:
        got["chunks"] += 1
        if chunk.usage:
            got["usageChunks"] += 1
            got["usage"] = chunk.usage.to_dict()
        for choice in chunk.choices:
            got["content"] += choice.delta.content or ""
            got["finish"] = choice.finish_reason or got["finish"]
            for call in choice.delta.tool_calls or []:
                if call.index > 0:
                    continue
                got["call"]["name"] += call.function.name or ""
                got["call"]["arguments"] += call.function.arguments or ""
    return got


out["stream"] = read(client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0, stream=True))
out["counted"] = read(client.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0, stream=True,
                                                     stream_options={"include_usage": True}))
# The schema allows white space, of which noise may fill a call until its tokens are spent.
calling = {"model": model, "messages": messages, "max_tokens": 64, "temperature": 1, "tools": tools, "tool_choice": "required",
           "logit_bias": {str(i): 100 for i in json.loads(tokens)}}
out["tool"] = out["toolStream"] = None
for _ in range(20):
    if not out["tool"]:
        choice = client.chat.completions.create(**calling).choices[0]
        if choice.message.tool_calls:
            call = choice.message.tool_calls[0].function
            out["tool"] = {"name": call.name, "arguments": call.arguments, "finish": choice.finish_reason}
    if not out["toolStream"]:
        streamed = read(client.chat.completions.create(**calling, stream=True))
        if streamed["call"]["arguments"].endswith("}"):  # else its tokens were spent before
            out["toolStream"] = {**streamed["call"], "finish": streamed["finish"]}

text = client.completions.create(model=model, prompt="Once upon a time", max_tokens=4, temperature=0)
out["completion"] = {"text": text.choices[0].text, "usage": text.usage.to_dict()}


def failure(**request):
    try:
        client.chat.completions.create(**request)
    except openai.APIStatusError as e:
        return {"name": type(e).__name__, "status": e.status_code, "code": e.code, "type": e.type, "requestID": e.request_id}
    return None


out["unknownModel"] = failure(model="no-such-model", messages=messages)
out["tooLong"] = failure(model=model, messages=[{"role": "user", "content": "word " * 300_000}])
out["badEffort"] = failure(model=model, messages=messages, reasoning_effort="enormous")

abandoned = client.chat.completions.create(model=model, messages=messages, max_tokens=2000, stream=True)
for _ in abandoned:
    break
abandoned.close()
out["afterAbandon"] = client.chat.completions.create(model=model, messages=messages, max_tokens=2).choices[0].finish_reason


async def several():
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=5, timeout=60) as c:
        return await asyncio.gather(*(
            c.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0) for _ in range(4)))


out["parallel"] = [a.choices[0].message.content for a in asyncio.run(several())]
print(json.dumps(out))
