"""Attacks on who may do what: keys, names that lead here, pages of others, caches of others."""

import os

from target import CHAT, TEXT, Target, require


def without_a_key(target: Target) -> None:
    """Keys that are none, and ways around asking for one."""
    if target.keys is None:
        return
    key = target.keys[0]
    for headers in (
        {}, {"authorization": "Basic YQ=="}, {"authorization": f"Bearer {key[:-1]}"},
        {"authorization": "Bearer "}, {"x_api_key": ""}, {"authorization": f"Bearer {key}\u00e9"},
        {"x_forwarded_for": "127.0.0.1"}, {"access_control_request_method": "POST"},
        {"authorization": "Bearer wrong-wrong", "x_api_key": key}, {"x_api_key": "a" * 9000},
    ):  # fmt: skip
        for path in ("/v1/models", "/metrics", "/v1/hmt/state", "/openapi.json", "//metrics",
                     "/metrics/", "/%6detrics", "/health/../metrics", "/METRICS",
                     f"/v1/models?api_key={key}", "/v1/models;x=/health"):  # fmt: skip
            answer = target.get(path, key=None, **headers)
            require(answer.status in (400, 401, 404), f"{path} with {headers}: {answer.status}")
            require("data" not in answer.json, f"{path} with {headers} tells something")
        answer = target.post(CHAT, target.chat(max_tokens=1), key=None, **headers)
        require(answer.status == 401, f"a chat with {headers}: {answer.status}")


def names_that_lead_here(target: Target) -> None:
    """A page of another origin, and its own name for this address (DNS rebinding)."""
    for host in (
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "0.0.0.0",
        "localhost.",
        "[::]",
        "localhost:x",
        "LOCALHOST@evil",
        "127.0.0.1:1:2",
    ):
        answer = target.get("/v1/models", key=None, host=host)
        require(answer.status in (400, 401, 403), f"Host: {host}: {answer.status}")
    for origin in ("https://evil.example", "null", "http://localhost.evil.example", "*"):
        answer = target.get("/health", origin=origin)
        named = answer.headers.get("access-control-allow-origin")
        require(named is None, f"a page of {origin} may read")
        preflight = target.ask(
            "OPTIONS", CHAT, key=None, origin=origin, access_control_request_method="POST"
        )
        named = preflight.headers.get("access-control-allow-origin")
        require(named is None, f"a page of {origin} may post")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = target.post(CHAT, target.chat(), content_type=kind)
        require(answer.status == 415, f"a form of another page ({kind!r}): {answer.status}")


def _cached(target: Target, prompt: str, key: int, **others: object) -> int:
    body = {"model": target.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, **others}
    answer = target.post(TEXT, body, key=key)
    require(answer.status == 200, f"a prompt: {answer.status} {answer.text[:200]}")
    return int(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def caches_prompts(target: Target) -> bool:
    """Whether a prompt is found again by its own key: whether there is a prefix cache."""
    prompt = f"{os.urandom(8).hex()} is asked twice by the same key, one after the other. " * 4
    _cached(target, prompt, 0)
    return _cached(target, prompt, 0) > 0


def _has_cache_of_keys(target: Target) -> bool:
    """Whether there are keys, and a prefix cache that one could use to learn of another."""
    return target.keys is not None and caches_prompts(target)


def prompts_of_others(target: Target) -> None:
    """Whether another key can tell by the prefix cache what was asked."""
    if not _has_cache_of_keys(target):
        return
    secret = f"{os.urandom(8).hex()} is my password, and mauve the colour that I love. " * 6
    _cached(target, secret, 0)
    require(_cached(target, secret, 1) == 0, "a key learns what another one has asked")


def flood_of_prompts(target: Target) -> None:
    """One key fills the prefix cache: another one's prompt is still there."""
    if not _has_cache_of_keys(target):
        return
    own = f"{os.urandom(8).hex()} is what the other key asks again and again. " * 6
    _cached(target, own, 1)
    for _ in range(24):
        _cached(target, f"{os.urandom(64).hex()} " * 6, 0)
    require(_cached(target, own, 1) > 0, "a flood of one key evicts what another one has")


ATTACKS = (without_a_key, names_that_lead_here, prompts_of_others, flood_of_prompts)
