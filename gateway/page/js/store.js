// What the browser keeps: conversations, settings, the key. Gateways below different paths of one origin keep apart.

const PREFIX = `sepal:${location.pathname}:`;
const TALK = `${PREFIX}talk:`;
/** Most conversations that are listed. */
const MAX_TALKS = 1000;

function read(key, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

const id = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), byte => byte.toString(16).padStart(2, "0")).join("");

let waiting = [];

/** Conversations and settings in localStorage. */
export const store = {
  key: () => read(`${PREFIX}key`, ""),
  setKey(key) {
    if (key) write(`${PREFIX}key`, key);
    else localStorage.removeItem(`${PREFIX}key`);
    waiting.forEach(done => done());
    waiting = [];
  },
  /** Waits until a key is given. */
  keyChanged: () => new Promise(done => waiting.push(done)),

  settings: () => read(`${PREFIX}settings`, {}),
  setSettings: settings => write(`${PREFIX}settings`, settings),
  model: () => read(`${PREFIX}model`, ""),
  setModel: name => write(`${PREFIX}model`, name),
  current: () => read(`${PREFIX}current`, null),
  setCurrent: name => write(`${PREFIX}current`, name),

  /** A conversation that is kept once it has a message. */
  fresh: () => ({ id: id(), title: "", at: Date.now(), settings: store.settings(), messages: [] }),

  /** All conversations, the newest first. */
  all() {
    const keys = Array.from({ length: localStorage.length }, (_, index) => localStorage.key(index));
    const talks = keys.filter(key => key?.startsWith(TALK)).map(key => read(key, null));
    return talks.filter(isTalk).sort((a, b) => b.at - a.at).slice(0, MAX_TALKS);
  },
  load(name) {
    const talk = name && read(TALK + name, null);
    return isTalk(talk) ? { settings: {}, ...talk } : null;
  },
  /** False if the browser has no more room. */
  save: talk => write(TALK + talk.id, talk),
  remove: talk => localStorage.removeItem(TALK + talk.id),

  /** Calls `changed` when another tab changes a conversation. */
  onChange(changed) {
    addEventListener("storage", event => {
      if (event.key === null || event.key.startsWith(TALK)) changed(event.key?.slice(TALK.length));
    });
  },
};

function isTalk(talk) {
  return typeof talk?.id === "string" && Array.isArray(talk.messages) && talk.messages.every(message => message?.role);
}
