"""Drives a Kinference endpoint through LangChain, which sits on both clients.

Usage: python langchain_client.py URL MODEL openai|anthropic
"""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool

from features import canonical, run

url, model, api = sys.argv[1:4]
if api == "openai":
    from langchain_openai import ChatOpenAI

    llm = ChatOpenAI(base_url=url + "/v1", api_key="unused", model=model, max_tokens=50, max_retries=0, stream_usage=True)
else:
    from langchain_anthropic import ChatAnthropic

    llm = ChatAnthropic(base_url=url, api_key="unused", model=model, max_tokens=50, max_retries=0)


@tool
def weather(city: str) -> str:
    """tells it"""
    return "sunny"


def user(name):
    return HumanMessage("script: " + name)


def chat():
    return llm.invoke([user("chat")]).text


def stream():
    return "".join(chunk.text for chunk in llm.stream([user("chat")]))


def tools(name):
    bound = llm.bind_tools([weather])
    first = bound.invoke([user(name)])
    results = [ToolMessage("sunny", tool_call_id=c["id"]) for c in first.tool_calls]
    return {"calls": [canonical(c["name"], c["args"]) for c in first.tool_calls], "final": bound.invoke([user(name), first] + results).text}


def stream_tools(name):
    whole = None
    for chunk in llm.bind_tools([weather]).stream([user(name)]):
        whole = chunk if whole is None else whole + chunk
    return {"calls": [canonical(c["name"], c["args"]) for c in whole.tool_calls]}


def usage():
    def counts(u):
        return {"input": u["input_tokens"], "cached": u["input_token_details"].get("cache_read"), "output": u["output_tokens"]}

    whole = None
    for chunk in llm.stream([user("chat")]):
        whole = chunk if whole is None else whole + chunk
    return {"whole": counts(llm.invoke([user("chat")]).usage_metadata), "stream": counts(whole.usage_metadata)}


run({
    "chat": chat, "stream": stream, "tools": lambda: tools("tools"), "tools, stream": lambda: stream_tools("tools"), "parallel tools": lambda: tools("parallel"),
    "parallel tools, stream": lambda: stream_tools("parallel"), "usage": usage,
})
