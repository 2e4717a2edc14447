// Messages of the conversation as they are shown, with what can be done with each.

import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";
import { shownImages } from "./images.js";
import { Rendered } from "./markdown.js";
import { bytes, counted, grouped, seconds, speed } from "./units.js";

const FEWEST_TIMED = 8; // tokens; a few that come together have no speed

/** An empty turn. */
export function turnOf(role, who) {
  return make("article", { class: `turn ${role}` }, make("h3", { class: "unseen" }, who));
}

/** What a person wrote.  Returns the turn. */
export function showQuestion(message) {
  const files = message.files.map(({ name, text }) => {
    const size = bytes(new Blob([text]).size);
    return folded("file", `${name} · ${size}`, make("pre", { tabindex: 0 }, text));
  });
  const words = message.text ? [make("p", {}, message.text)] : [];
  const said = make("div", { class: "said" }, ...shownImages(message.images), ...files, ...words);
  const turn = turnOf("user", "You");
  turn.append(said);
  return turn;
}

/** What a model wrote, complete. */
export function showAnswer(message, current) {
  const turn = turnOf("assistant", "Answer");
  if (message.reasoning) {
    const thought = make("div", { class: "words" });
    new Rendered(thought).show(message.reasoning);
    turn.append(folded("reasoning", "Thoughts", thought));
  }
  const words = make("div", { class: "words" });
  new Rendered(words).show(message.text);
  turn.append(words, ...showCalls(message.calls), ...told(message.told, current));
  return turn;
}

/** Results that a person gave for calls of tools. */
export function showResults(message) {
  const turn = turnOf("tool", "Results of tools");
  turn.append(...message.results.map(({ name, text }) => folded("call", `Result of ${name}`, make("pre", { tabindex: 0 }, text))));
  return turn;
}

function folded(kind, summary, ...inside) {
  return make("details", { class: kind }, make("summary", {}, summary), ...inside);
}

/** Calls of tools, with their arguments. */
export function showCalls(calls) {
  return calls.map(({ name, arguments: given }) => {
    return folded("call", `Calls ${name}`, make("pre", { tabindex: 0 }, pretty(given)));
  });
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

/** How an answer went: its end, length, speed, and how much of its prompt was in the prefix cache. */
export function told({ model, end, tokens, prompt, cached, first_s: first, took_s: took }, current) {
  const parts = [];
  if (current && model && model !== current) parts.push(model);
  if (end === "stopped") parts.push("stopped");
  if (end === "length") parts.push("ended at its longest length");
  if (tokens) parts.push(counted(tokens, "token"));
  if (tokens >= FEWEST_TIMED && took > first) parts.push(`${speed((tokens - 1) / (took - first))} tokens/s`);
  if (first) parts.push(`first after ${seconds(first)}`);
  if (cached) parts.push(`${grouped(cached)} of ${counted(prompt, "prompt token")} reused`);
  return parts.length ? [make("p", { class: "told" }, parts.join(" · "))] : [];
}

/**
 * What can be done with a message.
 * versions: of it, among which it is number `at`; actions: {copy, again, edit, show(number)}.
 */
export function toolsOf({ role, text }, versions, at, actions) {
  const button = (label, name, act) => {
    const made = make("button", { type: "button", class: "small-action", "aria-label": label, "data-act": name }, name);
    made.addEventListener("click", act);
    return made;
  };
  const bar = make("div", { class: "acts", role: "group", "aria-label": role === "user" ? "Your message" : "This answer" });
  if (text) bar.append(copyButton("Copy message", () => text));
  if (role === "user") bar.append(button("Edit message", "Edit", actions.edit));
  else bar.append(button("Answer again", "Again", actions.again));
  if (versions > 1) {
    const step = (label, sign, to) => {
      const made = button(label, sign, () => actions.show(to));
      if (to < 0 || to >= versions) made.disabled = true;
      return made;
    };
    bar.append(
      step("Previous version", "‹", at - 1),
      make("span", { class: "version" }, make("span", { class: "unseen" }, "Version "), `${at + 1} of ${versions}`),
      step("Next version", "›", at + 1),
    );
  }
  return bar;
}

/** A form in the place of a question's words.  done(text), or done(null) for "Cancel". */
export function editor(text, done) {
  const field = make("textarea", { rows: 3, "aria-label": "Edit message" });
  field.value = text;
  const cancel = make("button", { type: "button", class: "plain" }, "Cancel");
  const send = make("button", { type: "submit", class: "send" }, "Send");
  const form = make("form", { class: "editor" }, field, make("div", { class: "actions" }, make("span", { class: "spring" }), cancel, send));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    done(field.value.trim());
  });
  cancel.addEventListener("click", () => done(null));
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      done(null);
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      done(field.value.trim());
    }
  });
  return { form, field };
}

/** A form for the results of calls.  done(results) once they are sent. */
export function resultForm(calls, done) {
  const fields = calls.map(({ name }) => {
    const field = make("textarea", { rows: 2 });
    return { field, label: make("label", { class: "field" }, `Result of ${name}`, field) };
  });
  const send = make("button", { type: "submit", class: "plain" }, "Send results");
  const form = make("form", { class: "results" }, ...fields.map(({ label }) => label), send);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    done(calls.map(({ id, name }, at) => ({ id, name, text: fields[at].field.value })));
  });
  return form;
}
