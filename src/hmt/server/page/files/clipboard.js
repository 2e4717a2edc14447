// Copying: navigator.clipboard is missing on pages that came by http from another machine.

import { make, say } from "./dom.js";

const SAID_MS = 1500;

/** A button that copies what `text()` gives when it is pressed. */
export function copyButton(label, text) {
  const words = make("span", {}, "Copy");
  const button = make("button", { type: "button", class: "small-action copy", "aria-label": label }, words);
  button.addEventListener("click", async () => {
    const done = (await copied(text())) ? "Copied" : "Not copied";
    say(words, done);
    button.setAttribute("aria-label", done);
    setTimeout(() => {
      say(words, "Copy");
      button.setAttribute("aria-label", label);
    }, SAID_MS);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedBySelection(text);
  }
}

function copiedBySelection(text) {
  const before = document.activeElement;
  const field = make("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  (before?.closest("dialog") ?? document.body).append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}
