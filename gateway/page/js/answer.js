// One answer: the request for it, and what its stream says.
import { events, request } from "./api.js";

/** Settings that are numbers, by their names in the API. */
export const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

/** The message of an answer that has not begun. */
export const empty = model => ({ role: "assistant", model, content: "", reasoning: "", tools: [], error: "", stats: null });

/** The body of the request for the next answer of a conversation. */
export function bodyOf(talk, model) {
  const { settings } = talk;
  const messages = talk.messages.filter(isSaid).map(spoken);
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  const body = { model, messages, stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if (Number.isFinite(settings[name])) body[name] = settings[name];
  if (settings.stop?.length) body.stop = settings.stop;
  if (settings.tools?.length) body.tools = settings.tools;
  return body;
}

const isSaid = message => message.role !== "assistant" || message.content || message.tools?.length;

function spoken({ role, content, tools, call }) {
  if (role === "tool") return { role, content, tool_call_id: call };
  const calls = (tools ?? []).map(({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given },
  }));
  return { role, content, ...(calls.length ? { tool_calls: calls } : {}) };
}

/** Fills `message` from the stream, and calls `changed` after each piece. Ends early without error if `signal` says so. */
export async function stream(body, message, signal, changed) {
  const clock = { began: performance.now(), first: null, last: null, pieces: 0 };
  let usage = null;
  let route = null;
  try {
    const options = { method: "POST", body: JSON.stringify(body), signal };
    for await (const data of events(await request("v1/chat/completions", options))) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      route = chunk.route ?? route;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      message.finish = choice.finish_reason ?? message.finish;
      if (take(message, choice.delta ?? {})) {
        clock.last = performance.now();
        clock.first ??= clock.last;
        clock.pieces += 1;
      }
      changed();
    }
    if (!message.finish) throw new Error("the answer ended early");
  } catch (error) {
    if (signal.aborted) message.finish = "stopped";
    else message.error = error.message || String(error);
  }
  message.stats = statistics(clock, usage, route);
}

/** Adds what a delta says; false if it says nothing. */
function take(message, delta) {
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  message.reasoning += reasoning;
  message.content += delta.content ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const index = Math.min(Math.max(piece.index ?? 0, 0), message.tools.length);
    const call = (message.tools[index] ??= { id: "", name: "", arguments: "" });
    call.id = piece.id ?? call.id;
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}

/** Tokens, tokens/s after the first piece, the wait for that, and the servers. A stopped answer has its pieces counted. */
function statistics({ began, first, last, pieces }, usage, route) {
  if (first === null) return null;
  const tokens = usage?.completion_tokens ?? pieces;
  const seconds = (last - first) / 1000;
  const perSecond = pieces > 1 && seconds > 0 ? (tokens * (pieces - 1)) / pieces / seconds : null;
  return { tokens, isExact: usage !== null, perSecond, wait: (first - began) / 1000, route };
}

/** Thinking and answer; models whose thinking the gateway leaves in the text begin with `<think>`. */
export function parts(message) {
  const raw = message.content.match(/^\s*<think>([\s\S]*?)(?:<\/think>([\s\S]*)|$)/);
  if (message.reasoning || !raw) return { thinking: message.reasoning ?? "", text: message.content };
  return { thinking: raw[1].trim(), text: (raw[2] ?? "").trimStart() };
}
