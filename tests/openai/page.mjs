// The page of the gateway in a real browser, driven by playwright-core. Prints one line per point; exit status 1 if one fails.
//
//     node page.mjs http://127.0.0.1:8080/ CHROMIUM SCREENSHOT_FOLDER
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [base, executablePath, folder] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
let failed = 0;

async function point(name, check) {
  try {
    await check();
    console.log(`ok   page.${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL page.${name} ${String(error).split("\n")[0]}`);
  }
}

const problems = [];
async function open(options) {
  const page = await browser.newPage(options);
  page.setDefaultTimeout(600_000);
  page.on("console", message => message.type() === "error" && problems.push(message.text()));
  page.on("pageerror", error => problems.push(String(error)));
  page.on("dialog", dialog => { problems.push("a dialog opened: " + dialog.message()); dialog.dismiss(); });
  await page.goto(base);
  await page.waitForSelector("table td code");
  return page;
}

const page = await open({ viewport: { width: 1200, height: 900 } });
await point("shows_models_and_servers", async () => {
  assert.equal(await page.textContent("article h3"), "demo");
  assert.equal(await page.locator(".coverage span").count(), 8);
  assert.equal(await page.locator(".coverage .missing").count(), 0);
  assert.match(await page.textContent("#status"), /^Read at/);
  await page.screenshot({ path: `${folder}/page-light.png`, fullPage: true });
});
await point("escapes_what_servers_say", async () => {
  assert.ok((await page.textContent("table")).includes("<img src=x onerror=alert(1)>"));
  assert.equal(await page.locator("table img").count(), 0);
});
await point("chats_by_keyboard_as_it_streams", async () => {
  await page.focus("#text");
  await page.keyboard.type("Tell me of a fox.");
  await page.keyboard.press("Control+Enter");
  await page.waitForFunction(() => !document.getElementById("send").disabled && document.querySelectorAll("#talk p").length === 2);
  const answer = await page.textContent("#talk p:last-child span:last-child");
  assert.ok(answer.length > 5, answer);
  assert.equal(await page.evaluate(() => document.activeElement.id), "text");
});
await point("stops_an_answer", async () => {
  await page.fill("#text", "Go on, at length.");
  // In one step: the model of the test has little to say.
  await page.evaluate(() => { document.getElementById("send").click(); document.getElementById("stop").click(); });
  await page.waitForFunction(() => !document.getElementById("send").disabled);
  await page.click("#clear");
  assert.equal(await page.locator("#talk p").count(), 0);
});
await point("every_control_has_a_name_and_is_reached_by_tab", async () => {
  await page.focus("#talk");
  const reached = [];
  for (let i = 0; i < 6; i++) {
    await page.keyboard.press("Tab");
    reached.push(await page.evaluate(() => document.activeElement.id));
  }
  for (const id of ["model", "text", "send", "clear", "key"]) assert.ok(reached.includes(id), reached.join());
  const nameless = await page.evaluate(() => [...document.querySelectorAll("input,select,textarea")].filter(e => !e.labels.length).map(e => e.id));
  assert.deepEqual(nameless, []);
});
await point("fits_a_phone_and_the_dark", async () => {
  const phone = await open({ viewport: { width: 360, height: 740 }, colorScheme: "dark", isMobile: true });
  assert.ok(await phone.evaluate(() => document.documentElement.scrollWidth <= 360));
  const back = await phone.evaluate(() => getComputedStyle(document.body).backgroundColor);
  assert.equal(back, "rgb(20, 23, 26)");
  await phone.screenshot({ path: `${folder}/page-phone-dark.png`, fullPage: true });
});
await point("says_nothing_on_the_console", async () => assert.deepEqual(problems, []));
await browser.close();
process.exit(failed ? 1 : 0);
