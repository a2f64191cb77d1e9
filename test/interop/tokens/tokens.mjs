// Writes the tokenizer goldens: for each tokenizer one line per text of the corpus (JSON lines on stdin), which is the number of
// ids and their hash as internal/tokens/corpus.Digest states them. The ids come from Hugging Face's Rust tokenizers.
//
// usage: node tokens.mjs CACHE MODEL OUT   (CACHE: folder with <name>-<version>/tokenizer.json, MODEL: internal/fleetsim/model)
import { readFileSync, writeFileSync, mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createRequire } from "node:module";
const { Tokenizer } = createRequire(import.meta.url)("@anush008/tokenizers");

const [cache, model, out] = process.argv.slice(2);
const version = "3.7.2";
const texts = readFileSync(0, "utf8").trimEnd().split("\n").map((line) => JSON.parse(line));

function digest(ids) {
  let h = 0xcbf29ce484222325n;
  for (const id of ids) {
    for (let i = 0; i < 4; i++) {
      h ^= BigInt((id >>> (8 * i)) & 255);
      h = (h * 0x100000001b3n) & 0xffffffffffffffffn;
    }
  }
  return `${ids.length} ${h.toString(16).padStart(16, "0")}`;
}

// Variants of real files show rules that none of the four uses. The Go tests make the same changes.
const variants = {
  // Words with their combining marks, as in Qwen3-Next and later.
  qwen3_marks: ["qwen3", (t) => {
    const split = t.pre_tokenizer.pretokenizers[0];
    split.pattern.Regex = split.pattern.Regex.replace("]?\\p{L}+", "]?[\\p{L}\\p{M}]+").replace("[^\\s\\p{L}\\p{N}]+", "[^\\s\\p{L}\\p{M}\\p{N}]+");
  }],
  // Added tokens that take the white space around them.
  model_strip: ["model", (t) => {
    for (const a of t.added_tokens) {
      a.lstrip = a.content !== "<|im_end|>";
      a.rstrip = a.content !== "<|im_start|>";
    }
  }],
};

const dir = mkdtempSync(join(tmpdir(), "kinference-goldens-"));
for (const name of ["model", "qwen3", "llama3_1", "gptoss", "deepseek_v3", ...Object.keys(variants)]) {
  const [base, change] = variants[name] ?? [name, null];
  let path = base === "model" ? join(model, "tokenizer.json") : join(cache, `${base}-${version}`, "tokenizer.json");
  if (change) {
    const t = JSON.parse(readFileSync(path, "utf8"));
    change(t);
    path = join(dir, "tokenizer.json");
    writeFileSync(path, JSON.stringify(t));
  }
  const tokenizer = Tokenizer.fromFile(path);
  const lines = [];
  for (const text of texts) {
    const ids = (await tokenizer.encode(text, null, { addSpecialTokens: false })).getIds();
    lines.push(digest(ids));
  }
  writeFileSync(join(out, name + ".golden"), lines.join("\n") + "\n");
}
rmSync(dir, { recursive: true });
