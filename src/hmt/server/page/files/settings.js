// What an answer is asked for with, and presets of it that are kept in this browser.

import { askForText } from "./asking.js";
import { byId, make, say } from "./dom.js";
import { presets, reasonOf, removePreset, savePreset } from "./store.js";

const PRESETS = [
  { name: "None", system: "", temperature: 0.7, longest: "" },
  { name: "Short answers", system: "Answer in as few words as are needed, without an introduction.", temperature: 0.3, longest: "" },
  { name: "Programmer", system: "You are a careful programmer. Give complete code that runs, and say what it assumes.", temperature: 0.2, longest: "" },
  { name: "Explain simply", system: "Explain in plain words, with one example, to a reader who is new to the subject.", temperature: 0.7, longest: "" },
  { name: "Editor", system: "Improve the text that you are given: spelling, grammar and clarity. Keep its meaning and tone, and answer with the text only.", temperature: 0.2, longest: "" },
];

let own = [];

const system = byId("system");
const tools = byId("tools");
const temperature = byId("temperature");
const longest = byId("longest");
const choice = byId("preset");

export const settings = {
  /** What is kept with a conversation. */
  ofConversation: () => ({ system: system.value.trim(), tools: tools.value.trim() }),
  messages: () => (system.value.trim() ? [{ role: "system", content: system.value.trim() }] : []),
  ofRequest: () => {
    const most = Number.parseInt(longest.value, 10);
    const offered = readTools();
    return {
      temperature: Number(temperature.value),
      ...(most > 0 ? { max_tokens: most } : {}),
      ...(offered?.length ? { tools: offered } : {}),
    };
  },
};

/** Call once. */
export function startSettings() {
  const button = byId("settings-button");
  const box = byId("settings");
  button.addEventListener("click", () => {
    box.hidden = !box.hidden;
    button.setAttribute("aria-expanded", String(!box.hidden));
    if (!box.hidden) choice.focus();
  });
  temperature.addEventListener("input", showTemperature);
  tools.addEventListener("change", checkTools);
  choice.addEventListener("change", () => use(all().find(({ name }) => name === choice.value)));
  byId("preset-save").addEventListener("click", saveAs);
  byId("preset-remove").addEventListener("click", forget);
  showTemperature();
  showPresets("None");
  presets().then((found) => {
    own = found;
    showPresets(choice.value);
  }).catch(() => {}); // there are none where nothing can be kept
}

/** Those that a conversation was kept with. */
export function showSettings(conversation) {
  system.value = conversation.system;
  tools.value = conversation.tools;
  checkTools();
}

function showTemperature() {
  say(byId("temperature-value"), Number(temperature.value).toFixed(1));
}

function all() {
  return [...PRESETS, ...own];
}

function use(preset) {
  system.value = preset.system;
  temperature.value = preset.temperature;
  longest.value = preset.longest;
  showTemperature();
  byId("preset-remove").hidden = !own.includes(preset);
}

function showPresets(chosen) {
  choice.replaceChildren(...all().map(({ name }) => make("option", { value: name }, name)));
  choice.value = chosen;
  byId("preset-remove").hidden = !own.some(({ name }) => name === chosen);
}

async function saveAs() {
  const name = await askForText("Name of the preset", "Save", "");
  if (!name) return;
  if (PRESETS.some((one) => one.name === name)) {
    note(`${name} comes with the page: choose another name.`);
    return;
  }
  const preset = { name, system: system.value, temperature: Number(temperature.value), longest: longest.value };
  try {
    await savePreset(preset);
  } catch (error) {
    note(`The preset is not kept: ${reasonOf(error)}.`);
    return;
  }
  own = [...own.filter((one) => one.name !== name), preset];
  showPresets(name);
  note(`Preset ${name} is kept in this browser.`);
}

async function forget() {
  const name = choice.value;
  await removePreset(name).catch(() => {});
  own = own.filter((one) => one.name !== name);
  showPresets("None");
  note(`Preset ${name} deleted.`);
  choice.focus();
}

/** The tools that are offered, or null where that is no list of them. */
function readTools() {
  const text = tools.value.trim();
  if (!text) return [];
  try {
    const found = JSON.parse(text);
    return Array.isArray(found) ? found : null;
  } catch {
    return null;
  }
}

function checkTools() {
  const wrong = readTools() === null;
  tools.setAttribute("aria-invalid", String(wrong));
  note(wrong ? "Tools are not sent: they are no JSON list." : "");
}

function note(text) {
  say(byId("settings-note"), text);
}
