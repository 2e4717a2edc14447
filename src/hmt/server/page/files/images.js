// Images that go with the next message: picked, pasted or dropped, and shown small until then.

import { byId, make, say } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
// All of a conversation is sent with each question, and the server bounds what it takes at once.
const LARGE_BYTES = 384 * 1024;
const SIDE_PX = 1280; // of a large image, once it is made smaller
const QUALITY = 0.85;

const button = byId("image-button");
const list = byId("images");
const picker = byId("image-file");
const prompt = byId("prompt");

let images = []; // {name, url}: data URLs
let refused = ""; // why the model takes none
let reading = Promise.resolve(); // files in the order in which they came

/** Call once. */
export function startImages() {
  button.addEventListener("click", () => {
    if (refused) note(`No images: ${refused}.`);
    else picker.click();
  });
  picker.addEventListener("change", () => {
    take([...picker.files]);
    picker.value = ""; // the same file may be picked again
  });
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
    chat.classList.toggle("dropping", is && !refused);
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
  if (why === refused && button.title) return;
  refused = why;
  button.setAttribute("aria-disabled", String(Boolean(why)));
  button.title = why ? `No images: ${why}` : "Add images: PNG, JPEG, WebP or GIF";
  say(byId("image-why"), why);
  note("");
  if (why) clear();
}

/** What goes with the message that is sent now, once all of it is read; nothing is left. */
export async function takeImages() {
  await reading;
  const taken = images;
  clear();
  note("");
  return taken;
}

/** Parts of a message, as the server wants them. */
export function partsOf(taken) {
  return taken.map(({ url }) => ({ type: "image_url", image_url: { url } }));
}

/** Images of a message in the conversation. */
export function shownImages(taken) {
  return taken.map(({ name, url }) => make("img", { class: "sent", src: url, alt: name }));
}

export function hasImages() {
  return images.length > 0;
}

export function dropImages() {
  clear();
  note("");
}

function take(files) {
  if (refused) {
    note(`No images: ${refused}.`);
    return;
  }
  note("");
  for (const file of files) reading = reading.then(() => add(file));
}

async function add(file) {
  const name = file.name || "Pasted image";
  if (!TYPES.includes(file.type)) {
    note(`${name} is not added: images are PNG, JPEG, WebP or GIF.`);
    return;
  }
  try {
    const url = file.size > LARGE_BYTES ? await smaller(file) : await asUrl(file);
    const image = { name, url };
    await shows(url);
    images.push(image);
    show(image);
    say(byId("said"), `${name} added`);
  } catch {
    note(`${name} is not added: it cannot be read.`);
  }
}

function asUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", reject);
    reader.readAsDataURL(file);
  });
}

/** Throws where a browser cannot show it; then no server can. */
async function shows(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
}

/** As a JPEG of fewer pixels, on white. */
async function smaller(file) {
  const whole = await createImageBitmap(file);
  const scale = Math.min(1, SIDE_PX / Math.max(whole.width, whole.height));
  const canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(whole.width * scale));
  canvas.height = Math.max(1, Math.round(whole.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.imageSmoothingQuality = "high";
  context.drawImage(whole, 0, 0, canvas.width, canvas.height);
  whole.close();
  return canvas.toDataURL("image/jpeg", QUALITY);
}

function show(image) {
  const remove = make("button", { type: "button", "aria-label": `Remove ${image.name}`, title: "Remove" }, "×");
  const item = make("li", {}, make("img", { src: image.url, alt: image.name }), remove);
  remove.addEventListener("click", () => {
    const next = item.nextElementSibling ?? item.previousElementSibling;
    images = images.filter((one) => one !== image);
    item.remove();
    list.hidden = !images.length;
    say(byId("said"), `${image.name} removed`);
    (next?.querySelector("button") ?? prompt).focus();
  });
  list.append(item);
  list.hidden = false;
}

function clear() {
  images = [];
  list.replaceChildren();
  list.hidden = true;
}

/** What could not be done, where people who see and those who hear find it. */
function note(text) {
  const place = byId("image-note");
  place.hidden = !text;
  say(place, text);
}
