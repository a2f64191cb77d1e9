"""Drives a Kinference endpoint through LangChain, which sits on both clients.

Usage: python langchain_client.py URL MODEL openai|anthropic
"""

import json
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool

from features import canonical, run

url, model, api = sys.argv[1:4]
if api == "openai":
    import openai as sdk
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    def make(**more):
        return ChatOpenAI(**{"base_url": url + "/v1", "api_key": "unused", "model": model, "max_tokens": 50, "max_retries": 0, "stream_usage": True, **more})
else:
    import anthropic as sdk
    from langchain_anthropic import ChatAnthropic

    def make(**more):
        return ChatAnthropic(**{"base_url": url, "api_key": "unused", "model": model, "max_tokens": 50, "max_retries": 0, **more})


llm = make()
schema = {"title": "a", "type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"], "additionalProperties": False}
picture = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@tool
def weather(city: str) -> str:
    """tells it"""
    return "sunny"


def user(name):
    return HumanMessage("script: " + name)


def joined(chunks):
    whole = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    return whole


def calls(message):
    return [canonical(c["name"], c["args"]) for c in message.tool_calls]


def chat():
    return llm.invoke([user("chat")]).text


def stream():
    return "".join(chunk.text for chunk in llm.stream([user("chat")]))


def tools(name, llm=llm):
    bound = llm.bind_tools([weather])
    first = bound.invoke([user(name)])
    results = [ToolMessage("sunny", tool_call_id=c["id"]) for c in first.tool_calls]
    return {"calls": calls(first), "final": bound.invoke([user(name), first] + results).text}


def stream_tools(name):
    return {"calls": calls(joined(llm.bind_tools([weather]).stream([user(name)])))}


def json_schema():
    return json.dumps(llm.with_structured_output(schema, method="json_schema").invoke([user("schema")]))


def logprobs():
    return llm.bind(logprobs=True).invoke([user("logprobs")]).response_metadata["logprobs"]["content"][0]["logprob"]


def n():
    return [g.text for g in make(n=2).generate([[user("n")]]).generations[0]]


def stop():
    r = llm.invoke([user("stop")], stop=["three"])
    if api == "openai":
        return {"text": r.text, "stop": r.response_metadata["finish_reason"]}
    return {"text": r.text, "stop": r.response_metadata["stop_reason"], "sequence": r.response_metadata["stop_sequence"]}


def vision():
    return llm.invoke([HumanMessage([{"type": "text", "text": "script: vision"}, {"type": "image_url", "image_url": {"url": picture}}])]).text


def usage():
    def counts(u):
        return {"input": u["input_tokens"], "cached": u["input_token_details"].get("cache_read"), "output": u["output_tokens"]}

    return {"whole": counts(llm.invoke([user("chat")]).usage_metadata), "stream": counts(joined(llm.stream([user("chat")])).usage_metadata)}


def failure(call):
    try:
        call()
    except sdk.APIStatusError as e:  # LangChain has classes of its own below them
        kind = next(c.__name__ for c in type(e).__mro__ if c.__module__.startswith(sdk.__name__))
        told = {"code": e.code} if api == "openai" else {"type": e.body["error"]["type"]}
        return {"class": kind, "status": e.status_code, "id": bool(e.request_id), **told}


def errors():
    return {
        "model": failure(lambda: make(model="nobody").invoke([user("chat")])),
        "refused": failure(lambda: llm.invoke([user("no-such-script")])),
        "too long": failure(lambda: llm.invoke([HumanMessage("word " * 300_000)])),
    }


def retries():
    return make(max_retries=2, max_tokens=5).invoke([user("retry langchain-" + api)]).text


def abort():
    chunks = llm.stream([user("slow")])
    text = ""
    for chunk in chunks:
        text += chunk.text
        if text:
            break
    chunks.close()
    return text


def thoughts(message):
    return "".join(b.get("reasoning", "") for b in message.content_blocks if b["type"] == "reasoning")


def thinking():
    thinks = make(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=1100)
    first = joined(thinks.stream([user("think")]))
    again = thinks.invoke([user("think"), AIMessage(first.content), user("think")])
    return {"thinking": thoughts(first), "text": first.text, "again": again.text}


def count_tokens():
    messages = [SystemMessage("Be terse."), HumanMessage("Hello there")]
    return llm.get_num_tokens_from_messages(messages) == make(max_tokens=1).invoke(messages).usage_metadata["input_tokens"]


def responses():
    r = make(use_responses_api=True).invoke([user("chat")])
    u = r.usage_metadata
    return {"text": r.text, "status": r.response_metadata["status"], "input": u["input_tokens"], "cached": u["input_token_details"].get("cache_read"), "output": u["output_tokens"]}


def responses_stream():
    r = joined(make(use_responses_api=True).stream([user("think")]))
    return {"text": r.text, "status": r.response_metadata["status"]}


def embeddings():
    return OpenAIEmbeddings(base_url=url + "/v1", api_key="unused", model=model, check_embedding_ctx_length=False, max_retries=0).embed_documents(["a", "b"])


features = {
    "chat": chat, "stream": stream, "tools": lambda: tools("tools"), "tools, stream": lambda: stream_tools("tools"), "parallel tools": lambda: tools("parallel"),
    "parallel tools, stream": lambda: stream_tools("parallel"), "JSON schema": json_schema, "stop": stop, "vision": vision, "usage": usage,
    "errors": errors, "retries": retries, "abort": abort,
}
if api == "openai":
    features |= {
        "logprobs": logprobs, "n": n, "responses": responses, "responses, stream": responses_stream, "responses, tools": lambda: tools("parallel", make(use_responses_api=True)),
        "embeddings": embeddings,
    }
else:
    features |= {"thinking": thinking, "count_tokens": count_tokens}
run(features)
