"""The keys of the release's `config.json`: read, fixed to what we compute, or inert.

A key is in exactly one table. `read` keys are the fields of our config classes; `*_FIXED` keys
must hold the one value that the model code implements; inert keys are Hugging Face boilerplate
and generation defaults, accepted with any value because nothing here depends on them. Anything
else in a file is an unknown key. Source: the release's config.json, `architecture.md` 1.1-1.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOP_FIXED: Mapping[str, Any] = {"model_type": "kimi_k3", "tie_word_embeddings": False}
TOP_SECTIONS = frozenset({"text_config", "vision_config"})
TOP_SHARED = frozenset({"bos_token_id", "eos_token_id", "pad_token_id"})
"""Repeated at the top; must equal the text config's."""

TOP_INERT = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "dtype", "ignore_index",
        "image_placeholder", "media_placeholder_token_id", "transformers_version",
    }
)  # fmt: skip

TEXT_FIXED: Mapping[str, Any] = {
    "hidden_act": "situ",
    "latent_moe_use_norm": True,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "model_type": "kimi_linear",
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_expert_group": 1,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
}
"""Absent is refused too: the release's own class defaults are other values."""

TEXT_FIXED_IF_GIVEN: Mapping[str, Any] = {
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
    "torchscript": False,
    "use_bfloat16": False,
}

TEXT_INERT = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "bad_words_ids", "begin_suppress_tokens",
        "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task",
        "forced_bos_token_id", "forced_eos_token_id", "id2label", "label2id", "length_penalty",
        "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
        "prefix", "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
        "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params",
        "temperature", "tf_legacy_loss", "tokenizer_class", "top_k", "top_p",
        "transformers_version", "typical_p", "use_cache", "use_grouped_topk",
    }
)  # fmt: skip
"""`use_grouped_topk` is inert because `num_expert_group` and `topk_group` are fixed to 1."""

LINEAR_FIXED: Mapping[str, Any] = {"use_full_rank_gate": True}

QUANTIZATION_FIXED: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "kv_cache_scheme": None,
}
"""How the checkpoint's experts are stored; a loader goes by the tensors, not by this section."""

QUANTIZATION_INERT = frozenset(
    {"config_groups", "global_compression_ratio", "ignore", "quantization_status"}
)

VISION_FIXED: Mapping[str, Any] = {
    "attn_bias": False,
    "linear_bias": False,
    "merge_type": "sd2_tpool",
    "mlp_type": "mlp2",
    "mm_projector_type": "patchmergerv2",
    "norm_type": "rmsnorm",
    "patch_embed_proj_bias": False,
    "pos_emb_type": "divided_fixed",
}
"""They decide which tensors there are."""

VISION_INERT = frozenset({"_attn_implementation"})
