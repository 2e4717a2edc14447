"""Images over HTTP: what official clients send, what is fetched, and what is refused."""

import asyncio
import base64
import threading
from typing import Any

import openai as package
import pytest
from elsewhere import Elsewhere
from fastapi import FastAPI
from serving import CHAT, NAME, app_on, http, openai, run
from test_anthropic_client import client_of
from video_models import animation, frames
from vision_models import file_of, picture

import hmt
from hmt.engine import LoadedModel
from hmt.server.image_fetching import ImageFetcher

FILE = file_of(picture(37, 21))
DATA = base64.b64encode(FILE).decode()
TEXT = {"type": "text", "text": "What is this?"}


@pytest.fixture(scope="module")
def sees(seeing: LoadedModel) -> FastAPI:
    return app_on(seeing)


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def asking(*content: Any, role: str = "user") -> dict[str, Any]:
    messages = [{"role": role, "content": list(content)}]
    return {"model": NAME, "messages": messages, "max_tokens": 6, "temperature": 0}


def wanted(model: LoadedModel, content: list[Any], images: int = 1) -> hmt.Completion:
    chat = [{"role": "user", "content": content}]
    return model.infer(hmt.Request(chat, 6, images=(FILE,) * images))


def test_openais_client_sends_data_urls(sees: FastAPI, seeing: LoadedModel) -> None:
    url = part(f"data:image/png;base64,{DATA}")
    expected = wanted(seeing, [TEXT, {"type": "image"}, TEXT, {"type": "image"}], 2)

    async def work() -> None:
        async with openai(sees) as client:
            body = asking(TEXT, url, TEXT, url)
            done = await client.chat.completions.create(**body)
            assert done.choices[0].message.content == expected.text
            assert done.usage.prompt_tokens == expected.prompt_tokens
            parts = await client.chat.completions.create(**body, stream=True)
            texts = [one.choices[0].delta.content or "" async for one in parts]
            assert "".join(texts) == expected.text

    run(work())


def test_anthropics_client_sends_blocks(sees: FastAPI, seeing: LoadedModel) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": DATA}
    content = [{"type": "image", "source": source}, TEXT]
    expected = wanted(seeing, [{"type": "image"}, TEXT])

    async def work() -> None:
        async with client_of(sees) as client:
            messages = [{"role": "user", "content": content}]
            done = await client.messages.create(
                model=NAME, max_tokens=6, messages=messages, extra_body={"temperature": 0}
            )
        assert "".join(block.text for block in done.content) == expected.text
        assert done.usage.input_tokens == expected.prompt_tokens

    run(work())


def test_responses_take_images(sees: FastAPI, seeing: LoadedModel) -> None:
    """Of the user, and of what tools bring; also where the conversation goes on."""
    expected = wanted(seeing, [TEXT, {"type": "image"}])
    text = {"type": "input_text", "text": TEXT["text"]}
    image = {"type": "input_image", "image_url": f"data:image/png;base64,{DATA}", "detail": "auto"}

    async def work() -> None:
        async with openai(sees) as client:
            ask: dict[str, Any] = {"model": NAME, "max_output_tokens": 6, "temperature": 0}
            message = {"role": "user", "content": [text, image]}
            done = await client.responses.create(**ask, input=[message])
            assert done.output_text == expected.text
            assert done.usage.input_tokens == expected.prompt_tokens
            again = await client.responses.create(
                **ask, input="And now?", previous_response_id=done.id
            )
            assert again.usage.input_tokens > expected.prompt_tokens

    run(work())


def moving(url: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}}


def test_videos_come_as_files_and_as_frames(sees: FastAPI, seeing: LoadedModel) -> None:
    """Also beside an image, each in the place that the message has for it."""
    file, images = animation(frames(4, 30, 20, 5), 500), frames(3, 22, 30, 6)
    listed = tuple(file_of(image, "JPEG") for image in images)
    urls = [
        "data:image/gif;base64," + base64.b64encode(file).decode(),
        "data:video/jpeg;base64," + ",".join(base64.b64encode(one).decode() for one in listed),
    ]
    kinds: list[Any] = [{"type": "video"}, {"type": "image"}, TEXT, {"type": "video"}]
    chat = [{"role": "user", "content": kinds}]
    expected = seeing.infer(hmt.Request(chat, 6, images=(FILE,), videos=(file, listed)))

    async def work() -> None:
        async with openai(sees) as client:
            image = part(f"data:image/png;base64,{DATA}")
            body = asking(moving(urls[0]), image, TEXT, moving(urls[1]))
            done = await client.chat.completions.create(**body)
            assert done.choices[0].message.content == expected.text
            assert done.usage.prompt_tokens == expected.prompt_tokens

    run(work())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (moving("https://example.com/cat.mp4"), "data URL"),
        (moving("data:text/html;base64,PHN2Zy8+"), "Matroska"),
        (moving("data:video/mp4;base64,@@@@"), "base64"),
        (moving("data:video/mp4;base64,AAAA"), "decoded"),
        ({"type": "video_url"}, "missing"),
        (part("https://example.com/cat.png"), "not fetched"),
        (part("http://169.254.169.254/latest"), "not fetched"),
        (part("file:///etc/passwd"), "data URL"),
        (part("data:image/svg+xml;base64,PHN2Zy8+"), "PNG"),
        (part("data:image/png;base64,@@@@"), "base64"),
        (part(f"data:image/png;base64,{base64.b64encode(FILE[:90]).decode()}"), "decoded"),
        ({"type": "image_url"}, "missing"),
    ],
)
def test_what_is_no_image_is_refused(content: Any, said: str, sees: FastAPI) -> None:
    async def work() -> None:
        async with http(sees) as client:
            answer = await client.post(CHAT, json=asking(TEXT, content))
        error = answer.json()["error"]
        assert answer.status_code == 400 and said in error["message"], error
        assert error["param"].startswith("messages")

    run(work())


def test_images_are_the_users_and_a_model_must_see(app: FastAPI, sees: FastAPI) -> None:
    url = part(f"data:image/png;base64,{DATA}")

    async def work() -> None:
        async with http(sees) as client:
            answer = await client.post(CHAT, json=asking(TEXT, url, role="assistant"))
            assert answer.status_code == 400 and "images come from the user" in answer.text
            video = moving("data:image/gif;base64,AAAA")
            answer = await client.post(CHAT, json=asking(TEXT, video, role="assistant"))
            assert answer.status_code == 400 and "videos come from the user" in answer.text
        async with openai(app) as client:
            with pytest.raises(package.BadRequestError, match="reads text only"):
                await client.chat.completions.create(**asking(TEXT, url))

    run(work())


def test_images_of_named_hosts_are_fetched(seeing: LoadedModel) -> None:
    expected = wanted(seeing, [{"type": "image"}, TEXT])
    app = app_on(seeing, max_body_bytes=len(FILE) * 2)

    async def work(address: str) -> None:
        async with openai(app) as client:
            body = asking(part(f"http://{address}/cat"), TEXT)
            done = await client.chat.completions.create(**body)
            assert done.choices[0].message.content == expected.text
            # It counts as a part of the body.
            pair = [part(f"http://{address}/{name}") for name in ("cat", "dog")]
            with pytest.raises(package.APIStatusError, match="with images that are fetched"):
                await client.chat.completions.create(**asking(*pair, TEXT))
        source = {"type": "url", "url": f"http://{address}/cat"}
        async with client_of(app) as client:
            messages = [{"role": "user", "content": [{"type": "image", "source": source}, TEXT]}]
            said = await client.messages.create(
                model=NAME, max_tokens=6, messages=messages, extra_body={"temperature": 0}
            )
        assert said.content[0].text == expected.text

    with Elsewhere(FILE) as elsewhere:
        address = f"127.0.0.1:{elsewhere.server_port}"
        app.state.service.fetcher = ImageFetcher([address], reachable=lambda found: True)
        run(work(address))


def test_text_does_not_wait_for_decoders(
    sees: FastAPI, seeing: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many small requests have an image that takes long."""
    decoder = seeing._core.memory.images._decoder
    begun, goes_on, pixels = threading.Event(), threading.Event(), decoder.pixels

    def slow(data: bytes) -> Any:
        begun.set()
        assert goes_on.wait(30)
        return pixels(data)

    monkeypatch.setattr(decoder, "pixels", slow)

    async def work() -> None:
        async with http(sees) as client:
            body = asking(part(f"data:image/png;base64,{DATA}"), TEXT)
            images = [asyncio.create_task(client.post(CHAT, json=body)) for _ in range(40)]
            while not begun.is_set():
                await asyncio.sleep(0.001)
            answer = await client.post(CHAT, json=asking(TEXT))
            assert answer.status_code == 200 and not any(one.done() for one in images)
            goes_on.set()
            assert {one.status_code for one in await asyncio.gather(*images)} == {200}

    run(work())
