"""The keys of a checkpoint's files: which are read, which must be off, which have no effect.

One table for each kind of file, over the keys that `transformers` and `llama.cpp` act on for Llama,
Mistral and Qwen2, those that they write, and those of related architectures that would change the
network if they were honoured. `config.json` and GGUF files have one set of names for the same facts,
see `jaxspec.models.load.tensors.network_config`.
"""

import dataclasses
from collections.abc import Mapping

from jaxspec.models.load.fields import (
    NO_EFFECT,
    OFF,
    Table,
    advice,
    boolean,
    given,
    integer,
    mapping,
    number,
    only,
    strings,
)

MOST_HEAD_WIDTH = 1 << 16  # no network's is larger; a damaged file must not make endless angles
_MOST_CONTEXT = (1 << 31) - 1  # positions are int32
_ACTIVATION, _ONE = only("silu", "swish"), only(1)

GENERATION: Table = {
    "eos_token_id": given("stop"),
    **advice(OFF).of("""
        epsilon_cutoff eta_cutoff penalty_alpha min_length min_new_tokens min_p top_h dola_layers
        remove_invalid_values
    """),
    **advice(_ONE).of("typical_p repetition_penalty encoder_repetition_penalty num_beams"),
    # Tokens that may or must be somewhere: a text without them is another text.
    **OFF.of("""
        suppress_tokens begin_suppress_tokens bad_words_ids force_words_ids forced_decoder_ids
        constraints stop_strings sequence_bias exponential_decay_length_penalty watermarking_config
        no_repeat_ngram_size encoder_no_repeat_ngram_size token_healing
    """),
    **only().of("forced_bos_token_id forced_eos_token_id"),
    "guidance_scale": _ONE,
    # A decoder's arguments; of beams; how an engine runs and what it returns; whose the file is.
    **NO_EFFECT.of("""
        temperature top_k top_p do_sample max_length max_new_tokens max_time num_return_sequences
        num_beam_groups diversity_penalty length_penalty early_stopping low_memory
        renormalize_logits use_cache cache_* return_* prefill_chunk_size output_attentions
        output_hidden_states output_scores output_logits pad_token_id bos_token_id
        decoder_start_token_id *assistant* prompt_lookup_num_tokens max_matching_ngram_size
        target_lookbehind compile_config disable_compile generation_kwargs transformers* _*
        trust_remote_code chat_format max_window_size
    """),
}
"""Of `generation_config.json`, and of what older files have of it in `config.json`."""

CONFIG: Table = {
    **GENERATION,
    **NO_EFFECT.of("architectures model_type"),  # read before the other keys
    "vocab_size": integer("vocab"),
    "hidden_size": integer("width"),
    "intermediate_size": integer("hidden"),
    "num_hidden_layers": integer("layers"),
    "num_attention_heads": integer("heads"),
    "num_key_value_heads": integer("kv_heads", default=None),
    "head_dim": integer("head_width", 2, MOST_HEAD_WIDTH, default=None),
    "hidden_act": _ACTIVATION,
    "rms_norm_eps": number("norm_epsilon", 1e-6),
    "max_position_embeddings": integer("max_context", 1, _MOST_CONTEXT, default=None),
    "rope_theta": number("rope_base", 10000.0),
    "rope_scaling": mapping("rope_scaling"),
    "rope_parameters": mapping("rope_parameters"),
    "tie_word_embeddings": boolean("is_tied", False),
    "sliding_window": integer("window", default=None),
    "use_sliding_window": boolean("uses_window"),
    "max_window_layers": integer("full_layers", 0, default=28),
    "layer_types": strings("layer_types", None),
    # Biases; other RoPE, norms, windows and experts; logits capped; parts of a larger model.
    **OFF.of("""
        attention_bias mlp_bias use_bias attention_out_bias bias rope_interleave rope_interleaved
        use_mrope alibi use_alibi use_parallel_residual use_qk_norm qk_norm qk_layernorm
        attn_temperature_tuning post_norm is_encoder_decoder add_cross_attention tie_encoder_decoder
        quantization_config compression_config pruned_heads per_layer_config text_config
        vision_config audio_config cross_attention_hidden_size attn_logit_softcapping
        final_logit_softcapping clip_qkv attention_multiplier query_pre_attn_scalar
        rope_local_base_freq attention_chunk_size no_rope_layers sliding_window_pattern moe_layers
        mlp_only_layers no_rope_layer_interval num_nextn_predict_layers num_experts
        num_local_experts n_routed_experts n_shared_experts moe_num_experts
    """),
    **_ONE.of("""
        partial_rotary_factor rotary_pct rope_percent embedding_multiplier residual_multiplier
        logits_scaling logit_scale embedding_scale residual_scale scale_emb attention_scale
        head_scale
    """),
    "use_rope": only(True),
    # For training, for classifiers, for how an engine runs, and of whom the file is. Slices of
    # `pretraining_tp` give the same products.
    **NO_EFFECT.of("""
        sep_token_id unk_token_id pretraining_tp attention_dropout hidden_dropout resid_pdrop
        embd_pdrop initializer_range dtype torch_dtype torchscript use_bfloat16 tf_legacy_loss
        chunk_size_feed_forward output_past is_decoder id2label label2id num_labels problem_type
        finetuning_task task_specific_params prefix tokenizer_class name_or_path attn_implementation
        keys_to_ignore_at_inference unsloth_* router_aux_loss_coef router_jitter_noise
        output_router_logits model_name is_llama_config max_sequence_length
    """),
}
"""Of `config.json`."""

_ROPE: Table = {
    **NO_EFFECT.of("rope_type type"),  # read before the other keys
    "rope_theta": number("base", None),
    "partial_rotary_factor": _ONE,
}

ROPE: Mapping[str, Table] = {
    "default": _ROPE,
    "none": _ROPE,
    "linear": {**_ROPE, "factor": number("factor")},
    "llama3": {
        **_ROPE,
        "factor": number("factor"),
        "low_freq_factor": number("low"),
        "high_freq_factor": number("high"),
        "original_max_position_embeddings": number("context"),
    },
}
"""Of `rope_scaling` and `rope_parameters` in `config.json`, by RoPE type."""


def _are_shards(value: object) -> bool:
    return isinstance(value, dict) and all(
        isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\\0")
        for shard in value.values()
    )


_WEIGHT_MAP = "an object: by tensor the name of a safetensors file in the same directory"

INDEX: Table = {
    "weight_map": dataclasses.replace(integer("shards"), accepts=_are_shards, wanted=_WEIGHT_MAP),
    "metadata": NO_EFFECT,
}
"""Of `model.safetensors.index.json`."""

SPECIAL_TOKENS = (
    "bos_token eos_token unk_token pad_token sep_token cls_token mask_token "
    "additional_special_tokens extra_special_tokens"
)

TOKENIZER: Table = {
    **{key: given(key) for key in SPECIAL_TOKENS.split()},
    "add_bos_token": boolean("is_started"),
    "add_prefix_space": boolean("add_prefix_space"),
    "added_tokens_decoder": mapping("added"),
    **OFF.of("add_eos_token split_special_tokens do_lower_case fix_mistral_regex"),
    # `tokenizer.json` says how text is cut; the rest is for chats, for other tokenizer classes and
    # for batches. Texts are decoded without a cleanup of spaces.
    **NO_EFFECT.of("""
        chat_template tokenizer_class tokenizer_file tokenizer_type vocab_file merges_file
        model_max_length max_length max_len stride padding padding_side truncation truncation_side
        truncation_strategy pad_to_multiple_of pad_token_type_id use_default_system_prompt
        clean_up_tokenization_spaces spaces_between_special_tokens legacy legacy_behaviour from_slow
        use_fast sp_model_kwargs trim_offsets errors model_input_names model_specific_special_tokens
        name_or_path special_tokens_map_file backend is_local local_files_only processor_class
        prefix_token middle_token suffix_token eot_token fill_token suffix_first verbose
        transformers_version remove_space keep_accents response_template instruction_template
        unsloth_version return_token_type_ids bos_token_id eos_token_id pad_token_id unk_token_id
        vocab_size
    """),
}
"""Of `tokenizer_config.json`."""

_LLAMA: Table = {
    "vocab_size": integer("stated_vocab", default=None),
    "context_length": integer("max_context", 1, _MOST_CONTEXT),
    "embedding_length": integer("width"),
    "block_count": integer("layers"),
    "feed_forward_length": integer("hidden"),
    "attention.head_count": integer("heads"),
    "attention.head_count_kv": integer("kv_heads", default=None),
    "attention.key_length": integer("head_width", 2, MOST_HEAD_WIDTH, default=None),
    "attention.value_length": integer("value_width", default=None),
    "attention.layer_norm_rms_epsilon": number("norm_epsilon"),
    "attention.sliding_window": integer("window", 0, default=0),
    "attention.scale": number("attention_scale", 0, or_zero=True),
    "rope.dimension_count": integer("rotated_width", default=None),
    "rope.freq_base": number("rope_base", 10000.0),
    "rope.scaling.type": given("rope_type"),
    "rope.scaling.factor": number("rope_factor", None, or_zero=True),
    "rope.scale_linear": number("old_rope_factor", None, or_zero=True),
    **OFF.of("""
        expert_count expert_used_count expert_shared_count nextn_predict_layers n_deepstack_layers
        attention.shared_kv_layers attention.temperature_length leading_dense_block_count
        attention.max_alibi_bias attention.clamp_kqv attn_logit_softcapping final_logit_softcapping
        rope.scaling.yarn_log_multiplier rope.scaling.alpha attention.temperature_scale
        use_parallel_residual swin_norm
    """),
    # 0: not set.
    **only(0, 1).of("""
        logit_scale residual_scale embedding_scale attention.output_scale attention.value_scale
    """),
    **_ONE.of("rope.scaling.attn_factor rope.scaling.yarn_attn_factor"),
    "rope.scaling.yarn_ext_factor": only(0, -1),
    "attention.causal": only(True),
    "hidden_activation": _ACTIVATION,
    # Of YaRN, of experts, windows and other norms, where there are none; of embeddings.
    **NO_EFFECT.of("""
        rope.scaling.original_context_length rope.scaling.finetuned rope.scaling.yarn_beta_*
        rope.freq_base_swa rope.dimension_count_swa pooling_type tensor_data_layout
        attention.layer_norm_epsilon attention.group_norm_* expert_feed_forward_length
        expert_weights_* expert_gating_func router_logit_softcapping
    """),
}

GGUF: Table = {
    **{f"llama.{key}": field for key, field in _LLAMA.items()},
    "general.architecture": NO_EFFECT,  # read before the other keys
    "tokenizer.ggml.model": given("tokenizer"),
    "tokenizer.ggml.pre": given("pre_tokenizer"),
    "general.type": only("model"),
    "general.quantization_version": only(2),
    "split.no": OFF,
    "split.count": only(0, 1),
    "general.sampling.penalty_repeat": advice(_ONE),
    **advice(OFF).of("""
        general.sampling.min_p general.sampling.mirostat general.sampling.xtc_probability
    """),
    # Whose the file is, how it was quantised, the authors' decoder arguments.
    **NO_EFFECT.of("split.tensors.count general.* quantize.* imatrix.* tokenizer.*"),
}
"""Of GGUF files, except for the tokenizer's."""

_GGML: Table = {
    "tokens": strings("entries"),
    "merges": strings("merges"),
    "token_type": given("kinds"),
    "bos_token_id": integer("start", -1, default=None),
    "eos_token_id": integer("stop", -1, default=None),
    "eot_token_id": integer("turn_stop", -1, default=None),
    "eom_token_id": integer("message_stop", -1, default=None),
    "add_bos_token": boolean("is_started"),
    **OFF.of("""
        add_eos_token add_sep_token add_space_prefix remove_extra_whitespaces normalizer.*
        suppress_tokens precompiled_charsmap
    """),
    # In the table above; of other kinds of tokenizer and of filling in the middle.
    **NO_EFFECT.of("model pre scores token_type_count *_token_id"),
}

GGUF_TOKENIZER: Table = {
    **{f"tokenizer.ggml.{key}": field for key, field in _GGML.items()},
    **NO_EFFECT.of("tokenizer.huggingface.json tokenizer.rwkv.world tokenizer.chat_template*"),
}
"""Of the tokenizer in a GGUF file, read with the prefix `tokenizer.`."""
