// One answer as it comes.

import { make, say } from "./dom.js";
import { Rendered } from "./markdown.js";
import { showCalls, told, turnOf } from "./turns.js";

const REDRAWN_MS = 60; // apart, while it comes

/** Shows the events of a streamed chat.  Its `message` can be kept once it is finished. */
export class Answer {
  constructor(model, onDrawn) {
    this.turn = turnOf("assistant", "Answer");
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.told = { model: model ?? "", end: "", tokens: 0, prompt: 0, cached: 0, first_s: 0, took_s: 0 };
    this.onDrawn = onDrawn;
    this.began = performance.now();
    this.drawn = 0;
    this.timer = null;
    this.words = make("div", { class: "words coming" });
    this.rendered = new Rendered(this.words);
    this.turn.append(this.words);
  }

  get message() {
    const { text, reasoning, told: how } = this;
    return { role: "assistant", text, reasoning, calls: this.calls.filter(Boolean), told: how };
  }

  get isEmpty() {
    return !this.text && !this.calls.length;
  }

  take(event) {
    if (event.usage) this.count(event.usage);
    for (const { delta, finish_reason: reason } of event.choices ?? []) {
      if (reason) this.told.end = String(reason);
      if (delta?.reasoning_content) this.think(delta.reasoning_content);
      if (delta?.content) this.text += delta.content;
      for (const part of delta?.tool_calls ?? []) this.call(part);
      if (delta?.content || delta?.reasoning_content || delta?.tool_calls) {
        this.told.first_s ||= this.elapsed();
      }
    }
    if (this.timer === null) {
      const wait = Math.max(0, this.drawn + REDRAWN_MS - performance.now());
      this.timer = setTimeout(() => this.draw(), wait);
    }
  }

  elapsed() {
    return (performance.now() - this.began) / 1000;
  }

  count(usage) {
    this.told.tokens = usage.completion_tokens ?? 0;
    this.told.prompt = usage.prompt_tokens ?? 0;
    this.told.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  }

  call({ index = 0, id, function: part }) {
    if (!Number.isInteger(index) || index < 0 || index > 127) return;
    const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
    if (id) call.id = String(id);
    call.name += part?.name ?? "";
    call.arguments += part?.arguments ?? "";
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
    this.onDrawn();
  }

  /** how: "stopped" or "failed"; null where it ended by itself. */
  finish(how = null) {
    clearTimeout(this.timer);
    this.told.took_s = this.elapsed();
    if (how) this.told.end = how;
    this.draw();
    if (this.thoughts) say(this.summary, "Thoughts");
    this.words.classList.remove("coming");
    this.turn.append(...showCalls(this.message.calls));
    if (this.isEmpty && how !== "failed") {
      this.words.append(make("p", { class: "quiet" }, how === "stopped" ? "No answer." : "The answer is empty."));
    }
    this.turn.append(...told(this.told));
    this.onDrawn();
  }
}
