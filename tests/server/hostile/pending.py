"""Attacks that the server does not bear yet, and why.  Empty it as faults are fixed."""

PENDING: dict[str, str] = {
    "chains_of_rules": "grammars are compiled in this process (A1)",
    "chains_of_references": "grammars are compiled in this process (A1)",
    "expressions_that_explode": "grammars are compiled in this process (A1)",
    "grammars_without_number": "compiled grammars are bounded in number, not in bytes (A1)",
    "forms_that_take_long": "a token of an ambiguous grammar has no time limit (A1)",
    "templates_that_never_end": "chat templates have no time limit (A5)",
    "templates_that_grow": "chat templates have no limit of memory (A5)",
    "prompts_of_others": "the prefix cache is not scoped by key (A6)",
    "flood_of_prompts": "keys have no share of the prefix cache (A6)",
}
