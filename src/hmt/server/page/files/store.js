// Conversations and presets in this browser's IndexedDB.  One record for each conversation, and a
// small one beside it, so that the list reads no images.

import { merged } from "./conversation.js";

const STORES = { conversations: "id", summaries: "id", presets: "name" };

let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("hmt", 1);
    request.addEventListener("upgradeneeded", () => {
      for (const [name, keyPath] of Object.entries(STORES)) request.result.createObjectStore(name, { keyPath });
    });
    request.addEventListener("success", () => {
      request.result.addEventListener("versionchange", () => request.result.close());
      resolve(request.result);
    });
    request.addEventListener("error", () => reject(request.error));
  });
  return opening;
}

/** Run `work` in one transaction; resolves to what it returned once all of it is written. */
async function transaction(names, mode, work) {
  const open = await database();
  return new Promise((resolve, reject) => {
    const own = open.transaction(names, mode);
    const result = {};
    own.addEventListener("complete", () => resolve(result.value));
    own.addEventListener("abort", () => reject(own.error ?? new DOMException("aborted", "AbortError")));
    work((name) => own.objectStore(name), (value) => { result.value = value; });
  });
}

function all(name) {
  return transaction([name], "readonly", (store, give) => {
    const request = store(name).getAll();
    request.addEventListener("success", () => give(request.result));
  });
}

/** {id, title, changed, messages, bytes} of each, the one that changed last first. */
export async function summaries() {
  return (await all("summaries")).sort((a, b) => b.changed - a.changed);
}

/** The conversation with this id, or undefined. */
export function read(id) {
  return transaction(["conversations"], "readonly", (store, give) => {
    const request = store("conversations").get(id);
    request.addEventListener("success", () => give(request.result));
  });
}

export function readAll() {
  return all("conversations");
}

const written = new Set(); // ids that this page has written or read

/** Mark a conversation as one that the store has, so that saving it later does not bring it back. */
export function isKept(id) {
  written.add(id);
}

/**
 * Write a conversation, with what another tab has added to it; false where it was deleted meanwhile.
 * Rejects with a QuotaExceededError where the browser has no room.
 */
export async function save(conversation) {
  const { id } = conversation;
  const kept = await transaction(["conversations", "summaries"], "readwrite", (store, give) => {
    const request = store("conversations").get(id);
    request.addEventListener("success", () => {
      const older = request.result;
      give(Boolean(older) || !written.has(id));
      if (!older && written.has(id)) return;
      const whole = older ? merged(conversation, older) : conversation;
      store("conversations").put(whole);
      store("summaries").put(summary(whole));
    });
  });
  written.add(id);
  return kept;
}

function summary({ id, title, changed, messages }) {
  return { id, title, changed, messages: messages.length, bytes: JSON.stringify(messages).length };
}

export function rename(id, title) {
  return transaction(["conversations", "summaries"], "readwrite", (store) => {
    for (const name of ["conversations", "summaries"]) {
      const request = store(name).get(id);
      request.addEventListener("success", () => {
        if (request.result) store(name).put({ ...request.result, title });
      });
    }
  });
}

export function remove(id) {
  return transaction(["conversations", "summaries"], "readwrite", (store) => {
    store("conversations").delete(id);
    store("summaries").delete(id);
  });
}

export function removeAll() {
  return transaction(["conversations", "summaries"], "readwrite", (store) => {
    store("conversations").clear();
    store("summaries").clear();
  });
}

/** {name, system, temperature, longest} of each. */
export function presets() {
  return all("presets");
}

export function savePreset(preset) {
  return transaction(["presets"], "readwrite", (store) => store("presets").put(preset));
}

export function removePreset(name) {
  return transaction(["presets"], "readwrite", (store) => store("presets").delete(name));
}

/** Why something could not be kept, in words for people. */
export function reasonOf(error) {
  if (error?.name !== "QuotaExceededError") return "this browser lets the page keep nothing";
  return "the browser's room for this page is full: delete chats, or export them first";
}
