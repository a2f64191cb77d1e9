// Drives a Kinference endpoint with the official OpenAI client for Node.js.
// Usage: node openai.mjs URL MODEL
import OpenAI from "openai";
import { canonical, run } from "./features.mjs";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url + "/v1", apiKey: "unused", maxRetries: 0, timeout: 30_000 });
const tool = { type: "function", function: { name: "weather", description: "tells it", parameters: { type: "object", properties: { city: { type: "string" } } } } };
const schema = { type: "object", properties: { answer: { type: "integer" } }, required: ["answer"], additionalProperties: false };
const picture = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
const user = (name) => [{ role: "user", content: "script: " + name }];
const ask = (name, more = {}) => client.chat.completions.create({ model, messages: user(name), max_tokens: 50, ...more });
const calls = (message) => message.tool_calls.map((c) => canonical(c.function.name, c.function.arguments));

async function tools(name) {
  const first = await ask(name, { tools: [tool] });
  const { message, finish_reason } = first.choices[0];
  const results = message.tool_calls.map((c) => ({ role: "tool", tool_call_id: c.id, content: "sunny" }));
  const last = await ask(name, { tools: [tool], messages: [...user(name), message, ...results] });
  return { calls: calls(message), stop: finish_reason, final: last.choices[0].message.content };
}

async function streamTools(name) {
  const stream = client.chat.completions.stream({ model, messages: user(name), max_tokens: 50, tools: [tool] });
  const { message, finish_reason } = (await stream.finalChatCompletion()).choices[0];
  return { calls: calls(message), stop: finish_reason };
}

const counts = (u) => ({ input: u.prompt_tokens, cached: u.prompt_tokens_details.cached_tokens, output: u.completion_tokens });

async function failure(promise) {
  try {
    await promise;
    return null;
  } catch (e) {
    return { class: e.constructor.name, status: e.status, code: e.code, id: Boolean(e.requestID) };
  }
}

await run({
  chat: async () => {
    const c = (await ask("chat")).choices[0];
    return { text: c.message.content, stop: c.finish_reason };
  },
  stream: async () => {
    const out = { text: "", stop: null };
    for await (const chunk of await ask("chat", { stream: true })) {
      out.text += chunk.choices[0].delta.content ?? "";
      out.stop = chunk.choices[0].finish_reason ?? out.stop;
    }
    return out;
  },
  tools: () => tools("tools"),
  "tools, stream": () => streamTools("tools"),
  "parallel tools": () => tools("parallel"),
  "parallel tools, stream": () => streamTools("parallel"),
  "JSON schema": async () => (await ask("schema", { response_format: { type: "json_schema", json_schema: { name: "a", schema } } })).choices[0].message.content,
  logprobs: async () => (await ask("logprobs", { logprobs: true })).choices[0].logprobs.content[0].logprob,
  n: async () => (await ask("n", { n: 2 })).choices.map((c) => c.message.content),
  stop: async () => {
    const c = (await ask("stop", { stop: ["three"] })).choices[0];
    return { text: c.message.content, stop: c.finish_reason };
  },
  vision: async () =>
    (await ask("", { messages: [{ role: "user", content: [{ type: "text", text: "script: vision" }, { type: "image_url", image_url: { url: picture } }] }] })).choices[0].message.content,
  usage: async () => {
    let last;
    for await (const chunk of await ask("chat", { stream: true, stream_options: { include_usage: true } })) last = chunk.usage ?? last;
    return { whole: counts((await ask("chat")).usage), stream: counts(last) };
  },
  errors: async () => ({
    model: await failure(client.chat.completions.create({ model: "nobody", messages: user("chat") })),
    refused: await failure(ask("no-such-script")),
    "too long": await failure(ask("", { messages: [{ role: "user", content: "word ".repeat(300_000) }] })),
  }),
  retries: async () => (await client.chat.completions.create({ model, messages: user("retry openai-node"), max_tokens: 5 }, { maxRetries: 2 })).choices[0].message.content,
  abort: async () => {
    const stream = await ask("slow", { stream: true });
    for await (const chunk of stream) {
      const text = chunk.choices[0].delta.content;
      if (text) {
        stream.controller.abort();
        return text;
      }
    }
  },
  thinking: async () => {
    const { message } = (await ask("think")).choices[0];
    return { thinking: message.reasoning, text: message.content };
  },
  responses: async () => {
    const r = await client.responses.create({ model, input: "script: chat", max_output_tokens: 50 });
    return { text: r.output_text, status: r.status, input: r.usage.input_tokens, cached: r.usage.input_tokens_details.cached_tokens, output: r.usage.output_tokens };
  },
  "responses, stream": async () => {
    const r = await client.responses.stream({ model, input: "script: think" }).finalResponse();
    const thoughts = r.output.filter((i) => i.type === "reasoning").flatMap((i) => i.content.map((c) => c.text));
    return { text: r.output.filter((i) => i.type === "message").map((i) => i.content[0].text).join(""), status: r.status, thinking: thoughts.join("") };
  },
  "responses, tools": async () => {
    const tools = [{ type: "function", ...tool.function }];
    const input = user("parallel");
    const first = await client.responses.stream({ model, input, tools }).finalResponse();
    const calls = first.output.filter((i) => i.type === "function_call");
    const results = calls.map((c) => ({ type: "function_call_output", call_id: c.call_id, output: "sunny" }));
    const last = await client.responses.create({ model, input: [...input, ...calls, ...results], tools });
    return { calls: calls.map((c) => canonical(c.name, c.arguments)), final: last.output_text };
  },
  embeddings: async () => (await client.embeddings.create({ model, input: ["a", "b"] })).data.map((e) => e.embedding),
  models: async () => (await client.models.list()).data.some((m) => m.id === model),
});
