// The official `openai` package of npm against a gateway. Prints one line per point; exit status 1 if one fails.
//
//     node check.mjs http://127.0.0.1:8080/v1
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const ask = { model: "demo", messages: [{ role: "user", content: "Tell me of a fox." }], max_tokens: 16, temperature: 0 };
let failed = 0;

async function point(name, check) {
  try {
    await check();
    console.log(`ok   node.${name}`);
  } catch (error) {
    failed += 1;
    console.log(`FAIL node.${name} ${error}`);
  }
}

const whole = async () => (await client.chat.completions.create(ask)).choices[0].message.content;

await point("models", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.deepEqual(names, ["demo"]);
});
await point("chat", async () => assert.ok((await whole()).length > 0));
await point("chat.stream", async () => {
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, await whole());
});
await point("completions", async () => {
  const done = await client.completions.create({ model: "demo", prompt: "Once upon a time", max_tokens: 8, temperature: 0 });
  assert.ok(done.choices[0].text.length > 0);
});
await point("chat.json_schema", async () => {
  const schema = { type: "object", properties: { wild: { type: "boolean" } }, required: ["wild"], additionalProperties: false };
  const format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  const done = await client.chat.completions.create({ ...ask, max_tokens: 200, response_format: format });
  assert.equal(typeof JSON.parse(done.choices[0].message.content).wild, "boolean");
});
await point("errors", async () => {
  await assert.rejects(client.chat.completions.create({ ...ask, model: "gpt-4" }), OpenAI.NotFoundError);
  await assert.rejects(client.chat.completions.create({ ...ask, n: 0 }), OpenAI.BadRequestError);
});
await point("cancel", async () => {
  const stream = await client.chat.completions.create({ ...ask, max_tokens: 1000, stream: true });
  for await (const _ of stream) break;
  assert.ok((await whole()).length > 0);
});
process.exit(failed ? 1 : 0);
