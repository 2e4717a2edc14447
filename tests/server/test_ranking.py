"""Ranking and scoring, beside the vectors of /v1/embeddings."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from serving import NAME, app_on, http, run

import hmt
from hmt.cli.options import embedded_model

QUERY = "Where does the cat sit?"
DOCUMENTS = ["The stock market fell.", "A cat sat on the mat.", "Snow is white.", "Cats sit."]


def asked(app: FastAPI, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async def work() -> tuple[int, dict[str, Any]]:
        async with http(app) as client:
            answer = await client.post(path, json={"model": NAME} | body)
            return answer.status_code, answer.json()

    return run(work())


def vectors(app: FastAPI, texts: list[str], **more: Any) -> torch.Tensor:
    told = asked(app, "/v1/embeddings", {"input": texts} | more)[1]["data"]
    return torch.tensor([one["embedding"] for one in told])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_come_in_the_order_of_their_cosine(app: FastAPI, path: str) -> None:
    found = vectors(app, [QUERY, *DOCUMENTS])
    wanted = found[1:] @ found[0]
    given = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, *DOCUMENTS[2:]]
    status, told = asked(app, path, {"query": QUERY, "documents": given})
    assert status == 200 and told["model"] == NAME and told["usage"]["total_tokens"] > 10
    order = [one["index"] for one in told["results"]]
    assert order == wanted.argsort(descending=True).tolist()
    for one in told["results"]:
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
        assert one["relevance_score"] == pytest.approx(wanted[one["index"]].item(), abs=1e-5)
    body = {"query": QUERY, "documents": given, "top_n": 2, "return_documents": False}
    short = asked(app, path, body)[1]["results"]
    assert [one["index"] for one in short] == order[:2] and "document" not in short[0]


def test_pairs_are_scored(app: FastAPI) -> None:
    found = vectors(app, DOCUMENTS, pooling="mean")
    one_by_all = asked(
        app, "/v1/score", {"text_1": DOCUMENTS[0], "text_2": DOCUMENTS, "pooling": "mean"}
    )[1]
    scores = torch.tensor([one["score"] for one in one_by_all["data"]])
    torch.testing.assert_close(scores, found @ found[0], atol=1e-5, rtol=0)
    body = {"text_1": DOCUMENTS[:2], "text_2": DOCUMENTS[2:], "pooling": "mean"}
    pairs = [one["score"] for one in asked(app, "/score", body)[1]["data"]]
    assert pairs == pytest.approx((found[:2] * found[2:]).sum(1).tolist(), abs=1e-5)
    alone = asked(app, "/score", {"text_1": "a", "text_2": "a"})[1]["data"]
    assert alone == [{"index": 0, "object": "score", "score": pytest.approx(1.0, abs=1e-5)}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [3]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["x"]}, "rank_fields"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
    ],
    ids=str,
)
def test_what_cannot_be_ranked_is_refused(
    app: FastAPI, path: str, body: dict[str, Any], param: str
) -> None:
    status, told = asked(app, path, body)
    assert status == 400 and told["error"]["param"].startswith(param), told


def test_a_folder_says_what_stands_before_queries_and_documents(tmp_path: Path) -> None:
    folder = tmp_path / "embedder"
    shutil.copytree(embedded_model(), folder)
    prompts = {"query": "Instruct: find it.\nQuery: ", "document": "Text: ", "broken": 3}
    said = {"prompts": prompts, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    options = {"host_memory": "64MiB", "dtype": "float32", "context": 256}
    with hmt.Engine(**options) as engine, engine.load_model(folder) as model:
        app = app_on(model)
        texts = [prompts["query"] + QUERY, *(prompts["document"] + one for one in DOCUMENTS)]
        found = vectors(app, texts, model="embedder")
        body = {"model": "embedder", "query": QUERY, "documents": DOCUMENTS}
        told = asked(app, "/v1/rerank", body)[1]["results"]
    wanted = found[1:] @ found[0]
    for one in told:
        assert one["relevance_score"] == pytest.approx(wanted[one["index"]].item(), abs=1e-5)
