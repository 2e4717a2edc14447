"""Images in the page, in a real browser: given, shown, taken away, sent."""

import base64
import io
import random
from pathlib import Path
from typing import Any

from page_in_browser import (
    MARKS,
    SCREENSHOTS,
    Opened,
    answered,
    ask,
    given,
    opening,
    pending,
    served,
)
from PIL import Image
from vision_models import file_of, picture

from hmt.engine import LoadedModel

pytestmark = MARKS


def test_images_are_picked_pasted_dropped_taken_away_and_sent(
    browser: Any, seeing: LoadedModel, tmp_path: Path
) -> None:
    for number in range(2):
        picture(37, 21, number).save(tmp_path / f"{number}.png")
    files = [(tmp_path / f"{number}.png").read_bytes() for number in range(2)]
    noise = Image.frombytes("RGB", (1600, 900), random.Random(1).randbytes(1600 * 900 * 3))
    large = file_of(noise, "PNG")
    # The page goes before its server: what it asks a server that is gone is told on the console.
    with served(seeing, max_body_bytes=4 << 20) as at, opening(browser, at) as opened:
        page = opened()
        sent: list[Any] = []
        page.on("request", lambda r: sent.append(r.post_data_json) if r.post_data else None)
        page.wait_for_selector("#image-button[aria-disabled=false]")
        page.click("#settings-button")
        page.fill("#longest", "6")
        page.click("#settings-button")
        with page.expect_file_chooser() as chooser:  # by keyboard
            page.focus("#image-button")
            page.keyboard.press("Enter")
        chooser.value.set_files([tmp_path / "0.png", tmp_path / "1.png"])
        pending(page, 2)
        given(page, "paste", ("image.png", "image/png", large))
        given(page, "drop", ("dropped.png", "image/png", files[0]), ("a.bin", "", b"a\0"))
        pending(page, 4)
        assert page.inner_text("#attached-note").startswith("a.bin is not added")
        given(page, "drop", ("broken.gif", "image/gif", b"GIF89a and no more"))
        page.wait_for_selector("#attached-note:has-text('broken.gif')")
        page.get_by_role("button", name="Remove dropped.png").press("Enter")
        page.get_by_role("button", name="Remove 1.png").press("Enter")
        assert page.evaluate("document.activeElement.ariaLabel") == "Remove image.png"
        assert page.inner_text("#said") == "1.png removed"
        page.screenshot(path=SCREENSHOTS / "page-images-before.png")
        ask(page, "What is this?")
        answered(page, 0)
        pending(page, 0)
        content = sent[0]["messages"][0]["content"]
        urls = [one["image_url"]["url"] for one in content[:2]]
        assert urls[0] == f"data:image/png;base64,{base64.b64encode(files[0]).decode()}"
        smaller = Image.open(io.BytesIO(base64.b64decode(urls[1].partition(",")[2])))
        assert (smaller.format, smaller.size) == ("JPEG", (1280, 720))
        assert content[2:] == [{"type": "text", "text": "What is this?"}]
        assert page.locator(".turn.user img").evaluate_all(
            "all => all.map(e => [e.alt, e.naturalWidth])"
        ) == [["0.png", 37], ["image.png", 1280]]
        ask(page, "And now?")  # the conversation is sent with its images
        answered(page, 1)
        assert sent[1]["messages"][0]["content"] == content
        page.screenshot(path=SCREENSHOTS / "page-images.png")
        page.click("text=New chat")
        assert page.locator("img").count() == 0


def test_a_model_that_does_not_see_says_so(opened: Opened) -> None:
    page = opened()
    page.wait_for_selector("#image-button[title]")
    button = page.get_by_role("button", name="Add images")
    assert button.get_attribute("aria-disabled") == "true"
    assert "reads text only" in (button.get_attribute("title") or "")
    assert "reads text only" in page.inner_text("#image-why")
    button.press("Enter")
    assert "reads text only" in page.inner_text("#attached-note")
    given(page, "drop", ("a.png", "image/png", file_of(picture(4, 4))))
    assert page.locator("#attached li").count() == 0
    ask(page, "What is 12 + 30?")
    assert answered(page, 0).locator(".words").inner_text()
