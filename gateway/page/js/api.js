// What the page asks of its gateway. All addresses are relative: the page works below the path of a proxy.
import { store } from "./store.js";

/** An answer of the gateway that is an error. */
export class ApiFailure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers() {
  const key = store.key();
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

/** The response to a request, if it is a good one. */
export async function request(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.ok) return response;
  const text = await response.text();
  let message = `the gateway answered ${response.status}`;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    // An answer of a proxy, whose page says nothing to a reader.
  }
  throw new ApiFailure(response.status, message);
}

/** The data of server-sent events over fetch, which can carry a key. Comments are skipped. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held = (held + value).replaceAll("\r\n", "\n");
      let end;
      while ((end = held.indexOf("\n\n")) >= 0) {
        const lines = held.slice(0, end).split("\n").filter(line => line.startsWith("data:"));
        held = held.slice(end + 2);
        if (lines.length) yield lines.map(line => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Calls `show` with each state of the swarm and `fail` with each failure, for as long as the page is open. */
export async function watch(show, fail) {
  for (;;) {
    try {
      for await (const data of events(await request("api/v1/events"))) show(JSON.parse(data));
    } catch (error) {
      fail(error);
      if (error.status === 401) await store.keyChanged();
    }
    await new Promise(done => setTimeout(done, 3000));
  }
}

/** The names of the models, those with an adapter included. */
export async function models() {
  const list = await (await request("v1/models")).json();
  return list.data.map(model => model.id);
}
