// A gateway whose answers are scripted, below a path as behind a proxy. The page's own files come from the real gateway,
// with its headers, so that a browser holds them to its policy.
import { createServer } from "node:http";

const PATH = "/below/a/path/";
const pause = ms => new Promise(done => setTimeout(done, ms));

/** What hostile answers try: none of it may run, load anything, or look like the page. */
export const HOSTILE = [
  "<img src=x onerror=\"window.ran='img'\"> <script>window.ran='script'</script>",
  "<svg onload=\"window.ran='svg'\"><a href=\"javascript:window.ran='a'\">x</a></svg>",
  "[click](javascript:window.ran='link') [data](data:text/html,<script>window.ran=1</script>)",
  "![beacon](https://example.invalid/beacon.png)",
  "<details open ontoggle=\"window.ran='toggle'\"><summary id=\"send\" class=\"bad\">x</summary></details>",
  "<math><mtext><table><mglyph><style><!--</style><img title=\"--&gt;&lt;img src=1 onerror=window.ran='m'&gt;\">",
  "```html\n<img src=x onerror=\"window.ran='code'\">\n```",
  "```\"><img src=x onerror=window.ran='lang'>\ntext\n```",
  "<style>* { display: none }</style><iframe srcdoc=\"<script>parent.ran=1</script>\"></iframe>",
].join("\n\n");

const MARKDOWN = [
  "# A heading", "Some **bold** text, `code`, H<sub>2</sub>O and a [link](https://example.org/).",
  "- one\n- two\n\n1. first\n2. second",
  "| Planet | Moons |\n| --- | ---: |\n| Mars | 2 |\n| Jupiter | 95 |", "> Quoted words.",
  "```python\ndef area(radius: float) -> float:\n    \"\"\"The area of a circle.\"\"\"\n    return 3.14159 * radius ** 2  # about\n```", "That is all.",
].join("\n\n");

const servers = [
  { peer: "12D3KooWFakeServerOne11111111", start: 0, end: 5, state: "online", public_name: "ann", cache_tokens_left: 16384 },
  { peer: "12D3KooWFakeServerTwo22222222", start: 5, end: 8, state: "online", public_name: "<b>bob</b>", cache_tokens_left: 8192 },
].map(server => ({ inference_rps: 210.5, version: "2.3.0", torch_dtype: "bfloat16", quant_type: "nf4", using_relay: false, adapters: [],
  throughput: 100, ...server }));
const legs = servers.map(({ peer, start, end }) => ({ peer, start, end }));

/** Starts it; `base` is where its page is. */
export async function startFake(upstream) {
  const fake = { asked: [], isWhole: true, isSilent: false, key: "", open: 0 };
  const server = createServer((request, response) => {
    answer(fake, upstream, request, response).catch(error => response.destroy(error));
  });
  await new Promise(done => server.listen(0, "127.0.0.1", done));
  fake.base = `http://127.0.0.1:${server.address().port}${PATH}`;
  fake.end = () => { server.closeAllConnections(); server.close(); };
  return fake;
}

async function answer(fake, upstream, request, response) {
  const path = request.url.startsWith(PATH) ? request.url.slice(PATH.length) : null;
  if (path === null) return json(response, 404, { error: { message: `outside of the proxy's path: ${request.url}` } });
  if (path === "" || path.startsWith("page/")) return page(upstream + path, response);
  if (fake.key && request.headers.authorization !== `Bearer ${fake.key}`) {
    return json(response, 401, { error: { message: "no valid API key was given" } });
  }
  if (path === "v1/models") return json(response, 200, { data: [{ id: "fake" }] });
  if (path === "api/v1/events") return state(fake, response);
  if (path === "v1/chat/completions") return chat(fake, request, response);
  return json(response, 404, { error: { message: "nothing here" } });
}

function json(response, status, body) {
  response.writeHead(status, { "content-type": "application/json" }).end(JSON.stringify(body));
}

async function page(address, response) {
  const real = await fetch(address);
  const kept = ["content-type", "content-security-policy", "x-content-type-options", "cache-control"];
  const headers = kept.map(name => [name, real.headers.get(name)]).filter(([, value]) => value);
  response.writeHead(real.status, Object.fromEntries(headers)).end(Buffer.from(await real.arrayBuffer()));
}

async function state(fake, response) {
  response.writeHead(200, { "content-type": "text/event-stream" });
  while (!response.destroyed) {
    while (fake.isSilent) await pause(20);
    const shown = fake.isWhole ? servers : servers.slice(0, 1);
    const since = fake.isWhole ? null : 1_700_000_000;
    const model = {
      name: "fake", blocks: 8, can_chat: true, servers: shown, servers_in_all: shown.length, holes: fake.isWhole ? [] : [[5, 8]],
      holes_since: since, what_is_missing: fake.isWhole ? null : "blocks 5:8 of fake have had no server for 12 s",
      route: fake.isWhole ? { legs, step_seconds: 0.05, tokens_per_second: 20 } : null,
    };
    response.write(`data: ${JSON.stringify({ at: Date.now() / 1000, models: [model] })}\n\n`);
    await pause(200);
  }
}

async function chat(fake, request, response) {
  let text = "";
  for await (const piece of request) text += piece;
  const body = JSON.parse(text);
  fake.asked.push(body);
  const said = body.messages.at(-1).content;
  if (said === "fail") return json(response, 503, { error: { message: "no server has blocks 5:8" } });
  response.writeHead(200, { "content-type": "text/event-stream" });
  fake.open += 1;
  response.on("close", () => { fake.open -= 1; });
  const send = chunk => response.write(typeof chunk === "string" ? chunk : `data: ${JSON.stringify({ choices: [], ...chunk })}\n\n`);
  const delta = (piece, finish = null) => send({ choices: [{ index: 0, delta: piece, finish_reason: finish }] });
  send(": a pulse\n\n");
  delta({ role: "assistant", content: "" });
  const finish = await script(said, body, delta, response);
  delta({}, finish);
  send({ usage: { prompt_tokens: 9, completion_tokens: 42, total_tokens: 51 }, route: legs });
  send("data: [DONE]\n\n");
  response.end();
}

/** The pieces of the answer to what was `said`; gives why it ends. */
async function script(said, body, delta, response) {
  const type = async (text, size = 12) => {
    for (let at = 0; at < text.length && !response.destroyed; at += size) {
      delta({ content: text.slice(at, at + size) });
      await pause(4);
    }
  };
  if (said === "endless") {
    for (let word = 0; !response.destroyed; word++) await type(`word${word} `);
  } else if (said === "tool") {
    const call = { index: 0, id: "call_1", type: "function", function: { name: "weather", arguments: "" } };
    delta({ tool_calls: [call] });
    for (const piece of ["{\"city\":", "\"Oslo\"}"]) delta({ tool_calls: [{ index: 0, function: { arguments: piece } }] });
    return "tool_calls";
  } else if (said === "think") {
    for (const piece of ["First I ", "consider **this**."]) delta({ reasoning_content: piece });
    await type("Then I answer.");
  } else if (said === "long") {
    await type("A line of a long answer.\n\n".repeat(400), 400);
  } else {
    await type({ hostile: HOSTILE, markdown: MARKDOWN }[said] ?? `You said: ${said} (${fakeNumber()})`);
  }
  return "stop";
}

let answers = 0;
const fakeNumber = () => (answers += 1);
