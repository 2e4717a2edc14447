"""Embeddings through OpenAI's client, beside those of transformers."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI
from serving import NAME, app_on, at_rest, http, openai, run

import hmt
from hmt.cli.eval import held_out_text
from hmt.cli.options import embedded_model
from hmt.contracts.request import Pooling
from hmt.engine import LoadedModel

LONG = held_out_text(None)[:4000]
TEXTS = ["A cat sat on the mat.", "The stock market fell.", LONG, *(f"Text {n}." for n in range(9))]


@pytest.fixture(scope="module")
def wanted(model: LoadedModel) -> dict[str, torch.Tensor]:
    """transformers' last hidden states of TEXTS, pooled: f32 [texts, hidden_size] by pooling."""
    from transformers import AutoModel

    theirs = AutoModel.from_pretrained(embedded_model(), dtype=torch.float32)
    found: dict[str, list[torch.Tensor]] = {"mean": [], "last": []}
    for text in TEXTS:
        with torch.inference_mode():
            states = theirs(torch.tensor([model.tokenizer.encode(text)])).last_hidden_state[0]
        found["mean"].append(states.mean(0))
        found["last"].append(states[-1])
    normalize = torch.nn.functional.normalize
    return {name: normalize(torch.stack(rows), dim=1) for name, rows in found.items()}


def close(one: Any, other: torch.Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(one), other, rtol=1e-3, atol=1e-4)


def test_they_are_those_of_transformers(
    app: FastAPI, model: LoadedModel, wanted: dict[str, torch.Tensor]
) -> None:
    assert len(model.tokenizer.encode(LONG)) > model.plan.max_prefill_tokens  # in several chunks

    async def work() -> None:
        async with openai(app) as client:
            for pooling in ("mean", "last"):
                made = await client.embeddings.create(  # base64, by itself
                    model=NAME, input=TEXTS, extra_body={"pooling": pooling}
                )
                assert [one.index for one in made.data] == list(range(len(TEXTS)))
                close([one.embedding for one in made.data], wanted[pooling])
            ids = [model.tokenizer.encode(text) for text in TEXTS[:2]]
            assert made.usage.prompt_tokens > sum(map(len, ids))
            plain = await client.embeddings.create(model=NAME, input=ids, encoding_format="float")
            close([one.embedding for one in plain.data], wanted["last"][:2])
            short = await client.embeddings.create(model=NAME, input=TEXTS[0], dimensions=16)
            cut = torch.nn.functional.normalize(wanted["last"][0, :16], dim=0)
            close(short.data[0].embedding, cut)
        async with http(app) as client:
            body = {"model": NAME, "input": TEXTS[0], "encoding_format": "base64"}
            told = (await client.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
            close(np.frombuffer(base64.b64decode(told), "<f4").tolist(), wanted["last"][0])

    run(work())
    assert at_rest(model)


def test_what_is_held_is_computed_where_it_is_wanted(
    tmp_path: Path, wanted: dict[str, torch.Tensor]
) -> None:
    """With the prefix cache; and the folder says how to pool."""
    folder = tmp_path / "embedder"
    shutil.copytree(embedded_model(), folder)
    (folder / "1_Pooling").mkdir()
    said = {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(said))
    options = {"host_memory": "64MiB", "dtype": "float32", "context": 2048, "prefix_cache": True}
    with hmt.Engine(**options) as engine, engine.load_model(folder) as model:
        tokens = model.tokenizer.encode(LONG)
        assert model.infer(hmt.Request(tokens, 2)).token_ids
        for pooling in Pooling:
            found = model.infer(hmt.Request(tokens, 0, embedding=pooling))
            close(found.embedding, wanted[pooling.value][2])

        async def work() -> None:
            async with http(app_on(model)) as client:
                body = {"model": "embedder", "input": LONG}
                told = (await client.post("/v1/embeddings", json=body)).json()
                close(told["data"][0]["embedding"], wanted["mean"][2])

        run(work())
