"""Records what a real vLLM engine puts on its wires.

capture.sh runs it with the Python of an environment that has vLLM. It starts
engines with tiny models, asks them known questions and writes, for
internal/vllm/testdata/captures/<release>:

  *.jsonl      event frames in the order in which they came, and beside them
               what was asked: token ids, adapter, salt, the engine's usage
  bodies.jsonl HTTP answers as they are, errors above all
  metrics-*    pages of /metrics, with what was done in metrics.json

Only HTTP and ZMQ are used here: what the frames mean is for the test to find.
"""

import argparse
import base64
import http.client
import importlib.metadata
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import zmq

# Folders go into the hashes of LoRA blocks: the same for everyone.
SCRATCH = pathlib.Path("/tmp/kinference-capture")
VERSION = importlib.metadata.version("vllm").split("+")[0]
TOPIC = "kv@engine@qwen"
BLOCK = 32  # the CPU backend takes multiples of 32 only
KEY = "capture-key"
START_SECONDS = 600
QUIET_MS = 2000  # an engine is done when it has sent nothing for so long

SYSTEM = " ".join(
    f"Rule {i}: when a traveller asks about platform {i}, answer with the time of its next train and with nothing else."
    for i in range(1, 10)
)
LONG = " ".join(f"Parcel {i} weighs {i * 37 % 91} grams." for i in range(400))


def release():
    return tuple(int(n) for n in VERSION.split(".")[:2])


def free_ports(n):
    """n ports in a row: each rank of an engine adds its number. They are below
    those that connections get, so that a subscriber that waits for the engine
    never meets itself."""
    while True:
        base = random.randrange(22000, 32000)
        try:
            for p in range(base, base + n):
                with socket.socket() as s:
                    s.bind(("", p))
            return base
        except OSError:
            continue


class Engine:
    """A vLLM server in a process group of its own, and sockets to it."""

    def __init__(self, model, blocks, *flags, ranks=1, env=None, key=None, max_len=640):
        self.port, self.ranks, self.key = free_ports(1), ranks, key
        self.events, self.replays = free_ports(ranks), free_ports(ranks)
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://*:{self.replays}",
            "topic": TOPIC,
        }
        self.flags = ["--max-model-len", str(max_len), "--block-size", str(BLOCK), "--num-gpu-blocks-override", str(blocks), *flags]
        self.args = [
            "serve", str(model), "--served-model-name", "qwen", "--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager",
            "--host", "127.0.0.1", "--port", str(self.port), "--enable-prompt-tokens-details", *self.flags,
            "--kv-events-config", json.dumps(config),
        ]  # fmt: skip
        self.extra_env = env or {}
        self.env = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"},
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **self.extra_env,
        }  # fmt: skip
        if release() < (0, 12):
            # Older engines have two cores to choose from, and must be bound to a CPU.
            self.env |= {"VLLM_USE_V1": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
        if key:
            self.args += ["--api-key", key]
        self.log = SCRATCH / f"engine-{VERSION}.log"
        self.zmq = zmq.Context()
        self.sub = self.zmq.socket(zmq.SUB)
        self.sub.subscribe(b"")
        for r in range(ranks):
            self.sub.connect(f"tcp://127.0.0.1:{self.events + r}")
        self.launch()

    def launch(self):
        out = open(self.log, "ab")
        vllm = pathlib.Path(sys.executable).parent / "vllm"
        self.process = subprocess.Popen([vllm, *self.args], env=self.env, stdout=out, stderr=out, start_new_session=True)
        began = time.monotonic()
        while True:
            if self.process.poll() is not None or time.monotonic() - began > START_SECONDS:
                self.kill()
                sys.exit(f"the engine does not start: see {self.log}")
            try:
                if self.ask("GET", "/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.2)
        # libzmq renews the subscription of a connection that was lost only when
        # the socket is used, and the engine must get it before the first event.
        self.sub.poll(1000)
        print(f"  engine is up after {time.monotonic() - began:.0f} s", file=sys.stderr)

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def close(self):
        self.kill()
        self.zmq.destroy(linger=0)

    def connection(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)

    def send(self, c, method, path, body, headers=None):
        raw = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        h = {"Content-Type": "application/json"} if raw is not None else {}
        if self.key:
            h["Authorization"] = "Bearer " + self.key
        c.request(method, path, raw, {**h, **(headers or {})})
        return c.getresponse()

    def ask(self, method, path, body=None, headers=None):
        c = self.connection()
        try:
            r = self.send(c, method, path, body, headers)
            return r.status, r.getheader("Content-Type", ""), r.read()
        finally:
            c.close()

    def post(self, path, body, headers=None):
        status, _, raw = self.ask("POST", path, body, headers)
        if status != 200:
            sys.exit(f"{path} is answered {status}: {raw[:500]}")
        return json.loads(raw)

    def frames(self):
        """The messages of the event sockets until there are no more."""
        while self.sub.poll(QUIET_MS):
            yield self.sub.recv_multipart()

    def replay(self, start, rank=0):
        """All frames that answer one replay request, the end with them."""
        s = self.zmq.socket(zmq.DEALER)
        s.connect(f"tcp://127.0.0.1:{self.replays + rank}")
        s.send_multipart([b"", struct.pack(">Q", start)])
        while s.poll(5000):
            frames = s.recv_multipart()
            yield frames
            if frames[-1] == b"":
                s.close()
                return
        sys.exit("the replay has no end")


class File:
    """Lines of JSON; the first says where they come from."""

    def __init__(self, out, name, engine, about):
        self.engine, self.f = engine, open(out / name, "w")
        self.write({
            "vllm": VERSION, "about": about, "flags": engine.flags, "env": engine.extra_env, "block_size": BLOCK, "topic": TOPIC,
        })  # fmt: skip

    def write(self, line):
        self.f.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
        self.f.flush()

    def live(self):
        n = 0
        for frames in self.engine.frames():
            self.write({"live": encode(frames)})
            n += 1
        return n

    def replay(self, start):
        for frames in self.engine.replay(start):
            self.write({"replay": encode(frames), "from": start})

    def step(self, name, path, body, headers=None):
        """Asks, and writes what was asked and counted, then the frames."""
        prompt, output, usage = generate(self.engine, path, body, headers)
        line = {"step": name, "prompt": prompt, "output": output, "usage": usage}
        if body["model"] != "qwen":
            line["lora"] = body["model"]
        if "cache_salt" in body:
            line["salt"] = body["cache_salt"]
        if headers:
            line["headers"] = headers
        self.write(line)
        n = self.live()
        print(f"  {name}: {len(prompt)}+{len(output)} tokens, {n} batches, {usage.get('prompt_tokens_details')}", file=sys.stderr)
        return prompt, output


def text(raw):
    """An answer without the path of this environment, which some errors show."""
    return raw.decode(errors="replace").replace(sys.prefix, "/opt/vllm")


def encode(frames):
    return [base64.b64encode(f).decode() for f in frames]


def chat(*texts, tokens=8, model="qwen", **more):
    roles = ["system", "user", "assistant", "user"]
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts)]
    return {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def completion(prompt, tokens=2, model="qwen", **more):
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}


def generate(engine, path, body, headers=None):
    """Prompt ids, output ids and usage of one request that is no stream."""
    # Engines before 0.10.2 do not know return_token_ids; these two they know.
    old = {"logprobs": True if "messages" in body else 1, "return_tokens_as_token_ids": True}
    a = engine.post(path, {**body, "return_token_ids": True, **old}, headers)
    choice = a["choices"][0]
    prompt = a.get("prompt_token_ids") or choice.get("prompt_token_ids")
    if not prompt:
        ask = {"model": body["model"], **{k: body[k] for k in ("messages", "prompt") if k in body}}
        prompt = ask["prompt"] if isinstance(ask.get("prompt"), list) else engine.post("/tokenize", ask)["tokens"]
    output = choice.get("token_ids")
    if not output:
        marks = choice["logprobs"].get("tokens") or [t["token"] for t in choice["logprobs"]["content"]]
        output = [int(m.removeprefix("token_id:")) for m in marks]
    return prompt, output, a["usage"]


def tokens(engine, text, n):
    ids = engine.post("/tokenize", {"model": "qwen", "prompt": text, "add_special_tokens": False})["tokens"]
    return ids[:n]


# ---- scenarios ------------------------------------------------------------


def record_chat(out):
    """Turns, shared prefixes, evictions, replay, reset; then a restart."""
    e = Engine(SCRATCH / "qwen", 25, "--max-num-seqs", "2")
    try:
        f = File(out, "chat.jsonl", e, "turns of two conversations, evictions from a pool of 24 blocks, replay, a reset of the cache")
        first = chat(SYSTEM, "Which train leaves from platform 3?", tokens=40)
        prompt, output = f.step("first turn", "/v1/chat/completions", first)
        f.step("second turn", "/v1/chat/completions", chat(SYSTEM, "Which train leaves from platform 3?", "The one at noon.", "And from platform 4?"))
        f.step("other conversation", "/v1/chat/completions", chat(SYSTEM, "Is there a train in the night?"))
        for start in (0, 3, 1000):
            f.replay(start)
        f.step("continues what was generated", "/v1/completions", completion(prompt + output + tokens(e, LONG, 20)))
        aligned = tokens(e, LONG, 3 * BLOCK)
        f.step("whole blocks", "/v1/completions", completion(aligned))
        f.step("whole blocks again", "/v1/completions", completion(aligned))
        f.step("evicts", "/v1/completions", completion(tokens(e, "Other parcels. " + LONG, 500)))
        f.step("first turn again", "/v1/chat/completions", first)
        status, _, body = e.ask("POST", "/reset_prefix_cache")
        f.write({"reset": status, "body": text(body), "batches_while_idle": f.live()})
        f.step("after the reset", "/v1/chat/completions", first)
        e.kill()
        e.launch()
        f = File(out, "restart.jsonl", e, "the engine of chat.jsonl killed and started again: the same ports, flags and subscriber")
        f.step("first turn", "/v1/chat/completions", first)
        f.replay(0)
        record_metrics(out, e)
        record_bodies(out, e)
    finally:
        e.close()


def record_metrics(out, e):
    """Two pages of the restarted engine; until now it got one request."""
    load, prompts = {}, [tokens(e, f"Group {i}. " + LONG, 150) for i in range(4)]
    usages = []
    # Two of them do not fit, so one is preempted; old engines on the CPU die of that.
    n = 350 if release() >= (0, 12) else 150
    ask = lambda p: usages.append(generate(e, "/v1/completions", completion(p, tokens=n))[2])
    threads = [threading.Thread(target=ask, args=(p,)) for p in prompts]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        page = e.ask("GET", "/metrics")[2].decode()
        if value(page, "vllm:num_requests_running") == 2 and value(page, "vllm:num_requests_waiting") == 2:
            load = {"running": 2, "waiting": 2}
            (out / "metrics-load.txt").write_text(thin(page))
            break
    for t in threads:
        t.join()
    if not load or len(usages) < len(prompts):
        sys.exit("never two running and two waiting, or one failed")
    time.sleep(1.5)  # gauges follow a step later
    (out / "metrics-idle.txt").write_text(thin(e.ask("GET", "/metrics")[2].decode(), buckets=True))
    # The first request is in restart.jsonl.
    (out / "metrics.json").write_text(json.dumps({"load": load, "idle": {"after": "restart.jsonl", "usages": usages}}, indent=1) + "\n")
    for _ in e.frames():
        pass


def value(page, name):
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name + "{"))


def thin(page, buckets=False, only=""):
    """The engine's series, without what is only long."""
    kept = []
    for line in page.splitlines():
        drop = "vllm:" not in line or "_created" in line or only not in line
        if "_bucket{" in line:
            drop |= not buckets or not line.startswith(("vllm:time_to_first", "vllm:request_prompt_tokens"))
        if not drop and (buckets or not line.startswith("#")):
            kept.append(line + "\n")
    return "".join(kept)


def record_bodies(out, e):
    """Answers as they are; the engine does not survive the last one."""
    f = File(out, "bodies.jsonl", e, "answers of the HTTP routes")

    def ask(name, method, path, body=None, headers=None):
        status, kind, raw = e.ask(method, path, body, headers)
        shown = body.decode() if isinstance(body, bytes) else body
        if len(json.dumps(shown)) > 1000:
            shown = "(too long to show)"
        f.write({"name": name, "method": method, "path": path, "headers": headers or {}, "request": shown,
                 "status": status, "type": kind, "body": text(raw)})  # fmt: skip

    short = chat("Be brief.", "Hello", tokens=4)
    for path in ("/v1/models", "/version", "/health", "/load"):
        ask(path, "GET", path)
    for name, more in {
        "chat": {},
        "chat stream": {"stream": True},
        "chat stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
        "chat stream with usage in each chunk": {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        "chat with token ids": {"return_token_ids": True},
    }.items():  # fmt: skip
        ask(name, "POST", "/v1/chat/completions", {**short, **more})
    ask("completion", "POST", "/v1/completions", completion("Hello"))
    ask("completion stream with usage", "POST", "/v1/completions", completion("Hello", stream=True, stream_options={"include_usage": True}))
    ask("tokenize", "POST", "/tokenize", {"model": "qwen", "messages": short["messages"]})
    messages = {"model": "qwen", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    ask("messages", "POST", "/v1/messages", messages)
    ask("messages stream", "POST", "/v1/messages", {**messages, "stream": True})
    ask("responses", "POST", "/v1/responses", {"model": "qwen", "input": "Hello", "max_output_tokens": 4})

    f = File(out, "errors.jsonl", e, "answers to bad requests; the last ones while the engine's process is killed")
    bad = {
        "context too long": ("/v1/chat/completions", chat("Be brief.", LONG)),
        "more output than fits": ("/v1/completions", completion([9] * 630, tokens=100)),
        "max_tokens beyond the context": ("/v1/chat/completions", {**short, "max_tokens": 5000}),
        "context too long, completion": ("/v1/completions", completion(LONG)),
        "context too long, token ids": ("/v1/completions", completion([9] * 700)),
        "context too long, messages": ("/v1/messages", {**messages, "messages": [{"role": "user", "content": LONG}]}),
        "context too long, stream": ("/v1/chat/completions", {**chat("Be brief.", LONG), "stream": True}),
        "unknown model": ("/v1/chat/completions", {**short, "model": "nosuch"}),
        "unknown model, completion": ("/v1/completions", {**completion("Hello"), "model": "nosuch"}),
        "unknown model, messages": ("/v1/messages", {**messages, "model": "nosuch"}),
        "negative temperature": ("/v1/chat/completions", {**short, "temperature": -1}),
        "top_p too large": ("/v1/chat/completions", {**short, "top_p": 2}),
        "max_tokens 0": ("/v1/chat/completions", {**short, "max_tokens": 0}),
        "max_tokens is text": ("/v1/chat/completions", {**short, "max_tokens": "many"}),
        "no messages": ("/v1/chat/completions", {"model": "qwen"}),
        "empty messages": ("/v1/chat/completions", {"model": "qwen", "messages": []}),
        "unknown role": ("/v1/chat/completions", {"model": "qwen", "max_tokens": 1, "messages": [{"role": "nobody", "content": "Hello"}]}),
        "no JSON": ("/v1/chat/completions", b'{"model": "qwen", '),
        "empty body": ("/v1/chat/completions", b""),
        "empty prompt": ("/v1/completions", completion("")),
        "token id out of range": ("/v1/completions", completion([99999999])),
        "empty salt": ("/v1/completions", completion("Hello", cache_salt="")),
        "tools that are not on": ("/v1/chat/completions", {**short, "tool_choice": "auto", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {}}}]}),
        "image for a text model": ("/v1/chat/completions", {"model": "qwen", "max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}),
        "embedding of a text model": ("/v1/embeddings", {"model": "qwen", "input": "Hello"}),
        "unknown route": ("/v1/nosuch", {}),
    }  # fmt: skip
    for name, (path, body) in bad.items():
        ask(name, "POST", path, body)
    ask("GET on a POST route", "GET", "/v1/chat/completions")
    ask("wrong content type", "POST", "/v1/chat/completions", short, {"Content-Type": "text/plain"})
    ask("rank out of range", "POST", "/v1/chat/completions", short, {"X-data-parallel-rank": "7"})
    record_death(f, e)


def record_death(f, e):
    """Kills the engine's process, not the server, in the middle of a stream."""
    c = e.connection()
    r = e.send(c, "POST", "/v1/chat/completions", chat("Be brief.", "Hello", tokens=500, stream=True, stream_options={"include_usage": True}))
    raw = r.read(600)
    for pid in children(e.process.pid):
        os.kill(pid, signal.SIGKILL)
    broken = ""
    try:
        while part := r.read1():
            raw += part
    except Exception as x:
        broken = type(x).__name__
    events = text(raw).split("\n\n")
    body = "\n\n".join(events[:2] + events[-4:])  # what lies between is like the second
    f.write({"name": "the engine dies in a stream", "status": r.status, "type": r.getheader("Content-Type"), "body": body, "broken": broken})
    line = {"name": "after the engine died"}
    try:
        status, kind, raw = e.ask("POST", "/v1/chat/completions", chat("Be brief.", "Hello"))
        line |= {"status": status, "type": kind, "body": text(raw)}
    except (OSError, http.client.HTTPException) as x:
        line |= {"broken": type(x).__name__}
    f.write(line)


def children(pid):
    """Child processes that run an engine: those with most memory."""
    found = []
    for p in pathlib.Path("/proc").iterdir():
        try:
            if p.name.isdigit() and int((p / "stat").read_text().rsplit(")", 1)[1].split()[1]) == pid:
                found.append((int((p / "statm").read_text().split()[1]), int(p.name)))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return [max(found)[1]]


def record_tenants(out):
    """Adapters and salts; an engine that wants a key."""
    # Engines before 0.29 make their seed up; 0.11 dies of events about an adapter.
    seed = {} if release() >= (0, 29) else {"PYTHONHASHSEED": "0"}
    names = ("lora-a", "lora-b") if release() >= (0, 12) else ()
    adapters = {name: make_adapter(SCRATCH / "qwen", name, i) for i, name in enumerate(names)}
    flags = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules"] + [f"{n}={d}" for n, d in adapters.items()]
    e = Engine(SCRATCH / "qwen", 200, *(flags if adapters else []), key=KEY, env=seed)
    try:
        if adapters:
            record_adapters(out, e, adapters)
        f = File(out, "salt.jsonl", e, "one prompt under no salt and two salts; after lora.jsonl if that is there, no restart")
        ask = lambda name, **more: f.step(name, "/v1/chat/completions", chat(SYSTEM[300:700], "When do we arrive?", tokens=24, **more))
        ask("no salt")
        ask("salt 1", cache_salt="tenant-1")
        ask("salt 2", cache_salt="tenant-2")
        ask("salt 1 again", cache_salt="tenant-1")
        ask("no salt again")
        # A name that is a salt elsewhere.
        ask("the adapter's name as salt", cache_salt="lora-a")
        f = File(out, "bodies-key.jsonl", e, "answers of an engine that wants a key and has adapters")
        for name, headers in {"models": None, "no key": {"Authorization": ""}, "wrong key": {"Authorization": "Bearer no"}}.items():
            status, kind, raw = e.ask("GET", "/v1/models", None, headers)
            f.write({"name": name, "method": "GET", "path": "/v1/models", "status": status, "type": kind, "body": text(raw)})
        (out / "metrics-lora.txt").write_text(thin(e.ask("GET", "/metrics")[2].decode(), only="_info{"))
    finally:
        e.close()


def record_adapters(out, e, adapters):
    f = File(out, "lora.jsonl", e, "one prompt for the base model and for two adapters")
    f.write({"adapters": {n: str(d) for n, d in adapters.items()}})
    ask = lambda name, **more: f.step(name, "/v1/chat/completions", chat(SYSTEM[:300], "Which train is next?", tokens=24, **more))
    ask("base model")
    ask("adapter a", model="lora-a")
    ask("adapter b", model="lora-b")
    ask("adapter a again", model="lora-a")
    ask("base model again")
    ask("adapter a with a salt", model="lora-a", cache_salt="tenant-1")
    ask("adapter a with a salt again", model="lora-a", cache_salt="tenant-1")


def make_adapter(model, name, seed):
    """An adapter with small random weights on one projection of each layer."""
    import safetensors.torch
    import torch

    config = json.loads((model / "config.json").read_text())
    hidden, heads, size, rank = config["hidden_size"], config["num_attention_heads"], config["head_dim"], 8
    torch.manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        at = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        weights[at + ".lora_A.weight"] = torch.randn(rank, hidden) * 0.2
        weights[at + ".lora_B.weight"] = torch.randn(heads * size, rank) * 0.2
    folder = SCRATCH / name
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "qwen", "r": rank, "lora_alpha": 16, "bias": "none",
        "target_modules": ["q_proj"], "lora_dropout": 0.0,
    }))  # fmt: skip
    return folder


def record_cbor(out):
    """Another hash algorithm, another seed, whole digests on the wire."""
    e = Engine(SCRATCH / "qwen", 200, "--prefix-caching-hash-algo", "sha256_cbor",
               env={"PYTHONHASHSEED": "42", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"})  # fmt: skip
    try:
        f = File(out, "cbor.jsonl", e, "sha256_cbor, PYTHONHASHSEED and whole digests in the events")
        f.step("first turn", "/v1/chat/completions", chat(SYSTEM[:200], "Which train is next?", tokens=24))
        f.step("with a salt", "/v1/chat/completions", chat(SYSTEM[:200], "Which train is next?", cache_salt="tenant-1"))
    finally:
        e.close()


def record_hybrid(out):
    """A model with two groups of layers: full attention and sliding windows."""
    qwen = json.loads((SCRATCH / "qwen" / "config.json").read_text())
    folder = SCRATCH / "gemma3"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": qwen["vocab_size"], "max_position_embeddings": 8192,
        "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 64,
        "rope_theta": 1000000, "rope_local_base_freq": 10000, "torch_dtype": "bfloat16", "hidden_activation": "gelu_pytorch_tanh",
        "bos_token_id": qwen["bos_token_id"], "eos_token_id": qwen["eos_token_id"], "tie_word_embeddings": True,
    }))  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SCRATCH / "qwen" / name, folder)
    e = Engine(folder, 60, "--no-disable-hybrid-kv-cache-manager")
    try:
        f = File(out, "hybrid.jsonl", e, "full attention and windows of 64 tokens: two groups, a pool of 59 blocks")
        f.step("first turn", "/v1/chat/completions", chat(SYSTEM, "Which train leaves from platform 3?", tokens=40))
        f.step("other conversation", "/v1/chat/completions", chat(SYSTEM, "Is there a train in the night?"))
        f.step("first turn again", "/v1/chat/completions", chat(SYSTEM, "Which train leaves from platform 3?"))
        f.step("shares a part", "/v1/chat/completions", chat(SYSTEM[:500], "Is there a train in the night?"))
        f.step("evicts", "/v1/completions", completion(tokens(e, LONG, 600), tokens=1))
        f.step("evicts more", "/v1/completions", completion(tokens(e, "Other parcels. " + LONG, 400), tokens=1))
        f.step("first turn, evicted", "/v1/chat/completions", chat(SYSTEM, "Which train leaves from platform 3?"))
        (out / "metrics-hybrid.txt").write_text(thin(e.ask("GET", "/metrics")[2].decode(), only="_info{"))
    finally:
        e.close()


def record_ranks(out):
    """Two data-parallel ranks, each with its own event sockets."""
    e = Engine(SCRATCH / "qwen", 60, "--data-parallel-size", "2", ranks=2)
    try:
        f = File(out, "ranks.jsonl", e, "two data-parallel ranks; the frames of both sockets in the order in which they came")
        for rank in ("0", "1", "1"):
            f.step("rank " + rank, "/v1/chat/completions", chat(SYSTEM[:300], "Which train is next?"), {"X-data-parallel-rank": rank})
        time.sleep(1.5)
        (out / "metrics-ranks.txt").write_text(thin(e.ask("GET", "/metrics")[2].decode()))
    finally:
        e.close()


def record_limits(out):
    """What an engine answers that limits its queue (vLLM 0.31 and later)."""
    e = Engine(SCRATCH / "qwen", 60, "--max-num-seqs", "1", "--max-num-queued-reqs", "2")
    try:
        f = File(out, "limits.jsonl", e, "an engine that takes two requests at most, which are there already")
        ask = lambda: e.post("/v1/completions", completion("Hello", tokens=500))
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for t in threads:
            t.start()
            time.sleep(0.5)
        messages = {"model": "qwen", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
        for path, body in (("/v1/chat/completions", chat("Be brief.", "Hello")), ("/v1/messages", messages)):
            c = e.connection()
            r = e.send(c, "POST", path, body)
            f.write({"name": "queue is full", "path": path, "status": r.status, "type": r.getheader("Content-Type"),
                     "retry_after": r.getheader("Retry-After"), "body": text(r.read())})  # fmt: skip
        for t in threads:
            t.join()
    finally:
        e.close()


SCENARIOS = {
    "chat": record_chat, "tenants": record_tenants, "cbor": record_cbor, "hybrid": record_hybrid, "ranks": record_ranks,
    "limits": record_limits,
}  # fmt: skip


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=pathlib.Path, required=True, help="folder of all captures")
    p.add_argument("--models", type=pathlib.Path, required=True, help="folder with the tiny model qwen")
    p.add_argument("scenario", nargs="*", help=f"of {', '.join(SCENARIOS)}; default: all")
    a = p.parse_args()
    # So that engines are killed when this is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted"))
    SCRATCH.mkdir(exist_ok=True)
    (SCRATCH / "qwen").unlink(missing_ok=True)
    (SCRATCH / "qwen").symlink_to(a.models / "qwen")
    (SCRATCH / f"engine-{VERSION}.log").unlink(missing_ok=True)
    out = a.out / VERSION
    out.mkdir(parents=True, exist_ok=True)
    for name in a.scenario or SCENARIOS:
        print(f"vLLM {VERSION}: {name}", file=sys.stderr)
        SCENARIOS[name](out)


if __name__ == "__main__":
    main()
