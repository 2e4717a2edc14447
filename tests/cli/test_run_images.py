"""`hmt run --image`, and /image in a chat."""

import io
import sys
from pathlib import Path

import pytest
from video_models import animation, frames
from vision_models import picture, publish, vision_model

OPTIONS = ("--host-memory", "64MiB", "--threads", "1", "--max-new-tokens", "5", "--no-summary")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    publish(vision_model("llava"), folder)
    for number in range(2):
        picture(40, 30, number).save(folder / f"{number}.png")
    return folder


def test_a_prompt_about_images(hmt, seeing):
    first, second = ("--image", seeing / "0.png"), ("--image", seeing / "1.png")
    answers = [
        hmt("run", *OPTIONS, *images, seeing, "What is this?")
        for images in ((), first, second, (*first, *second))
    ]
    assert [answer.code for answer in answers] == [0] * 4
    assert len({answer.out for answer in answers}) == 4


def test_a_chat_shows_images(hmt, seeing, monkeypatch):
    one = hmt("run", *OPTIONS, "--image", seeing / "0.png", seeing, "What is this?")
    lines = f"/image {seeing / 'none.png'}\n/image {seeing / '0.png'}\nWhat is this?\nAnd now?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    chat = hmt("run", *OPTIONS, seeing)
    assert chat.code == 0 and chat.out.startswith(one.out)
    assert "cannot be read" in chat.err


def test_videos_of_a_prompt_and_in_a_chat(hmt, seeing, tmp_path, monkeypatch):
    publish(vision_model("qwen2_vl"), tmp_path)
    file = tmp_path / "moving.gif"
    file.write_bytes(animation(frames(3, 30, 20, 1), 500))
    one = hmt("run", *OPTIONS, "--video", file, tmp_path, "What is this?")
    assert one.code == 0 and one.out.strip()
    lines = f"/video {tmp_path / 'none.gif'}\n/video {file}\nWhat is this?\nAnd now?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    chat = hmt("run", *OPTIONS, tmp_path)
    assert chat.code == 0 and chat.out.startswith(one.out)
    assert "none.gif cannot be read" in chat.err
    blind = hmt("run", *OPTIONS, "--video", file, seeing, "What is this?")
    assert blind.code != 0 and "HMT has none for models of type 'llava'" in blind.err
    assert "/video FILE" in hmt("run", "--video", file, seeing).err


def test_the_published_model_describes_its_image(hmt):
    model = Path(__file__).parents[2] / "assets" / "mini-vision"
    options = ("--host-memory", "64MiB", "--threads", "1", "--no-summary")
    said = hmt("run", *options, "--image", model / "shapes.png", model, "Describe the image.")
    shapes = "black star top right, orange circle left, yellow ring centre, blue cross right"
    assert (said.code, said.out.strip(), said.err) == (0, shapes, "")


def test_images_need_a_prompt_and_a_model_that_sees(hmt, seeing):
    assert "/image FILE" in hmt("run", "--image", seeing / "0.png", seeing).err
    blind = hmt("run", "--host-memory", "16MiB", "--image", seeing / "0.png", "What is this?")
    assert blind.code != 0 and "reads text only" in blind.err


def test_an_image_is_looked_for_before_a_model_is_loaded(hmt, seeing, monkeypatch):
    monkeypatch.setattr("hmt.engine.Engine", None)  # what loads
    gone = hmt("run", "--image", seeing / "none.png", seeing, "What is this?")
    assert gone.code == 1 and "none.png cannot be read (No such file or directory)" in gone.err
