"""Fields of OpenAI's API and of other engines that are not used here: ignored, or refused and why.

Sources: the types of the `openai` package (3.54), and the request schemas of vLLM, llama.cpp's
server, SGLang, Ollama, OpenRouter and text-generation-webui, whose front ends send them to any
endpoint.  Most front ends send all of their settings; `Refusal.neutral` has the values with which
a setting is off.
"""

from collections.abc import Mapping
from typing import Final

from hmt.server.fields import Refusal, reasons

_IMAGES: Final = "send images in messages, as parts of type image_url"

# Of all endpoints that answer.
IGNORED: Final[Mapping[str, str]] = {
    **reasons(
        "tells OpenAI who asks, or what to keep",
        ("user", "metadata", "store", "safety_identifier"),
    ),
    **reasons(
        "prompts are cached as --prefix-cache says",
        ("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "cache_prompt",
         "n_keep", "id_slot", "slot_id", "keep_alive", "cache_control"),
    ),
    "prediction": "a prediction only saves OpenAI time",
    **reasons(
        "chooses among OpenRouter's providers",
        ("models", "route", "provider", "usage", "session_id"),
    ),
    **reasons(
        "says how another engine works inside",
        ("priority", "request_id", "rid", "kv_transfer_params", "vllm_xargs", "mm_processor_kwargs",
         "guided_decoding_backend", "spaces_between_special_tokens", "bootstrap_host",
         "bootstrap_port", "bootstrap_room", "timings_per_token", "return_progress",
         "post_sampling_probs", "t_max_predict_ms", "parse_tool_calls"),
    ),
    **reasons(
        "belongs to a sampler that is refused when it is on",
        ("mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
         "dry_sequence_breakers", "xtc_threshold", "dynatemp_exponent", "smoothing_curve",
         "top_n_sigma_decay", "temperature_last", "sampler_seed"),
    ),
}  # fmt: skip

_LENGTH: Final = "write max_tokens"
_STOP: Final = "write stop, or stop_token_ids"
_FORM: Final = "write structured_outputs, or response_format"
_SAMPLER: Final = (
    "this sampler is not implemented: use temperature, top_k, top_p, min_p and the penalties"
)
_SHAPE: Final = "answers cannot have this form: leave it out"
_BEAMS: Final = "beam search is not served: leave it out, or use n and best_of"

REFUSED: Final[Mapping[str, Refusal]] = {
    **dict.fromkeys(
        ("max_new_tokens", "max_length", "num_predict", "n_predict", "max_output_tokens",
         "max_tokens_to_sample", "max_gen_len"),
        Refusal(_LENGTH, (-1, 0)),
    ),
    "min_length": Refusal("write min_tokens"),
    "min_new_tokens": Refusal("write min_tokens"),
    **dict.fromkeys(
        ("stop_sequence", "stop_sequences", "stopping_strings", "stop_words", "stop_regex",
         "stop_strings", "eos_token_id", "custom_token_bans", "bad_words", "ban_eos_token"),
        Refusal(_STOP),
    ),
    "allowed_token_ids": Refusal("write logit_bias, or structured_outputs"),
    "include_stop_str_in_output": Refusal("answers end before a stop string"),
    "no_stop_trim": Refusal("answers end before a stop string"),
    "skip_special_tokens": Refusal("answers have no special tokens", (True,)),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "grammar", "ebnf",
         "regex", "json_schema", "format", "structural_tag", "grammar_string"),
        Refusal(_FORM),
    ),
    **dict.fromkeys(
        ("mirostat", "mirostat_mode", "dry_multiplier", "xtc_probability", "dynatemp_range",
         "dynamic_temperature", "top_a", "smoothing_factor", "epsilon_cutoff", "eta_cutoff",
         "penalty_alpha", "no_repeat_ngram_size", "nsigma", "adaptive_target"),
        Refusal(_SAMPLER),
    ),
    "top_n_sigma": Refusal(_SAMPLER, (-1, 0)),
    **dict.fromkeys(
        ("typical_p", "typical", "tfs", "tfs_z", "encoder_repetition_penalty", "guidance_scale",
         "length_penalty", "num_beams"),
        Refusal(_SAMPLER, (1,)),
    ),
    **dict.fromkeys(
        ("samplers", "sampler_order"),
        Refusal("the order is fixed: penalties, temperature, top_k, top_p, min_p"),
    ),
    "do_sample": Refusal("write temperature: 0 takes the likeliest token", (True,)),
    "use_beam_search": Refusal(_BEAMS),
    "early_stopping": Refusal(_BEAMS),
    "logits_processors": Refusal("the server runs no code of clients: use logit_bias"),
    "custom_logit_processor": Refusal("the server runs no code of clients: use logit_bias"),
    "negative_prompt": Refusal("guidance by a second prompt is not implemented"),
    "prompt_logprobs": Refusal("write echo and logprobs to /v1/completions"),
    **dict.fromkeys(
        ("return_tokens_as_token_ids", "return_token_ids", "n_probs", "return_hidden_states",
         "logprob_start_len", "top_logprobs_num", "response_fields"),
        Refusal(_SHAPE, (-1, 0)),
    ),
    **dict.fromkeys(
        ("truncate", "truncate_prompt_tokens", "truncation_length", "transforms"),
        Refusal("prompts are not shortened: send what fits the context"),
    ),
    **dict.fromkeys(
        ("num_ctx", "n_ctx"),
        Refusal("the context is set when the model is loaded: hmt serve --context"),
    ),
    "options": Refusal("write its fields at the top level"),
    "extra_body": Refusal("write its fields at the top level, as OpenAI's Python client does"),
    "lora": Refusal("write MODEL:ADAPTER to model"),
    "lora_path": Refusal("write MODEL:ADAPTER to model"),
    "session_params": Refusal("the server keeps no sessions: send the whole prompt"),
    "moderation": Refusal("the server does not moderate"),
    "image_data": Refusal(_IMAGES),
    "multimodal_data": Refusal(_IMAGES),
}  # fmt: skip

_THINKING: Final = 'write chat_template_kwargs, such as {"enable_thinking": false}'

CHAT_IGNORED: Final[Mapping[str, str]] = {
    **IGNORED,
    "verbosity": "no chat template has a place for it",
    "stream_reasoning": "a stream always has the reasoning",
    "chat_template_content_format": "content is text",
}

CHAT_REFUSED: Final[Mapping[str, Refusal]] = {
    **REFUSED,
    "prompt": Refusal("a chat has messages; send a prompt to /v1/completions"),
    "system": Refusal("write it as the first message, with the role system"),
    "instructions": Refusal("write them as the first message, with the role system"),
    "suffix": Refusal("filling in the middle is for /v1/completions"),
    "audio": Refusal("only text is served"),
    "web_search_options": Refusal("the server does not search: offer a tool"),
    "plugins": Refusal("the server has no plugins: offer tools"),
    "functions": Refusal("write tools, which replace it"),
    "function_call": Refusal("write tool_choice, which replaces it", ("none", "auto")),
    "documents": Refusal("write them in a message, or in chat_template_kwargs"),
    "chat_template": Refusal("the server chooses its template: hmt serve --chat-template"),
    "template": Refusal("the server chooses its template: hmt serve --chat-template"),
    "echo": Refusal("a chat is not echoed"),
    "add_special_tokens": Refusal("the chat template writes all special tokens"),
    "enable_thinking": Refusal(_THINKING, (True,)),
    "thinking": Refusal(_THINKING, ({"type": "enabled"}, {"type": "adaptive"})),
    "think": Refusal(_THINKING, (True,)),
    "thinking_budget": Refusal("write thinking_token_budget"),
    "reasoning_budget": Refusal("write thinking_token_budget", (-1,)),
    "reasoning": Refusal("write reasoning_effort", ({},)),
    "reasoning_format": Refusal(_SHAPE, ("auto", "deepseek")),
    "separate_reasoning": Refusal("reasoning is always apart from the content", (True,)),
    "include_reasoning": Refusal("reasoning is always part of the answer", (True,)),
    "best_of": Refusal("write n: a chat has no best_of", (1, 0)),
}

TEXT_REFUSED: Final[Mapping[str, Refusal]] = {
    **REFUSED,
    "messages": Refusal("a completion has a prompt; send messages to /v1/chat/completions"),
    "input_prefix": Refusal("write prompt and suffix"),
    "input_suffix": Refusal("write prompt and suffix"),
    "input_extra": Refusal("write it in the prompt"),
    **dict.fromkeys(
        ("prompt_embeds", "input_embeds", "inputs_embeds"),
        Refusal("only text and token ids are served"),
    ),
    "add_special_tokens": Refusal("send token ids for a prompt without start token", (True,)),
    "add_bos_token": Refusal("send token ids for a prompt without start token", (True,)),
    "raw": Refusal("a prompt is always taken as it is", (True,)),
}

EMBED_IGNORED: Final[Mapping[str, str]] = {
    name: why for name, why in IGNORED.items() if not why.startswith("belongs to a sampler")
}

EMBED_REFUSED: Final[Mapping[str, Refusal]] = {
    **dict.fromkeys(
        ("truncate", "truncate_prompt_tokens", "late_chunking", "truncation"),
        Refusal("texts are not shortened: send what fits the context", ("none", "NONE", False, -1)),
    ),
    **dict.fromkeys(
        ("input_type", "task", "prompt_name", "instruction", "prompt"),
        Refusal("write the model's instruction in the input itself"),
    ),
    "messages": Refusal("write the text as input"),
    "normalize": Refusal("embeddings have length 1", (True,)),
    "embed_dtype": Refusal("numbers are float32", ("float32",)),
    "embedding_type": Refusal("write encoding_format", ("float",)),
    "add_special_tokens": Refusal("send token ids for a text without start token", (True,)),
    "extra_body": Refusal("write its fields at the top level, as OpenAI's Python client does"),
}

# Of one message of a chat.
MESSAGE_IGNORED: Final[Mapping[str, str]] = {
    **reasons(
        "tells of an answer what its text already has",
        ("annotations", "id", "status", "type", "index", "finish_reason", "stop_reason",
         "logprobs", "usage", "model", "created", "created_at", "timestamp", "token_ids",
         "provider_specific_fields", "reasoning_details", "thinking_blocks", "signature",
         "context"),
    ),
    "cache_control": "prompts are cached as --prefix-cache says",
}  # fmt: skip

_CONTINUE: Final = "write continue_final_message beside the messages"
MESSAGE_REFUSED: Final[Mapping[str, Refusal]] = {
    "audio": Refusal("only text is served: send the transcript as content"),
    "images": Refusal(_IMAGES),
    "prefix": Refusal(_CONTINUE),
    "partial": Refusal(_CONTINUE),
    "tools": Refusal("write tools beside the messages"),
}
