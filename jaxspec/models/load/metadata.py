"""The keys of a checkpoint's files: which are read, which must be neutral, which have no effect.

One table for each kind of file, over the keys that `transformers` and `llama.cpp` act on for Llama,
Mistral and Qwen2, those that they write, and those of related architectures that would change the
network if they were honoured. `config.json` and GGUF files have one set of names for the same facts,
see `jaxspec.models.load.tensors.network_config`.
"""

import dataclasses
from collections.abc import Mapping

from jaxspec.models.load.fields import (
    NO_EFFECT,
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

GENERATION: Table = {
    "eos_token_id": given("stop"),
    **advice(0).of("epsilon_cutoff eta_cutoff penalty_alpha min_length min_new_tokens min_p top_h"),
    **advice(1).of("typical_p repetition_penalty encoder_repetition_penalty num_beams"),
    "dola_layers": advice(),
    "remove_invalid_values": advice(False),
    # Tokens that may or must be somewhere: a text without them is another text.
    **only([]).of("""
        suppress_tokens begin_suppress_tokens bad_words_ids force_words_ids forced_decoder_ids
        constraints stop_strings
    """),
    "sequence_bias": only({}, []),
    **only().of("""
        forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty watermarking_config
    """),
    **only(0).of("no_repeat_ngram_size encoder_no_repeat_ngram_size"),
    "guidance_scale": only(1),
    "token_healing": only(False),
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
    "hidden_act": only("silu", "swish"),
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
    **only(False).of("""
        attention_bias mlp_bias use_bias attention_out_bias bias rope_interleave rope_interleaved
        use_mrope alibi use_alibi use_parallel_residual use_qk_norm qk_norm qk_layernorm
        attn_temperature_tuning post_norm is_encoder_decoder add_cross_attention tie_encoder_decoder
    """),
    "use_rope": only(True),
    **only({}).of("quantization_config compression_config pruned_heads per_layer_config"),
    # Parts of a larger model; logits capped, clipped or scaled.
    **only().of("""
        text_config vision_config audio_config cross_attention_hidden_size attn_logit_softcapping
        final_logit_softcapping clip_qkv attention_multiplier query_pre_attn_scalar
        rope_local_base_freq attention_chunk_size
    """),
    **only(1).of("""
        partial_rotary_factor rotary_pct rope_percent embedding_multiplier residual_multiplier
        logits_scaling logit_scale embedding_scale residual_scale scale_emb attention_scale
        head_scale
    """),
    **only([]).of("no_rope_layers sliding_window_pattern moe_layers mlp_only_layers"),
    **only(0).of("""
        no_rope_layer_interval num_nextn_predict_layers num_experts num_local_experts
        n_routed_experts n_shared_experts moe_num_experts
    """),
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
    "partial_rotary_factor": only(1),
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
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
    "extra_special_tokens",
)

TOKENIZER: Table = {
    **{key: given(key) for key in SPECIAL_TOKENS},
    "add_bos_token": boolean("is_started"),
    "add_prefix_space": boolean("add_prefix_space"),
    "added_tokens_decoder": mapping("added"),
    **only(False).of("add_eos_token split_special_tokens do_lower_case fix_mistral_regex"),
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

GGUF: Table = {
    **NO_EFFECT.of("general.architecture general.alignment"),  # read before the other keys
    "llama.vocab_size": integer("stated_vocab", default=None),
    "llama.context_length": integer("max_context", 1, _MOST_CONTEXT),
    "llama.embedding_length": integer("width"),
    "llama.block_count": integer("layers"),
    "llama.feed_forward_length": integer("hidden"),
    "llama.attention.head_count": integer("heads"),
    "llama.attention.head_count_kv": integer("kv_heads", default=None),
    "llama.attention.key_length": integer("head_width", 2, MOST_HEAD_WIDTH, default=None),
    "llama.attention.value_length": integer("value_width", default=None),
    "llama.attention.layer_norm_rms_epsilon": number("norm_epsilon"),
    "llama.attention.sliding_window": integer("window", 0, default=0),
    "llama.attention.scale": number("attention_scale", 0, or_zero=True),
    "llama.rope.dimension_count": integer("rotated_width", default=None),
    "llama.rope.freq_base": number("rope_base", 10000.0),
    "llama.rope.scaling.type": given("rope_type"),
    "llama.rope.scaling.factor": number("rope_factor", None, or_zero=True),
    "llama.rope.scale_linear": number("old_rope_factor", None, or_zero=True),
    "tokenizer.ggml.model": given("tokenizer"),
    "tokenizer.ggml.pre": given("pre_tokenizer"),
    "general.type": only("model"),
    "general.quantization_version": only(2),
    "split.no": only(0),
    "split.count": only(0, 1),
    **only(0).of("""
        llama.expert_count llama.expert_used_count llama.expert_shared_count
        llama.nextn_predict_layers llama.n_deepstack_layers llama.attention.shared_kv_layers
        llama.attention.temperature_length llama.leading_dense_block_count
        llama.attention.max_alibi_bias llama.attention.clamp_kqv llama.attn_logit_softcapping
        llama.final_logit_softcapping llama.rope.scaling.yarn_log_multiplier
        llama.rope.scaling.alpha llama.attention.temperature_scale
    """),
    # 0: not set.
    **only(0, 1).of("""
        llama.logit_scale llama.residual_scale llama.embedding_scale llama.attention.output_scale
        llama.attention.value_scale
    """),
    **only(1).of("llama.rope.scaling.attn_factor llama.rope.scaling.yarn_attn_factor"),
    "llama.rope.scaling.yarn_ext_factor": only(0, -1),
    "llama.attention.causal": only(True),
    **only(False).of("llama.use_parallel_residual llama.swin_norm"),
    "llama.hidden_activation": only("silu", "swish"),
    "general.sampling.penalty_repeat": advice(1),
    **advice(0).of("""
        general.sampling.min_p general.sampling.mirostat general.sampling.xtc_probability
    """),
    # Of YaRN, of experts, windows and other norms, where there are none; of embeddings; whose the
    # file is, how it was quantised, the authors' decoder arguments.
    **NO_EFFECT.of("""
        llama.rope.scaling.original_context_length llama.rope.scaling.finetuned
        llama.rope.scaling.yarn_beta_* llama.rope.freq_base_swa llama.rope.dimension_count_swa
        llama.pooling_type llama.tensor_data_layout llama.attention.layer_norm_epsilon
        llama.attention.group_norm_* llama.expert_feed_forward_length llama.expert_weights_*
        llama.expert_gating_func llama.router_logit_softcapping split.tensors.count general.*
        quantize.* imatrix.* tokenizer.*
    """),
}
"""Of GGUF files, except for the tokenizer's."""

GGUF_TOKENIZER: Table = {
    "tokenizer.ggml.tokens": strings("entries"),
    "tokenizer.ggml.merges": strings("merges"),
    "tokenizer.ggml.token_type": given("kinds"),
    "tokenizer.ggml.bos_token_id": integer("start", -1, default=None),
    "tokenizer.ggml.eos_token_id": integer("stop", -1, default=None),
    "tokenizer.ggml.eot_token_id": integer("turn_stop", -1, default=None),
    "tokenizer.ggml.eom_token_id": integer("message_stop", -1, default=None),
    "tokenizer.ggml.add_bos_token": boolean("is_started"),
    **only(False).of("""
        tokenizer.ggml.add_eos_token tokenizer.ggml.add_sep_token tokenizer.ggml.add_space_prefix
        tokenizer.ggml.remove_extra_whitespaces tokenizer.ggml.normalizer.*
    """),
    **only([]).of("tokenizer.ggml.suppress_tokens tokenizer.ggml.precompiled_charsmap"),
    # In the table of the network; of other kinds of tokenizer, of filling in the middle, of chats.
    **NO_EFFECT.of("""
        tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.scores
        tokenizer.ggml.token_type_count tokenizer.ggml.*_token_id tokenizer.huggingface.json
        tokenizer.rwkv.world tokenizer.chat_template*
    """),
}
"""Of the tokenizer in a GGUF file, read with the prefix `tokenizer.`."""
