// A little Markdown: enough for what models write.  All text stays text, so nothing needs escaping:
// elements are made one by one, and links lead to http and https only.

import { copyButton } from "./clipboard.js";
import { make } from "./dom.js";
import { math } from "./math.js";

const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)\s*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s*>\s?(.*)$/;
const ROW = /^\s*\|.*\|\s*$/;
const FORMULA = /^\s*(\$\$|\\\[)/; // begins one of its own lines
const FARTHEST = 2000; // characters between two marks that belong together
const RULED = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;

/** Keeps `element` showing a text that grows: blocks that are as they were stay untouched. */
export class Rendered {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  show(text) {
    try {
      this.#show(text);
    } catch (error) {
      if (!(error instanceof RangeError)) throw error;
      this.element.replaceChildren(make("p", {}, text)); // nested too deep to be meant
      this.sources = [];
    }
  }

  #show(text) {
    const blocks = split(text);
    let same = 0;
    while (same < blocks.length && this.sources[same] === blocks[same].source) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of blocks.slice(same)) this.element.append(render(block));
    this.sources = blocks.map((block) => block.source);
  }
}

/** Blocks in order, each with the lines that it was made of. */
function split(text) {
  const lines = text.replaceAll("\r\n", "\n").split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [kind, end] = extent(lines, at);
    const own = lines.slice(at, end);
    blocks.push({ kind, lines: own, source: `${kind}\n${own.join("\n")}` });
    at = end;
  }
  return blocks;
}

/** What begins at a line that is not empty, and the first line after it. */
function extent(lines, at) {
  const fence = FENCE.exec(lines[at]);
  if (fence) {
    let end = at + 1;
    while (end < lines.length && !closes(lines[end], fence[1])) end += 1;
    return ["code", Math.min(end + 1, lines.length)];
  }
  const formula = FORMULA.exec(lines[at]);
  if (formula) {
    const end = formulaEnd(lines, at, formula[1]);
    if (end) return ["formula", end];
  }
  if (HEADING.test(lines[at])) return ["heading", at + 1];
  if (RULE.test(lines[at])) return ["rule", at + 1];
  if (ROW.test(lines[at]) && RULED.test(lines[at + 1] ?? "")) return ["table", run(lines, at, ROW)];
  if (QUOTE.test(lines[at])) return ["quote", run(lines, at, QUOTE)];
  if (ITEM.test(lines[at])) return ["list", listEnd(lines, at)];
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
  return ["paragraph", end];
}

function closes(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

/** The line after a formula that ends with a line's end; 0 where it does not. */
function formulaEnd(lines, at, mark) {
  const closing = mark === "$$" ? "$$" : "\\]";
  for (let end = at; end < lines.length && lines[end].trim(); end += 1) {
    const text = end === at ? lines[at].trim().slice(2) : lines[end].trim();
    if (text.includes(closing)) return text.endsWith(closing) && text.indexOf(closing) === text.length - 2 ? end + 1 : 0;
  }
  return 0;
}

function run(lines, at, pattern) {
  let end = at + 1;
  while (end < lines.length && pattern.test(lines[end])) end += 1;
  return end;
}

function listEnd(lines, at) {
  const first = ITEM.exec(lines[at]);
  let end = at + 1;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = ITEM.exec(line);
    if (item && !isInner(item, first) && isOrdered(item) !== isOrdered(first)) break;
    if (item || /^\s{2,}\S/.test(line)) continue;
    if (line.trim() || !ITEM.test(lines[end + 1] ?? "")) break; // one empty line may part items
  }
  return end;
}

function isOrdered(item) {
  return /\d/.test(item[2]);
}

function isInner(item, outer) {
  return item[1].length > outer[1].length + 1;
}

function begins(line) {
  return [FENCE, FORMULA, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

function render({ kind, lines }) {
  switch (kind) {
    case "code":
      return code(lines);
    case "formula": {
      const text = lines.join("\n").trim();
      return make("div", { class: "formula", tabindex: 0, role: "region", "aria-label": "Formula" }, formula(text, 2, true));
    }
    case "heading": {
      const [, marks, text] = HEADING.exec(lines[0]);
      return make(`h${Math.min(6, marks.length + 3)}`, {}, ...inline(text));
    }
    case "rule":
      return make("hr");
    case "quote": {
      const quoted = make("blockquote");
      for (const block of split(lines.map((line) => QUOTE.exec(line)[1]).join("\n"))) {
        quoted.append(render(block));
      }
      return quoted;
    }
    case "list":
      return list(lines);
    case "table":
      return table(lines);
    default:
      return make("p", {}, ...broken(lines));
  }
}

/** Lines of a paragraph; models mean their line ends. */
function broken(lines) {
  return lines.flatMap((line, at) => [...(at ? [make("br")] : []), ...inline(line.trim())]);
}

function code(lines) {
  const [, fence, language] = FENCE.exec(lines[0]);
  const closed = lines.length > 1 && closes(lines.at(-1), fence);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const label = language ? `Code, ${language}` : "Code";
  const shown = make("pre", { tabindex: 0, role: "region", "aria-label": label }, make("code", {}, text));
  return closed ? make("div", { class: "code" }, copyButton("Copy code", () => text), shown) : shown;
}

function list(lines) {
  const first = ITEM.exec(lines[0]);
  const ordered = isOrdered(first);
  const start = ordered ? Number.parseInt(first[2], 10) : 1;
  const made = make(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : null });
  let item = null;
  let inner = [];
  const finish = () => {
    if (!item) return;
    for (const block of split(inner.join("\n"))) item.append(render(block));
    made.append(item);
  };
  for (const line of lines) {
    const found = ITEM.exec(line);
    if (found && !isInner(found, first)) {
      finish();
      item = make("li", {}, ...inline(found[3]));
      inner = [];
    } else {
      inner.push(line.replace(/^\s{1,4}/, ""));
    }
  }
  finish();
  return made;
}

function table(lines) {
  const cells = (line) => line.trim().slice(1, -1).split("|").map((cell) => cell.trim());
  const row = (line, tag) => make("tr", {}, ...cells(line).map((cell) => make(tag, {}, ...inline(cell))));
  const body = make("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  const made = make("table", {}, make("thead", {}, row(lines[0], "th")), body);
  return make("div", { class: "wide-table", tabindex: 0, role: "region", "aria-label": "Table" }, made);
}

/** What stands between two marks of `mark` characters, as a formula; as it was written else. */
function formula(text, mark, isBlock) {
  return math(text.slice(mark, -mark), isBlock) ?? make("code", {}, text);
}

/** "$5 and 10$" has a word, which no formula has outside of a command. */
function isMoney(text) {
  return /\s/.test(text) && /[a-z]{3}/i.test(text.replace(/\\(?:text|operatorname|math)\w*\s*\{[^}]*\}|\\[a-z]+/gi, ""));
}

// Earlier ones first: code hides what is in it.
const INLINE = [
  [/^(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, (found) => make("code", {}, found[2])],
  [/^\$\$(?=\S)([^$]+)\$\$/, (found) => formula(found[0], 2, true)],
  [/^\$(?=[^\s$])((?:\\.|[^$\n\\])*?)(?<!\s)\$(?!\d)/, (found) => (isMoney(found[1]) ? null : formula(found[0], 1, false))],
  [/^\\\((?:[^\\]|\\[^()])+\\\)/, (found) => formula(found[0], 2, false)],
  [/^\\\[(?:[^\\]|\\[^[\]])+\\\]/, (found) => formula(found[0], 2, true)],
  [/^\*\*(?=\S)([\s\S]*?\S)\*\*/, (found) => make("strong", {}, ...inline(found[1]))],
  [/^__(?=\S)([\s\S]*?\S)__(?!\w)/, (found) => make("strong", {}, ...inline(found[1]))],
  [/^\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, (found) => make("em", {}, ...inline(found[1]))],
  [/^_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/, (found) => make("em", {}, ...inline(found[1]))],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (found) => make("del", {}, ...inline(found[1]))],
  [/^\[([^\]\n]+)\]\((https?:\/\/[^\s()]+)\)/, (found) => link(found[2], inline(found[1]))],
  [/^https?:\/\/[^\s<>()"'`]*[^\s<>()"'`.,;:!?]/, (found) => link(found[0], [found[0]])],
];

function link(href, children) {
  return make("a", { href, target: "_blank", rel: "noopener noreferrer" }, ...children);
}

/** Text and elements of one line. */
function inline(text) {
  const parts = [];
  let plain = "";
  for (let at = 0; at < text.length; ) {
    const found = special(text, at);
    if (!found && text[at] === "\\" && /[\\`*_~[\]()#+\-.!|>$]/.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    if (!found) {
      plain += text[at];
      at += 1;
      continue;
    }
    if (plain) parts.push(plain);
    plain = "";
    parts.push(found.element);
    at += found.length;
  }
  if (plain) parts.push(plain);
  return parts;
}

function special(text, at) {
  if (!"`*_~[h$\\".includes(text[at])) return null;
  if ("_h".includes(text[at]) && /\w/.test(text[at - 1] ?? "")) return null; // inside_a_word
  const rest = text.slice(at, at + FARTHEST);
  for (const [pattern, element] of INLINE) {
    const found = pattern.exec(rest);
    const made = found && element(found);
    if (made) return { element: made, length: found[0].length };
  }
  return null;
}
