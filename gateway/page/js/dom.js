// Small helpers over the document.

/** The element of this id. */
export const byId = id => document.getElementById(id);

/** A new element with these properties and children; texts are never read as HTML. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (/^aria[A-Z]/.test(name)) element.setAttribute(`aria-${name.slice(4).toLowerCase()}`, value);
    else if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child != null));
  return element;
}

/** A button that does one thing. */
export function button(text, label, action) {
  return make("button", { type: "button", className: "plain", title: label, ariaLabel: label, onclick: action }, text);
}

/** A number as people read it. */
export function readable(number) {
  if (number == null || !Number.isFinite(number)) return "";
  return number >= 100 ? Math.round(number).toLocaleString("en") : number.toFixed(1);
}

/** Puts a text on the clipboard; browsers offer `navigator.clipboard` to secure origins only. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = make("textarea", { value: text, className: "unseen" });
    const before = document.activeElement;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    before?.focus();
    return done;
  }
}

/** A button that copies what `text` gives, and says so for a moment. */
export function copyButton(label, text) {
  const made = button("Copy", label, async () => {
    made.textContent = (await copy(text())) ? "Copied" : "Not copied";
    announce(made.textContent);
    setTimeout(() => { made.textContent = "Copy"; }, 2000);
  });
  made.classList.add("copy");
  return made;
}

/** Has a screen reader say a text. */
export function announce(text) {
  byId("heard").replaceChildren(make("p", {}, text));
}

/** Asks for a text, or only for a yes; gives null if the person changes their mind. */
export function ask(title, value, yes) {
  const dialog = byId("ask");
  byId("ask-title").textContent = title;
  byId("ask-field").hidden = value === null;
  byId("ask-text").value = value ?? "";
  byId("ask-yes").textContent = yes;
  dialog.returnValue = "";
  return new Promise(resolve => {
    byId("ask-no").onclick = () => dialog.close("");
    dialog.querySelector("form").onsubmit = event => {
      event.preventDefault();
      dialog.close("yes");
    };
    dialog.onclose = () => resolve(dialog.returnValue === "yes" ? byId("ask-text").value.trim() : null);
    dialog.showModal();
    (value === null ? byId("ask-no") : byId("ask-text")).focus();
  });
}

/** Offers a file for download. */
export function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
