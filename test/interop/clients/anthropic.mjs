// Drives a Kinference endpoint with the official Anthropic client for Node.js.
// Usage: node anthropic.mjs URL MODEL
import Anthropic from "@anthropic-ai/sdk";
import { canonical, run } from "./features.mjs";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0, timeout: 30_000 });
const tool = { name: "weather", description: "tells it", input_schema: { type: "object", properties: { city: { type: "string" } } } };
const schema = { type: "object", properties: { answer: { type: "integer" } }, required: ["answer"], additionalProperties: false };
const picture = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
const user = (name) => [{ role: "user", content: "script: " + name }];
const ask = (name, more = {}) => client.messages.create({ model, messages: user(name), max_tokens: 50, ...more });
const streamed = (name, more = {}) => client.messages.stream({ model, messages: user(name), max_tokens: 50, ...more }).finalMessage();
const texts = (m) => m.content.map((b) => (b.type === "text" ? b.text : "")).join("");
const calls = (m) => m.content.filter((b) => b.type === "tool_use").map((b) => canonical(b.name, b.input));

async function tools(name) {
  const first = await ask(name, { tools: [tool] });
  const results = first.content.filter((b) => b.type === "tool_use").map((b) => ({ type: "tool_result", tool_use_id: b.id, content: "sunny" }));
  const messages = [...user(name), { role: "assistant", content: first.content }, { role: "user", content: results }];
  return { calls: calls(first), stop: first.stop_reason, final: texts(await ask(name, { tools: [tool], messages })) };
}

async function streamTools(name) {
  const m = await streamed(name, { tools: [tool] });
  return { calls: calls(m), stop: m.stop_reason };
}

const counts = (u) => ({ input: u.input_tokens, cached: u.cache_read_input_tokens, output: u.output_tokens });

async function failure(promise) {
  try {
    await promise;
    return null;
  } catch (e) {
    return { class: e.constructor.name, status: e.status, type: e.error.error.type, id: Boolean(e.requestID) };
  }
}

await run({
  chat: async () => {
    const m = await ask("chat");
    return { text: texts(m), stop: m.stop_reason };
  },
  stream: async () => {
    const m = await streamed("chat");
    return { text: texts(m), stop: m.stop_reason };
  },
  tools: () => tools("tools"),
  "tools, stream": () => streamTools("tools"),
  "parallel tools": () => tools("parallel"),
  "parallel tools, stream": () => streamTools("parallel"),
  "JSON schema": async () => texts(await ask("schema", { output_config: { format: { type: "json_schema", schema } } })),
  stop: async () => {
    const m = await ask("stop", { stop_sequences: ["three"] });
    return { text: texts(m), stop: m.stop_reason, sequence: m.stop_sequence };
  },
  vision: async () => {
    const source = { type: "base64", media_type: "image/png", data: picture };
    return texts(await ask("", { messages: [{ role: "user", content: [{ type: "text", text: "script: vision" }, { type: "image", source }] }] }));
  },
  usage: async () => ({ whole: counts((await ask("chat")).usage), stream: counts((await streamed("chat")).usage) }),
  errors: async () => ({
    model: await failure(client.messages.create({ model: "nobody", max_tokens: 5, messages: user("chat") })),
    refused: await failure(ask("no-such-script")),
    "too long": await failure(ask("", { messages: [{ role: "user", content: "word ".repeat(300_000) }] })),
  }),
  retries: async () => texts(await client.messages.create({ model, messages: user("retry anthropic-node"), max_tokens: 5 }, { maxRetries: 2 })),
  abort: async () => {
    const stream = await client.messages.create({ model, messages: user("slow"), max_tokens: 50, stream: true });
    for await (const event of stream) {
      if (event.type === "content_block_delta") {
        stream.controller.abort();
        return event.delta.text;
      }
    }
  },
  thinking: async () => {
    const thinking = { type: "enabled", budget_tokens: 1024 };
    const first = await streamed("think", { thinking });
    const again = await ask("", { thinking, messages: [...user("think"), { role: "assistant", content: first.content }, ...user("think")] });
    return { thinking: first.content.map((b) => (b.type === "thinking" ? b.thinking : "")).join(""), text: texts(first), again: texts(again) };
  },
  count_tokens: async () => {
    const request = { model, system: "Be terse.", messages: [{ role: "user", content: "Hello there" }] };
    const { usage } = await client.messages.create({ ...request, max_tokens: 1 });
    return (await client.messages.countTokens(request)).input_tokens === usage.input_tokens + usage.cache_read_input_tokens;
  },
  models: async () => {
    for await (const m of client.models.list()) if (m.id === model) return (await client.models.retrieve(model)).id === model;
    return false;
  },
});
