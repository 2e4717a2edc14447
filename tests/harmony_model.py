"""The small model with gpt-oss's marks, and a template that writes its messages."""

import json
import shutil
from pathlib import Path

from hmt.cli.options import embedded_model

# In place of the model's own special tokens: there are as many.
_TOKENS = {
    "<|begin|>": "<|return|>",
    "<|user|>": "<|start|>",
    "<|assistant|>": "<|channel|>",
    "<|system|>": "<|message|>",
    "<|tool|>": "<|constrain|>",
    "<|image|>": "<|call|>",
}
# As OpenAI's does: one call to a message, results by the latest call, thoughts only before calls.
_TEMPLATE = """
{{- "<|start|>system<|message|>Effort: " + (reasoning_effort or "medium") }}
{%- for tool in tools or [] %}
{{- "// " + tool.function.description + tool.function.name }}
{{- tool.function.parameters.properties | tojson }}
{%- endfor %}
{{- "<|end|>" }}
{%- set last = namespace(name=none) %}
{%- for m in messages %}
{%- if m.tool_calls %}
{%- set call = m.tool_calls[0].function %}
{%- if m.content and m.thinking %}{{ raise_exception("both") }}{% endif %}
{%- set thought = m.content or m.thinking %}
{%- if thought %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + thought + "<|end|>" }}
{%- endif %}
{{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary json<|message|>" }}
{{- call.arguments | tojson + "<|call|>" }}
{%- set last.name = call.name %}
{%- elif m.role == "tool" %}
{{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
{{- m.content | tojson + "<|end|>" }}
{%- elif m.role == "assistant" %}
{{- "<|start|>assistant<|channel|>final<|message|>" + m.content + "<|end|>" }}
{%- else %}
{{- "<|start|>" + m.role + "<|message|>" + m.content + "<|end|>" }}
{%- endif %}
{%- endfor %}
{{- "<|start|>assistant" }}"""


def harmony_folder(folder: Path) -> Path:
    """Write it."""
    shutil.copytree(embedded_model(), folder)
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for old, new in _TOKENS.items():
        text = text.replace(old, new)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    for name in ("config.json", "generation_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": 0}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    return folder
