// The picture of the machine: memory by tier, what flows between, requests, and what bounds it all.

import { byId, draw, make, say } from "./dom.js";
import { showExperts, startExperts } from "./experts.js";
import { bytes, counted, grouped, percent, rate, seconds, speed } from "./units.js";

const HISTORY = 90; // looks
const SHOWN_PLACES = 32; // for requests
const FASTEST_S = 0.7; // in which a full link's pattern moves by one piece
const SLOWEST_S = 6;

const PARTS = [
  ["weights", "weights_bytes", "weights"],
  ["experts", "experts_bytes", "experts"],
  ["kv", "kv_bytes", "keys and values"],
  ["other", "other_bytes", "buffers"],
];

const trends = { speed: [], reading: [] };
let picture = null; // what was built, for as long as the tiers are the same ones

export function startMachine() {
  startExperts();
}

/** Call when another model is shown from now on. */
export function forgetTrends() {
  for (const history of Object.values(trends)) history.length = 0;
}

export function showMachine({ model, requests, engine }) {
  showRequests(requests);
  byId("machine-wait").hidden = engine !== null;
  byId("machine-body").hidden = engine === null;
  if (!engine) {
    say(byId("machine-wait"), "A long step is under way; figures come when it has ended.");
    return;
  }
  showLimit(engine.bottleneck, requests);
  showTrend("speed", engine.tokens.generation_per_s, engine.window_s);
  showTrend("reading", engine.tokens.prompt_per_s, engine.window_s);
  showTiers(engine);
  showExperts(engine.experts);
  showFacts(model, engine);
  const old = engine.age_s > 2.5;
  say(byId("age"), old ? `These figures are ${seconds(engine.age_s)} old: a long step is under way.` : "");
}

function showLimit(limit, requests) {
  const box = byId("limit");
  const idle = !limit?.now && !requests.running;
  box.classList.toggle("idle", idle);
  if (!limit) {
    say(byId("limit-text"), "none yet; nothing has been computed.");
  } else {
    const text = limit.text.replace(/(\d) (?=[kMGT]?B)/g, "$1\u00a0");
    say(byId("limit-text"), `${text}${idle ? ", when it last computed" : ""}.`);
  }
}

function showRequests({ running, waiting, inside, max_running: most }) {
  // Those that have come and that the engine has not seen yet wait as well.
  const queued = Math.max(waiting, inside - running);
  say(byId("running"), grouped(running));
  say(byId("waiting"), grouped(queued));
  const places = byId("places");
  const shown = Math.min(SHOWN_PLACES, Math.max(most, running) + queued);
  while (places.childElementCount > shown) places.lastElementChild.remove();
  while (places.childElementCount < shown) places.append(make("i"));
  [...places.children].forEach((place, at) => {
    place.className = at < running ? "taken" : at < Math.max(most, running) ? "" : "queued";
  });
}

function showTrend(name, value, window_s) {
  const history = trends[name];
  if (window_s > 0) history.push(value);
  if (history.length > HISTORY) history.shift();
  say(byId(name), speed(value));
  const most = Math.max(...history, 1e-9);
  const points = history.map((one, at) => {
    const x = 120 - (history.length - 1 - at) * (120 / (HISTORY - 1));
    return `${x.toFixed(1)} ${(27 - (one / most) * 25).toFixed(1)}`;
  });
  const svg = byId(`${name}-trend`);
  if (!svg.firstChild) {
    const base = draw("path", { class: "base", d: "M0 27.2H120" });
    svg.append(base, draw("path", { class: "area" }), draw("path", { class: "line" }));
  }
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  const first = points[0]?.split(" ")[0];
  svg.children[1].setAttribute("d", line && `${line}L120 28L${first} 28Z`);
  svg.children[2].setAttribute("d", line);
}

// Tiers and links

function showTiers(engine) {
  const names = [...engine.tiers.map((one) => one.tier), ...engine.links.map((one) => one.target)].join();
  if (picture?.names !== names) {
    picture = build(engine);
    picture.names = names;
    byId("tiers").replaceChildren(picture.element);
  }
  for (const tier of engine.tiers) fill(picture.tiers.get(tier.tier), tier);
  for (const link of engine.links) flow(picture.links.get(`${link.source} ${link.target}`), link);
  spend(picture.cpu, engine.time);
}

const LABELS = { device: "GPU", host: "Memory", disk: "Disk" };
const ENDS = { device: "the GPU", host: "memory", disk: "the disk", cpu: "the CPU" };

/** Processors above, each with its link; then memory; then the disk. */
function build({ machine, tiers, links }) {
  const found = { tiers: new Map(), links: new Map(), cpu: null };
  const has = new Set(tiers.map((tier) => tier.tier));
  const tier = (name, about) => {
    const made = bar(LABELS[name], about);
    found.tiers.set(name, made);
    return made.element;
  };
  const link = (source, target) => {
    if (!links.some((one) => one.source === source && one.target === target)) return "";
    const made = channel(source, target);
    found.links.set(`${source} ${target}`, made);
    return made.element;
  };
  found.cpu = bar("CPU", counted(machine.cores, "core"));
  const processors = make("div", { class: has.has("device") ? "processors two" : "processors" });
  processors.append(make("div", {}, found.cpu.element, link("host", "cpu")));
  if (has.has("device")) {
    processors.append(make("div", {}, tier("device", machine.gpu), link("host", "device")));
  }
  found.element = make("div", { class: "picture" }, processors, tier("host", ""));
  if (has.has("disk")) found.element.append(link("disk", "host"), tier("disk", "what memory has no room for"));
  return found;
}

function bar(name, about) {
  const amount = make("span", { class: "amount" });
  const track = make("div", { class: "bar", role: "img" });
  const legend = make("ul", { class: "legend" });
  const head = make("div", { class: "tier-head" }, make("h4", {}, name), make("span", { class: "quiet about" }, about), amount);
  return { name, amount, track, legend, element: make("div", { class: "tier" }, head, track, legend) };
}

/** parts: [class, share of the bar, share of the part that is solid, words for the legend]. */
function paint(shown, parts, label) {
  const { track, legend } = shown;
  const kinds = parts.map(([kind]) => kind).join();
  if (shown.kinds !== kinds) {
    shown.kinds = kinds;
    track.replaceChildren(...parts.map(([kind]) => make("div", { class: `part ${kind}` }, make("div", { class: "solid" }))));
    legend.replaceChildren(...parts.map(([kind]) => make("li", {}, make("i", { class: `part ${kind}` }), make("span"))));
  }
  parts.forEach(([, share, solid, words], at) => {
    track.children[at].hidden = share === 0;
    track.children[at].style.width = `${(share * 100).toFixed(2)}%`;
    track.children[at].firstChild.style.width = `${(solid * 100).toFixed(1)}%`;
    say(legend.children[at].lastChild, words);
  });
  track.setAttribute("aria-label", label);
}

function fill(shown, tier) {
  const used = PARTS.reduce((sum, [, field]) => sum + tier[field], 0);
  const room = Math.max(tier.budget_bytes || used, used, 1);
  const parts = PARTS.filter(([, field]) => tier[field] > 0).map(([kind, field, name]) => {
    const taken = kind === "kv" ? tier.kv_taken_bytes / tier.kv_bytes : 1;
    const words = `${name} ${bytes(tier[field])}${kind === "kv" ? `, ${percent(taken)} taken` : ""}`;
    return [kind, tier[field] / room, taken, words];
  });
  const amount = tier.budget_bytes ? `${bytes(used)} of ${bytes(tier.budget_bytes)}` : bytes(used);
  say(shown.amount, amount);
  paint(shown, parts, `${shown.name}: ${amount}; ${parts.map((part) => part[3]).join(", ")}`);
}

function spend(shown, time) {
  const parts = [
    ["computing", time.computing, 1, `computing ${percent(time.computing)}`],
    ["drive-wait", time.waiting_for_disk, 1, `waiting for the disk ${percent(time.waiting_for_disk)}`],
  ];
  if (picture.tiers.has("device")) {
    parts.push(["gpu-wait", time.waiting_for_gpu, 1, `waiting for the GPU ${percent(time.waiting_for_gpu)}`]);
  }
  const busy = parts.reduce((sum, part) => sum + part[1], 0);
  say(shown.amount, busy < 0.005 ? "idle" : `busy ${percent(Math.min(1, busy))} of the time`);
  paint(shown, parts, `CPU: ${parts.map((part) => part[3]).join(", ")}`);
}

/** A link as a channel: as wide as it was measured to carry, with a stream in it. */
function channel(source, target) {
  const stream = make("div", { class: "stream" });
  const meter = make("div", {
    class: "channel",
    role: "meter",
    "aria-label": `From ${ENDS[source]} to ${ENDS[target]}`,
    "aria-valuemin": 0,
    "aria-valuemax": 100,
  });
  meter.append(stream);
  const now = make("b");
  const ceiling = make("span", { class: "quiet" });
  const way = make("span", { class: "quiet" }, `\u2191 from ${ENDS[source]} to ${ENDS[target]}`);
  const words = make("div", { class: "flow-words" }, way, make("span", {}, now, " ", ceiling));
  return { stream, meter, now, ceiling, element: make("div", { class: "link" }, meter, words) };
}

function flow({ stream, meter, now, ceiling, element }, link) {
  const share = link.ceiling ? Math.min(1, link.rate / link.ceiling) : link.rate ? 1 : 0;
  element.classList.toggle("still", link.rate === 0);
  stream.style.width = link.rate ? `max(3px, ${(share * 100).toFixed(1)}%)` : "0";
  // A new duration would make the pattern jump: it changes in few steps.
  const pace = Math.round(Math.sqrt(share) * 6) / 6;
  stream.style.setProperty("--lap", `${(SLOWEST_S + (FASTEST_S - SLOWEST_S) * pace).toFixed(2)}s`);
  const above = link.ceiling && link.rate > 1.1 * link.ceiling;
  say(now, rate(link.rate));
  const of = link.ceiling ? `${percent(link.rate / link.ceiling)} of its measured ${rate(link.ceiling)}` : "its limit was not measured";
  say(ceiling, above ? `above its measured ${rate(link.ceiling)}` : of);
  meter.setAttribute("aria-valuenow", String(Math.round(share * 100)));
  meter.setAttribute("aria-valuetext", `${now.textContent}, ${ceiling.textContent}`);
}

// What is not drawn

function showFacts(model, { tokens, kv, reads, prefixes, speculation, machine, links }) {
  const facts = [];
  facts.push(["Tokens", `${grouped(tokens.generation)} of answers, ${grouped(tokens.prompt)} of prompts`]);
  for (const link of links.filter((one) => one.total_bytes)) {
    facts.push([`From ${ENDS[link.source]} to ${ENDS[link.target]}`, bytes(link.total_bytes)]);
  }
  const needed = reads.hits + reads.pending + reads.misses;
  if (needed) facts.push(["Blocks from the disk", `${percent(reads.hits / needed)} there in time, of ${grouped(needed)}`]);
  facts.push(["Keys and values", `room for ${grouped(kv.free_tokens)} of ${counted(kv.capacity_tokens, "token")}`]);
  const levels = Object.entries(kv.level_pages).filter(([, pages]) => pages);
  for (const [level, pages] of levels) {
    const where = { near: "near", host: "in memory", disk: "on the disk" }[level] ?? level;
    facts.push([`Pages ${where}`, `${grouped(kv.level_held_pages[level] ?? 0)} of ${grouped(pages)}`]);
  }
  if (prefixes) facts.push(["Prompts that began alike", `${counted(prefixes.hit_tokens, "token")} not computed again`]);
  if (speculation.proposed) {
    const right = `${percent(speculation.accepted / speculation.proposed)} of ${grouped(speculation.proposed)} right`;
    facts.push(["Guessed tokens", `${right}, ${(speculation.tokens / speculation.steps).toFixed(1)} tokens a step`]);
  }
  facts.push(["Process", `${bytes(machine.peak_rss_bytes)} at its peak`]);
  if (machine.name) facts.push(["Machine", machine.name]);
  const list = byId("facts");
  const names = facts.map(([name]) => name).join();
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(...facts.map(([name]) => make("div", {}, make("dt", {}, name), make("dd"))));
  }
  facts.forEach(([, words], at) => say(list.children[at].lastChild, words));
}
