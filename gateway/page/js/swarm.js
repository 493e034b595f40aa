// What the page knows of the swarm: models to talk to, their servers, blocks without a server.
import { models } from "./api.js";
import { byId, make, readable } from "./dom.js";
import { store } from "./store.js";
import { modelView } from "./servers.js";

/** The models and servers, as the gateway told last. */
export class Swarm {
  constructor() {
    this.state = null;
    this.shown = "";
    this.offered = "";
    this.trouble = "";
    this.problem = "";
    /** Is called once there is a model. */
    this.whenOffered = null;
    byId("model").addEventListener("change", () => {
      store.setModel(this.chosen());
      this.#tell();
    });
  }

  /** The model to talk to; empty if there is none. */
  chosen() {
    return byId("model").value;
  }

  /** What a server calls itself, with the end of its peer id. */
  serverName(peer) {
    const servers = (this.state?.models ?? []).flatMap(model => model.servers);
    const name = servers.find(server => server.peer === peer)?.public_name;
    return `${name ? `${name} ` : ""}…${peer.slice(-8)}`;
  }

  /** Shows a state. */
  async show(state) {
    this.state = state;
    this.trouble = "";
    byId("status").textContent = `Read at ${new Date(state.at * 1000).toLocaleTimeString()}.`;
    const shown = JSON.stringify(state.models);
    // What has not changed keeps its place and the focus.
    if (shown !== this.shown) byId("models").replaceChildren(...state.models.map(modelView));
    this.shown = shown;
    await this.#offer();
    this.#tell();
    if (this.whenOffered && this.chosen()) {
      const { whenOffered } = this;
      this.whenOffered = null;
      this.setProblem("");
      whenOffered();
    }
  }

  /** Shows that no state came. */
  fail(error) {
    this.trouble = error.status ? error.message : "The gateway does not answer; trying again.";
    byId("status").textContent = this.trouble;
    this.#tell();
  }

  /** Says what is wrong with the browser. */
  setProblem(text) {
    this.problem = text;
    this.#tell();
  }

  /** The state of a model or, for `MODEL:ADAPTER`, of that below it. */
  #stateOf(name) {
    const known = this.state?.models ?? [];
    return known.find(model => model.name === name) ?? known.find(model => name.startsWith(`${model.name}:`));
  }

  async #offer() {
    let names = this.state.models.filter(model => model.can_chat).map(model => model.name);
    const adapters = this.state.models.flatMap(model => model.servers.flatMap(server => server.adapters));
    const offered = JSON.stringify([names, [...new Set(adapters)].sort()]);
    if (offered === this.offered) return;
    this.offered = offered;
    try {
      names = (await models()).filter(name => this.#stateOf(name)?.can_chat);
    } catch {
      // The state names the models without adapters.
    }
    const chosen = this.chosen() || store.model();
    byId("model").replaceChildren(...names.map(name => make("option", { value: name }, name)));
    if (names.includes(chosen)) byId("model").value = chosen;
    byId("model").hidden = names.length === 0;
  }

  /** The sentence above the field: what is wrong now, if anything is. */
  #tell() {
    const model = this.#stateOf(this.chosen());
    const nothing = this.state && !this.state.models.some(one => one.can_chat)
      ? "There is no model to talk to: the models here have no chat template. The tab Swarm shows their servers."
      : "";
    const text = this.trouble || nothing || lack(model) || this.problem;
    const notice = byId("notice");
    // Said once: a screen reader would read it again and again.
    if (notice.textContent !== text) notice.textContent = text;
    notice.hidden = !text;
    const route = model?.route;
    const servers = route ? `${route.legs.length} server${route.legs.length === 1 ? "" : "s"}` : "";
    byId("expected").textContent = route ? `Expected now: ${readable(route.tokens_per_second)} tokens/s over ${servers}.` : "";
  }
}

/** Why a model cannot answer now; a sentence that stays the same for as long as that is so. */
function lack(model) {
  if (!model || (model.route && !model.holes.length)) return "";
  if (!model.holes.length) return `The servers of ${model.name} cannot be reached right now.`;
  const blocks = model.holes.map(([start, end]) => `${start}:${end}`).join(", ");
  const since = model.holes_since ? ` since ${new Date(model.holes_since * 1000).toLocaleTimeString()}` : "";
  return `${model.name} cannot answer now: no server has served blocks ${blocks}${since}. The tab Swarm has more.`;
}
