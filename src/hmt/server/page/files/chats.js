// The list of conversations that are kept: opened, renamed, deleted, exported and imported.

import { askForText } from "./asking.js";
import { beginAnew, opened, openConversation } from "./chat.js";
import { exported, imported, LARGEST_IMPORT_BYTES, Refused } from "./conversation.js";
import { byId, make, say } from "./dom.js";
import { addressed, keepNothing, keepsNothing, kept, showWhere } from "./keeping.js";
import { isKept, read, readAll, reasonOf, remove, removeAll, rename, save, summaries } from "./store.js";
import { bytes, counted } from "./units.js";

const LONGEST_TITLE = 200;

const dialog = byId("chats-dialog");
const list = byId("chats");

/** Call once.  Opens the conversation that the address names. */
export async function startChats() {
  showWhere();
  byId("chats-button").addEventListener("click", async () => {
    dialog.showModal();
    say(byId("chats-note"), "");
    await kept();
    await show();
  });
  byId("chats-close").addEventListener("click", () => dialog.close());
  byId("keep").checked = !keepsNothing();
  byId("keep").addEventListener("change", (event) => keepNothing(!event.target.checked));
  byId("chats-export").addEventListener("click", async () => download(await readAll(), "hmt-chats.json"));
  byId("chats-import").addEventListener("click", () => byId("chats-file").click());
  byId("chats-file").addEventListener("change", async (event) => {
    const [file] = event.target.files;
    if (file) await take(file);
    event.target.value = "";
  });
  confirmed(byId("chats-remove"), "Delete all", async () => {
    await removeAll();
    leave(opened().id);
    await show();
    note("All chats are deleted");
    byId("chats-close").focus();
  });
  const [, id] = /^#chat=([0-9a-f]{24})$/.exec(location.hash) ?? [];
  const found = id && (await read(id).catch(() => undefined));
  if (found && !opened().messages.length) go(found);
  else if (id) addressed("");
}

function go(conversation) {
  isKept(conversation.id);
  openConversation(conversation);
}

/** The open conversation ends where it is the one that was deleted. */
function leave(id) {
  if (opened().id === id) beginAnew();
}

async function show() {
  let all = [];
  try {
    all = await summaries();
  } catch (error) {
    note(`Nothing can be read: ${reasonOf(error)}`);
  }
  const size = all.reduce((sum, one) => sum + one.bytes, 0);
  const count = all.length ? `${counted(all.length, "chat")}, ${bytes(size)}. ` : "None yet. ";
  const where = "They are in this browser on this device and nowhere else: all who use it can read them, and the browser may clear them with its data.";
  say(byId("chats-about"), count + where);
  byId("chats-remove").hidden = byId("chats-export").hidden = !all.length;
  list.hidden = !all.length;
  list.replaceChildren(...all.map(row));
}

function row({ id, title, changed, messages }) {
  const name = title || "Untitled";
  const when = new Date(changed).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
  const about = make("span", { class: "quiet small" }, `${when} · ${counted(messages, "message")}`);
  const open = make("button", { type: "button", class: "chat-row" }, make("span", { class: "chat-title" }, name), about);
  if (opened().id === id) open.setAttribute("aria-current", "true");
  const small = (label) => make("button", { type: "button", class: "small-action", "aria-label": `${label} ${name}` }, label);
  const [renaming, exporting, removing] = ["Rename", "Export", "Delete"].map(small);
  open.addEventListener("click", async () => {
    const found = await read(id);
    if (!found) return show();
    dialog.close();
    if (opened().id !== id) go(found);
  });
  renaming.addEventListener("click", async () => {
    const given = (await askForText("Name of the chat", "Rename", name)).slice(0, LONGEST_TITLE);
    if (given) {
      await rename(id, given);
      if (opened().id === id) opened().title = given;
      await show();
    }
    focusRow(id, "Rename");
  });
  exporting.addEventListener("click", async () => download([await read(id)], `${fileName(name)}.json`));
  const item = make("li", { "data-id": id }, open, make("div", { class: "acts" }, renaming, exporting, removing));
  confirmed(removing, "Delete", async () => {
    const next = item.nextElementSibling ?? item.previousElementSibling;
    await remove(id);
    leave(id);
    await show();
    note(`${name} deleted`);
    if (next) focusRow(next.dataset.id, "Delete");
    else byId("chats-close").focus();
  });
  return item;
}

function focusRow(id, label) {
  const buttons = [...list.querySelectorAll(`[data-id="${id}"] .small-action`)];
  buttons.find((one) => one.textContent === label)?.focus();
}

/** A button that acts when it is pressed a second time. */
function confirmed(button, label, act) {
  const named = button.getAttribute("aria-label");
  const set = (asking) => {
    button.classList.toggle("sure", asking);
    say(button, asking ? "Really?" : label);
    if (asking) button.setAttribute("aria-label", `Really ${named ?? label}?`);
    else if (named) button.setAttribute("aria-label", named);
    else button.removeAttribute("aria-label");
  };
  button.addEventListener("click", async () => {
    const sure = button.classList.contains("sure");
    set(!sure);
    if (sure) await act();
  });
  button.addEventListener("blur", () => set(false));
}

function fileName(title) {
  return title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
}

function download(conversations, name) {
  const url = URL.createObjectURL(new Blob([exported(conversations)], { type: "application/json" }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function take(file) {
  try {
    if (file.size > LARGEST_IMPORT_BYTES) {
      throw new Refused(`it has ${bytes(file.size)}, and ${bytes(LARGEST_IMPORT_BYTES)} are read at most`);
    }
    const all = imported(await file.text());
    for (const one of all) await save(one);
    note(`${counted(all.length, "chat")} imported`);
  } catch (error) {
    if (error instanceof Refused) note(`${file.name} is not imported: ${error.message}.`);
    else note(`${file.name} is not imported, or not all of it: ${reasonOf(error)}.`);
  }
  await show();
}

function note(text) {
  say(byId("chats-note"), text);
}
