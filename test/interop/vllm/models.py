"""Writes the tiny models of test/interop/vllm: configuration, a real tokenizer with its template, and no weights.

    python models.py --tokenizers DIR --out DIR [name ...]

The engine makes the weights itself (--load-format dummy, the same ones in each
process), so a folder is a few kilobytes plus the tokenizer. Only the LoRA
adapters hold weights, from a fixed seed. Folders that are there are kept, so
OUT has to be a folder of this version of the file: see env.sh.
"""

import argparse
import json
import os
import shutil
import tempfile

# What most of them share: two layers, four heads, two of them for keys and values.
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
# Vocabulary and special tokens belong to a tokenizer.
QWEN3 = {"vocab_size": 151936, "bos_token_id": 151643, "eos_token_id": 151645}
LLAMA3 = {"vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009]}
GPTOSS = {"vocab_size": 201088, "bos_token_id": 199998, "eos_token_id": 200002, "pad_token_id": 199999}

QWEN = {**TINY, **QWEN3, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}

# name: (tokenizer, config.json)
MODELS = {
    "qwen": ("qwen3", QWEN),
    "llama": ("llama3_1", {**TINY, **LLAMA3, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500000}),
    # Harmony instead of a template, experts, sliding window and full attention: two cache groups.
    "gptoss": (
        "gptoss",
        {
            **TINY,
            **GPTOSS,
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "rope_theta": 150000,
            "swiglu_limit": 7.0,
        },
    ),
    # Group 0 is a sliding window of 128 tokens, group 1 full attention.
    "hybrid": (
        "qwen3",
        {
            **TINY,
            **QWEN3,
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "sliding_window": 128,
            "query_pre_attn_scalar": 64,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": 10000,
            "pad_token_id": 151643,
        },
    ),
    # Groups 0 to 2 are linear attention (kind mamba), group 3 full attention. The engine settles on blocks of 160
    # tokens whatever it is told. Heads of 32 are too small for the kernel of the CPU backend.
    "hybrid-mamba": (
        "qwen3",
        {
            **TINY,
            **QWEN3,
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "partial_rotary_factor": 0.25,
        },
    ),
    # Groups 0 to 2 are short convolutions (kind mamba) with blocks of 32 tokens, group 3 full attention with blocks of 64,
    # but of 32 for a tail that fills half a block: two sizes in one group.
    "hybrid-conv": (
        "qwen3",
        {
            **TINY,
            **QWEN3,
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "conv_bias": False,
            "conv_dim": 128,
            "conv_dim_out": 128,
            "block_dim": 128,
            "block_ff_dim": 256,
            "block_multiple_of": 32,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-5,
        },
    ),
    # Heavy enough that prefill is what a request waits for: see README.md for its speed.
    "qwen-wide": ("qwen3", {**QWEN, "hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 12, "num_attention_heads": 8}),
}

# LoRA adapters of qwen by their seed.
ADAPTERS = {"qwen-lora-a": 1, "qwen-lora-b": 2}
RANK = 8


def write_json(path, value):
    with open(path, "w") as f:
        json.dump(value, f, indent=2)
        f.write("\n")


def write_model(folder, name, tokenizers):
    tokenizer, config = MODELS[name]
    write_json(os.path.join(folder, "config.json"), config)
    (source,) = [d for d in sorted(os.listdir(tokenizers)) if d.startswith(tokenizer + "-")]
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(os.path.join(tokenizers, source, file), os.path.join(folder, file))


def write_adapter(folder, name):
    """In the format of PEFT. Weights are large beside those of the engine's dummy model, so that each adapter changes the output."""
    import numpy
    from safetensors.numpy import save_file

    random = numpy.random.default_rng(ADAPTERS[name])
    config = MODELS["qwen"][1]
    heads, kv = config["num_attention_heads"] * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    sizes = {"v_proj": (config["hidden_size"], kv), "o_proj": (heads, config["hidden_size"])}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (inner, outer) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[key + ".lora_A.weight"] = random.normal(0, inner**-0.5, (RANK, inner)).astype("float32")
            weights[key + ".lora_B.weight"] = random.normal(0, 1, (outer, RANK)).astype("float32")
    save_file(weights, os.path.join(folder, "adapter_model.safetensors"))
    write_json(
        os.path.join(folder, "adapter_config.json"),
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "qwen",
            "r": RANK,
            "lora_alpha": 2 * RANK,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(sizes),
            "inference_mode": True,
        },
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokenizers", required=True, help="folder that scripts/fetch-tokenizers.sh fills")
    parser.add_argument("--out", required=True)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    for name in args.names or [*MODELS, *ADAPTERS]:
        target = os.path.join(args.out, name)
        if os.path.isdir(target):
            continue
        with tempfile.TemporaryDirectory(dir=args.out, prefix=".make-") as work:
            folder = os.path.join(work, name)
            os.mkdir(folder)
            if name in ADAPTERS:
                write_adapter(folder, name)
            else:
                write_model(folder, name, args.tokenizers)
            os.rename(folder, target)


if __name__ == "__main__":
    main()
