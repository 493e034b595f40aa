// The dialog of settings: system prompt, sampling, tools, the key.
import { NUMBERS } from "./answer.js";
import { byId } from "./dom.js";
import { store } from "./store.js";

const field = name => byId(`set-${name}`);

/** Opens the dialog for the conversation that `talk` holds; the key may be what is missing. */
export function openSettings(talk, wantsKey) {
  const { settings } = talk.talk;
  field("system").value = settings.system ?? "";
  for (const name of NUMBERS) field(name).value = settings[name] ?? "";
  field("stop").value = (settings.stop ?? []).join("\n");
  field("tools").value = settings.tools ? JSON.stringify(settings.tools, null, 1) : "";
  field("key").value = store.key();
  byId("settings-problem").textContent = wantsKey ? "This gateway wants an API key." : "";
  byId("settings").showModal();
  if (wantsKey) field("key").focus();
}

/** Prepares the dialog; `saved` is called after each change. */
export function prepareSettings(talk, saved) {
  const dialog = byId("settings");
  byId("settings-open").addEventListener("click", () => openSettings(talk, false));
  byId("settings-cancel").addEventListener("click", () => dialog.close());
  dialog.querySelector("form").addEventListener("submit", event => {
    event.preventDefault();
    try {
      keep(talk.talk, read());
    } catch (error) {
      byId("settings-problem").textContent = error.message;
      field("tools").focus();
      return;
    }
    dialog.close();
    saved();
  });
}

function keep(talk, settings) {
  talk.settings = settings;
  store.setSettings(settings);
  if (talk.messages.length) store.save(talk);
  const key = field("key").value.trim();
  if (key !== store.key()) store.setKey(key);
}

function read() {
  const settings = {};
  const system = field("system").value.trim();
  if (system) settings.system = system;
  for (const name of NUMBERS) if (field(name).value !== "") settings[name] = field(name).valueAsNumber;
  const stop = field("stop").value.split("\n").filter(Boolean);
  if (stop.length) settings.stop = stop;
  const tools = field("tools").value.trim();
  if (tools) settings.tools = list(tools);
  return settings;
}

function list(text) {
  let read = null;
  try {
    read = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(read)) throw new Error("The tools are not a list: expected [{\"type\": \"function\", …}]");
  return read;
}
