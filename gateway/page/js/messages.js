// Messages of a conversation as elements.
import { parts } from "./answer.js";
import { button, copyButton, make, readable } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** A message on the page. `actions` are what its buttons do: edit, again, answerTool. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = make("div", { className: "body" });
    this.tail = make("div", { className: "tail" });
    this.element = make("li", { className: `message ${message.role}` });
    const who = { user: "You", tool: `Result of ${message.name ?? "a tool"}` }[message.role] ?? message.model ?? "Answer";
    const article = make("article", { ariaLabel: who }, make("h3", { className: "who" }, who), this.body, this.tail);
    this.element.append(article);
    this.article = article;
    if (message.role === "assistant") {
      this.think = thinking();
      this.text = new MarkdownView();
      this.tools = make("div", { className: "tools" });
      this.problem = make("p", { className: "bad" });
      this.body.append(this.think, this.text.element, this.tools, this.problem);
    } else {
      this.body.append(make("div", { className: "said" }, message.content));
    }
    this.update(true);
  }

  /** Shows what the message says now; `isWhole` once nothing more comes. */
  update(isWhole) {
    const { message } = this;
    this.article.setAttribute("aria-busy", String(!isWhole));
    this.element.classList.toggle("busy", !isWhole);
    if (message.role === "assistant") this.#answer(isWhole);
    if (isWhole) this.tail.replaceChildren(...this.#tail());
  }

  #answer(isWhole) {
    const { thinking: thought, text } = parts(this.message);
    this.think.hidden = !thought.trim();
    this.think.querySelector("div").textContent = thought.trim();
    this.think.querySelector("summary").textContent = text || isWhole ? "Thoughts" : "Thinking …";
    this.text.update(text, isWhole);
    this.problem.textContent = this.message.error ?? "";
    this.problem.hidden = !this.message.error;
    this.#tools();
  }

  #tools() {
    const shown = [...this.tools.children];
    for (const [index, call] of (this.message.tools ?? []).entries()) {
      const box = shown[index] ?? make("details", { open: true }, make("summary"), make("pre", { tabIndex: 0 }));
      if (!shown[index]) this.tools.append(box);
      box.querySelector("summary").textContent = `Calls the tool ${call.name}`;
      box.querySelector("pre").textContent = pretty(call.arguments);
    }
  }

  #tail() {
    const { message, actions } = this;
    const row = make("div", { className: "row" });
    if (message.content) row.append(copyButton("Copy this message", () => parts(message).text));
    if (message.role === "user") {
      row.append(button("Edit", "Edit this message and go on from it", () => actions.edit(message)));
    }
    if (message.role === "assistant" && actions.isLast(message)) {
      row.append(button("Try again", "Have this answer made again", () => actions.again(message)));
    }
    const open = actions.isLast(message) ? (message.tools ?? []) : [];
    return [row, figures(message, actions), ...open.length ? [results(message, actions)] : []].filter(Boolean);
  }
}

function thinking() {
  return make("details", { className: "think", hidden: true }, make("summary"), make("div", { className: "soft" }));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const WHY = { length: "ended at the longest answer that was asked for", stopped: "stopped", content_filter: "filtered" };

/** Tokens, tokens/s and the servers of an answer. */
function figures(message, actions) {
  const { stats, finish } = message;
  const told = [];
  if (stats) {
    told.push(`${stats.isExact ? "" : "about "}${stats.tokens} token${stats.tokens === 1 ? "" : "s"}`);
    if (stats.perSecond) told.push(`${readable(stats.perSecond)} tokens/s`);
    told.push(`first after ${stats.wait.toFixed(stats.wait < 10 ? 1 : 0)} s`);
  }
  if (WHY[finish]) told.push(WHY[finish]);
  if (!told.length) return null;
  const line = make("p", { className: "figures soft" }, told.join(" · "));
  if (!stats?.route?.length) return line;
  const servers = stats.route.length === 1 ? "1 server" : `${stats.route.length} servers`;
  const leg = ({ start, end, peer }) => make("li", {}, `blocks ${start}:${end} `, make("code", {}, actions.serverName(peer)));
  const legs = stats.route.map(leg);
  const route = make("details", { className: "route" }, make("summary", {}, `Route: ${servers}`), make("ol", {}, ...legs));
  return make("div", {}, line, route);
}

/** Fields for what the tools of an answer gave. */
function results(message, actions) {
  const form = make("form", { className: "results" });
  const fields = message.tools.map(call => {
    const label = `Result of ${call.name}`;
    const field = make("textarea", { rows: 2, ariaLabel: label, placeholder: label });
    form.append(field);
    return { call, field };
  });
  form.append(make("button", { type: "submit" }, "Send results"));
  form.onsubmit = event => {
    event.preventDefault();
    const given = fields.map(({ call, field }) => ({ role: "tool", call: call.id, name: call.name, content: field.value }));
    actions.answerTools(given);
  };
  return form;
}
