// The page of the gateway in a real browser, driven by playwright-core. Prints one line per point; exit status 1 if one fails.
//
//     node page.mjs http://127.0.0.1:8080/ CHROMIUM SCREENSHOT_FOLDER
//
// The first points are held against the gateway itself; the others against scripted answers below a path (fake.mjs).
import assert from "node:assert/strict";
import { chromium } from "playwright-core";
import { startFake } from "./fake.mjs";

const [real, executablePath, folder] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const fake = await startFake(real);
const WIDE = { viewport: { width: 1200, height: 850 } };
const PHONE = { viewport: { width: 360, height: 740 }, isMobile: true, hasTouch: true };
let failed = 0;

async function point(name, check) {
  try {
    await check();
    console.log(`ok   page.${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL page.${name} ${String(error.stack ?? error).split("\n").slice(0, 3).join(" ")}`);
  }
}

const problems = [];
async function open(base, options = WIDE, awaited = "#model option") {
  const context = await browser.newContext({ permissions: ["clipboard-read", "clipboard-write"], ...options });
  const page = await context.newPage();
  page.setDefaultTimeout(600_000);
  page.on("console", message => message.type() === "error" && problems.push(`${message.text()} ${message.location().url}`));
  page.on("pageerror", error => problems.push(String(error)));
  page.on("dialog", dialog => { problems.push("a dialog opened: " + dialog.message()); dialog.dismiss(); });
  page.on("request", asked => asked.url().startsWith(new URL(base).origin) || /^(blob|data):/.test(asked.url()) || problems.push(asked.url()));
  await page.goto(base);
  await page.waitForSelector(awaited, { state: "attached" });
  return page;
}
const ended = page => page.waitForSelector("#send:not([hidden])");
async function say(page, text) {
  await page.fill("#text", text);
  await page.keyboard.press("Enter");
  await ended(page);
}
const last = page => page.locator("#messages > li").last();
const active = page => page.evaluate(() => document.activeElement.id);
const shot = (page, name) => page.screenshot({ path: `${folder}/page-${name}.png` });
/** Expects what the server said of a request that failed, and forgets that the browser logs it too. */
const forget = part => {
  const at = problems.findIndex(problem => problem.includes(part));
  assert.ok(at >= 0, problems.join());
  problems.splice(at, 1);
};

const gateway = await open(real);
await point("chats_with_the_gateway_and_shows_tokens_and_route", async () => {
  assert.equal(await active(gateway), "text");
  await gateway.keyboard.type("Tell me of a fox.");
  await gateway.keyboard.press("Enter");
  await gateway.waitForFunction(() => document.querySelectorAll("#messages > li").length === 2);
  await ended(gateway);
  assert.ok((await last(gateway).locator(".markdown").textContent()).length > 5);
  assert.match(await last(gateway).locator(".figures").textContent(), /^\d+ tokens? · .* s/);
  assert.match(await last(gateway).locator(".route li").textContent(), /^blocks 0:8 .*<img src=x onerror=alert\(1\)> …\w{8}$/);
  assert.equal(await active(gateway), "text");
});
await point("shows_models_and_servers_behind_the_second_tab", async () => {
  await gateway.click("#tab-swarm");
  assert.equal(await gateway.textContent("#models h3"), "demo");
  assert.equal(await gateway.locator(".coverage span").count(), 8);
  assert.equal(await gateway.locator(".coverage .missing").count(), 0);
  assert.match(await gateway.textContent("#status"), /^Read at/);
  assert.ok((await gateway.textContent("#models table")).includes("<img src=x onerror=alert(1)>"));
  assert.equal(await gateway.locator("img").count(), 0);
  await shot(gateway, "swarm");
  await gateway.reload();
  assert.ok(await gateway.isVisible("#swarm"));
});
await point("is_kept_by_the_browser_and_loads_nothing_twice", async () => {
  const html = await (await fetch(real)).text();
  const address = new URL(html.match(/page\/[0-9a-f]{16}\/js\/main\.js/)[0], real);
  const main = await fetch(address);
  assert.match(main.headers.get("cache-control"), /immutable/);
  assert.match(main.headers.get("content-security-policy"), /script-src 'self';/);
  assert.equal(main.headers.get("content-encoding"), "gzip");
  assert.equal((await fetch(real, { headers: { "if-none-match": main.headers.get("etag") } })).status, 304);
});
await gateway.context().close();

const page = await open(fake.base);
await point("works_below_the_path_of_a_proxy", async () => {
  await say(page, "hello");
  assert.match(await last(page).locator(".markdown").textContent(), /^You said: hello/);
  const { messages, stream } = fake.asked.at(-1);
  assert.deepEqual([messages, stream], [[{ role: "user", content: "hello" }], true]);
});
await point("shift_enter_breaks_the_line", async () => {
  await page.fill("#text", "one");
  await page.keyboard.press("Shift+Enter");
  await page.keyboard.type("two");
  assert.equal(await page.inputValue("#text"), "one\ntwo");
  await page.keyboard.press("Enter");
  await ended(page);
  assert.equal(fake.asked.at(-1).messages.at(-1).content, "one\ntwo");
  assert.equal(fake.asked.at(-1).messages.length, 3);
});
await point("an_enter_that_ends_a_composition_sends_nothing", async () => {
  const before = fake.asked.length;
  await page.fill("#text", "かな");
  const key = { key: "Enter", isComposing: true, bubbles: true, cancelable: true };
  await page.evaluate(init => document.getElementById("text").dispatchEvent(new KeyboardEvent("keydown", init)), key);
  assert.deepEqual([fake.asked.length, await page.inputValue("#text")], [before, "かな"]);
});
await point("shows_an_answer_as_it_comes_and_stops_it", async () => {
  await page.fill("#text", "endless");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#messages > li:last-child .markdown").textContent.includes("word20"));
  assert.equal(await last(page).locator("article").getAttribute("aria-busy"), "true");
  await page.click("#stop");
  await ended(page);
  assert.match(await last(page).locator(".figures").textContent(), /^about \d+ tokens .* stopped$/);
  assert.match(await last(page).locator(".markdown").textContent(), /word20/);
  while (fake.open) await page.waitForTimeout(20);
  await page.fill("#text", "endless");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#messages > li:last-child .markdown").textContent.includes("word3"));
  await page.keyboard.press("Escape");
  await ended(page);
});
await point("makes_an_answer_again", async () => {
  await say(page, "again");
  const first = await last(page).locator(".markdown").textContent();
  const count = await page.locator("#messages > li").count();
  await last(page).getByRole("button", { name: "Have this answer made again" }).click();
  await ended(page);
  assert.notEqual(await last(page).locator(".markdown").textContent(), first);
  assert.equal(await page.locator("#messages > li").count(), count);
  assert.equal(fake.asked.at(-1).messages.at(-1).content, "again");
});
await point("a_message_is_edited", async () => {
  await page.locator("#messages > li.user").last().getByRole("button", { name: "Edit this message" }).click();
  assert.deepEqual([await active(page), await page.inputValue("#text")], ["text", "again"]);
  await say(page, "edited");
  assert.ok(!fake.asked.at(-1).messages.some(message => message.content === "again"));
});
await point("renders_markdown_and_copies_code", async () => {
  await say(page, "markdown");
  for (const tag of ["h1", "strong", "sub", "ul li", "ol li", "table td", "blockquote", ".hljs-keyword"]) {
    assert.ok((await last(page).locator(`.markdown ${tag}`).count()) > 0, tag);
  }
  assert.match(await last(page).locator(".markdown a").getAttribute("rel"), /noopener/);
  await last(page).getByRole("button", { name: "Copy this code" }).click();
  await page.waitForFunction(() => document.querySelector("#messages > li:last-child .code .copy").textContent === "Copied");
  const copied = await page.evaluate(() => navigator.clipboard.readText());
  assert.match(copied, /^def area\(radius: float\) -> float:\n {4}"""The area/);
  await shot(page, "light");
});
await point("a_hostile_answer_runs_nothing_and_loads_nothing", async () => {
  await say(page, "hostile");
  const text = await last(page).locator(".markdown").textContent();
  for (const part of ["<img src=x onerror", "<script>", "<svg onload", "<iframe", "<style>"]) assert.ok(text.includes(part), part);
  const found = await page.evaluate(() => {
    const inside = [...document.querySelectorAll("#messages .markdown *")];
    const bad = inside.filter(e => e.matches("img, script, style, iframe, svg, math, form, details, [id], [style]")
      || [...e.attributes].some(a => a.name.startsWith("on") || /javascript:|data:/.test(a.value)));
    return { ran: window.ran ?? null, bad: bad.map(e => e.outerHTML) };
  });
  assert.deepEqual(found, { ran: null, bad: [] });
  for (const link of await last(page).locator(".markdown a:not([href])").all()) await link.click();
  assert.equal(await page.evaluate(() => window.ran ?? null), null);
});
await point("folds_thinking", async () => {
  await say(page, "think");
  const thought = last(page).locator("details.think");
  assert.equal(await thought.evaluate(e => e.open), false);
  assert.equal(await thought.locator("div").textContent(), "First I consider **this**.");
  assert.equal((await last(page).locator(".markdown").textContent()).trim(), "Then I answer.");
  await say(page, "hello");
  assert.ok(!JSON.stringify(fake.asked.at(-1)).includes("consider"));
});
await point("shows_tool_calls_and_sends_their_results", async () => {
  await say(page, "tool");
  assert.equal(await last(page).locator(".tools summary").textContent(), "Calls the tool weather");
  assert.deepEqual(JSON.parse(await last(page).locator(".tools pre").textContent()), { city: "Oslo" });
  await last(page).locator(".results textarea").fill("rain");
  await last(page).getByRole("button", { name: "Send results" }).click();
  await page.waitForFunction(() => document.querySelector("#messages > li:last-child .markdown")?.textContent.startsWith("You said: rain"));
  await ended(page);
  const [call, result] = fake.asked.at(-1).messages.slice(-2);
  assert.deepEqual(call.tool_calls, [{ id: "call_1", type: "function", function: { name: "weather", arguments: "{\"city\":\"Oslo\"}" } }]);
  assert.deepEqual(result, { role: "tool", content: "rain", tool_call_id: "call_1" });
});
await point("settings_and_system_prompt_are_sent", async () => {
  await page.click("#settings-open");
  await page.getByLabel("System prompt").fill("Be brief.");
  await page.getByLabel("Temperature").fill("0.25");
  await page.getByLabel("Longest answer, in tokens").fill("77");
  await page.getByLabel("Texts that end").fill("END\nSTOP");
  await page.getByLabel("Tools, as").fill("{");
  await page.click("#settings-save");
  assert.match(await page.textContent("#settings-problem"), /not JSON/);
  await page.getByLabel("Tools, as").fill("[]");
  await page.click("#settings-save");
  await say(page, "set");
  const { messages, temperature, max_tokens, stop, top_p } = fake.asked.at(-1);
  assert.deepEqual(messages[0], { role: "system", content: "Be brief." });
  assert.deepEqual([temperature, max_tokens, stop, top_p], [0.25, 77, ["END", "STOP"], undefined]);
});
await point("an_error_is_shown_and_can_be_tried_again", async () => {
  await say(page, "fail");
  assert.equal(await last(page).locator(".bad").textContent(), "no server has blocks 5:8");
  forget("503");
  assert.equal(await last(page).getByRole("button", { name: "Have this answer made again" }).count(), 1);
});
await point("says_which_blocks_lack_servers", async () => {
  assert.ok(await page.isHidden("#notice"));
  fake.isWhole = false;
  await page.waitForSelector("#notice:not([hidden])");
  assert.match(await page.textContent("#notice"), /^fake cannot answer now: no server has served blocks 5:8 since /);
  assert.equal(await page.getAttribute("#notice", "role"), "alert");
  await shot(page, "holes");
  fake.isWhole = true;
  await page.waitForSelector("#notice", { state: "hidden" });
});
await point("conversations_outlive_a_reload", async () => {
  const before = await page.locator("#messages > li").allTextContents();
  await page.reload();
  await page.waitForSelector("#model option", { state: "attached" });
  assert.deepEqual((await page.locator("#messages > li").allTextContents()).length, before.length);
  assert.deepEqual(await page.locator("#messages .markdown").last().textContent(), "");
  assert.equal(await page.textContent("#conversations .open[aria-current]"), "hello");
  await page.click("#settings-open");
  assert.equal(await page.getByLabel("Temperature").inputValue(), "0.25");
  await page.keyboard.press("Escape");
});
await point("conversations_are_renamed_exported_and_deleted", async () => {
  await page.click("#new");
  await say(page, "second");
  assert.deepEqual(await page.locator("#conversations .open").allTextContents(), ["second", "hello"]);
  await page.getByRole("button", { name: "More for second" }).click();
  await page.getByRole("button", { name: "Rename second" }).click();
  await page.fill("#ask-text", "<b>Better</b>");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.querySelector("#conversations .open").textContent === "<b>Better</b>");
  await page.getByRole("button", { name: "More for <b>Better</b>" }).click();
  const [file] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Export <b>Better" }).click()]);
  let text = "";
  for await (const piece of await file.createReadStream()) text += piece;
  assert.equal(JSON.parse(text).messages[0].content, "second");
  await page.getByRole("button", { name: "Delete <b>Better" }).click();
  await page.click("#ask-yes");
  await page.waitForFunction(() => document.querySelectorAll("#conversations li").length === 1);
  assert.equal(await page.locator("#messages > li").count(), 0);
  await page.locator("#conversations .open").click();
  assert.ok((await page.locator("#messages > li").count()) > 10);
});
await point("a_reader_who_scrolls_up_is_left_alone", async () => {
  await page.click("#new");
  await page.fill("#text", "long");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => document.getElementById("scroll").scrollTop > 300);
  await page.evaluate(() => { document.getElementById("scroll").scrollTop = 10; });
  await ended(page);
  assert.ok(await page.evaluate(() => document.getElementById("scroll").scrollTop < 100));
  await page.click("#down");
  assert.ok(await page.evaluate(() => document.getElementById("scroll").scrollTop > 300));
});
await page.context().close();

await point("a_message_waits_for_a_model", async () => {
  fake.isSilent = true;
  const early = await open(fake.base, WIDE, "#text:focus");
  await early.fill("#text", "early");
  await early.keyboard.press("Enter");
  assert.deepEqual([await early.inputValue("#text"), await early.isVisible("#notice")], ["early", true]);
  fake.isSilent = false;
  await early.waitForFunction(() => document.querySelectorAll("#messages > li").length === 2);
  await ended(early);
  assert.match(await last(early).locator(".markdown").textContent(), /^You said: early/);
  assert.ok(await early.isHidden("#notice"));
  await early.context().close();
});
await point("works_by_keyboard_alone", async () => {
  const keys = await open(fake.base);
  await keys.keyboard.type("hello");
  await keys.keyboard.press("Enter");
  await ended(keys);
  await keys.focus(".skip");
  const reached = [];
  for (let i = 0; i < 30; i++) {
    await keys.keyboard.press("Tab");
    reached.push(await keys.evaluate(() => document.activeElement.id || document.activeElement.title || document.activeElement.className));
  }
  const order = ["tab-chat", "model", "settings-open", "new", "open", "scroll", "Copy this message", "text", "send"];
  const places = order.map(name => reached.indexOf(name));
  assert.ok(places.every(place => place >= 0) && places.every((place, i) => i === 0 || places[i - 1] < place), reached.join());
  await keys.focus("#tab-chat");
  await keys.keyboard.press("ArrowRight");
  assert.equal(await active(keys), "tab-swarm");
  assert.ok(await keys.isVisible("#swarm"));
  await keys.keyboard.press("ArrowLeft");
  await keys.focus("#settings-open");
  await keys.keyboard.press("Enter");
  await keys.waitForSelector("#settings[open]");
  await keys.keyboard.press("Escape");
  assert.equal(await active(keys), "settings-open");
  await keys.context().close();
});
await point("tells_a_screen_reader", async () => {
  const heard = await open(fake.base);
  await say(heard, "hello");
  assert.match(await heard.textContent("[aria-live=polite]"), /^You said: hello/);
  const nameless = await heard.evaluate(() => [...document.querySelectorAll("button, input, select, textarea, summary, [role=tabpanel], dialog")]
    .filter(e => !(e.labels?.length || e.getAttribute("aria-label") || e.getAttribute("aria-labelledby") || e.textContent.trim()))
    .map(e => e.outerHTML));
  assert.deepEqual(nameless, []);
  await heard.context().close();
});
await point("asks_for_a_key_and_keeps_it", async () => {
  fake.key = "0123456789abcdef";
  const context = await browser.newContext(WIDE);
  const asked = await context.newPage();
  await asked.goto(fake.base);
  await asked.waitForSelector("#settings[open]");
  assert.match(await asked.textContent("#settings-problem"), /wants an API key/);
  assert.equal(await active(asked), "set-key");
  await asked.keyboard.type(fake.key);
  await asked.keyboard.press("Enter");
  await asked.waitForSelector("#model option", { state: "attached" });
  await asked.reload();
  await asked.waitForSelector("#model option", { state: "attached" });
  await say(asked, "hello");
  assert.match(await last(asked).textContent(), /You said: hello/);
  fake.key = "";
  await context.close();
});
for (const [name, options] of Object.entries({ light: WIDE, dark: { ...WIDE, colorScheme: "dark" } })) {
  await point(`has_contrast_in_${name}`, async () => {
    const shown = await open(fake.base, options);
    await say(shown, "think");
    await say(shown, "markdown");
    assert.deepEqual(await shown.evaluate(faint), []);
    await shot(shown, name);
    await shown.context().close();
  });
}
await point("fits_a_phone_in_the_dark", async () => {
  const phone = await open(fake.base, { ...PHONE, colorScheme: "dark" });
  await say(phone, "markdown");
  await say(phone, "hostile");
  const wide = () => phone.evaluate(() => document.documentElement.scrollWidth);
  assert.ok((await wide()) <= 360);
  assert.equal(await phone.evaluate(() => getComputedStyle(document.body).backgroundColor), "rgb(20, 23, 26)");
  const box = await phone.locator("#send").boundingBox();
  assert.ok(box.y + box.height <= 740 && box.x + box.width <= 360);
  await shot(phone, "phone-dark");
  assert.ok(await phone.isHidden("#new"));
  await phone.tap("#drawer");
  assert.ok(await phone.isVisible("#new"));
  await shot(phone, "phone-drawer");
  await phone.tap("#conversations .open");
  assert.ok(await phone.isHidden("#new"));
  await phone.tap("#tab-swarm");
  assert.ok((await wide()) <= 360);
  await shot(phone, "phone-swarm");
  await phone.context().close();
});
await point("asks_no_other_origin_and_says_nothing_on_the_console", async () => assert.deepEqual(problems, []));
fake.end();
await browser.close();
process.exit(failed ? 1 : 0);

/** In the browser: texts whose contrast with what is behind them is below 4.5 : 1. */
function faint() {
  const numbers = colour => colour.match(/[\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const [r, g, b, a = 1] = numbers(getComputedStyle(e).backgroundColor);
      if (a > 0.5) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll("body *")].filter(e => e.checkVisibility() && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  return texts.map(e => {
    const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)];
  }).filter(([ratio]) => ratio < 4.5);
}
