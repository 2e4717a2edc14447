// The conversation: kept in this page only, sent whole with each question.

import { chat as answers, Problem } from "./api.js";
import { byId, make, say } from "./dom.js";
import { dropImages, hasImages, partsOf, shownImages, startImages, takeImages } from "./images.js";
import { Rendered } from "./markdown.js";
import { counted, seconds, speed } from "./units.js";

const REDRAWN_MS = 60; // apart, while an answer comes
const NEAR_END_PX = 80;
const FEWEST_TIMED = 8; // tokens; a few that come together have no speed

const log = byId("log");
const prompt = byId("prompt");
const send = byId("send");
const stop = byId("stop");

let model = null; // its name; null: the server's own
let turns = []; // {role, content}, as the server wants them
let answering = null; // AbortController of the answer that comes
let sending = false; // images of the next message are being read
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
  byId("anew").addEventListener("click", beginAnew);
  for (const idea of byId("ideas").querySelectorAll("button")) {
    idea.addEventListener("click", () => submit(idea.textContent));
  }
  startSettings();
  startImages();
  fitPrompt();
}

export function useModel(name) {
  model = name;
}

function startSettings() {
  const button = byId("settings-button");
  const settings = byId("settings");
  button.addEventListener("click", () => {
    settings.hidden = !settings.hidden;
    button.setAttribute("aria-expanded", String(!settings.hidden));
    if (!settings.hidden) byId("system").focus();
  });
  const temperature = byId("temperature");
  const show = () => say(byId("temperature-value"), Number(temperature.value).toFixed(1));
  temperature.addEventListener("input", show);
  show();
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function beginAnew() {
  answering?.abort();
  turns = [];
  dropImages();
  for (const turn of log.querySelectorAll(".turn")) turn.remove();
  byId("greeting").hidden = false;
  byId("anew").hidden = true;
  say(byId("said"), "New chat");
  prompt.focus();
}

async function submit(text) {
  const question = text.trim();
  if (!(question || hasImages()) || answering || sending) return;
  sending = true;
  const images = await takeImages();
  const shown = shownImages(images);
  await Promise.allSettled(shown.map((image) => image.decode())); // before that it has no height
  sending = false;
  prompt.value = "";
  fitPrompt();
  byId("greeting").hidden = true;
  byId("anew").hidden = false;
  const said = question ? [{ type: "text", text: question }] : [];
  const content = images.length ? [...partsOf(images), ...said] : question;
  turns.push({ role: "user", content });
  const words = question ? [make("p", {}, question)] : [];
  add("user", "You").append(...shown, ...words);
  follow(true);
  await answer();
}

function add(role, who) {
  const turn = make("article", { class: `turn ${role}` }, make("h3", { class: "unseen" }, who));
  log.append(turn);
  return turn;
}

/** Scroll to the end, if that is where the reader is. */
function follow(always = false) {
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX) {
    log.scrollTop = log.scrollHeight;
  }
}

/** Ask for an answer to all turns, and show it. */
async function answer() {
  const own = new AbortController();
  const asked = turns;
  const shown = new Answer(add("assistant", "Answer"));
  begin(own);
  try {
    for await (const event of answers(body(), own.signal)) shown.take(event);
    shown.finish();
    say(byId("said"), `Answer of ${counted(shown.tokens, "token")} complete`);
  } catch (error) {
    if (own.signal.aborted) {
      shown.finish("stopped");
      say(byId("said"), "Stopped");
    } else {
      const problem = error instanceof Problem ? error : new Problem("Something went wrong in this page.");
      if (problem !== error) console.error(error);
      end(own);
      await fail(shown, problem, asked);
      return;
    }
  }
  // After "New chat" the answer belongs to no conversation.
  if (turns === asked && shown.text) turns.push({ role: "assistant", content: shown.text });
  end(own);
}

function body() {
  const system = byId("system").value.trim();
  const longest = Number.parseInt(byId("longest").value, 10);
  return {
    ...(model === null ? {} : { model }),
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    temperature: Number(byId("temperature").value),
    ...(longest > 0 ? { max_tokens: longest } : {}),
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
async function fail(shown, problem, asked) {
  shown.finish("failed");
  const again = make("button", { type: "button", class: "plain" }, "Try again");
  shown.turn.append(make("div", { class: "failed", role: "alert" }, make("p", {}, problem.message), again));
  again.addEventListener("click", () => retry(shown, asked));
  follow();
  if (problem.status === 401 && (await needsKey())) retry(shown, asked);
}

function retry(shown, asked) {
  if (answering || turns !== asked || !shown.turn.isConnected) return;
  shown.turn.remove();
  answer();
}

/** One answer as it comes. */
class Answer {
  constructor(turn) {
    this.turn = turn;
    this.text = "";
    this.reasoning = "";
    this.tokens = 0;
    this.reason = null;
    this.began = performance.now();
    this.first = null;
    this.drawn = 0;
    this.timer = null;
    this.words = make("div", { class: "words coming" });
    this.rendered = new Rendered(this.words);
    turn.append(this.words);
  }

  take(event) {
    if (event.usage) this.tokens = event.usage.completion_tokens;
    for (const { delta, finish_reason: reason } of event.choices ?? []) {
      if (reason) this.reason = reason;
      if (delta?.reasoning_content) this.think(delta.reasoning_content);
      if (delta?.content) this.text += delta.content;
      if (delta?.content || delta?.reasoning_content) this.first ??= performance.now();
    }
    if (this.timer === null) {
      const wait = Math.max(0, this.drawn + REDRAWN_MS - performance.now());
      this.timer = setTimeout(() => this.draw(), wait);
    }
  }

  think(text) {
    if (!this.thoughts) {
      this.thought = make("div", { class: "words" });
      this.renderedThought = new Rendered(this.thought);
      this.summary = make("summary", {}, "Thinking…");
      this.thoughts = make("details", { class: "reasoning" }, this.summary, this.thought);
      this.words.before(this.thoughts);
    }
    this.reasoning += text;
  }

  draw() {
    this.timer = null;
    this.drawn = performance.now();
    if (this.thoughts) this.renderedThought.show(this.reasoning);
    if (this.thoughts && this.text) say(this.summary, "Thoughts");
    this.rendered.show(this.text);
    follow();
  }

  finish(how = null) {
    clearTimeout(this.timer);
    this.draw();
    if (this.thoughts) say(this.summary, "Thoughts");
    this.words.classList.remove("coming");
    if (!this.text && how !== "failed") {
      this.words.append(make("p", { class: "quiet" }, how === "stopped" ? "No answer." : "The answer is empty."));
    }
    const told = [];
    if (how === "stopped") told.push("stopped");
    if (this.reason === "length") told.push("ended at its longest length");
    if (this.tokens) told.push(counted(this.tokens, "token"));
    if (this.tokens >= FEWEST_TIMED && this.first !== null) {
      const took = (performance.now() - this.first) / 1000;
      if (took > 0) told.push(`${speed((this.tokens - 1) / took)} tokens/s`);
    }
    if (this.first !== null) told.push(`first after ${seconds((this.first - this.began) / 1000)}`);
    if (told.length) this.turn.append(make("p", { class: "told" }, told.join(" · ")));
    follow();
  }
}
