// A conversation as data: a tree of messages, in which an edited question or another answer is a
// branch beside the first one.  A message that was added never changes.

export const LARGEST_IMPORT_BYTES = 128 * 2 ** 20;
const FORMAT = "hmt-conversations";
const MOST = { conversations: 2000, messages: 10_000, attached: 64, calls: 128, name: 300, text: 2_000_000, url: 12_000_000 };
const IMAGE = /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+={0,2}$/;
const TITLE_CHARACTERS = 80;

/** What an imported file is refused for, in words for people. */
export class Refused extends Error {}

/** 96 random bits; crypto.randomUUID is missing on pages that came by http from another machine. */
export function newId() {
  const random = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "", system: "", tools: "", created: now, changed: now, leaf: null, messages: [] };
}

/** Add `message` below the one with id `parent` (null: the first); shown if that was the end. */
export function addMessage(conversation, parent, message) {
  const added = { id: newId(), parent, at: Date.now(), ...message };
  conversation.messages.push(added);
  if (conversation.leaf === parent) conversation.leaf = added.id;
  conversation.changed = added.at;
  conversation.title ||= titleOf(added);
  return added;
}

function titleOf({ text, images = [], files = [] }) {
  const named = text?.trim().split("\n")[0] || images[0]?.name || files[0]?.name || "";
  return [...named].slice(0, TITLE_CHARACTERS).join("");
}

/** The messages that are shown: from the first one to `leaf`. */
export function shownPath(conversation) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const path = [];
  for (let id = conversation.leaf; id !== null; id = path.at(-1).parent) path.push(byId.get(id));
  return path.reverse();
}

/** The message and those that stand in its place in other branches, oldest first. */
export function versions(conversation, message) {
  return conversation.messages.filter(({ parent, role }) => parent === message.parent && role === message.role);
}

/** Show the branch of `message`, down to what was written last below it. */
export function showBranch(conversation, message) {
  let leaf = message;
  const below = new Set([message.id]);
  for (const one of conversation.messages) {
    if (!below.has(one.parent)) continue; // parents come before what answers them
    below.add(one.id);
    leaf = one;
  }
  conversation.leaf = leaf.id;
}

/** Messages of both; the title, settings and branch are those of `newer`. */
export function merged(newer, older) {
  const known = new Set(newer.messages.map(({ id }) => id));
  const missing = older.messages.filter(({ id }) => !known.has(id));
  if (!missing.length) return newer;
  // Stable, and a parent is never younger than what answers it.
  const messages = [...newer.messages, ...missing].sort((a, b) => a.at - b.at);
  return { ...newer, messages: parentsFirst(messages) };
}

function parentsFirst(messages) {
  const placed = new Set([null]);
  const ordered = [];
  for (let waiting = messages; waiting.length; ) {
    const left = [];
    for (const message of waiting) {
      if (!placed.has(message.parent)) left.push(message);
      else {
        placed.add(message.id);
        ordered.push(message);
      }
    }
    if (left.length === waiting.length) return ordered; // answers to nothing
    waiting = left;
  }
  return ordered;
}

/** The messages of a path as the server wants them. */
export function asRequest(path) {
  return path.flatMap((message, at) => {
    if (message.role === "tool") {
      return message.results.map(({ id, text }) => ({ role: "tool", tool_call_id: id, content: text }));
    }
    if (message.role === "assistant") {
      // Templates want a result for each call.
      const answered = path[at + 1]?.role === "tool";
      const calls = answered ? { tool_calls: message.calls.map(asCall) } : {};
      return [{ role: "assistant", content: message.text, ...calls }];
    }
    const text = [...message.files.map(fenced), ...(message.text ? [message.text] : [])].join("\n\n");
    if (!message.images.length) return [{ role: "user", content: text }];
    const images = message.images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
    return [{ role: "user", content: [...images, ...(text ? [{ type: "text", text }] : [])] }];
  });
}

function asCall({ id, name, arguments: given }) {
  return { id, type: "function", function: { name, arguments: given } };
}

/** A file as text, in a fence that is longer than any within it. */
function fenced({ name, text }) {
  const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([marks]) => marks.length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** What a file of conversations holds. */
export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations });
}

/** Conversations of an exported file, with new ids.  Throws Refused; nothing of it is trusted. */
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Refused("it is not JSON");
  }
  if (file?.format !== FORMAT || file.version !== 1) {
    throw new Refused("it is not a file that this page has exported");
  }
  const all = list(file.conversations, MOST.conversations, "conversations").map(checked);
  if (!all.length) throw new Refused("it has no conversations");
  return all;
}

function checked(raw) {
  const made = newConversation();
  made.title = string(raw?.title, MOST.name, "title");
  made.system = string(raw.system, MOST.text, "system prompt");
  made.tools = string(raw.tools ?? "", MOST.text, "list of tools");
  made.created = time(raw.created);
  made.changed = time(raw.changed);
  const known = new Map([[null, null]]); // ids of the file, and ours
  const roles = new Map([[null, null]]);
  for (const one of list(raw.messages, MOST.messages, "messages")) {
    const id = string(one?.id, MOST.name, "id");
    if (known.has(id)) throw new Refused("two of its messages have one id");
    if (!known.has(one.parent)) throw new Refused("a message answers one that does not come before it");
    const message = checkedMessage(one, roles.get(one.parent));
    const added = { id: newId(), parent: known.get(one.parent), at: time(one.at), ...message };
    known.set(id, added.id);
    roles.set(id, message.role);
    made.messages.push(added);
  }
  made.leaf = known.get(raw.leaf) ?? made.messages.at(-1)?.id ?? null;
  return made;
}

// A question that was not answered may be followed by another one.
const FOLLOWS = { user: [null, "user", "assistant", "tool"], assistant: ["user", "tool"], tool: ["assistant"] };

function checkedMessage(raw, before) {
  const role = raw.role;
  if (!Object.hasOwn(FOLLOWS, role) || !FOLLOWS[role].includes(before)) {
    throw new Refused("its messages do not follow each other as in a conversation");
  }
  const name = (value) => string(value, MOST.name, "name");
  const words = (value) => string(value, MOST.text, "text");
  if (role === "tool") {
    const results = list(raw.results, MOST.calls, "results");
    return { role, results: results.map((one) => ({ id: name(one?.id), name: name(one.name), text: words(one.text) })) };
  }
  const text = words(raw.text);
  if (role === "user") {
    const images = list(raw.images, MOST.attached, "images").map((one) => {
      const url = string(one?.url, MOST.url, "image");
      if (!IMAGE.test(url)) throw new Refused("one of its images is not PNG, JPEG, WebP or GIF");
      return { name: name(one.name), url };
    });
    const files = list(raw.files, MOST.attached, "files");
    return { role, text, images, files: files.map((one) => ({ name: name(one?.name), text: words(one.text) })) };
  }
  const calls = list(raw.calls, MOST.calls, "calls").map((one) => {
    return { id: name(one?.id), name: name(one.name), arguments: words(one.arguments) };
  });
  return { role, text, reasoning: words(raw.reasoning), calls, told: checkedTold(raw.told) };
}

function checkedTold(raw) {
  const told = { model: string(raw?.model, MOST.name, "model"), end: string(raw.end, MOST.name, "end") };
  for (const field of ["tokens", "prompt", "cached", "first_s", "took_s"]) told[field] = number(raw[field]);
  return told;
}

function list(value, most, what) {
  if (!Array.isArray(value)) throw new Refused(`its ${what} are not a list`);
  if (value.length > most) throw new Refused(`it has ${value.length} ${what} in one list, and ${most} are read at most`);
  return value;
}

function string(value, most, what) {
  if (typeof value !== "string") throw new Refused(`a ${what} is missing`);
  if (value.length > most) throw new Refused(`a ${what} has ${value.length} characters, and ${most} are read at most`);
  return value;
}

function number(value) {
  if (typeof value !== "number" || !(value >= 0)) throw new Refused("a number is missing");
  return value;
}

function time(value) {
  return Math.min(number(value), Date.now());
}
