// The cluster as a picture: gateway, engines by node, what lies in their tiers, stores, and pairs.

import { clean, svg } from "./dom.js";
import { bytes, count, short } from "./format.js";

export const TIERS = ["hbm", "dram", "disk", "object", "peer"];
const GATEWAY = 92;
const [ENGINE, ROW, SMALL, PAD, HEAD, GAP] = [176, 46, 26, 12, 26, 14];
const FEW = 24; // more engines than that are drawn small
const TIERS_WIDE = 196;
const STORE = 118;
const LABELS_MAX = 8;

/** The whole picture, `width` pixels wide. */
export function topology(state, width) {
  const plan = placed(state, width);
  return svg("svg", { width: plan.width, height: plan.height, role: "img", "aria-label": told(state) },
    svg("defs", null, svg("marker", { id: "end", viewBox: "0 0 6 6", refX: 5.4, refY: 3, markerUnits: "userSpaceOnUse", markerWidth: 8, markerHeight: 8, orient: "auto", class: "head" }, svg("path", { d: "M0 0L6 3L0 6z" }))),
    plan.bands.map((band) => frame(band, plan)),
    plan.engines.map((engine) => link(plan, engine)),
    plan.engines.map((placed) => carries(placed)),
    plan.stores.map((store) => reaches(store)),
    pairs(state, plan),
    gateway(plan, state),
    plan.bands.map((band) => (band.agent ? tiers(band, plan) : null)),
    plan.engines.map((engine) => box(engine, plan)),
    plan.stores.map((store) => drum(store)));
}

function told(state) {
  const up = state.engines.filter((engine) => engine.up).length;
  const bad = state.pairs.filter((pair) => pair.state === "degraded").length;
  return `${up} of ${state.engines_all} engines are up, ${state.agents_all} nodes with agents, ${state.pairs_all} pairs, ${bad} of them degraded. The tables below say the same.`;
}

// -- where things stand --------------------------------------------------------------------------

function placed(state, width) {
  const small = state.engines.length > FEW;
  const row = small ? SMALL : ROW;
  const halves = state.engines.some((engine) => engine.role === "decode");
  const stored = state.agents.some((agent) => agent.store);
  const left = GATEWAY + 60;
  const storeAt = width - STORE;
  const bandWidth = Math.max(halves ? 2 * ENGINE + 96 + TIERS_WIDE : ENGINE + 60 + TIERS_WIDE, (stored ? storeAt - 60 : width) - left);
  const columns = [left + PAD, halves ? left + PAD + ENGINE + Math.max(60, bandWidth - 2 * ENGINE - TIERS_WIDE - 2 * PAD - 56) : 0];
  const plan = { small, row, halves, left, bandWidth, engines: [], bands: [], stores: [], width: Math.max(width, left + bandWidth + (stored ? 60 + STORE : 0)) };
  plan.most = Math.max(1, ...state.engines.map((engine) => total(engine.held)));
  plan.mostBelow = Math.max(1, ...state.agents.flatMap((agent) => Object.entries(agent.held).map(([tier, n]) => (tier === "object" ? 0 : n))));
  let top = 2;
  for (const { agent, engines } of grouped(state)) {
    const sides = [engines.filter((e) => e.role !== "decode"), engines.filter((e) => e.role === "decode")];
    const rows = Math.max(1, sides[0].length, sides[1].length);
    const head = agent || state.agents.length ? HEAD : PAD;
    const height = head + Math.max(rows * row, agent ? 56 : 0) + PAD - 4;
    const band = { agent, top, height, left, width: bandWidth, head };
    sides.forEach((side, column) => side.forEach((engine, i) => plan.engines.push({
      engine, band, x: columns[column], y: top + head + i * row, width: ENGINE, height: row - (small ? 4 : 8), first: column === 0,
    })));
    plan.bands.push(band);
    top += height + GAP;
  }
  plan.height = Math.max(150, top - GAP + 4);
  placeStores(state, plan);
  return plan;
}

function grouped(state) {
  const byName = new Map(state.engines.map((engine) => [engine.name, engine]));
  const groups = [];
  for (const agent of state.agents) {
    const engines = agent.workers.flatMap((name) => byName.get(name) ?? []);
    engines.forEach((engine) => byName.delete(engine.name));
    groups.push({ agent, engines });
  }
  if (byName.size) groups.push({ agent: null, engines: [...byName.values()] });
  return groups;
}

function placeStores(state, plan) {
  const names = [...new Set(state.agents.flatMap((agent) => (agent.store ? [agent.store] : [])))];
  const each = plan.height / Math.max(1, names.length);
  plan.stores = names.map((name, i) => ({
    name,
    x: plan.width - STORE, y: each * (i + 0.5) - 38, width: STORE, height: 76,
    held: Math.max(0, ...state.agents.filter((agent) => agent.store === name).map((agent) => agent.held.object ?? 0)),
    bands: plan.bands.filter((band) => band.agent?.store === name),
  }));
}

const total = (held) => Object.values(held).reduce((sum, n) => sum + n, 0);

// -- what is drawn -------------------------------------------------------------------------------

function gateway(plan, state) {
  const y = plan.height / 2 - 30;
  const flying = state.engines.reduce((sum, engine) => sum + engine.in_flight, 0);
  return svg("g", { class: "gateway" }, svg("rect", { x: 1, y, width: GATEWAY, height: 60, rx: 8 }),
    svg("text", { class: "name", x: 1 + GATEWAY / 2, y: y + 26, "text-anchor": "middle" }, "gateway"),
    svg("text", { x: 1 + GATEWAY / 2, y: y + 44, "text-anchor": "middle" }, `${count(flying)} in flight`));
}

function frame(band) {
  const { agent } = band;
  return svg("g", { class: `band ${agent ? "" : "loose"} ${agent && !agent.up ? "down" : ""}` },
    svg("rect", { x: band.left, y: band.top, width: band.width, height: band.height, rx: 10 }),
    band.head === HEAD ? svg("text", { class: "where", x: band.left + PAD, y: band.top + 18 },
      agent ? clean(agent.name, 40) : "no agent", agent && !agent.up ? " – does not answer" : "") : null,
    agent?.error ? svg("title", null, clean(agent.error, 300)) : null);
}

function box({ engine, x, y, width, height }, plan) {
  const middle = y + (plan.small ? height / 2 + 4 : 17);
  const kind = !engine.up ? "down" : engine.draining ? "drains" : engine.degraded ? "doubted" : "up";
  const role = engine.role === "combined" ? "" : engine.role;
  return svg("g", { class: `engine ${kind}` }, svg("title", null, about(engine)),
    svg("rect", { class: "body", x, y, width, height, rx: 6 }),
    svg("circle", { class: "state", cx: x + 12, cy: middle - 4, r: 4 }),
    svg("text", { class: "name", x: x + 22, y: middle }, clean(engine.name, 15)),
    svg("text", { x: x + width - 9, y: middle, "text-anchor": "end" },
      engine.up ? (engine.in_flight ? `${short(engine.in_flight)} in flight` : engine.draining ? "drains" : role || "idle") : "down"),
    plan.small ? null : [bar(x + 9, y + height - 12, width - 62, 5, engine.held, plan.most),
      svg("text", { class: "tiny", x: x + width - 9, y: y + height - 6, "text-anchor": "end" }, `${short(total(engine.held))} bl`)]);
}

function about(engine) {
  const lines = [engine.name, [engine.role, engine.software, engine.models.join(", ")].filter(Boolean).join(" · "),
    Object.entries(engine.held).map(([tier, n]) => `${tier}: ${count(n)} blocks`).join(", ") || "announces nothing",
    `${engine.in_flight} in flight`, engine.error, engine.degraded].filter(Boolean);
  return lines.map((line) => clean(line, 200)).join("\n");
}

function bar(x, y, width, height, held, most) {
  let from = x;
  return [svg("rect", { class: "track", x, y, width, height, rx: height / 2 }), TIERS.map((tier) => {
    if (!held[tier]) return null;
    const wide = Math.max(2, (held[tier] / most) * width);
    const part = svg("rect", { class: `fill t-${tier}`, x: from, y, width: Math.min(wide, x + width - from), height, rx: Math.min(2, height / 2) });
    from = Math.min(x + width, from + wide);
    return part;
  })];
}

function tiers(band, plan) {
  const x = band.left + band.width - TIERS_WIDE;
  const rows = ["dram", "disk"];
  const top = middle(band) - rows.length * 11 + 6;
  return svg("g", { class: "tiers" }, rows.map((tier, i) => {
    const n = band.agent.held[tier] ?? 0;
    const y = top + i * 22;
    return [svg("text", { x, y: y + 9 }, tier), bar(x + 40, y + 1, TIERS_WIDE - 40 - 62 - PAD, 9, { [tier]: n }, plan.mostBelow),
      svg("text", { x: x + TIERS_WIDE - PAD, y: y + 9, "text-anchor": "end" }, svg("title", null, `${count(n)} blocks in ${tier}`), `${short(n)} bl`)];
  }));
}

function link(plan, { engine, x, y, height, first }) {
  if (!first) return null;
  const [x1, y1, y2] = [GATEWAY + 1, plan.height / 2, y + height / 2];
  const bend = (x - x1) / 2;
  return svg("path", { class: `link ${engine.in_flight ? "busy" : ""} ${engine.up && !engine.draining ? "" : "off"}`,
    "stroke-width": Math.min(7, 1.2 + Math.log2(1 + engine.in_flight)), d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x - bend} ${y2} ${x - 1} ${y2}` });
}

function carries({ engine, band, x, y, width, height }) {
  if (!band.agent || engine.role === "prefill") return null; // that half's lines are its pairs
  const [x1, y1, x2, y2] = [x + width, y + height / 2, band.left + band.width - TIERS_WIDE - 10, middle(band)];
  const bend = Math.min(80, (x2 - x1) / 2);
  return svg("path", { class: `link node ${band.agent.up ? "" : "off"}`, d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` });
}

const middle = (band) => band.top + band.head + (band.height - band.head - PAD) / 2;

function reaches(store) {
  const y2 = store.y + store.height / 2;
  return store.bands.map((band) => {
    const [x1, y1] = [band.left + band.width, middle(band)];
    const bend = (store.x - x1) / 2;
    return svg("path", { class: "link store", d: `M${x1} ${y1}C${x1 + bend} ${y1} ${store.x - bend} ${y2} ${store.x} ${y2}` });
  });
}

function drum({ name, x, y, width, height, held }) {
  const r = 7;
  return svg("g", { class: "drum" }, svg("title", null, `store ${clean(name)}: ${count(held)} blocks are announced`),
    svg("path", { d: `M${x} ${y + r}a${width / 2} ${r} 0 0 1 ${width} 0v${height - 2 * r}a${width / 2} ${r} 0 0 1 ${-width} 0z` }),
    svg("path", { class: "lid", d: `M${x} ${y + r}a${width / 2} ${r} 0 0 0 ${width} 0` }),
    svg("text", { class: "name", x: x + width / 2, y: y + 38, "text-anchor": "middle" }, clean(name, 13)),
    svg("text", { x: x + width / 2, y: y + 56, "text-anchor": "middle" }, `${short(held)} blocks`));
}

function pairs(state, plan) {
  const where = new Map(plan.engines.map((placed) => [placed.engine.name, placed]));
  const drawn = state.pairs.filter((pair) => where.has(pair.prefill) && where.has(pair.decode));
  const named = drawn.length <= LABELS_MAX;
  return drawn.map((pair) => {
    const [from, to] = [where.get(pair.prefill), where.get(pair.decode)];
    const [x1, y1, x2, y2] = [from.x + from.width, from.y + from.height / 2, to.x - 2, to.y + to.height / 2];
    const bend = (x2 - x1) / 2;
    const words = label(pair);
    return svg("g", { class: `pair ${pair.state}` }, svg("title", null, `${clean(pair.prefill)} → ${clean(pair.decode)}: ${pair.state}\n${clean(pair.why || words, 300)}`),
      svg("path", { class: "wide", d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` }),
      svg("path", { "marker-end": "url(#end)", d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}` }),
      named && words && x2 - x1 > 140 ? way(words, [x1, y1, x2, y2], from.y === to.y ? 0.5 : 0.38) : null);
  });
}

/** Words beside a pair's line, `share` of the way along. */
function way(words, [x1, y1, x2, y2], share) {
  const rise = share * share * (3 - 2 * share); // of that curve
  return svg("text", { class: "way", x: x1 + (x2 - x1) * share, y: y1 + (y2 - y1) * rise - 5, "text-anchor": "middle" }, words);
}

/** Over what a pair hands over, and how fast, as far as is known. */
export function label(pair) {
  const over = pair.seen || (pair.expected === "any" ? "" : `${pair.expected}?`);
  return [over, pair.bytes_per_s ? `${bytes(pair.bytes_per_s)}/s` : ""].filter(Boolean).join(" · ");
}
