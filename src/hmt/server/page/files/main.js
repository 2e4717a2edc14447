// The page: theme, views, the key, and a look at the machine every second.

import { load, Problem, state, storedKey, storeKey } from "./api.js";
import { allowImages } from "./attachments.js";
import { startChat, useModel } from "./chat.js";
import { startChats } from "./chats.js";
import { byId, make, say } from "./dom.js";
import { forgetTrends, showMachine, startMachine } from "./machine.js";
import { bytes, counted, percent } from "./units.js";

const APART_MS = 1000;
const APART_AFTER_FAILURE_MS = 4000;

const root = document.documentElement;

function startTheme() {
  const themes = ["auto", "light", "dark"];
  const names = { auto: "Auto", light: "Light", dark: "Dark" };
  const button = byId("theme");
  const set = (theme) => {
    root.dataset.theme = theme;
    say(byId("theme-name"), names[theme]);
    button.setAttribute("aria-label", `Theme: ${names[theme]}`);
    window.dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme) + 1) % themes.length];
    localStorage.setItem("hmt-theme", next);
    set(next);
  });
  const kept = localStorage.getItem("hmt-theme");
  set(themes.includes(kept) ? kept : "auto");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    window.dispatchEvent(new Event("themechange"));
  });
}

/** On a phone one of the two is there at a time. */
function startViews() {
  const buttons = [...document.querySelectorAll("[data-show]")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      root.dataset.view = button.dataset.show;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      window.dispatchEvent(new Event("resize"));
    });
  }
}

let asking = null; // promise of the dialog that is open

/** Ask for a key; whether one was given. */
function askForKey(hint = "It stays in this tab and is forgotten when you close it.") {
  asking ??= new Promise((resolve) => {
    const dialog = byId("key-dialog");
    const field = byId("key");
    say(byId("key-hint"), hint);
    byId("key-forget").hidden = !storedKey();
    field.value = "";
    dialog.returnValue = "";
    const closed = () => {
      asking = null;
      const given = dialog.returnValue === "given" && field.value.trim();
      if (given) storeKey(field.value.trim());
      field.value = "";
      byId("key-button").hidden = false;
      resolve(Boolean(given));
    };
    dialog.addEventListener("close", closed, { once: true });
    dialog.showModal();
    field.focus();
  });
  return asking;
}

function startKey() {
  const dialog = byId("key-dialog");
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close("given");
  });
  byId("key-cancel").addEventListener("click", () => dialog.close(""));
  byId("key-forget").addEventListener("click", () => {
    storeKey("");
    dialog.close("");
  });
  byId("key-button").hidden = !storedKey();
  byId("key-button").addEventListener("click", async () => {
    if (await askForKey()) lookNow();
  });
}

function wrongKey() {
  return storedKey() ? "The key that was given is not one of this server's." : undefined;
}

let chosen = null; // the model that was asked for, where there are several; null: the first one
let comes = ""; // the model that is loaded now, because it was chosen here
let refusal = ""; // why that failed

function startModels() {
  byId("model-choice").addEventListener("change", async (event) => {
    const name = event.target.value;
    refusal = "";
    if (event.target.selectedOptions[0].dataset.away) {
      comes = name;
      lookNow();
      try {
        await load(name);
      } catch (error) {
        refusal = `${name} is not loaded: ${error.message}`;
      }
      if (comes !== name) return; // another one was chosen meanwhile
      comes = "";
      if (refusal) {
        lookNow();
        return;
      }
    }
    comes = "";
    chosen = name;
    useModel(chosen);
    forgetTrends();
    lookNow();
  });
}

/** One model has its name in the header; of several one is chosen there. */
function showModels({ models, loadable, loading, model }) {
  const choice = byId("model-choice");
  const several = models.length + loadable.length > 1;
  byId("model-name").hidden = several;
  byId("model-choice-label").hidden = choice.hidden = !several;
  const options = [
    ...models.map((name) => [name, name, false]),
    ...loadable.map((name) => [name, `${name} (not loaded)`, true]),
  ];
  const shown = JSON.stringify(options);
  if (choice.dataset.shown !== shown) {
    choice.dataset.shown = shown;
    choice.replaceChildren(
      ...options.map(([value, text, away]) => make("option", { value, "data-away": away && "yes" }, text)),
    );
  }
  choice.value = comes || model.name;
  const [name, share] = Object.entries(loading).find(([one]) => one === comes) ?? Object.entries(loading)[0] ?? [comes, 0];
  const bar = byId("loading");
  bar.hidden = !name;
  if (name) {
    byId("loading-share").value = share;
    say(byId("loading-text"), `Loading ${name}: ${percent(share)}`);
  }
}

let timer = null;
let looking = false;
let declined = false; // to give a key: asked again only by the button, or by a question

function lookNow() {
  declined = false;
  clearTimeout(timer);
  look();
}

async function look() {
  if (looking) return;
  looking = true;
  let wait = APART_MS;
  try {
    const asked = chosen;
    const seen = await state(asked);
    if (asked !== chosen) {
      wait = 0; // another one was chosen meanwhile
      return;
    }
    if (refusal) showProblem(refusal);
    else byId("problem").hidden = true;
    showModels(seen);
    showModel(seen.model);
    showMachine(seen);
  } catch (error) {
    wait = APART_AFTER_FAILURE_MS;
    if (!(error instanceof Problem)) console.error(error);
    if (error.status === 401) {
      showProblem("The server asks for a key.");
      if (!declined && (await askForKey(wrongKey()))) wait = 0;
      else declined = true;
    } else if (error.status === 404 && chosen !== null) {
      chosen = null; // it has been unloaded
      forgetTrends();
      wait = 0;
    } else {
      showProblem(`${error.message} Trying again…`);
    }
  } finally {
    looking = false;
    clearTimeout(timer);
    // Whoever does not see it does not need it.
    if (!document.hidden && !declined) timer = setTimeout(look, wait);
  }
}

function showProblem(text) {
  const problem = byId("problem");
  problem.hidden = false;
  say(problem, text);
}

function showModel(model) {
  useModel(model.name);
  allowImages(model.images_refused);
  say(byId("model-name"), model.name);
  const facts = [bytes(model.published_bytes), counted(model.layers, "layer")];
  facts.push(`context of ${counted(model.max_positions, "token")}`);
  say(byId("model-facts"), facts.join(" · "));
  if (document.title !== `${model.name} · HMT`) document.title = `${model.name} · HMT`;
}

async function askForChat() {
  const given = await askForKey(wrongKey());
  if (given) lookNow();
  return given;
}

startTheme();
startViews();
startModels();
startKey();
startMachine();
startChat(askForChat);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the chat that is open
  byId("prompt").focus();
});
startChats();
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && !declined) lookNow();
});
if (matchMedia("(pointer: fine)").matches) byId("prompt").focus(); // else a keyboard would open
look();
