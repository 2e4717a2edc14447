"""The page at / in a real browser: Chromium, driven by playwright; skipped where one is missing.

What a model would write is put in its place where a test needs it to be of a certain kind.
"""

import json
import time
from typing import Any

import pytest
from page_in_browser import (
    AXE,
    MARKS,
    Opened,
    answered,
    ask,
    given,
    opening,
    pending,
    served,
    stream,
    sync_api,
)
from vision_models import file_of, picture

from hmt.engine import LoadedModel
from hmt.server import KeyRing

pytestmark = MARKS
KEY = "sk-correct-horse"
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}


def test_a_chat_streams_stops_and_goes_on_after_errors(opened: Opened, model: LoadedModel) -> None:
    page = opened(expected="503")
    page.wait_for_selector("#machine-body:not([hidden])")
    page.click("#settings-button")
    page.fill("#temperature", "0")
    assert page.inner_text("#temperature-value") == "0.0"
    ask(page, "What is 12 + 30?")
    turn = answered(page, 0)
    assert turn.locator(".words").inner_text() == "42"
    assert "tokens · first after" in turn.locator(".told").inner_text()

    # An answer without end is stopped, by keyboard, and the engine is free again.
    page.route("**/chat/completions", lambda route: route.continue_(
        post_data=json.dumps(json.loads(route.request.post_data) | {
            "ignore_eos": True, "max_tokens": 1500, "logit_bias": {"1": -100},
        })
    ))  # fmt: skip
    ask(page, "Tell me a long story.")
    page.wait_for_selector(".coming :text-matches('.')")
    page.keyboard.press("Escape")
    assert "stopped" in answered(page, 1).locator(".told").inner_text()
    end = time.monotonic() + 30
    while model.load.running:
        assert time.monotonic() < end
        time.sleep(0.01)
    page.unroute("**/chat/completions")

    # A refusal, and a stream that breaks off: said in words, and asked again on demand.
    refusal = {"error": {"message": "the server is busy", "type": "x", "param": None, "code": None}}
    page.route("**/chat/completions", lambda r: r.fulfill(status=503, json=refusal))
    ask(page, "What is 2 + 3?")
    assert "The server is busy" in answered(page, 2).locator(".failed").inner_text()
    cut = stream({"content": "about"})
    cut["body"] = cut["body"].replace("data: [DONE]\n\n", "")
    page.unroute("**/chat/completions")
    page.route("**/chat/completions", lambda route: route.fulfill(**cut))
    page.click("text=Try again")
    assert "before the answer did" in answered(page, 2).locator(".failed").inner_text()
    page.unroute("**/chat/completions")
    sent = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.post_data else None)
    page.fill("#system", "You add numbers.")
    page.click("text=Try again")
    assert "tokens" in answered(page, 2).locator(".told").inner_text()
    roles = [message["role"] for message in sent[-1]["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    assert sent[-1]["temperature"] == 0 and sent[-1]["model"] == "mini-dense"
    page.click("text=New chat")
    assert page.locator(".turn").count() == 0 and page.is_visible("#greeting")
    assert page.evaluate("[localStorage.length, sessionStorage.length]") == [0, 0]


HOSTILE = """# Title <img src=x onerror=alert(1)>

Some **bold**, *thin*, `code <b>`, a_b_c, 2 * 3 * 4 and [a link](https://example.org/a?b=1).
[no](javascript:alert(1)) <script>alert(2)</script> https://example.org/x.

- one
  - deeper
- two

3. three

> said <iframe src="/x"></iframe>

| a | b |
|---|---|
| 1 | <i>2</i> |

```html
<script>alert(3)</script>
```

It costs $5 and 10$ with $e^{i\\pi} + 1 = 0$, $\\href{javascript:alert(4)}{x}$ and \\(a < <b>c\\).

$$
\\sum_{k=1}^n \\frac{\\text{<img src=x>}}{\\mathbb{R}_k} =
\\begin{cases} 1 & k' \\le 2 \\\\ \\sqrt[3]{x} \\end{cases}
$$
"""


def test_what_a_model_writes_stays_text(opened: Opened) -> None:
    page = opened()
    parts = [{"reasoning_content": "Let me *see*."}, *({"content": c} for c in HOSTILE)]
    page.route("**/chat/completions", lambda route: route.fulfill(**stream(*parts)))
    ask(page, "<b>Hello</b>")
    turn = answered(page, 0)
    assert page.locator(".turn.user p").inner_text() == "<b>Hello</b>"
    words = turn.locator("> .words")
    tags = words.evaluate("e => [...new Set([...e.querySelectorAll('*')].map(x => x.localName))]")
    assert " ".join(sorted(tags)) == (
        "a blockquote br button code div em h4 li math mfrac mi mn mo mroot mrow msub msup "
        "mtable mtd mtext mtr munderover ol p pre span strong table tbody td th thead tr ul"
    )
    spoken = words.locator("math").evaluate_all("all => all.map(e => [e.textContent, e.localName])")
    assert spoken == [
        ["eiπ+1=0", "math"],
        ["a<<b>c", "math"],
        ["∑k=1n<img src=x>\u211dk={1k\u2032≤2x3", "math"],
    ]
    assert "It costs $5 and 10$ with" in words.inner_text()
    assert words.locator("p code").last.inner_text() == "$\\href{javascript:alert(4)}{x}$"
    assert words.locator("h4").inner_text() == "Title <img src=x onerror=alert(1)>"
    assert words.locator("pre").inner_text() == "<script>alert(3)</script>"
    links = words.locator("a").evaluate_all("all => all.map(a => [a.href, a.rel])")
    safe = "noopener noreferrer"
    assert links == [["https://example.org/a?b=1", safe], ["https://example.org/x", safe]]
    assert "a_b_c, 2 * 3 * 4" in words.inner_text() and "[no](javascript:" in words.inner_text()
    assert words.locator("ul ul li").inner_text() == "deeper"
    assert words.locator("ol").get_attribute("start") == "3"
    thoughts = turn.locator("details.reasoning")
    assert not thoughts.evaluate("e => e.open") and not thoughts.locator("em").is_visible()
    thoughts.locator("summary").press("Enter")
    assert thoughts.locator("em").inner_text() == "see"


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Any, model: LoadedModel) -> None:
    with served(model, keys=KeyRing.of([KEY])) as at, opening(browser, at) as opened:
        page = opened(expected="401")  # browsers write refusals down themselves
        page.wait_for_selector("#key-dialog[open]")
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("sk-wrong-and-long")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=is not one of this server's")
        page.wait_for_selector("#key-dialog[open]")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        page.wait_for_selector("#machine-body:not([hidden])")
        assert page.is_hidden("#problem")
        ask(page, "What is 12 + 30?")
        assert answered(page, 0).locator(".words").inner_text()
        stores = page.evaluate("[{...sessionStorage}, {...localStorage}, document.cookie]")
        assert stores == [{"hmt-key": KEY}, {}, ""]
        page.reload()
        page.wait_for_selector("#machine-body:not([hidden])")


def colour(page: Any, name: str) -> str:
    return str(page.evaluate(f"getComputedStyle(document.body.parentElement).{name}"))


def test_a_phone_dark_and_light_and_nothing_moves_for_who_wants_that(opened: Opened) -> None:
    page = opened(**PHONE, color_scheme="dark", reduced_motion="reduce")
    page.wait_for_selector("#machine-body", state="attached")
    dark = colour(page, "backgroundColor")
    for view in ("machine", "chat"):
        page.click(f"[data-show={view}]")
        widths = page.evaluate(
            "['html', '#machine', '#log'].map(s => document.querySelector(s))"
            ".map(e => e.scrollWidth - e.clientWidth)"
        )
        assert widths == [0, 0, 0]
        assert page.is_visible(f"#{view}")
        assert page.locator("#machine:visible, #chat:visible").count() == 1
    assert page.evaluate("document.getAnimations().length") == 0
    seen = []
    for _ in range(3):  # light, dark, and what the system says
        page.click("#theme")
        seen.append((page.get_attribute("#theme", "aria-label"), colour(page, "backgroundColor")))
    light = seen[0][1]
    assert light != dark
    assert seen == [("Theme: Light", light), ("Theme: Dark", dark), ("Theme: Auto", dark)]
    page.click("#theme")
    page.reload()
    assert colour(page, "backgroundColor") == light  # remembered


def machine_with_gpu(state: dict[str, Any]) -> dict[str, Any]:
    """A state with all that can be drawn."""
    engine = state["engine"]
    host = engine["tiers"][0]
    engine["machine"]["gpu"] = "A card"
    engine["tiers"] = [
        host | {"tier": "device", "budget_bytes": 16 << 30, "experts_bytes": 6 << 30},
        host | {"experts_bytes": 1 << 24, "kv_taken_bytes": host["kv_bytes"] // 2},
        host | {"tier": "disk", "budget_bytes": 0, "kv_bytes": 0, "other_bytes": 0},
    ]
    ends = (("disk", "host"), ("host", "cpu"), ("host", "device"))
    engine["links"] = [
        {"source": a, "target": b, "total_bytes": 1 << 30, "rate": 2e9, "ceiling": 4e9}
        for a, b in ends
    ]
    engine["experts"] = {
        "layers": [1, 2, 3],
        "places": ["gmcd" * 8] * 3,
        "heat": [[n % 100 for n in range(32)], [50] * 32, None],
    }
    return state


def test_the_machine_is_drawn_and_works_by_keyboard(opened: Opened) -> None:
    page = opened(viewport={"width": 1280, "height": 800})
    page.route("**/v1/hmt/state", lambda r: r.fulfill(json=machine_with_gpu(r.fetch().json())))
    page.reload()
    page.wait_for_selector(".tier:has-text('A card')")
    meters = page.locator("[role=meter]").evaluate_all(
        "all => all.map(e => [e.ariaLabel, e.getAttribute('aria-valuenow')])"
    )
    assert sorted(meters) == sorted(
        [f"From {way}", "50"]
        for way in ("memory to the CPU", "memory to the GPU", "the disk to memory")
    )
    tiers = page.inner_text("#tiers").replace("\u00a0", " ")
    assert "2.00 GB/s 50% of its measured 4.00 GB/s" in tiers and "50% taken" in tiers
    assert page.locator("#limit").inner_text().startswith("Bottleneck:")
    page.focus("#heat")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.inner_text("#heat-text").startswith("Layer 2, expert 1: in memory; needed in 50%")
    page.keyboard.press("ArrowDown")
    assert "is not counted here" in page.inner_text("#heat-text")
    painted = page.locator("#heat-map").evaluate(
        "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size"
    )
    assert painted > 10

    # From the top everything is reached by Tab, in the order in which it is read, and is seen.
    page.focus(".skip")
    order = ["skip"]
    for _ in range(13):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        shown = page.evaluate(
            "(e => e.id === 'prompt' || getComputedStyle(e).outlineStyle !== 'none')"
            "(document.activeElement)"
        )
        assert shown, order
    assert order[:8] == ["skip", "chats-button", "theme", "log", "", "", "", "prompt"]
    assert order[8:] == [
        "image-button",
        "file-button",
        "settings-button",
        "send",
        "machine",
        "heat",
    ]


def test_of_several_models_one_is_chosen(opened: Opened) -> None:
    page = opened(expected="404")
    away = []

    def told(route: Any) -> None:
        other = "model=other" in route.request.url
        if other and away:
            problem = {"message": "not loaded", "type": "x", "param": None, "code": None}
            route.fulfill(status=404, json={"error": problem})
            return
        state = route.fetch(url=route.request.url.split("?")[0]).json()
        state["models"] = ["mini-dense"] if away else ["mini-dense", "other"]
        if other:
            state["model"]["name"] = "other"
        route.fulfill(json=state)

    assert page.is_hidden("#model-choice") and page.is_visible("#model-name")
    page.route("**/v1/hmt/state*", told)
    page.wait_for_selector("#model-choice:visible")
    assert page.is_hidden("#model-name") and page.title() == "mini-dense · HMT"
    page.get_by_label("Model").select_option("other")
    sync_api.expect(page).to_have_title("other · HMT", timeout=20_000)
    sent = []
    page.route("**/chat/completions", lambda route: (
        sent.append(route.request.post_data_json), route.fulfill(**stream({"content": "Yes."}))
    ))  # fmt: skip
    ask(page, "Hello")
    answered(page, 0)
    assert sent[0]["model"] == "other"
    away.append(True)  # it is unloaded: the page shows what there is
    sync_api.expect(page).to_have_title("mini-dense · HMT", timeout=20_000)
    assert page.is_hidden("#model-choice") and page.is_hidden("#problem")


@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm install --no-save axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(opened: Opened, scheme: str) -> None:
    def check(page: Any) -> None:
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found = page.evaluate("axe.run().then(found => found.violations)")
        told = [(one["id"], [node["html"][:150] for node in one["nodes"]]) for one in found]
        assert told == []

    page = opened(color_scheme=scheme, reduced_motion="reduce")
    page.route("**/v1/hmt/state*", lambda r: r.fulfill(
        json=machine_with_gpu(r.fetch().json()) | {"models": ["mini-dense", "another"]}
    ))  # fmt: skip
    parts = [{"reasoning_content": "Let me *see*."}, {"content": HOSTILE}]
    page.route("**/chat/completions", lambda route: route.fulfill(**stream(*parts)))
    page.reload()
    page.wait_for_selector(".tier:has-text('A card')")
    check(page)
    page.click("#settings-button")
    page.evaluate("import('./page/attachments.js').then(page => page.allowImages(''))")
    given(page, "paste", ("a.png", "image/png", file_of(picture(4, 4))))
    pending(page, 1)
    check(page)
    ask(page, "Hello")
    answered(page, 0).locator("summary").click()
    check(page)
    page.set_viewport_size(PHONE["viewport"])
    check(page)
    page.click("[data-show=machine]")
    check(page)
