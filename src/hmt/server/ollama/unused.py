"""Fields of Ollama's API that are not used here: ignored, or refused and why.

Sources: the types of the `ollama` package (0.6), and Ollama's `docs/api.md` and `api/types.go`.
"""

from collections.abc import Mapping
from typing import Final

from hmt.server.fields import Refusal, reasons
from hmt.server.openai.unused import REFUSED

USED: Final = (
    "num_ctx", "num_predict", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_SAMPLERS: Final = ("mirostat", "tfs_z", "typical_p")

OPTIONS_IGNORED: Final[Mapping[str, str]] = {
    **reasons(
        "memory and computation are planned when the model is loaded",
        ("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all",
         "vocab_only", "use_mmap", "use_mlock", "embedding_only", "num_thread"),
    ),
    "num_keep": "prompts are not shortened",
    **reasons(
        "belongs to a sampler that is refused when it is on", ("mirostat_tau", "mirostat_eta")
    ),
    "penalize_newline": "a penalty is for all tokens",
}  # fmt: skip

OPTIONS_REFUSED: Final[Mapping[str, Refusal]] = {
    **{name: REFUSED[name] for name in _SAMPLERS},
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), Refusal("write num_predict")),
}

IGNORED: Final[Mapping[str, str]] = {
    "keep_alive": "models stay loaded: see /v1/models/unload",
}

REFUSED_OUTSIDE: Final[Mapping[str, Refusal]] = {
    **dict.fromkeys(
        (*USED, *_SAMPLERS, "max_tokens", "max_completion_tokens"), Refusal("write it in options")
    ),
    **dict.fromkeys(("response_format", "structured_outputs"), Refusal("write format")),
}

CHAT_REFUSED: Final[Mapping[str, Refusal]] = {
    **REFUSED_OUTSIDE,
    "prompt": Refusal("a chat has messages; send a prompt to /api/generate"),
    "system": Refusal("write it as the first message, with the role system"),
    "template": Refusal("the server chooses its template: hmt serve --chat-template"),
    "tool_choice": Refusal("the model decides whether to call: /v1/chat/completions has it",
                           ("auto",)),
}  # fmt: skip

GENERATE_REFUSED: Final[Mapping[str, Refusal]] = {
    **REFUSED_OUTSIDE,
    "context": Refusal("send the whole conversation to /api/chat"),
    "template": Refusal("send a raw prompt, or start with hmt serve --chat-template"),
    "messages": Refusal("send messages to /api/chat"),
    "tools": Refusal("offer tools in /api/chat"),
    **dict.fromkeys(("width", "height", "steps"), Refusal("answers are text", (0,))),
}
