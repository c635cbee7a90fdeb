"""Small sizes for the configuration of any architecture, under the attribute names that families share."""

from __future__ import annotations

import inspect
from typing import Any

HIDDEN, HEADS, WORDS = 64, 4, 128

_SMALL: dict[int, str] = {
    HIDDEN: """hidden_size d_model n_embd dim model_dim hidden_dim dim_model embedding_size decoder_hidden_size
        word_embed_proj_dim d_embed qformer_hidden_size cross_attention_hidden_size encoder_hidden_size
        out_hidden_size text_hidden_size output_dim lru_width emb_dim text_embed_dim adapter_hidden_size
        output_proj_dims encoder_dim decoder_dim""",
    HEADS: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        attention_heads num_encoder_attention_heads num_decoder_attention_heads decoder_num_attention_heads
        num_experts n_routed_experts num_local_experts moe_num_experts num_memory_blocks
        encoder_num_attention_heads heads num_conv_pos_embedding_groups attention_chunk_size
        linear_num_key_heads linear_num_value_heads""",
    1: """n_group topk_group n_shared_experts first_k_dense_replace num_shared_experts
        moe_layer_start_index num_nextn_predict_layers""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth num_encoder_layers
        num_decoder_layers num_decoder_hidden_layers num_key_value_heads num_kv_heads multi_query_group_num
        depth_layers num_experts_per_tok num_experts_per_token moe_topk top_k encoder_num_hidden_layers
        decoder_num_hidden_layers index_n_heads num_experts_per_topk moe_k num_global_layers
        num_local_layers""",
    8: """qk_rope_head_dim qk_nope_head_dim state_size d_state mamba_d_state index_topk mamba_n_heads
        ssm_state_size rotary_dim""",
    16: """head_dim v_head_dim kv_lora_rank projection_dim qk_head_dim d_kv index_head_dim
        hidden_size_per_layer_input num_codevectors_per_group codevector_dim proj_codevector_dim
        time_step_rank attention_head_dim classifier_proj_size num_queries num_query_tokens
        vision_embed_dim num_conv_pos_embeddings mamba_d_head kv_channels attention_head_size
        linear_key_head_dim linear_value_head_dim num_latents d_head mamba_headdim""",
    24: "q_lora_rank",
    32: "image_size",
    96: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner feed_forward_size
        ffn_hidden_size moe_intermediate_size mlp_dim dim_feedforward decoder_intermediate_size
        ffn_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
        expert_dim encoder_intermediate_size dense_intermediate_size dff""",
    128: """max_position_embeddings n_positions max_source_positions max_target_positions n_ctx max_seq_len
        max_sequence_length rel_max_position vocab_size_per_layer_input sliding_window""",
}
"""Names by the size that they get, where the default is larger."""
SMALL = {name: value for value, names in _SMALL.items() for name in names.split()}
VOCABULARIES = (
    "vocab_size", "decoder_vocab_size", "encoder_vocab_size", "codebook_size", "src_vocab_size",
    "tgt_vocab_size", "entity_vocab_size", "text_vocab_size", "input_vocab_size",
    "output_vocab_size", "n_token", "audio_vocab_size",
)  # fmt: skip
DEPTHS = ("depths", "num_blocks", "layers", "encoder_depths", "decoder_depths", "layer_depths")
WIDTHS = ("hidden_sizes", "embed_dims", "encoder_hidden_sizes", "neck_hidden_sizes", "widths", "conv_dim", "tdnn_dim")
OFF = ("apply_spec_augment", "use_cache", "use_timm_backbone", "use_pretrained_backbone")
OTHER = {"num_frames": 2, "num_mel_bins": 16, "patch_size": 8, "num_feature_levels": 4, "num_labels": 3}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MROPE_KINDS = (
    "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm4v_moe_text", "glm_ocr_text",
)  # fmt: skip

CHOICES: dict[str, dict[str, Any]] = {
    **{kind: {"rope_parameters": MROPE} for kind in MROPE_KINDS},
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_embds": False,
        "local_attn_chunk_length": 4,
        "is_decoder": True,
        "lsh_attn_chunk_length": 4,
        "num_hidden_layers": 2,
        "hidden_dropout_prob": 0.0,  # drawn from a seed that the model takes from the clock
        "local_attention_probs_dropout_prob": 0.0,
    },
    "longformer": {"attention_window": 8},
    "led": {"attention_window": 8},
    "squeezebert": {"embedding_size": HIDDEN},
    "falcon": {"num_kv_heads": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "num_attention_heads": 4},
    "bit": {"num_groups": 8},
    "nemotron": {"num_key_value_heads": 2},
}
"""Sizes that the shared names cannot give, by model type."""


def changed(name: str, old: Any, config: Any) -> Any:
    """The small value of one attribute, or None if it stays; `old` is its default."""
    number = isinstance(old, int) and not isinstance(old, bool)
    many = isinstance(old, (list, tuple)) and bool(old) and all(isinstance(each, int) for each in old)
    if name in VOCABULARIES and number:
        return min(old, WORDS)
    if name in SMALL and number:
        return min(old, SMALL[name]) if old > 0 else None
    if name == "image_size" and many:
        return type(old)(32 for _ in old)
    if name in ("initializer_range", "init_std") and isinstance(old, float):
        return max(old, HIDDEN**-0.5)  # with a large model's, a tiny one's outputs vanish, and its gradients
    if name in OFF:
        return False
    if name in OTHER and number:
        return min(old, OTHER[name])
    if name in DEPTHS and many:
        return type(old)(min(1, each) for each in old)
    if name in WIDTHS and many and min(old) > 16:
        return type(old)(max(8, each * 16 // min(old)) for each in old)
    if name in ("rope_parameters", "rope_scaling") and isinstance(old, dict) and "mrope_section" in old:
        return {**old, "mrope_section": MROPE["mrope_section"]}
    if name == "embed_dim" and number:
        heads = getattr(config, "num_heads", None)
        return 8 * heads[0] if isinstance(heads, (list, tuple)) else HIDDEN
    return None


def small_values(config: Any, recipe: int) -> dict[str, Any]:
    """Overrides for one configuration class and its parts.

    Args:
        config: The default configuration.
        recipe: 0 for all names; 1 has as many key-value heads as heads; 2 also leaves head sizes to the class; 3 also
            leaves image and patch sizes as they are.
    """
    cls = type(config)
    aliases = getattr(cls, "attribute_map", {})
    accepted = set(inspect.signature(cls.__init__).parameters) | set(aliases)
    parts = {name for name in getattr(cls, "sub_configs", {}) if hasattr(getattr(config, name, None), "to_dict")}
    special = iter(range(WORDS - 1, 0, -1))
    given: dict[str, Any] = {}
    for name in sorted(parts | (accepted & set(config.to_dict()))):
        old = getattr(config, name, None)
        if name in parts:
            given[name] = {"model_type": old.model_type, **small_values(old, recipe)}
        elif name.endswith(("_token_id", "_token_index", "_idx")) and isinstance(old, int) and old >= WORDS - 20:
            given[name] = next(special)
        elif (value := changed(name, old, config)) is not None:
            given[name] = value
    given |= {name: HEADS for name in ("num_key_value_heads", "num_kv_heads") if recipe >= 1 and name in given}
    left = ("head_dim", "v_head_dim", "d_kv", "attention_head_dim") if recipe >= 2 else ()
    left += ("image_size", "patch_size", "num_mel_bins") if recipe >= 3 else ()
    doubled = [name for name, real in aliases.items() if real in given]
    return {name: value for name, value in given.items() if name not in (*left, *doubled)} | CHOICES.get(
        config.model_type, {}
    )
