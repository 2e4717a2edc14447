// Images as the server takes them: data URLs of four formats, large ones made smaller.

import { make } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
// All of a conversation is sent with each question, and the server bounds what it takes at once.
const LARGE_BYTES = 384 * 1024;
const SIDE_PX = 1280; // of a large image, once it is made smaller
const QUALITY = 0.85;

/** {name, url} of a file.  Rejects with words for people. */
export async function readImage(file) {
  const name = file.name || "Pasted image";
  if (!TYPES.includes(file.type)) throw new Error("images are PNG, JPEG, WebP or GIF");
  try {
    const url = file.size > LARGE_BYTES ? await smaller(file) : await asUrl(file);
    await shows(url);
    return { name, url };
  } catch {
    throw new Error("it cannot be read");
  }
}

/** Images of a message in the conversation. */
export function shownImages(images) {
  return images.map(({ name, url }) => make("img", { class: "sent", src: url, alt: name }));
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
