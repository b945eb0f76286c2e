"""The configs of published drafters as data, and the same drafters at a width that a test can run.

Values are those of the published table (DFlash specification, section F). Where it has a dash: LFM2.5 is as
its training config in SpecForge; gpt-oss as projects that load it report it, YaRN as in its target;
Qwen3-Coder-30B-A3B and Qwen3.5-4B take the fields of the drafter above them whose target is of their family.
"""

from __future__ import annotations

from typing import Any

_COMMON = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_FULL = {"sliding_window": None, "use_sliding_window": False}

# Older files: block size and depth of the target at the top level, plain rope_theta.
_QWEN3 = _COMMON | {
    **_FULL,
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "num_target_layers": 36,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "vocab_size": 151936,
}

# Newer files: block size under dflash_config, rope_parameters.
_QWEN3_5 = _COMMON | {
    **_FULL,
    "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 262144,
    "num_target_layers": 64,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "vocab_size": 248320,
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-4B": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728},
    "Qwen3-8B": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288},
    # Five features, eight layers, in the older layout.
    "Qwen3-Coder-30B-A3B": _QWEN3
    | {
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 12, 23, 34, 45]},
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "layer_types": ["full_attention"] * 8,
        "num_hidden_layers": 8,
        "num_target_layers": 48,
    },
    "Qwen3.5-4B": _QWEN3_5
    | {
        "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 8, 15, 22, 29]},
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_target_layers": 32,
    },
    "Qwen3.5-27B": _QWEN3_5,
    # Five features, eight layers.
    "Qwen3.5-35B-A3B": _QWEN3_5
    | {
        "dflash_config": {"block_size": 16, "mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "layer_types": ["full_attention"] * 8,
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "num_target_layers": 40,
    },
    "Qwen3.6-27B": _QWEN3_5
    | {
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
        "use_sliding_window": True,
    },
    "LFM2.5-1.2B": _COMMON
    | {
        "block_size": 16,
        "dflash_config": {"mask_token_id": 16, "target_layer_ids": [1, 4, 7, 10, 13]},
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "layer_types": ["full_attention"] * 8,
        "max_position_embeddings": 128000,
        "num_hidden_layers": 8,
        "num_target_layers": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 65536,
    },
    "gpt-oss-20b": _COMMON
    | {
        "attention_bias": True,
        "block_size": 8,
        "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 7680,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_hidden_layers": 8,
        "num_target_layers": 24,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "vocab_size": 201088,
    },
}


def reduced(fields: dict[str, Any], hidden_size: int = 64) -> dict[str, Any]:
    """The same drafter, narrow: two key/value heads, and widths in the published proportions.

    Rotary settings, head size, layer types, window, block size, ids and vocabulary stay as they are.
    """
    num_kv_heads = fields["num_key_value_heads"]
    return fields | {
        "hidden_size": hidden_size,
        "intermediate_size": fields["intermediate_size"] * hidden_size // fields["hidden_size"],
        "num_attention_heads": fields["num_attention_heads"] * 2 // num_kv_heads,
        "num_key_value_heads": 2,
    }
