// Whether conversations are kept in this browser, and what is said where they cannot be.

import { byId, say } from "./dom.js";
import { reasonOf, save } from "./store.js";

const OFF = "hmt-keep-nothing";

let saving = Promise.resolve(); // in order

export function keepsNothing() {
  return localStorage.getItem(OFF) !== null;
}

/** What is kept already stays until it is deleted. */
export function keepNothing(is) {
  if (is) localStorage.setItem(OFF, "yes");
  else localStorage.removeItem(OFF);
  showWhere();
}

export function showWhere() {
  const text = keepsNothing()
    ? "Chats are not kept: this one ends with this page."
    : "Chats are kept in this browser, on this device, until you delete them.";
  say(byId("kept-where"), `Nothing that you write leaves this server. ${text}`);
}

/** Have the address name the conversation with this id, so that it is there after a reload; "": none. */
export function addressed(id) {
  const kept = id && !keepsNothing();
  history.replaceState(null, "", kept ? `#chat=${id}` : location.pathname);
}

/** Keep the conversation as it is now, in the background.  quiet: say nothing where that fails. */
export function keep(conversation, quiet = false) {
  if (keepsNothing()) return;
  const now = structuredClone(conversation); // it goes on meanwhile
  saving = saving.then(async () => {
    try {
      const kept = await save(now);
      if (!quiet) note(kept ? "" : "This chat was deleted in this browser, and is not kept any more.");
    } catch (error) {
      if (!quiet) note(`This chat is not kept: ${reasonOf(error)}. Its messages stay until this page is closed.`);
    }
  });
}

/** Resolves once all that was to be kept is written. */
export function kept() {
  return saving;
}

function note(text) {
  const place = byId("kept-note");
  place.hidden = !text;
  say(place, text);
}
