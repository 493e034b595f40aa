// The second tab: for each model which blocks have a server, and its servers.
import { make, readable } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const COLUMNS = ["Server", "Blocks", "State", "Steps/s", "Free cache", "Weights", "Adapters", "Reached", "Version"];

/** A model with its coverage, its route and its servers. */
export function modelView(model) {
  const box = make("article", {}, make("h3", {}, model.name), coverage(model));
  if (model.what_is_missing) box.append(make("p", { className: "bad" }, model.what_is_missing));
  else if (model.route) box.append(make("p", {}, expected(model.route)));
  box.append(servers(model));
  const more = model.servers_in_all - model.servers.length;
  if (more > 0) box.append(make("p", { className: "soft" }, `And ${more} more servers.`));
  return box;
}

function expected(route) {
  const over = `${route.legs.length} server${route.legs.length === 1 ? "" : "s"}`;
  const step = (route.step_seconds * 1000).toFixed(0);
  return `A step takes about ${step} ms over ${over}: ${readable(route.tokens_per_second)} tokens/s expected.`;
}

function coverage(model) {
  const missing = block => model.holes.some(([start, end]) => start <= block && block < end);
  const holes = model.holes.map(([start, end]) => `${start}:${end}`).join(", ");
  const label = holes ? `blocks without a server: ${holes}` : `all ${model.blocks} blocks have a server`;
  const row = make("div", { className: "coverage", role: "img", ariaLabel: label });
  for (let block = 0; block < model.blocks; block++) {
    row.append(make("span", { className: missing(block) ? "missing" : "", title: `block ${block}` }));
  }
  return row;
}

function servers(model) {
  const legs = new Map((model.route?.legs ?? []).map(leg => [leg.peer, leg]));
  const head = make("tr", {}, ...COLUMNS.map(name => make("th", { scope: "col" }, name)));
  const table = make("table", {},
    make("caption", { className: "soft" }, `Servers of ${model.name}; blue is the route that would be taken now`),
    make("thead", {}, head),
    make("tbody", {}, ...model.servers.map(server => row(model, server, legs.get(server.peer)))));
  return make("div", { className: "wide", tabIndex: 0, role: "region", ariaLabel: `Servers of ${model.name}` }, table);
}

function row(model, server, leg) {
  const weights = [server.torch_dtype, server.quant_type].filter(kind => kind && kind !== "none").join(" ");
  const name = make("td", {}, make("div", {}, server.public_name ?? ""), make("code", {}, `…${server.peer.slice(-8)}`));
  const map = make("td", { className: "map" }, make("div", {}, `${server.start}:${server.end}`), bar(model, server, leg));
  const reached = server.using_relay ? "relay" : "direct";
  const cells = [server.state, readable(server.inference_rps), server.cache_tokens_left?.toLocaleString("en") ?? "", weights,
    server.adapters.join(", "), reached, server.version ?? ""];
  return make("tr", {}, name, map, ...cells.map(cell => make("td", {}, cell)));
}

/** Where in the model the blocks of a server lie, and which of them the route takes. */
function bar(model, server, leg) {
  const drawing = document.createElementNS(SVG, "svg");
  const set = (element, values) => Object.entries(values).forEach(([name, value]) => element.setAttribute(name, value));
  const label = `blocks ${server.start} to ${server.end} of ${model.blocks}`;
  set(drawing, { viewBox: `0 0 ${model.blocks} 1`, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const piece = (start, end, kind) => {
    const part = document.createElementNS(SVG, "rect");
    set(part, { x: start, width: Math.max(0, end - start), y: 0, height: 1, class: kind });
    drawing.append(part);
  };
  piece(server.start, server.end, server.state);
  if (leg) piece(leg.start, leg.end, "routed");
  return make("div", { className: "bar" }, drawing);
}
