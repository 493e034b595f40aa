// The list of conversations: open, rename, delete, export.
import { ask, byId, button, download, make } from "./dom.js";
import { store } from "./store.js";

const save = (name, content) => download(name, JSON.stringify(content, null, 2));

/** The list beside the conversation in view, which `talk` holds. */
export class Conversations {
  constructor(talk, opened) {
    this.talk = talk;
    this.opened = opened;
    byId("new").addEventListener("click", () => this.open(store.fresh()));
    byId("export-all").addEventListener("click", () => save("sepal-conversations.json", store.all()));
    store.onChange(name => {
      // What another tab wrote is shown, unless an answer comes into it here.
      const other = this.talk.under ? null : store.load(this.talk.talk.id);
      if (other && (!name || name === other.id)) this.talk.open(other);
      else this.list();
    });
  }

  open(talk) {
    // An answer may come into the one in view.
    if (talk.id !== this.talk.talk.id) this.talk.open(talk);
    this.opened();
    byId("text").focus();
  }

  /** Shows the list as it is now. */
  list() {
    const current = this.talk.talk?.id;
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    const talks = store.all();
    byId("conversations").replaceChildren(...talks.map(talk => this.#entry(talk, talk.id === current)));
    byId("export-all").hidden = talks.length === 0;
    if (focused) byId("conversations").querySelector(`li[data-id="${CSS.escape(focused)}"] button`)?.focus();
  }

  #entry(talk, isCurrent) {
    const name = talk.title || "Untitled";
    const open = make("button", { type: "button", className: "open" }, name);
    open.addEventListener("click", () => this.open(store.load(talk.id) ?? talk));
    if (isCurrent) open.setAttribute("aria-current", "true");
    const entry = make("li", {}, open);
    entry.dataset.id = talk.id;
    const deeds = make("div", { className: "deeds", hidden: true },
      button("Rename", `Rename ${name}`, () => this.#rename(talk, name)),
      button("Export", `Export ${name}`, () => save(`sepal-${talk.id}.json`, talk)),
      button("Delete", `Delete ${name}`, () => this.#remove(talk, name)));
    const more = button("⋯", `More for ${name}`, () => {
      deeds.hidden = !deeds.hidden;
      more.setAttribute("aria-expanded", String(!deeds.hidden));
    });
    more.classList.add("more");
    more.setAttribute("aria-expanded", "false");
    entry.append(more, deeds);
    return entry;
  }

  async #rename(talk, name) {
    const title = await ask("Rename the conversation", name, "Rename");
    if (!title) return;
    const kept = this.talk.talk.id === talk.id ? this.talk.talk : store.load(talk.id);
    if (kept) store.save(Object.assign(kept, { title }));
    this.list();
  }

  async #remove(talk, name) {
    if ((await ask(`Delete “${name}”?`, null, "Delete")) === null) return;
    store.remove(talk);
    if (this.talk.talk.id === talk.id) this.talk.open(store.fresh());
    this.list();
    byId("new").focus();
  }
}
