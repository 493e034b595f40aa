// The conversation in view: sending, stopping, making an answer again.
import { bodyOf, empty, parts, stream } from "./answer.js";
import { announce, byId } from "./dom.js";
import { MessageView } from "./messages.js";
import { store } from "./store.js";

/** An answer under way is saved this often. */
const SAVE_PERIOD_MS = 1000;

/** The conversation in view. `swarm` knows models and servers, `changed` is called when the list of conversations changes. */
export class Talk {
  constructor(swarm, changed) {
    this.swarm = swarm;
    this.changed = changed;
    this.under = null;
    this.views = [];
    this.follows = true;
    this.at = 0;
    this.actions = {
      edit: message => this.edit(message),
      again: message => this.again(message),
      answerTools: given => this.#go(...given),
      isLast: message => this.talk.messages.at(-1) === message,
      serverName: peer => swarm.serverName(peer),
    };
    this.#listen();
  }

  #listen() {
    const text = byId("text");
    byId("form").addEventListener("submit", event => {
      event.preventDefault();
      this.send();
    });
    text.addEventListener("keydown", event => {
      // A key that ends the composition of a character sends nothing.
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      this.send();
    });
    text.addEventListener("input", () => this.#fit());
    byId("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", event => {
      if (event.key === "Escape" && !document.querySelector("dialog[open]")) this.stop();
    });
    const scroll = byId("scroll");
    scroll.addEventListener("scroll", () => {
      this.follows = !isFar(scroll);
      byId("down").hidden = this.follows;
    });
    // A notice above the field, or a higher field, hides no line.
    new ResizeObserver(() => this.#follow()).observe(scroll);
    byId("down").addEventListener("click", () => this.#toEnd());
  }

  /** Brings a conversation into view. */
  open(talk) {
    this.stop();
    this.talk = talk;
    store.setCurrent(talk.id);
    this.views = [];
    byId("messages").replaceChildren();
    talk.messages.forEach(message => this.#show(message));
    byId("empty").hidden = talk.messages.length > 0;
    this.#toEnd();
    this.changed();
  }

  /** Sends what is in the field. */
  send() {
    const content = byId("text").value.trim();
    if (!content || this.under) return;
    if (!this.swarm.chosen()) {
      this.swarm.setProblem("The message is sent as soon as the gateway offers a model.");
      this.swarm.whenOffered = () => this.send();
      return;
    }
    byId("text").value = "";
    this.#fit();
    this.#go({ role: "user", content });
  }

  stop() {
    this.under?.abort();
  }

  /** Takes an answer back and asks for another. */
  again(message) {
    if (this.under || !this.swarm.chosen()) return;
    this.#cut(message);
    this.#go();
  }

  /** Takes a message and what came after it back into the field. */
  edit(message) {
    if (this.under) return;
    this.#cut(message);
    byId("text").value = message.content;
    this.#fit();
    byId("text").focus();
    this.#save();
  }

  #cut(message) {
    const at = this.talk.messages.indexOf(message);
    if (at < 0) return;
    this.talk.messages.splice(at);
    for (const view of this.views.splice(at)) view.element.remove();
    byId("empty").hidden = this.talk.messages.length > 0;
  }

  /** Adds messages and asks for the answer. */
  async #go(...messages) {
    const { talk } = this;
    const model = this.swarm.chosen();
    if (this.under || !model) return;
    talk.messages.push(...messages);
    messages.forEach(message => this.#show(message));
    talk.title ||= title(talk.messages[0]?.content ?? "");
    const body = bodyOf(talk, model);
    const answer = empty(model);
    talk.messages.push(answer);
    this.views.forEach(view => view.update(true));
    const view = this.#show(answer);
    view.update(false);
    byId("empty").hidden = true;
    this.#toEnd();
    const under = new AbortController();
    this.#begin(under);
    announce(`${model} is answering.`);
    const show = painter(() => {
      view.update(false);
      this.#follow();
    });
    let saved = performance.now();
    await stream(body, answer, under.signal, () => {
      show();
      if (performance.now() - saved > SAVE_PERIOD_MS) {
        saved = performance.now();
        store.save(talk);
      }
    });
    show.cancel();
    this.#end(talk, answer, view);
  }

  #begin(under) {
    this.under = under;
    byId("send").hidden = true;
    byId("stop").hidden = false;
    this.#save();
  }

  #end(talk, answer, view) {
    this.under = null;
    byId("stop").hidden = true;
    byId("send").hidden = false;
    // A conversation that was deleted meanwhile stays deleted.
    if (store.load(talk.id)) this.#save(talk);
    if (this.talk !== talk) return;
    view.update(true);
    this.#follow();
    if (answer.error) announce(`The answer failed: ${answer.error}`);
    else announce(view.text.element.textContent || parts(answer).text || "The answer is empty.");
    const { activeElement } = document;
    if (activeElement === document.body || activeElement === byId("stop")) byId("text").focus();
  }

  #show(message) {
    const view = new MessageView(message, this.actions);
    this.views.push(view);
    byId("messages").append(view.element);
    return view;
  }

  #save(talk = this.talk) {
    talk.at = Date.now();
    const room = talk.messages.length === 0 ? store.remove(talk) ?? true : store.save(talk);
    this.swarm.setProblem(room ? "" : "This browser keeps no more conversations: delete some, or export them first.");
    this.changed();
  }

  #toEnd() {
    this.follows = true;
    this.at = 0;
    this.#follow();
  }

  /** Keeps the newest line in view, unless the reader has scrolled up: then the event of that may still be to come. */
  #follow() {
    const scroll = byId("scroll");
    if (scroll.scrollTop < this.at - 5 && isFar(scroll)) this.follows = false;
    if (this.follows) scroll.scrollTop = scroll.scrollHeight;
    this.at = scroll.scrollTop;
  }

  /** Makes the field as high as its text, within limits of the style. */
  #fit() {
    const text = byId("text");
    text.style.height = "auto";
    text.style.height = `${text.scrollHeight + 2}px`;
  }
}

/** Whether the newest line is out of view. */
const isFar = scroll => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight > 60;

function title(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 57)}…` : line;
}

/** Paints at most once a frame, and so that painting takes a quarter of the time at most. */
function painter(paint) {
  let timer = null;
  let pause = 0;
  const run = () => {
    timer = null;
    const began = performance.now();
    paint();
    pause = 3 * (performance.now() - began);
  };
  const ask = () => { timer ??= setTimeout(run, Math.max(16, pause)); };
  ask.cancel = () => clearTimeout(timer);
  return ask;
}
