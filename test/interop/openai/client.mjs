// Drives a Kinference endpoint with the official OpenAI client and prints what
// came back as one JSON object. Usage: node client.mjs BASE_URL MODEL
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "unused", maxRetries: 0, timeout: 30_000 });
const messages = [
  { role: "system", content: "You are terse." },
  { role: "user", content: "Name three colours." },
];
const out = {};

out.models = (await client.models.list()).data.map((m) => m.id).sort();

const whole = await client.chat.completions.create({ model, messages, max_tokens: 8 });
out.chat = { content: whole.choices[0].message.content, finish: whole.choices[0].finish_reason, usage: whole.usage, model: whole.model };

// Without include_usage the client must see no usage chunk at all.
const plain = await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true });
out.stream = { content: "", chunks: 0, usageChunks: 0, emptyChoices: 0 };
for await (const chunk of plain) {
  out.stream.chunks++;
  if (chunk.usage) out.stream.usageChunks++;
  if (chunk.choices.length === 0) out.stream.emptyChoices++;
  out.stream.content += chunk.choices[0]?.delta?.content ?? "";
}

const counted = await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true, stream_options: { include_usage: true } });
out.counted = { content: "", usage: null };
for await (const chunk of counted) {
  out.counted.content += chunk.choices[0]?.delta?.content ?? "";
  if (chunk.usage) out.counted.usage = chunk.usage;
}

const text = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 4 });
out.completion = { text: text.choices[0].text, usage: text.usage };

async function failure(promise) {
  try {
    await promise;
    return null;
  } catch (e) {
    return { name: e.constructor.name, status: e.status, code: e.code, type: e.type, param: e.param, requestID: e.requestID ?? null };
  }
}
out.unknownModel = await failure(client.chat.completions.create({ model: "no-such-model", messages }));
out.tooLong = await failure(client.chat.completions.create({ model, messages: [{ role: "user", content: "word ".repeat(300_000) }] }));

// Leaving a stream early must not break the next request.
const abandoned = await client.chat.completions.create({ model, messages, max_tokens: 200, stream: true });
for await (const _ of abandoned) break;
out.afterAbandon = (await client.chat.completions.create({ model, messages, max_tokens: 2 })).choices[0].finish_reason;

console.log(JSON.stringify(out));
