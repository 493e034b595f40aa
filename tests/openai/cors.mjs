// The official `openai` package of npm in a page of another origin, in a real browser. Prints one line per point; exit status 1 if one
// fails. Beside it lies `node_modules`, which the page loads the package from.
//
//     node cors.mjs http://127.0.0.1:8080/v1 CHROMIUM PORT       http://127.0.0.1:PORT is allowed by the gateway, http://localhost:PORT is not
import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import path from "node:path";
import { chromium } from "playwright-core";

const [base, executablePath, port] = process.argv.slice(2);
const modules = path.join(import.meta.dirname, "node_modules");
let failed = 0;

async function point(name, check) {
  try {
    await check();
    console.log(`ok   cors.${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL cors.${name} ${String(error).split("\n")[0]}`);
  }
}

const page = `<!doctype html><title>x</title><script type="module">
  import OpenAI from "/openai/index.mjs";
  window.client = new OpenAI({ baseURL: ${JSON.stringify(base)}, apiKey: "none", maxRetries: 0, dangerouslyAllowBrowser: true });
</script>`;
const server = createServer(async (request, response) => {
  const file = path.join(modules, path.normalize(request.url.split("?")[0]));
  if (request.url === "/") return response.setHeader("content-type", "text/html").end(page);
  try {
    if (!file.startsWith(path.join(modules, "openai") + path.sep)) throw new Error("nothing else is served");
    response.setHeader("content-type", "text/javascript").end(await readFile(file));
  } catch {
    response.writeHead(404).end();
  }
});
await new Promise(done => server.listen(Number(port), "127.0.0.1", done));
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--host-resolver-rules=MAP localhost 127.0.0.1"] });

async function open(host) {
  const tab = await browser.newPage();
  tab.setDefaultTimeout(600_000);
  await tab.goto(`http://${host}:${port}/`);
  await tab.waitForFunction(() => window.client);
  return tab;
}

const ask = { model: "demo", messages: [{ role: "user", content: "Tell me of a fox." }], max_tokens: 16, temperature: 0 };
const tab = await open("127.0.0.1");
await point("chat", async () => {
  const said = await tab.evaluate(async ask => (await client.chat.completions.create(ask)).choices[0].message.content, ask);
  assert.ok(said.length > 0);
});
await point("chat.stream", async () => {
  const [text, whole] = await tab.evaluate(async ask => {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
    return [text, (await client.chat.completions.create(ask)).choices[0].message.content];
  }, ask);
  assert.equal(text, whole);
});
await point("errors_can_be_read", async () => {
  const told = await tab.evaluate(async ask => {
    try {
      await client.chat.completions.create({ ...ask, model: "gpt-4" });
    } catch (error) {
      return [error.status, error.message];
    }
  }, ask);
  assert.equal(told[0], 404);
  assert.match(told[1], /not offered/);
});
await point("other_origins_are_refused", async () => {
  const other = await open("localhost");
  const told = await other.evaluate(ask => client.chat.completions.create(ask).then(() => "served", error => error.constructor.name), ask);
  assert.notEqual(told, "served");
});
await browser.close();
server.close();
process.exit(failed ? 1 : 0);
