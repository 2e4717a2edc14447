// A dialog that asks for one line of text.

import { byId, say } from "./dom.js";

/** What is written, trimmed; "" where that is nothing or the dialog was left. */
export function askForText(title, label, value) {
  const dialog = byId("text-dialog");
  const field = byId("text-field");
  const submit = (event) => {
    event.preventDefault();
    dialog.close("given");
  };
  say(byId("text-title"), title);
  say(byId("text-ok"), label);
  field.value = value;
  dialog.returnValue = "";
  const cancel = () => dialog.close("");
  byId("text-form").addEventListener("submit", submit);
  byId("text-cancel").addEventListener("click", cancel);
  dialog.showModal();
  field.select();
  return new Promise((resolve) => {
    const closed = () => {
      byId("text-form").removeEventListener("submit", submit);
      byId("text-cancel").removeEventListener("click", cancel);
      resolve(dialog.returnValue === "given" ? field.value.trim() : "");
    };
    dialog.addEventListener("close", closed, { once: true });
  });
}
