"""Which metadata of a checkpoint is read, which must have a neutral value, and which has no effect.

One table for each kind of file, over the keys that `transformers` and `llama.cpp` act on for Llama,
Mistral and Qwen2, those that they write, and those of related architectures that would change the
network if they were honoured. A key ending in `.*` stands for all keys that begin so. What is in no
table is reported once by a `CheckpointWarning`, for it may matter.

A null counts as absent everywhere.
"""

import dataclasses
import inspect
import os
import pathlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.models.load.tensors import CheckpointError, shown

_PACKAGE = os.path.join(pathlib.Path(__file__).parents[1], "")


class CheckpointWarning(UserWarning):
    """A checkpoint says something that this package neither knows nor applies."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is done about a key.

    Attributes:
      neutral: the values without effect; None where every value is fine, because the loader reads the
        key itself or the key changes neither the network nor its text.
      is_advice: whether other values only recommend how to sample: they are reported, not rejected.
    """

    neutral: tuple[Any, ...] | None = None
    is_advice: bool = False


READ = Rule()
"""The loader reads it, and checks its type and range."""

NO_EFFECT = Rule()
"""It changes neither the network nor the tokens of a text."""


def only(*neutral: Any) -> Rule:
    """Reject every other value: it asks for something that this package does not do."""
    return Rule(neutral=neutral)


def advice(*neutral: Any) -> Rule:
    """Report every other value: a recommendation for sampling that this package cannot follow."""
    return Rule(neutral=neutral, is_advice=True)


def _all(rule: Rule, keys: str) -> dict[str, Rule]:
    return dict.fromkeys(keys.split(), rule)


Table = Mapping[str, Rule]

GENERATION: Table = {
    "eos_token_id": READ,
    # What the caller of a decoder says: temperature, filters and lengths are arguments there.
    **_all(
        NO_EFFECT,
        "temperature top_k top_p do_sample max_length max_new_tokens max_time num_return_sequences",
    ),
    **_all(advice(0, 0.0), "epsilon_cutoff eta_cutoff penalty_alpha min_length min_new_tokens"),
    **_all(advice(0, 0.0), "min_p top_h"),
    **_all(advice(1, 1.0), "typical_p repetition_penalty encoder_repetition_penalty num_beams"),
    "dola_layers": advice(),
    "renormalize_logits": NO_EFFECT,  # a softmax follows in any case
    "remove_invalid_values": advice(False),
    # Of beams alone.
    **_all(NO_EFFECT, "num_beam_groups diversity_penalty length_penalty early_stopping low_memory"),
    # What may or must come where: a text without it is another text.
    **_all(only([]), "suppress_tokens begin_suppress_tokens bad_words_ids force_words_ids"),
    **_all(only([]), "forced_decoder_ids constraints stop_strings"),
    **_all(only({}, []), "sequence_bias"),
    **_all(only(), "forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty"),
    **_all(only(0), "no_repeat_ngram_size encoder_no_repeat_ngram_size"),
    "guidance_scale": only(1, 1.0),
    "watermarking_config": only(),
    "token_healing": only(False),
    # How an engine runs, what it returns, and of whom the file is.
    **_all(
        NO_EFFECT,
        "use_cache cache_implementation cache_config return_legacy_cache prefill_chunk_size "
        "output_attentions output_hidden_states output_scores output_logits return_dict "
        "return_dict_in_generate pad_token_id bos_token_id decoder_start_token_id is_assistant "
        "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
        "prompt_lookup_num_tokens max_matching_ngram_size assistant_early_exit "
        "assistant_lookbehind target_lookbehind compile_config disable_compile generation_kwargs "
        "transformers_version transformers.js_config _from_model_config _commit_hash "
        "trust_remote_code chat_format max_window_size",
    ),
}
"""Of `generation_config.json`, and of what older files have of it in `config.json`."""

CONFIG: Table = {
    **GENERATION,
    **_all(
        READ,
        "architectures model_type vocab_size hidden_size intermediate_size num_hidden_layers "
        "num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps "
        "max_position_embeddings rope_theta rope_scaling rope_parameters tie_word_embeddings "
        "sliding_window use_sliding_window max_window_layers layer_types eos_token_id",
    ),
    **_all(only(False), "attention_bias mlp_bias use_bias attention_out_bias bias"),
    **_all(only(1, 1.0), "partial_rotary_factor rotary_pct rope_percent"),
    **_all(
        only(False),
        "rope_interleave rope_interleaved use_mrope alibi use_alibi use_parallel_residual",
    ),
    **_all(only(True), "use_rope"),
    **_all(only({}), "quantization_config compression_config pruned_heads per_layer_config"),
    # Of the text part of a larger model: its weights have other names too.
    **_all(only(), "text_config vision_config audio_config"),
    # Normalised, capped, clipped or scaled in other ways.
    **_all(only(False), "use_qk_norm qk_norm qk_layernorm attn_temperature_tuning post_norm"),
    **_all(
        only(),
        "attn_logit_softcapping final_logit_softcapping clip_qkv attention_multiplier "
        "query_pre_attn_scalar rope_local_base_freq attention_chunk_size",
    ),
    **_all(
        only(1, 1.0),
        "embedding_multiplier residual_multiplier logits_scaling logit_scale embedding_scale "
        "residual_scale scale_emb attention_scale head_scale",
    ),
    **_all(only([]), "no_rope_layers sliding_window_pattern moe_layers mlp_only_layers"),
    **_all(only(0), "no_rope_layer_interval num_nextn_predict_layers"),
    # Experts.
    **_all(
        only(0), "num_experts num_local_experts n_routed_experts n_shared_experts moe_num_experts"
    ),
    # Another kind of model.
    **_all(only(False), "is_encoder_decoder add_cross_attention tie_encoder_decoder"),
    **_all(only(), "cross_attention_hidden_size"),
    # For training, for classifiers, for how an engine runs, and of whom the file is. Slices of
    # `pretraining_tp` give the same products.
    **_all(
        NO_EFFECT,
        "bos_token_id pad_token_id sep_token_id unk_token_id pretraining_tp "
        "attention_dropout hidden_dropout resid_pdrop embd_pdrop initializer_range use_cache dtype "
        "torch_dtype transformers_version torchscript use_bfloat16 tf_legacy_loss "
        "chunk_size_feed_forward output_past is_decoder id2label label2id num_labels problem_type "
        "finetuning_task task_specific_params prefix tokenizer_class _name_or_path name_or_path "
        "attn_implementation _attn_implementation _attn_implementation_autoset "
        "_flash_attn_2_enabled _experts_implementation keys_to_ignore_at_inference "
        "unsloth_version unsloth_fixed router_aux_loss_coef router_jitter_noise "
        "output_router_logits model_name is_llama_config max_sequence_length",
    ),
}
"""Of `config.json`."""

TOKENIZER: Table = {
    **_all(
        READ,
        "eos_token bos_token add_bos_token added_tokens_decoder additional_special_tokens "
        "add_prefix_space unk_token pad_token sep_token cls_token mask_token",
    ),
    **_all(only(False), "add_eos_token split_special_tokens do_lower_case fix_mistral_regex"),
    "extra_special_tokens": READ,
    # `tokenizer.json` says how text is cut; the rest is for other tokenizer classes, for batches, or
    # for chats. Texts are decoded as their tokens spell them, without a cleanup of spaces.
    **_all(
        NO_EFFECT,
        "tokenizer_class tokenizer_file tokenizer_type vocab_file merges_file model_max_length "
        "max_length max_len stride padding padding_side truncation truncation_side "
        "truncation_strategy pad_to_multiple_of pad_token_type_id chat_template "
        "use_default_system_prompt clean_up_tokenization_spaces spaces_between_special_tokens "
        "legacy legacy_behaviour from_slow use_fast sp_model_kwargs trim_offsets errors "
        "model_input_names model_specific_special_tokens name_or_path special_tokens_map_file "
        "backend is_local local_files_only processor_class prefix_token middle_token suffix_token "
        "eot_token fill_token suffix_first verbose transformers_version remove_space keep_accents "
        "response_template instruction_template unsloth_version return_token_type_ids "
        "bos_token_id eos_token_id pad_token_id unk_token_id vocab_size",
    ),
}
"""Of `tokenizer_config.json`."""

GGUF: Table = {
    **_all(
        READ,
        "general.architecture general.alignment llama.vocab_size llama.context_length "
        "llama.embedding_length llama.block_count llama.feed_forward_length "
        "llama.attention.head_count llama.attention.head_count_kv llama.attention.key_length "
        "llama.attention.value_length llama.attention.layer_norm_rms_epsilon "
        "llama.attention.sliding_window llama.attention.scale llama.rope.dimension_count "
        "llama.rope.freq_base llama.rope.scale_linear llama.rope.scaling.type "
        "llama.rope.scaling.factor",
    ),
    "general.type": only("model"),
    "general.quantization_version": only(2),
    "split.no": only(0),
    "split.count": only(0, 1),
    "split.tensors.count": NO_EFFECT,
    **_all(
        only(0),
        "llama.expert_count llama.expert_used_count llama.expert_shared_count "
        "llama.nextn_predict_layers llama.n_deepstack_layers llama.attention.shared_kv_layers "
        "llama.attention.temperature_length llama.leading_dense_block_count",
    ),
    **_all(
        only(0, 0.0),
        "llama.attention.max_alibi_bias llama.attention.clamp_kqv llama.attn_logit_softcapping "
        "llama.final_logit_softcapping llama.rope.scaling.yarn_log_multiplier "
        "llama.rope.scaling.alpha llama.attention.temperature_scale",
    ),
    # 0 is how these say that they are not set.
    **_all(
        only(0.0, 1.0),
        "llama.logit_scale llama.residual_scale llama.embedding_scale llama.attention.output_scale "
        "llama.attention.value_scale",
    ),
    **_all(only(1.0), "llama.rope.scaling.attn_factor llama.rope.scaling.yarn_attn_factor"),
    "llama.rope.scaling.yarn_ext_factor": only(0.0, -1.0),
    "llama.attention.causal": only(True),
    **_all(only(False), "llama.use_parallel_residual llama.swin_norm"),
    "llama.hidden_activation": only("silu", "swish"),
    # Of scaling by yarn, of experts, windows and other norms, where there are none; of embeddings.
    **_all(
        NO_EFFECT,
        "llama.rope.scaling.original_context_length llama.rope.scaling.finetuned "
        "llama.rope.scaling.yarn_beta_fast llama.rope.scaling.yarn_beta_slow "
        "llama.rope.freq_base_swa llama.rope.dimension_count_swa llama.pooling_type "
        "llama.tensor_data_layout llama.attention.layer_norm_epsilon "
        "llama.attention.group_norm_epsilon llama.attention.group_norm_groups "
        "llama.expert_feed_forward_length llama.expert_weights_scale llama.expert_weights_norm "
        "llama.expert_gating_func llama.router_logit_softcapping",
    ),
    **_all(advice(1.0), "general.sampling.penalty_repeat"),
    **_all(
        advice(0, 0.0),
        "general.sampling.min_p general.sampling.mirostat general.sampling.xtc_probability",
    ),
    # Of whom the file is, how it was quantised, which arguments its authors give to a decoder.
    **_all(NO_EFFECT, "general.* quantize.* imatrix.* tokenizer.*"),
}
"""Of GGUF files, but for the tokenizer's."""

GGUF_TOKENIZER: Table = {
    **_all(
        READ,
        "tokenizer.ggml.model tokenizer.ggml.pre tokenizer.ggml.tokens tokenizer.ggml.token_type "
        "tokenizer.ggml.merges tokenizer.ggml.bos_token_id tokenizer.ggml.eos_token_id "
        "tokenizer.ggml.eot_token_id tokenizer.ggml.eom_token_id tokenizer.ggml.add_bos_token",
    ),
    **_all(
        only(False),
        "tokenizer.ggml.add_eos_token tokenizer.ggml.add_sep_token tokenizer.ggml.add_space_prefix "
        "tokenizer.ggml.remove_extra_whitespaces tokenizer.ggml.normalizer.lowercase "
        "tokenizer.ggml.normalizer.strip_accents",
    ),
    **_all(only([]), "tokenizer.ggml.suppress_tokens tokenizer.ggml.precompiled_charsmap"),
    # Of other kinds of tokenizer, of tasks other than going on with a text, and of chats.
    **_all(
        NO_EFFECT,
        "tokenizer.ggml.scores tokenizer.ggml.token_type_count tokenizer.ggml.unknown_token_id "
        "tokenizer.ggml.padding_token_id tokenizer.ggml.seperator_token_id "
        "tokenizer.ggml.separator_token_id tokenizer.ggml.cls_token_id "
        "tokenizer.ggml.mask_token_id tokenizer.ggml.prefix_token_id "
        "tokenizer.ggml.suffix_token_id tokenizer.ggml.middle_token_id "
        "tokenizer.ggml.fim_pre_token_id tokenizer.ggml.fim_suf_token_id "
        "tokenizer.ggml.fim_mid_token_id tokenizer.ggml.fim_pad_token_id "
        "tokenizer.ggml.fim_rep_token_id tokenizer.ggml.fim_sep_token_id "
        "tokenizer.huggingface.json tokenizer.rwkv.world tokenizer.chat_template "
        "tokenizer.chat_template.* tokenizer.chat_templates",
    ),
}
"""Of the tokenizer in a GGUF file, where one is made of it."""


def check_keys(
    path: str | os.PathLike[str],
    values: Mapping[str, Any],
    table: Table,
    keys: Iterable[str] | None = None,
) -> None:
    """Reject what this package does not do, and report once what it does not know.

    Args:
      path: the file.
      values: its keys and their values.
      table: the rules.
      keys: those to look at; default all.

    Raises:
      CheckpointError: the first key of a value that is not neutral.

    Warns:
      CheckpointWarning: once for the file, naming the keys that are in no table, and the
        recommendations that are not followed.
    """
    unknown, ignored = [], []
    for key in values if keys is None else keys:
        rule = _rule(table, key)
        if rule is None and values[key] is None:
            continue  # null says what the absence of the key says
        if rule is None:
            unknown.append(f"{shown(key)} ({shown(values[key])})")
        elif rule.neutral is not None and not _is_neutral(values[key], rule.neutral):
            if not rule.is_advice:
                raise CheckpointError(
                    f"{path}: {key} is {shown(values[key])}; {_wanted(rule.neutral)}"
                )
            ignored.append(f"{key} ({shown(values[key])})")
    said = []
    if unknown:
        said.append(f"unknown keys, which may change the network or its text: {_listed(unknown)}")
    if ignored:
        said.append(f"sampling recommendations that are not applied: {_listed(ignored)}")
    if said:
        report(f"{path}: {'; '.join(said)}")


def report(message: str) -> None:
    """Warn whoever called this package, at the line where that was."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, CheckpointWarning, stacklevel=level)


def _rule(table: Table, key: str) -> Rule | None:
    """Return the rule of a key, or of the longest `.*` that covers it."""
    rule, head = table.get(key), key
    while rule is None and "." in head:
        head = head.rpartition(".")[0]
        rule = table.get(f"{head}.*")
    return rule


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # False equals 0, yet one stands for a switch and the other for a number.
    return value is None or any(
        isinstance(value, bool) == isinstance(each, bool) and bool(value == each)
        for each in neutral
    )


def _wanted(neutral: tuple[Any, ...]) -> str:
    if not neutral:
        return "this package does not support it"
    return f"this package has {' or '.join(dict.fromkeys(map(str, map(_plain, neutral))))}"


def _plain(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value == int(value) else value


def _listed(names: list[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
