// LaTeX's formulas as MathML: the part of it that models write most.  What is not known is an
// error, and the caller shows the source instead.  Only elements and attributes that are named
// here are ever made, and text stays text.  After MathML Core (W3C, 2025).

import {
  ACCENTS, ALPHABETS, BIG, DELIMITERS, ENVIRONMENTS, FUNCTIONS, LIMITS, OPERATORS, SPACES, SYMBOLS,
} from "./math_symbols.js";

const NAMESPACE = "http://www.w3.org/1998/Math/MathML";
const LONGEST = 4000; // characters
const DEEPEST = 40;
const TOKEN = /\\(?:[a-zA-Z]+\*?|[\s\S])|\d+(?:[.,]\d+)*|\s+|[\s\S]/gu;

class Unknown extends Error {}

/** <math> for LaTeX without its delimiters; null where it has what is not known. */
export function math(source, isBlock) {
  if (source.length > LONGEST) return null;
  try {
    const parser = new Parser(source);
    const inside = parser.row(0, () => false);
    const whole = element("math", { alttext: source }, inside);
    if (isBlock) whole.setAttribute("display", "block");
    return whole;
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

function element(tag, attributes, ...children) {
  const made = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function operator(text, attributes = {}) {
  return element("mo", attributes, text);
}

/** One element, or a row of several. */
function grouped(children) {
  return children.length === 1 ? children[0] : element("mrow", {}, ...children);
}

class Parser {
  constructor(source) {
    this.tokens = (source.match(TOKEN) ?? []).map((token) => (/^\s/.test(token) ? " " : token));
    this.at = 0;
  }

  peek() {
    while (this.tokens[this.at] === " ") this.at += 1;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    if (token === undefined) throw new Unknown("it ends too early");
    this.at += 1;
    return token;
  }

  expect(token) {
    if (this.next() !== token) throw new Unknown(`no ${token}`);
  }

  takes(token) {
    if (this.peek() !== token) return false;
    this.at += 1;
    return true;
  }

  /** Elements up to the end, or to the token at which `ends` holds. */
  children(depth, ends) {
    if (depth > DEEPEST) throw new Unknown("it is nested too deep");
    const made = [];
    for (let token = this.peek(); token !== undefined && !ends(token); token = this.peek()) {
      made.push(this.scripted(depth));
    }
    return made;
  }

  row(depth, ends) {
    const made = grouped(this.children(depth, ends));
    if (this.peek() !== undefined && !ends(this.peek())) throw new Unknown("it goes on");
    return made;
  }

  /** A nucleus with what is above and below it. */
  scripted(depth) {
    const base = "^_'".includes(this.peek()) ? element("mrow", {}) : this.atom(depth);
    let [below, above] = [null, null];
    let limits = base.limits ?? false;
    for (;;) {
      if (this.takes("\\limits")) limits = true;
      else if (this.takes("\\nolimits")) limits = false;
      else if (this.peek() === "_" && !below) below = this.script(depth);
      else if (this.peek() === "^" && !above) above = this.script(depth);
      else if (this.peek() === "'" && !above) above = this.primes(depth);
      else break;
    }
    if ("^_".includes(this.peek() ?? " ")) throw new Unknown("two scripts in one place");
    if (!below && !above) return base;
    const tag = limits ? { both: "munderover", below: "munder", above: "mover" } : { both: "msubsup", below: "msub", above: "msup" };
    if (below && above) return element(tag.both, {}, base, below, above);
    return below ? element(tag.below, {}, base, below) : element(tag.above, {}, base, above);
  }

  script(depth) {
    this.next();
    return this.argument(depth);
  }

  primes(depth) {
    let count = 0;
    while (this.takes("'")) count += 1;
    const marks = operator("′".repeat(count));
    return this.peek() === "^" ? element("mrow", {}, marks, this.script(depth)) : marks;
  }

  /** {...}, or one atom. */
  argument(depth) {
    if (this.peek() !== "{") return this.atom(depth + 1);
    return this.braced(depth);
  }

  braced(depth) {
    this.expect("{");
    const inside = this.row(depth + 1, (token) => token === "}");
    this.expect("}");
    return inside;
  }

  /** The text of {...} as it stands. */
  raw() {
    this.expect("{");
    let text = "";
    for (let open = 0; ; this.at += 1) {
      const token = this.tokens[this.at];
      if (token === undefined) throw new Unknown("a brace is not closed");
      if (token === "{") open += 1;
      if (token === "}") open -= 1;
      if (open < 0) break;
      text += /^\\[ %$&#_{}]$/.test(token) ? token[1] : token;
    }
    this.at += 1;
    return text;
  }

  atom(depth) {
    const token = this.next();
    if (token === "{") {
      this.at -= 1;
      return this.braced(depth);
    }
    if (token.startsWith("\\")) return this.command(token.slice(1), depth);
    if (/^\d/.test(token)) return element("mn", {}, token);
    if (/^\p{L}$/u.test(token)) return element("mi", {}, token);
    if (token === "~") return element("mspace", { width: "0.33em" });
    if ("}&#%$^_".includes(token)) throw new Unknown(`${token} here`);
    if ("()[]|".includes(token)) return operator(token, { stretchy: "false" });
    return operator(token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  command(name, depth) {
    const own = (table) => (Object.hasOwn(table, name) ? table[name] : undefined);
    if (own(SYMBOLS)) return element("mi", {}, own(SYMBOLS));
    if (own(OPERATORS)) return operator(own(OPERATORS), "{}|‖⟨⟩⌈⌉⌊⌋".includes(own(OPERATORS)) ? { stretchy: "false" } : {});
    if (own(BIG)) return this.limited(operator(own(BIG), { largeop: "true" }), !name.includes("int"));
    if (FUNCTIONS.has(name)) return this.limited(element("mi", {}, name.replace(/^(lim)(sup|inf)$/, "$1 $2")), LIMITS.has(name));
    if (own(SPACES)) return element("mspace", { width: own(SPACES) });
    if (own(ALPHABETS)) return this.alphabet(own(ALPHABETS), depth);
    if (own(ACCENTS)) return this.accent(own(ACCENTS), depth);
    return this.construct(name, depth);
  }

  limited(made, is) {
    made.limits = is;
    return made;
  }

  construct(name, depth) {
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
      case "cfrac":
        return element("mfrac", {}, this.argument(depth), this.argument(depth));
      case "binom": {
        const inside = element("mfrac", { linethickness: "0" }, this.argument(depth), this.argument(depth));
        return element("mrow", {}, operator("("), inside, operator(")"));
      }
      case "sqrt":
        return this.root(depth);
      case "text":
      case "textrm":
      case "textbf":
      case "textit":
      case "mbox":
        return element("mtext", {}, this.raw().replace(/^ | $/g, "\u00a0")); // else they are cut off
      case "operatorname":
      case "operatorname*":
        return this.limited(element("mi", { mathvariant: "normal" }, this.raw()), name.endsWith("*"));
      case "left":
        return this.fenced(depth);
      case "begin":
        return this.environment(depth);
      case "overset":
      case "stackrel": {
        const above = this.argument(depth);
        return element("mover", {}, this.argument(depth), above);
      }
      case "underset": {
        const below = this.argument(depth);
        return this.limited(element("munder", {}, this.argument(depth), below), true);
      }
      case "boxed":
        return element("mrow", { class: "boxed" }, this.argument(depth));
      case "not": {
        const inside = this.argument(depth);
        return operator(`${inside.textContent}\u0338`);
      }
      case "pmod":
        return element("mrow", {}, element("mspace", { width: "1em" }), operator("("), element("mi", {}, "mod"), element("mspace", { width: "0.33em" }), this.argument(depth), operator(")"));
      case "displaystyle":
      case "textstyle":
        return element("mrow", {});
      default:
        if (/^(?:big|Big|bigg|Bigg)[lrm]?$/.test(name)) return operator(this.delimiter(), { stretchy: "false" });
        throw new Unknown(`\\${name}`);
    }
  }

  root(depth) {
    if (!this.takes("[")) return element("msqrt", {}, this.argument(depth));
    const index = this.row(depth + 1, (token) => token === "]");
    this.expect("]");
    return element("mroot", {}, this.argument(depth), index);
  }

  delimiter() {
    const token = this.next();
    if (token === ".") return "";
    if ("()[]|/".includes(token)) return token;
    const name = token.slice(1);
    if (token.startsWith("\\") && Object.hasOwn(DELIMITERS, name)) return DELIMITERS[name];
    throw new Unknown(`${token} as a delimiter`);
  }

  fenced(depth) {
    const parts = [operator(this.delimiter(), { stretchy: "true" })];
    for (;;) {
      parts.push(grouped(this.children(depth + 1, (token) => token === "\\right" || token === "\\middle")));
      const which = this.next();
      parts.push(operator(this.delimiter(), { stretchy: "true" }));
      if (which === "\\right") return element("mrow", {}, ...parts);
    }
  }

  accent([mark, where], depth) {
    const base = this.argument(depth);
    const made = element(where === "below" ? "munder" : "mover", where === "below" ? {} : { accent: "true" }, base, operator(mark));
    return this.limited(made, mark === "⏞" || mark === "⏟");
  }

  /** Letters and digits of another alphabet; where there is more than these, all as it is. */
  alphabet({ letters, upright }, depth) {
    const begin = this.at;
    const text = this.peek() === "{" ? this.raw() : this.next();
    if (/[^\p{L}\d ,.]/u.test(text)) {
      this.at = begin;
      return this.argument(depth);
    }
    const shown = letters ? Array.from(text, letters).join("") : text;
    return element("mi", upright ? { mathvariant: "normal" } : {}, shown);
  }

  environment(depth) {
    const name = this.raw();
    if (!Object.hasOwn(ENVIRONMENTS, name)) throw new Unknown(`environment ${name}`);
    const [before, after, kind] = ENVIRONMENTS[name];
    if (kind === "array") this.raw(); // how its columns are aligned
    const rows = [[]];
    for (;;) {
      const ends = (token) => token === "&" || token === "\\\\" || token === "\\end";
      const cell = this.children(depth + 1, ends);
      rows.at(-1).push(element("mtd", {}, ...cell));
      const which = this.next();
      if (which === "\\end") break;
      if (which === "\\\\") {
        if (this.takes("[")) while (this.next() !== "]"); // a distance
        rows.push([]);
      }
    }
    if (this.raw() !== name) throw new Unknown(`the end of ${name} is missing`);
    const full = rows.filter((row) => row.length > 1 || row[0].childNodes.length);
    const table = element("mtable", { class: kind }, ...full.map((row) => element("mtr", {}, ...row)));
    if (!before && !after) return table;
    return element("mrow", {}, operator(before, { stretchy: "true" }), table, operator(after, { stretchy: "true" }));
  }
}
