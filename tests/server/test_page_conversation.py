"""Conversations of the page at /, in Chromium: by keyboard, kept, branched, exported, imported."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page_in_browser import (
    AXE,
    MARKS,
    SCREENSHOTS,
    Opened,
    answered,
    ask,
    opening,
    served,
    stream,
    sync_api,
)
from vision_models import picture

from hmt.engine import LoadedModel

pytestmark = MARKS
FOCUSED = """() => {
    const e = document.activeElement;
    return [e.id, e.getAttribute('aria-label'), e.textContent.trim(), e.className];
}"""


def tab_to(page: Any, name: str, backwards: bool = False) -> None:
    """Press Tab until an element with this id, label, text or class has the focus."""
    for _ in range(60):
        page.keyboard.press("Shift+Tab" if backwards else "Tab")
        if name in page.evaluate(FOCUSED):
            return
    raise AssertionError(f"{name} is not reached by keyboard")


def press(page: Any, name: str, backwards: bool = False) -> None:
    tab_to(page, name, backwards)
    page.keyboard.press("Enter")


def shown(page: Any) -> list[str]:
    """The words of the turns that are shown."""
    return page.locator(".said p, .turn.assistant > .words").all_inner_texts()  # type: ignore[no-any-return]


def accessible(page: Any) -> None:
    if AXE.exists():
        page.evaluate(AXE.read_text(encoding="utf-8"))
        found = page.evaluate("axe.run().then(found => found.violations)")
        told = [(one["id"], [node["html"][:150] for node in one["nodes"]]) for one in found]
        assert told == []


def list_of_chats(page: Any) -> None:
    """Rename, export and delete the only one."""
    press(page, "chats-button", backwards=True)
    page.wait_for_selector("#chats li")
    accessible(page)
    press(page, "Rename First question")
    page.keyboard.type("Renamed")
    page.keyboard.press("Enter")
    page.wait_for_selector("#chats >> text=Renamed")
    with page.expect_download() as download:
        press(page, "Export Renamed")
    assert download.value.suggested_filename == "Renamed.json"
    saved = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert [m["role"] for m in saved["conversations"][0]["messages"]] == [
        "user", "assistant", "assistant", "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    press(page, "Delete Renamed")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Renamed deleted")
    page.keyboard.press("Escape")
    assert shown(page) == [] and page.is_visible("#greeting")
    page.reload()
    page.wait_for_selector("#greeting")
    assert shown(page) == []


def test_a_whole_conversation_by_keyboard(
    browser: Any, seeing: LoadedModel, tmp_path: Path
) -> None:
    picture(37, 21).save(tmp_path / "a.png")
    (tmp_path / "notes.txt").write_text("```\n<b>one</b>\n", encoding="utf-8")
    with served(seeing) as at, opening(browser, at) as opened:
        page = opened(accept_downloads=True)
        sent: list[Any] = []
        page.on("request", lambda r: sent.append(r.post_data_json) if r.post_data else None)
        page.wait_for_selector("#image-button[aria-disabled=false]")
        press(page, "settings-button")
        tab_to(page, "longest")
        page.keyboard.type("6")
        press(page, "settings-button")
        tab_to(page, "prompt", backwards=True)
        page.keyboard.type("First question")
        page.keyboard.press("Enter")
        answered(page, 0)
        page.locator(".acts >> text=Again").wait_for()

        # Another answer, and back to the first one.
        press(page, "Answer again", backwards=True)
        page.wait_for_selector("text=2 of 2")
        first_answer, second_answer = (len(shown(page)), shown(page)[1])
        assert first_answer == 2
        press(page, "Previous version", backwards=True)
        page.wait_for_selector("text=1 of 2")
        assert page.evaluate(FOCUSED)[1] == "Next version"  # there is no previous one now
        page.keyboard.press("Enter")
        assert shown(page)[1] == second_answer

        # A file of each kind, and an edited question.
        for button, name in (("image-button", "a.png"), ("file-button", "notes.txt")):
            with page.expect_file_chooser() as chooser:
                press(page, button)
            chooser.value.set_files([tmp_path / name])
            page.wait_for_selector(f"#attached :is([alt='{name}'], :text('{name}'))")
        tab_to(page, "prompt", backwards=True)
        page.keyboard.type("What is this?")
        page.keyboard.press("Enter")
        answered(page, 1)
        content = sent[-1]["messages"][2]["content"]
        assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")
        wanted = "File notes.txt:\n````\n```\n<b>one</b>\n````\n\nWhat is this?"
        assert content[1] == {"type": "text", "text": wanted}
        page.locator(".turn >> nth=3").locator(".acts").wait_for()
        press(page, "Edit message", backwards=True)
        page.keyboard.press("Control+A")
        page.keyboard.type("And what is that?")
        page.keyboard.press("Enter")
        page.wait_for_selector("text=And what is that?")
        page.locator(".turn >> nth=3").locator(".acts").wait_for()
        assert sent[-1]["messages"][2]["content"][0] == content[0]  # the image stays
        whole = shown(page)
        assert (whole[0], whole[2]) == ("First question", "And what is that?")
        accessible(page)
        page.screenshot(path=SCREENSHOTS / "page-branches.png")

        # After a reload all of it is there, with its branches.
        page.reload()
        page.wait_for_selector("text=And what is that?")
        assert shown(page) == whole and page.locator(".said img").count() == 1
        assert page.locator(".version").all_text_contents() == ["Version 2 of 2"] * 2
        press(page, "Previous version", backwards=True)
        assert shown(page)[2] == "What is this?"

        list_of_chats(page)


CALL = {"index": 0, "id": "call_1", "function": {"name": "add", "arguments": '{"a": 1}'}}
USAGE = {
    "completion_tokens": 9,
    "prompt_tokens": 120,
    "prompt_tokens_details": {"cached_tokens": 96},
}


def test_tools_presets_models_and_copies(opened: Opened) -> None:
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    sent: list[Any] = []
    answers = [
        stream({"tool_calls": [CALL]}),  # type: ignore[dict-item]
        stream({"content": "```py\nprint(1)\n```"}),
    ]
    usage = json.dumps({"choices": [], "usage": USAGE})
    answers[1]["body"] = answers[1]["body"].replace(
        "data: [DONE]", f"data: {usage}\n\ndata: [DONE]"
    )
    page.route("**/chat/completions", lambda route: (
        sent.append(route.request.post_data_json), route.fulfill(**answers[len(sent) - 1])
    ))  # fmt: skip
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    page.click("#settings-button")
    page.fill("#tools", "{}")
    page.locator("#tools").blur()
    assert "no JSON list" in page.inner_text("#settings-note")
    page.fill("#tools", json.dumps(tools))
    page.get_by_label("Preset").select_option("Programmer")
    page.fill("#system", "You add.")
    page.click("#preset-save")
    page.keyboard.type("Adding")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=Preset Adding is kept")
    ask(page, "Add")
    assert page.locator("summary").inner_text() == "Calls add"
    page.get_by_label("Result of add").fill("3")
    page.click("text=Send results")
    turn = answered(page, 1)
    assert sent[0]["tools"] == tools and sent[0]["temperature"] == 0.2
    roles = [message["role"] for message in sent[1]["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    assert sent[1]["messages"][3] == {"role": "tool", "tool_call_id": "call_1", "content": "3"}
    assert "96 of 120 prompt tokens reused" in turn.locator(".told").inner_text()
    turn.get_by_label("Copy code").click()
    page.wait_for_selector("text=Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "print(1)"
    page.reload()
    page.wait_for_selector(".turn.tool")
    assert page.input_value("#system") == "You add."
    page.click("#settings-button")
    page.get_by_label("Preset").select_option("Adding")
    page.click("#preset-remove")
    page.wait_for_selector("text=Preset Adding deleted")


def message(parent: str | None, identity: str, role: str, **others: Any) -> dict[str, Any]:
    content = {
        "user": {"text": identity, "images": [], "files": []},
        "assistant": {
            "text": identity, "reasoning": "", "calls": [],
            "told": {"model": "m", "end": "stop", "tokens": 1, "prompt": 1, "cached": 0,
                     "first_s": 0.1, "took_s": 0.2},
        },
    }[role]  # fmt: skip
    return {"id": identity, "parent": parent, "role": role, "at": 1} | content | others


GOOD: dict[str, Any] = {
    "format": "hmt-conversations",
    "version": 1,
    "conversations": [
        {
            "id": "<img src=x onerror=alert(1)>", "title": "<script>alert(2)</script>",
            "system": "", "tools": "", "created": 1, "changed": 1e300, "leaf": "a",
            "messages": [message(None, "q", "user"), message("q", "a", "assistant")],
        }
    ],
}  # fmt: skip

Change = Callable[[dict[str, Any]], object]
HOSTILE: list[Change] = [
    lambda c: c.update(messages="none"),
    lambda c: c.update(title=["a"]),
    lambda c: c.update(created=-1),
    lambda c: c.pop("system"),
    lambda c: c.update(title="x" * 1000),
    lambda c: c["messages"].insert(0, None),
    lambda c: c["messages"].reverse(),
    lambda c: c["messages"][0].update(parent="a"),  # a circle
    lambda c: c["messages"][1].update(id="q"),
    lambda c: c["messages"][1].update(parent=None),  # an answer to nothing
    lambda c: c["messages"][0].update(role="system"),
    lambda c: c["messages"][0].update(role="constructor"),
    lambda c: c["messages"][0].update(text={"toString": "x"}),
    lambda c: c["messages"][0].update(images=[{"name": "a", "url": "http://elsewhere/a.png"}]),
    lambda c: c["messages"][0].update(images=[{"name": "a", "url": "data:image/svg+xml,<svg/>"}]),
    lambda c: c["messages"][0].update(files=[None]),
    lambda c: c["messages"][1]["told"].update(tokens="9"),
    lambda c: c["messages"].extend([copy.deepcopy(c["messages"][0])] * 10_000),
]


def test_imports_are_checked_and_a_full_store_is_told(opened: Opened, tmp_path: Path) -> None:
    page = opened(accept_downloads=True)
    page.click("#chats-button")
    files = ["[" * 200_000, "{}", "", "null", json.dumps(GOOD | {"conversations": []})]
    for change in HOSTILE:
        bad = copy.deepcopy(GOOD)
        change(bad["conversations"][0])
        files.append(json.dumps(bad))
    for number, content in enumerate(files):
        (tmp_path / f"{number}.json").write_text(content, encoding="utf-8")
        page.set_input_files("#chats-file", tmp_path / f"{number}.json")
        page.wait_for_selector(f"#chats-note:has-text('{number}.json is not imported: ')")
    assert page.locator("#chats li").count() == 0

    # Names that are markup stay text; the same file twice is two chats; nothing is overwritten.
    polluted = json.dumps(GOOD).replace('"version"', '"__proto__": {"polluted": 1}, "version"')
    (tmp_path / "good.json").write_text(polluted, encoding="utf-8")
    for count in (1, 2):
        page.set_input_files("#chats-file", tmp_path / "good.json")
        sync_api.expect(page.locator("#chats li")).to_have_count(count, timeout=20_000)
    assert page.evaluate("({}).polluted") is None
    page.click(".chat-row >> nth=0")
    page.wait_for_selector(".turn.assistant")
    assert page.inner_text(".said p") == "q" and page.locator("script").count() == 1
    assert "<script>" in page.inner_text("#said")
    page.click("#chats-button")
    with page.expect_download() as download:
        page.click("#chats-export")
    again = json.loads(Path(download.value.path()).read_text(encoding="utf-8"))
    assert [one["title"] for one in again["conversations"]] == ["<script>alert(2)</script>"] * 2
    page.click("#chats-close")

    # Keeping can be switched off, and all can be deleted.
    page.click("#chats-button")
    page.click("#chats-remove")
    page.click("#chats-remove")
    page.wait_for_selector("text=All chats are deleted")
    page.route("**/chat/completions", lambda route: route.fulfill(**stream({"content": "Yes."})))
    page.uncheck("#keep")
    page.click("#chats-close")
    assert page.inner_text("#kept-where").endswith("this one ends with this page.")
    ask(page, "Hello")
    answered(page, 0)
    page.reload()
    page.wait_for_selector("#greeting")
    page.click("#chats-button")
    assert page.inner_text("#chats-about").startswith("None yet.")

    # No room: said, and the chat goes on.  (What a browser knew of its room it knows for a while.)
    full = opened()
    limits = full.context.new_cdp_session(full)
    origin = full.evaluate("location.origin")
    limits.send("Storage.overrideQuotaForOrigin", {"origin": origin, "quotaSize": 1000})
    full.route("**/chat/completions", lambda route: route.fulfill(**stream({"content": "Yes."})))
    ask(full, "x" * 100_000)
    assert answered(full, 0).locator(".words").inner_text() == "Yes."
    full.wait_for_selector("#kept-note:has-text('is not kept: the browser')")
    limits.send("Storage.overrideQuotaForOrigin", {"origin": origin})
    ask(full, "And now?")
    answered(full, 1)
    sync_api.expect(full.locator("#kept-note")).to_be_hidden(timeout=20_000)


def test_a_chat_in_two_tabs_keeps_the_messages_of_both(opened: Opened) -> None:
    page = opened()
    page.route("**/chat/completions", lambda route: route.fulfill(**stream({"content": "Yes."})))
    ask(page, "One")
    answered(page, 0)
    sync_api.expect(page.locator("#said")).to_contain_text("complete", timeout=20_000)
    other = page.context.new_page()
    other.goto(page.url)
    other.wait_for_selector(".turn.assistant")
    other.route("**/chat/completions", lambda route: route.fulfill(**stream({"content": "No."})))
    for tab, text in ((other, "Two"), (page, "Three")):
        ask(tab, text)
        answered(tab, 1)
        tab.wait_for_timeout(50)
    page.reload()
    page.wait_for_selector(".said >> text=Three")
    assert page.locator(".version").text_content() == "Version 2 of 2"
    page.get_by_label("Previous version").click()
    page.wait_for_selector(".said >> text=Two")

    # Deleted in one tab, it does not come back from the other.
    page.click("#chats-button")
    page.click("#chats >> text=Delete")
    page.click("#chats >> text=Really?")
    page.wait_for_selector("text=One deleted")
    ask(other, "Four")
    other.wait_for_selector("#kept-note:has-text('was deleted')")


def test_a_model_is_loaded_from_the_list(opened: Opened) -> None:
    page = opened(expected="503")
    waits: list[Any] = []
    loaded: list[str] = []

    def told(route: Any) -> None:
        state = route.fetch(url=route.request.url.split("?")[0]).json()
        if "model=other" in route.request.url:
            state["model"]["name"] = "other"
        names = ["mini-dense", *loaded]
        more = {"loadable": [n for n in ("mini-dense", "other") if n not in names], "models": names}
        route.fulfill(json=state | more | {"loading": {"other": 0.25} if waits else {}})

    page.route("**/v1/hmt/state*", told)
    page.route("**/v1/models/load", lambda route: waits.append(route))
    page.wait_for_selector("#model-choice:visible")
    choice = page.get_by_label("Model", exact=True)
    for works in (False, True):
        choice.select_option("other")
        page.wait_for_selector("text=Loading other: 25%")
        assert page.get_by_role("progressbar").evaluate("e => e.value") == 0.25
        assert page.title() == "mini-dense · HMT"
        if works:
            loaded.append("other")
            waits.pop().fulfill(json={})
            sync_api.expect(page).to_have_title("other · HMT", timeout=20_000)
        else:
            problem = {"message": "no room", "type": "x", "param": None, "code": None}
            waits.pop().fulfill(status=503, json={"error": problem})
            page.wait_for_selector("text=other is not loaded: No room")
            assert choice.input_value() == "mini-dense"
        sync_api.expect(page.locator("#loading")).to_be_hidden(timeout=20_000)
    assert page.is_hidden("#problem")
