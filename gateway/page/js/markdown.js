// Markdown of an answer as elements. Whatever an answer says is hostile: raw HTML is shown as text, and what marked
// makes of the rest goes through DOMPurify, which lets the listed elements pass. Images are links: nothing is loaded.
import { Marked } from "../vendor/marked.js";
import highlighter from "../vendor/highlight.js";
import "../vendor/purify.js";
import { copyButton, make } from "./dom.js";

const ALLOWED = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "input", "kbd",
    "li", "mark", "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "u", "ul"],
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
/** Tags that answers use within text; without attributes they pass as they are. */
const PLAIN_TAG = /^<(?:br ?\/?|\/?(?:b|i|em|strong|s|u|sub|sup|kbd|mark))>$/i;
/** Code beyond this is shown without colours. */
const MAX_COLOURED = 50_000;

const escaped = text => text.replace(/[&<>"']/g, sign => `&#${sign.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => (PLAIN_TAG.test(text.trim()) ? text : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    code({ text, lang }) {
      const language = (lang ?? "").match(/^[\w+#.-]+/)?.[0] ?? "";
      const known = language && text.length <= MAX_COLOURED && highlighter.getLanguage(language);
      const body = known ? highlighter.highlight(text, { language, ignoreIllegals: true }).value : escaped(text);
      return `<pre><code class="language-${escaped(language)}">${body}</code></pre>`;
    },
  },
});

// Classes are those of code alone: an answer cannot look like a part of the page.
globalThis.DOMPurify.addHook("uponSanitizeAttribute", (_, data) => {
  if (data.attrName === "class") data.keepAttr = /^(?:hljs-[\w-]+|language-[\w+#.-]*)(?: [a-z_-]+)*$/.test(data.attrValue);
});
globalThis.DOMPurify.addHook("afterSanitizeAttributes", node => {
  if (node.tagName === "A") {
    node.target = "_blank";
    node.rel = "noopener noreferrer nofollow";
  }
  if (node.tagName === "INPUT") {
    node.type = "checkbox";
    node.disabled = true;
    node.setAttribute("aria-label", node.checked ? "done" : "not done");
  }
});

function fragment(html) {
  const clean = globalThis.DOMPurify.sanitize(html, ALLOWED);
  for (const pre of clean.querySelectorAll("pre")) pre.replaceWith(framed(pre));
  for (const table of clean.querySelectorAll("table")) {
    const box = make("div", { className: "wide", tabIndex: 0, role: "region", ariaLabel: "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  return clean;
}

/** Code with its language and a button that copies it. */
function framed(pre) {
  const code = pre.querySelector("code");
  const language = code?.className.match(/language-(\S+)/)?.[1] ?? "";
  const head = make("div", { className: "code-head" }, make("span", {}, language || "text"));
  head.append(copyButton("Copy this code", () => (code ?? pre).textContent.replace(/\n$/, "")));
  const box = make("div", { className: "code" }, head);
  pre.tabIndex = 0;
  box.append(pre.cloneNode(true));
  return box;
}

/** Shows a text that grows: of its blocks only those are made anew that changed. */
export class MarkdownView {
  constructor() {
    this.element = make("div", { className: "markdown" });
    this.blocks = [];
  }

  /** The text so far; links of the text are found anew once it `isWhole`. */
  update(text, isWhole) {
    const tokens = marked.lexer(text).filter(token => token.type !== "space" && token.type !== "def");
    const isSame = (token, index) => !isWhole && this.blocks[index]?.raw === token.raw;
    let same = 0;
    while (same < tokens.length && isSame(tokens[same], same)) same += 1;
    for (const block of this.blocks.splice(same)) block.element.remove();
    for (const token of tokens.slice(same)) {
      const element = make("div", {}, fragment(marked.parser([token])));
      this.blocks.push({ raw: token.raw, element });
      this.element.append(element);
    }
  }
}
