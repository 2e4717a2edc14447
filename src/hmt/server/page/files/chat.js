// The conversation that is open: shown, gone on with, branched, and sent whole with each question.

import { Answer } from "./answer.js";
import { chat as answers, Problem } from "./api.js";
import { dropAttached, hasAttached, startAttachments, takeAttached } from "./attachments.js";
import { addMessage, asRequest, newConversation, showBranch, shownPath, versions } from "./conversation.js";
import { byId, make, say } from "./dom.js";
import { addressed, keep } from "./keeping.js";
import { settings, showSettings, startSettings } from "./settings.js";
import { editor, resultForm, showAnswer, showQuestion, showResults, toolsOf } from "./turns.js";
import { counted } from "./units.js";

const NEAR_END_PX = 80;

const log = byId("log");
const prompt = byId("prompt");
const send = byId("send");
const stop = byId("stop");

let model = null; // its name; null: the server's own
let open = newConversation();
let answering = null; // AbortController of the answer that comes
let sending = false; // files of the next message are being read
let needsKey = async () => false;

/** Call once.  `askForKey` resolves to whether there is a new key. */
export function startChat(askForKey) {
  needsKey = askForKey;
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit(prompt.value);
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit(prompt.value);
    }
  });
  prompt.addEventListener("input", fitPrompt);
  stop.addEventListener("click", () => answering?.abort());
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && answering && !document.querySelector("dialog[open]")) answering.abort();
  });
  byId("anew").addEventListener("click", () => beginAnew());
  for (const idea of byId("ideas").querySelectorAll("button")) {
    idea.addEventListener("click", () => submit(idea.textContent));
  }
  startSettings();
  startAttachments();
  fitPrompt();
}

export function useModel(name) {
  model = name;
}

/** The conversation that is open. */
export function opened() {
  return open;
}

/** An empty conversation in the place of the open one. */
export function beginAnew() {
  show(newConversation());
  say(byId("said"), "New chat");
  prompt.focus();
}

/** Open a conversation that was kept. */
export function openConversation(conversation) {
  show(conversation);
  showSettings(conversation);
  say(byId("said"), `Chat opened: ${conversation.title}`);
  prompt.focus();
}

function show(conversation) {
  answering?.abort();
  open = conversation;
  addressed(open.messages.length ? open.id : "");
  dropAttached();
  redraw();
  log.scrollTop = log.scrollHeight;
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

/** Show the open conversation from its data.  Who listens is not read all of it again. */
function redraw() {
  log.setAttribute("aria-live", "off");
  for (const turn of log.querySelectorAll(".turn")) turn.remove();
  const path = shownPath(open);
  byId("greeting").hidden = path.length > 0;
  byId("anew").hidden = !path.length;
  for (const message of path) log.append(turnOf(message));
  const last = path.at(-1);
  if (last?.role === "assistant") offerResults(log.lastElementChild, last);
  else if (last) offerAnswer(log.lastElementChild, "There is no answer yet.", "Answer");
  setTimeout(() => log.removeAttribute("aria-live"), 0);
}

const SHOWN = { user: showQuestion, assistant: showAnswer, tool: showResults };

function turnOf(message) {
  const turn = SHOWN[message.role](message, model);
  if (message.role !== "tool") addTools(turn, message);
  return turn;
}

function addTools(turn, message) {
  const all = versions(open, message);
  turn.dataset.id = message.id;
  turn.append(
    toolsOf(message, all.length, all.indexOf(message), {
      edit: () => edit(turn, message),
      again: () => answerAgain(message),
      show: (at) => {
        if (answering) return;
        const back = document.activeElement?.getAttribute("aria-label");
        showBranch(open, all[at]);
        keep(open);
        redraw();
        focusTool(all[at], back);
        say(byId("said"), `Version ${at + 1} of ${all.length}`);
      },
    }),
  );
}

/** The button with this label below a message, or another one there where that cannot be pressed. */
function focusTool(message, label) {
  const turn = log.querySelector(`[data-id="${message.id}"]`);
  const all = [...turn.querySelectorAll(".acts button:enabled")];
  (all.find((one) => one.getAttribute("aria-label") === label) ?? all.at(-1)).focus();
  turn.scrollIntoView({ block: "nearest" });
}

/** Write another version of a question, which begins a branch. */
function edit(turn, message) {
  if (answering || turn.classList.contains("edited")) return;
  const said = turn.querySelector(".said");
  const acts = turn.querySelector(".acts");
  const { form, field } = editor(message.text, (text) => {
    form.remove();
    turn.classList.remove("edited");
    said.hidden = acts.hidden = false;
    const changed = text !== null && text !== message.text && (text || message.images.length || message.files.length);
    if (!changed || answering) {
      acts.querySelector("[data-act=Edit]").focus();
      return;
    }
    open.leaf = message.parent;
    addMessage(open, message.parent, { role: "user", text, images: message.images, files: message.files });
    redraw();
    answer();
  });
  said.hidden = acts.hidden = true;
  turn.classList.add("edited");
  turn.append(form);
  field.focus();
}

function answerAgain(message) {
  if (answering) return;
  open.leaf = message.parent;
  redraw();
  answer();
}

async function submit(text) {
  const question = text.trim();
  if (!(question || hasAttached()) || answering || sending) return;
  sending = true;
  const into = open;
  const attached = await takeAttached();
  sending = false;
  if (into !== open) return;
  prompt.value = "";
  fitPrompt();
  byId("greeting").hidden = true;
  byId("anew").hidden = false;
  for (const offer of log.querySelectorAll(".results, .failed button")) offer.remove();
  const message = addMessage(open, open.leaf, { role: "user", text: question, ...attached });
  const turn = turnOf(message);
  log.append(turn);
  // Before they are decoded they have no height.
  await Promise.allSettled([...turn.querySelectorAll("img")].map((image) => image.decode()));
  follow(true);
  await answer();
}

/** Scroll to the end, if that is where the reader is. */
function follow(always = false) {
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX) {
    log.scrollTop = log.scrollHeight;
  }
}

/** Ask for an answer to what is shown, and show it. */
async function answer() {
  log.querySelector(".failed.waits")?.remove();
  const own = new AbortController();
  const asked = open;
  const parent = open.leaf;
  Object.assign(asked, settings.ofConversation());
  keep(asked);
  addressed(asked.id);
  const shown = new Answer(model, follow);
  log.append(shown.turn);
  follow(true);
  begin(own);
  try {
    for await (const event of answers(body(), own.signal)) shown.take(event);
    shown.finish();
    say(byId("said"), `Answer of ${counted(shown.told.tokens, "token")} complete`);
  } catch (error) {
    if (!own.signal.aborted) {
      const problem = error instanceof Problem ? error : new Problem("Something went wrong in this page.");
      if (problem !== error) console.error(error);
      end(own);
      await fail(shown, problem);
      return;
    }
    shown.finish("stopped");
    say(byId("said"), "Stopped");
  }
  if (!shown.isEmpty) {
    const message = addMessage(asked, parent, shown.message);
    keep(asked, open !== asked);
    if (open === asked) {
      addTools(shown.turn, message);
      offerResults(shown.turn, message);
      follow();
    }
  }
  end(own);
}

function body() {
  return {
    ...(model === null ? {} : { model }),
    ...settings.ofRequest(),
    messages: [...settings.messages(), ...asRequest(shownPath(open))],
  };
}

function begin(own) {
  answering = own;
  send.hidden = true;
  stop.hidden = false;
  if (document.activeElement === send) stop.focus();
  log.setAttribute("aria-busy", "true");
  say(byId("said"), "Answering");
}

function end(own) {
  if (answering !== own) return;
  answering = null;
  const hadFocus = document.activeElement === stop;
  send.hidden = false;
  stop.hidden = true;
  log.setAttribute("aria-busy", "false");
  if (hadFocus || document.activeElement === document.body) prompt.focus();
}

/** Say what went wrong, below whatever had come, and offer to ask again. */
async function fail(shown, problem) {
  shown.finish("failed");
  const again = offerAnswer(shown.turn, problem.message, "Try again", true);
  follow();
  if (problem.status === 401 && (await needsKey())) again();
}

/** A sentence at the end of a turn, and a button to ask for an answer.  Returns what it does. */
function offerAnswer(turn, text, label, failed = false) {
  const button = make("button", { type: "button", class: "plain" }, label);
  const box = make("div", { class: failed ? "failed" : "failed waits", role: failed ? "alert" : null }, make("p", {}, text), button);
  const act = () => {
    if (answering || !turn.isConnected) return;
    if (failed) turn.remove();
    answer();
  };
  button.addEventListener("click", act);
  turn.append(box);
  return act;
}

/** Where an answer calls tools: fields for what they gave. */
function offerResults(turn, message) {
  if (!message.calls.length) return;
  const form = resultForm(message.calls, (results) => {
    if (answering || open.leaf !== message.id) return;
    form.remove();
    log.append(turnOf(addMessage(open, message.id, { role: "tool", results })));
    answer();
  });
  turn.append(form);
}
