// The page: a place to talk, and behind a tab the swarm that answers.
import { watch } from "./api.js";
import { Conversations } from "./conversations.js";
import { byId } from "./dom.js";
import { openSettings, prepareSettings } from "./settings.js";
import { store } from "./store.js";
import { Swarm } from "./swarm.js";
import { Talk } from "./talk.js";

const TABS = ["chat", "swarm"];

/** Shows one of the two views; the address says which. */
function select(name, takesFocus) {
  for (const tab of TABS) {
    const isChosen = tab === name;
    byId(`tab-${tab}`).setAttribute("aria-selected", String(isChosen));
    byId(`tab-${tab}`).tabIndex = isChosen ? 0 : -1;
    byId(tab).hidden = !isChosen;
  }
  document.body.dataset.view = name;
  history.replaceState(null, "", name === "swarm" ? "#swarm" : location.pathname + location.search);
  if (takesFocus) byId(`tab-${name}`).focus();
}

function prepareTabs() {
  for (const [index, name] of TABS.entries()) {
    byId(`tab-${name}`).addEventListener("click", () => select(name, false));
    byId(`tab-${name}`).addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowLeft: -1, Home: -index, End: TABS.length - 1 - index }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      select(TABS[(index + step + TABS.length) % TABS.length], true);
    });
  }
  addEventListener("hashchange", () => location.hash === "#swarm" && select("swarm", false));
  select(location.hash === "#swarm" ? "swarm" : "chat", false);
}

/** On a narrow screen the list of conversations is a drawer. */
function openDrawer(isOpen) {
  document.body.classList.toggle("drawn", isOpen);
  byId("drawer").setAttribute("aria-expanded", String(isOpen));
  if (isOpen) byId("new").focus();
}

function start() {
  const swarm = new Swarm();
  let conversations = null;
  const talk = new Talk(swarm, () => conversations?.list());
  conversations = new Conversations(talk, () => openDrawer(false));
  talk.open(store.load(store.current()) ?? store.fresh());
  prepareTabs();
  prepareSettings(talk, () => byId("text").focus());
  byId("drawer").addEventListener("click", () => openDrawer(!document.body.classList.contains("drawn")));
  byId("talk").addEventListener("pointerdown", () => openDrawer(false));
  document.addEventListener("keydown", event => {
    if (event.key === "Escape" && document.body.classList.contains("drawn")) {
      openDrawer(false);
      byId("drawer").focus();
    }
  });
  byId("text").focus();
  watch(state => swarm.show(state), error => {
    swarm.fail(error);
    if (error.status === 401 && !byId("settings").open) openSettings(talk, true);
  });
}

start();
