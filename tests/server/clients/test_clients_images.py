"""A question about an image from the clients that people use, as their documentation shows it."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from answering import Served
from listening import listening
from serving import NAME, app_on
from test_clients import HERE, NODE, check, needs_node
from vision_models import file_of, picture

import hmt
from hmt.engine import LoadedModel

WHAT = "What is in this image?"  # as in given.py, which is for the clients themselves
FILE = file_of(picture(37, 21), "JPEG")


@pytest.fixture(scope="module")
def served(seeing: LoadedModel) -> Iterator[Served]:
    with listening(app_on(seeing)) as url:
        yield Served(url, NAME, "")


@pytest.fixture(scope="module")
def answer(seeing: LoadedModel) -> str:
    """What the engine itself says, which without the image is something else."""
    content = [{"type": "image"}, {"type": "text", "text": WHAT}]
    asked = hmt.Request([{"role": "user", "content": content}], 6, images=(FILE,))
    said = seeing.infer(asked).text
    assert said != seeing.infer(hmt.Request([{"role": "user", "content": WHAT}], 6)).text
    return said


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "image.jpg").write_bytes(FILE)
    return str(tmp_path / "image.jpg")


@pytest.mark.parametrize("name", ["openai", "anthropic", "langchain"])
def test_clients_of_the_same_versions(
    name: str, served: Served, answer: str, file: str, surroundings: dict[str, str]
) -> None:
    command = [sys.executable, str(HERE / f"{name}_image_client.py"), served.url, served.name, file]
    assert check(command, surroundings) == f"{answer}\n"


@needs_node
def test_the_ai_sdk(served: Served, answer: str, file: str, surroundings: dict[str, str]) -> None:
    for program in ("given.mjs", "ai_image.mjs"):
        shutil.copy(HERE / "node" / program, NODE)
    command = ["node", str(NODE / "ai_image.mjs"), served.url, served.name, file]
    assert check(command, surroundings) == f"{answer}\n"
