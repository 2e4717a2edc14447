// Images and text files that go with the next message: picked, pasted or dropped, and shown small
// until then.

import { byId, make, say } from "./dom.js";
import { readImage } from "./images.js";
import { bytes } from "./units.js";

const LARGEST_TEXT_BYTES = 256 * 1024; // of a file; all of it is sent with each question
const MOST = 32;

const imageButton = byId("image-button");
const list = byId("attached");
const prompt = byId("prompt");

let attached = []; // {name, url} of images, {name, text} of files
let refused = ""; // why the model takes no images
let reading = Promise.resolve(); // files in the order in which they came

/** Call once. */
export function startAttachments() {
  imageButton.addEventListener("click", () => {
    if (refused) note(`No images: ${refused}.`);
    else byId("image-file").click();
  });
  byId("file-button").addEventListener("click", () => byId("text-file").click());
  for (const id of ["image-file", "text-file"]) {
    const picker = byId(id);
    picker.addEventListener("change", () => {
      take([...picker.files]);
      picker.value = ""; // the same file may be picked again
    });
  }
  prompt.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    take(files);
  });
  const chat = byId("chat");
  const over = (event, is) => {
    if (!event.dataTransfer.types.includes("Files")) return false;
    event.preventDefault(); // or the browser would show the file instead of this page
    chat.classList.toggle("dropping", is);
    return true;
  };
  chat.addEventListener("dragover", (event) => over(event, true));
  chat.addEventListener("dragleave", (event) => over(event, chat.contains(event.relatedTarget)));
  chat.addEventListener("drop", (event) => {
    if (over(event, false)) take([...event.dataTransfer.files]);
  });
}

/** Whether the model takes images.  why: what is said where it does not; else empty. */
export function allowImages(why) {
  if (why === refused && imageButton.title) return;
  refused = why;
  imageButton.setAttribute("aria-disabled", String(Boolean(why)));
  imageButton.title = why ? `No images: ${why}` : "Add images: PNG, JPEG, WebP or GIF";
  say(byId("image-why"), why);
  note("");
  if (why) for (const one of attached.filter(({ url }) => url)) drop(one);
}

/** What goes with the message that is sent now, {images, files}, once all of it is read. */
export async function takeAttached() {
  await reading;
  const taken = attached;
  dropAttached();
  return { images: taken.filter(({ url }) => url), files: taken.filter(({ url }) => !url) };
}

export function hasAttached() {
  return attached.length > 0;
}

export function dropAttached() {
  attached = [];
  list.replaceChildren();
  list.hidden = true;
  note("");
}

function take(files) {
  note("");
  for (const file of files) reading = reading.then(() => add(file));
}

async function add(file) {
  const name = file.name || "Pasted file";
  try {
    if (attached.length >= MOST) throw new Error(`a message has ${MOST} files at most`);
    const image = file.type.startsWith("image/") && file.type !== "image/svg+xml";
    if (image && refused) {
      note(`No images: ${refused}.`);
      return;
    }
    const read = image ? await readImage(file) : { name, text: await readText(file) };
    attached.push(read);
    show(read);
    say(byId("said"), `${read.name} added`);
  } catch (error) {
    note(`${name} is not added: ${error.message}.`);
  }
}

async function readText(file) {
  if (file.size > LARGEST_TEXT_BYTES) {
    throw new Error(`it has ${bytes(file.size)}, and text files may have ${bytes(LARGEST_TEXT_BYTES)}`);
  }
  const content = await file.arrayBuffer().catch(() => {
    throw new Error("it cannot be read");
  });
  let text = "\0";
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(content);
  } catch {
    // said below
  }
  if (text.includes("\0")) throw new Error("it is neither an image nor text in UTF-8");
  return text;
}

const items = new WeakMap(); // list items of what is attached

function show(one) {
  const remove = make("button", { type: "button", "aria-label": `Remove ${one.name}`, title: "Remove" }, "×");
  const seen = one.url ? make("img", { src: one.url, alt: one.name }) : make("span", { class: "file-name" }, one.name);
  const item = make("li", {}, seen, remove);
  items.set(one, item);
  remove.addEventListener("click", () => {
    const next = item.nextElementSibling ?? item.previousElementSibling;
    drop(one);
    say(byId("said"), `${one.name} removed`);
    (next?.querySelector("button") ?? prompt).focus();
  });
  list.append(item);
  list.hidden = false;
}

function drop(one) {
  attached = attached.filter((other) => other !== one);
  items.get(one)?.remove();
  items.delete(one);
  list.hidden = !attached.length;
}

/** What could not be done, where people who see and those who hear find it. */
function note(text) {
  const place = byId("attached-note");
  place.hidden = !text;
  say(place, text);
}
