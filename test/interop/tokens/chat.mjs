// Writes the chat template goldens: for each template the prompt of each case, rendered by Hugging Face's Jinja, or null where the
// template raises. What vLLM does to a request before the template is written here a second time, apart from internal/chat.
//
// usage: node chat.mjs CACHE MODEL CASES OUT
import { readFileSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { Template } from "@huggingface/jinja";

const [cache, model, casesFile, out] = process.argv.slice(2);
const cases = JSON.parse(readFileSync(casesFile, "utf8"));

function config(dir) {
  const c = JSON.parse(readFileSync(join(dir, "tokenizer_config.json"), "utf8"));
  const special = {};
  for (const name of ["bos_token", "eos_token", "unk_token", "pad_token"]) {
    const token = c[name]?.content ?? c[name];
    if (token) special[name] = token;
  }
  return { special, source: c.chat_template };
}

const templates = { parts: { special: { bos_token: "<s>", eos_token: "</s>" }, source: readFileSync(join(dirname(casesFile), "parts.jinja"), "utf8"), parts: true } };
for (const name of ["qwen3", "llama3_1", "deepseek_v3"]) templates[name] = config(join(cache, `${name}-3.7.2`));
templates.model = { ...config(model), source: readFileSync(join(model, "chat_template.jinja"), "utf8") };

const partText = (p) => (typeof p === "string" ? p : p[p.type === "refusal" ? "refusal" : "text"]);

function content(c, wantParts) {
  const parts = c == null ? [] : typeof c === "string" ? [{ type: "text", text: c }] : c;
  if (wantParts) return parts.map((p) => ({ type: "text", text: partText(p) }));
  return parts.map(partText).filter((t) => t).join("\n");
}

function parseArguments(a) {
  try {
    const v = typeof a === "string" && a ? JSON.parse(a) : a;
    return v && typeof v === "object" && !Array.isArray(v) ? v : {};
  } catch {
    return {};
  }
}

function toolCall({ id, function: { arguments: a, name, ...moreFunction }, ...more }) {
  return { id, function: { arguments: parseArguments(a), name, ...moreFunction }, type: "function", ...more };
}

function conversation(messages, wantParts) {
  let all = messages.map((m) => {
    const n = { role: m.role, content: content(m.content, wantParts) };
    if (m.role === "assistant") {
      if (m.tool_calls?.length) n.tool_calls = m.tool_calls.map(toolCall);
      const reasoning = m.reasoning ?? m.reasoning_content;
      if (reasoning != null) n.reasoning = n.reasoning_content = reasoning;
    }
    if (m.role === "tool") {
      n.tool_call_id = m.tool_call_id;
      if (wantParts) n.content = n.content.map((p) => p.text).join("\n");
    }
    if (m.name) n.name = m.name;
    return n;
  });
  if (!all.some((m) => m.role === "developer")) return all;
  for (const m of all) if (m.role === "developer") m.role = "system";
  const isSystem = (m) => m.role === "system";
  if (all.findLastIndex(isSystem) > 0) {
    const text = all.filter(isSystem).map((m) => (typeof m.content === "string" ? m.content : m.content.map((p) => p.text).join("\n")));
    all = [{ role: "system", content: text.filter((t) => t).join("\n\n") }, ...all.filter((m) => !isSystem(m))];
  }
  return all;
}

function tool({ function: { name, description, parameters, strict } }) {
  return { type: "function", function: { name, description: description ?? null, parameters: parameters ?? null, ...(strict != null && { strict }) } };
}

const tag = "CONTINUE_FINAL_MESSAGE_TAG ";

// mark puts the tag behind the last message's text, in a copy.
function mark(messages) {
  const last = { ...messages.at(-1) };
  if (typeof last.content === "string") last.content += tag;
  else last.content = last.content.map((p, i, all) => (i === all.length - 1 ? { ...p, text: p.text + tag } : p));
  return [...messages.slice(0, -1), last];
}

for (const [name, t] of Object.entries(templates)) {
  const template = new Template(t.source);
  const golden = {};
  for (const { name: test, only, request: r } of cases) {
    if (only && !only.includes(name)) continue;
    const messages = conversation(r.messages, t.parts);
    const kwargs = Object.fromEntries(Object.entries(r.chat_template_kwargs ?? {}).filter(([, v]) => v !== null && v !== "auto"));
    const vars = { ...t.special, tools: r.tools?.map(tool) ?? null, documents: r.documents ?? null, ...kwargs, messages };
    if (r.continue_final_message) vars.messages = mark(messages);
    vars.add_generation_prompt = r.add_generation_prompt ?? false;
    if (r.reasoning_effort) {
      vars.reasoning_effort = r.reasoning_effort;
      if (!("enable_thinking" in (r.chat_template_kwargs ?? {}))) vars.enable_thinking = r.reasoning_effort !== "none";
    }
    let prompt = null;
    try {
      prompt = template.render(vars);
      if (r.continue_final_message) {
        const at = prompt.lastIndexOf(tag.trim());
        prompt = prompt.startsWith(tag, at) ? prompt.slice(0, at) : prompt.slice(0, at).trimEnd();
      }
    } catch {
      // The golden says null.
    }
    golden[test] = prompt;
  }
  writeFileSync(join(out, name + ".golden.json"), JSON.stringify(golden, null, 1) + "\n");
}

const snippets = JSON.parse(readFileSync(join(dirname(casesFile), "snippets.json"), "utf8"));
const rendered = snippets.templates.map((source) => new Template(source).render(snippets.variables));
writeFileSync(join(out, "snippets.golden.json"), JSON.stringify(rendered, null, 1) + "\n");
