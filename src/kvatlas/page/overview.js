// The overview: key figures, the cluster, charts, and tables of what stands behind them.

import { TimeChart } from "./chart.js";
import { card, clean, h, replace, svg } from "./dom.js";
import { bytes, clock, count, percent, seconds, short } from "./format.js";
import { label, topology } from "./topology.js";

const TERM_NAMES = { wait: "wait", load: "load", recompute: "recompute", hand_off: "hand-off", crowd: "crowd", charge: "charge" };
const RECENT_SHOWN = 40;
const MINUTE_BUCKETS = 12;
const FLAGS_SHOWN = 100;

/** Everything but explained requests. `update(state, health)` as often as there is news. */
export class Overview {
  constructor(host) {
    this.figures = h("dl", { class: "tiles figures" });
    this.map = h("div", { class: "wide map", tabindex: "0", role: "group", "aria-label": "Topology" });
    this.parts = new Map();
    this.charts = charts();
    const side = h("div", { class: "side" }, this.part("flags", "Health"), this.part("prefixes", "Hot prefixes"));
    replace(host, this.figures,
      h("div", { class: "split" }, card("Topology", { id: "topology", note: "bars: complete blocks, against the longest" }, this.map, legend()), side),
      h("div", { class: "thirds" }, this.charts.map((chart) => chart.element)),
      this.part("requests", "Requests"),
      h("div", { class: "halves" }, this.part("pairs", "Pairs"), this.part("tenants", "Tenants")),
      this.part("engines", "Engines and nodes"));
    new ResizeObserver(() => this.draw()).observe(this.map);
  }

  part(id, title) {
    const body = h("div", { class: "wide", tabindex: "0", role: "group", "aria-labelledby": `${id}-title` });
    const note = h("span", { class: "soft note" });
    const whole = card(title, { id }, body);
    whole.querySelector(".head").append(note);
    this.parts.set(id, { body, note, shown: "" });
    return whole;
  }

  set(id, values, note, make) {
    const part = this.parts.get(id);
    part.note.textContent = note;
    const now = JSON.stringify(values);
    if (now === part.shown) return; // what stays the same is not made anew
    part.shown = now;
    replace(part.body, make());
  }

  update(state, health) {
    this.state = state;
    replace(this.figures, figures(state));
    this.draw();
    for (const chart of this.charts) chart.update(state);
    this.set("flags", health, health ? health.flags.length ? `${health.flags.length} flagged` : "nothing is degraded" : "", () => flags(health));
    this.set("prefixes", state.prefixes, `since ${clock(state.began_at)}`, () => prefixes(state));
    this.set("requests", state.recent, `the last ${Math.min(RECENT_SHOWN, state.recent.length)}, each with its explanation`, () => requests(state));
    this.set("pairs", state.pairs, more(state.pairs.length, state.pairs_all), () => pairs(state));
    this.set("tenants", [state.tenants_on, state.tenants], more(state.tenants.length, state.tenants_all), () => tenants(state));
    this.set("engines", [state.engines, state.agents], more(state.engines.length, state.engines_all), () => engines(state));
  }

  draw() {
    const width = this.map.clientWidth;
    if (!this.state || !width) return;
    const { engines, agents, pairs } = this.state;
    const now = JSON.stringify([width, engines, agents, pairs]);
    if (now === this.drawn) return;
    this.drawn = now;
    replace(this.map, topology(this.state, width));
  }
}

const more = (shown, all) => (all > shown ? `${count(shown)} of ${count(all)}` : "");

function legend() {
  return h("ul", { class: "legend" }, [["hbm", "hbm"], ["dram", "dram"], ["disk", "disk"], ["object", "object store"]].map(([tier, name]) =>
    h("li", null, h("i", { class: `swatch t-${tier}` }), name)),
  h("li", null, h("i", { class: "swatch thin pair-ok" }), "pair"), h("li", null, h("i", { class: "swatch thin pair-degraded" }), "degraded pair"));
}

// -- figures -------------------------------------------------------------------------------------

function figures(state) {
  const newest = Math.floor((state.at - state.first_bucket_at) / state.bucket_s);
  const last = state.buckets.filter((bucket) => bucket.index > newest - MINUTE_BUCKETS);
  const sum = (pick, among = state.buckets) => among.reduce((total, bucket) => total + pick(bucket), 0);
  const tokens = hits(state.buckets, state.sources);
  const judged = sum((b) => b.judged);
  const flying = state.engines.reduce((total, engine) => total + engine.in_flight, 0);
  const minute = Math.min(MINUTE_BUCKETS * state.bucket_s, Math.max(state.bucket_s, state.at - Math.min(state.began_at, state.log_from ?? state.began_at)));
  const rate = sum((b) => b.ended, last) / minute;
  const met = state.objectives.met + state.objectives.missed;
  return [
    ["Requests", `${rate >= 10 ? Math.round(rate) : rate.toFixed(1)}/s`, `${count(flying)} in flight, ${count(state.decisions)} since the start`],
    ["Tokens reused", percent(tokens.known ? tokens.hit / tokens.known : null), `${short(tokens.hit)} of ${short(tokens.known)} prompt tokens`],
    ["First token", seconds(judged ? sum((b) => b.measured_s) / judged : null), judged ? `mean; predicted ${seconds(sum((b) => b.predicted_s) / judged)}` : "no stream was seen"],
    ["Regret", seconds(judged ? sum((b) => b.regret_s) / judged : null), judged ? "mean of a request" : "of streams only"],
    met ? ["Objectives met", percent(state.objectives.met / met), `${count(met)} answers had one`]
      : ["Failed or refused", count(sum((b) => b.failed) + sum((b) => b.refused)), `${count(sum((b) => b.failed))} failed, ${count(sum((b) => b.refused))} refused`],
  ].map(([name, value, note]) => h("div", { class: "tile" }, h("dt", null, name), h("dd", null, h("b", { "data-figure": name }, value), h("span", { class: "soft small" }, note))));
}

function hits(buckets, sources) {
  let [hit, known] = [0, 0];
  for (const bucket of buckets) {
    bucket.tokens.forEach((n, i) => {
      if (sources[i] === "unreported") return;
      known += n;
      if (sources[i] !== "computed") hit += n;
    });
  }
  return { hit, known };
}

function charts() {
  const sources = ["hbm", "dram", "disk", "object", "peer", "computed", "unreported"];
  const terms = Object.keys(TERM_NAMES);
  const mean = (buckets, pick, per) => {
    const n = buckets.reduce((total, b) => total + b[per], 0);
    return n ? buckets.reduce((total, b) => total + pick(b), 0) / n : null;
  };
  const sums = ["measured_s", "predicted_s", "regret_s"];
  return [
    new TimeChart({
      id: "hits", title: "Prompt tokens by where they came from", kind: "stack", show: short, empty: "no answers yet",
      series: sources.map((name) => ({ label: name === "unreported" ? "not reported" : name, class: `t-${name}`, rare: ["disk", "object", "peer", "unreported"].includes(name) })),
      value: (bucket, i) => bucket.tokens[i], whole: (buckets, i) => buckets.reduce((total, b) => total + b.tokens[i], 0),
    }),
    new TimeChart({
      id: "prices", title: "Price of the plans taken", kind: "stack", show: seconds, empty: "nothing was priced yet",
      series: terms.map((name) => ({ label: TERM_NAMES[name], class: `p-${name}`, rare: ["hand_off", "crowd"].includes(name) })),
      value: (bucket, i) => (bucket.priced ? bucket.price_s[i] / bucket.priced : null), whole: (buckets, i) => mean(buckets, (b) => b.price_s[i], "priced"),
    }),
    new TimeChart({
      id: "first", title: "First token and regret", kind: "lines", show: seconds, empty: "no stream was seen yet",
      series: [{ label: "measured", class: "l-measured" }, { label: "predicted", class: "l-predicted" }, { label: "regret", class: "l-regret", area: true }],
      value: (bucket, i) => (bucket.judged ? bucket[sums[i]] / bucket.judged : null), whole: (buckets, i) => mean(buckets, (b) => b[sums[i]], "judged"),
    }),
  ];
}

// -- tables --------------------------------------------------------------------------------------

function table(columns, rows, empty) {
  if (!rows.length) return h("p", { class: "soft" }, empty);
  return h("table", null, h("thead", null, h("tr", null, columns.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))),
    h("tbody", null, rows.map((row) => h("tr", null, row.map((cell, i) => h("td", { class: columns[i][1] }, cell))))));
}

function flags(health) {
  if (!health) return h("p", { class: "soft" }, "not asked yet");
  const flagged = new Set(health.flags.map((flag) => flag.split(":")[0]));
  const alike = new Map(); // what is said of several in the same words is said once
  for (const [problem, whom] of Object.entries(health.details)) {
    const each = typeof whom === "object" && whom !== null ? Object.entries(whom) : [["", whom]];
    for (const [who, why] of each) {
      const key = JSON.stringify([problem, why]);
      alike.set(key, { problem, why, whom: [...(alike.get(key)?.whom ?? []), who] });
    }
  }
  const unsaid = health.flags.filter((flag) => !(flag.split(":")[0] in health.details)).map((flag) => ({ problem: flag, why: "", whom: [], bare: true }));
  const rows = [...unsaid, ...alike.values()].slice(0, FLAGS_SHOWN).map(({ problem, why, whom, bare }) =>
    h("li", { class: bare || flagged.has(problem) ? "bad" : "" }, h("b", null, clean(problem).replaceAll("_", " ")), ` ${whom.filter(Boolean).map((who) => clean(who)).join(", ")}`,
      h("div", { class: "soft small" }, clean(why, 300))));
  return rows.length ? h("ul", { class: "flags" }, rows) : h("p", { class: "fine" }, "All engines, agents, feeds and pairs are as they should be.");
}

function prefixes(state) {
  return table([["Prefix"], ["Tokens", "n"], ["Requests", "n"], ["Resumed at"]], state.prefixes.map((prefix) => [
    h("code", null, prefix.key), count(prefix.tokens), count(prefix.requests), prefix.engines.map((name) => clean(name, 24)).join(", "),
  ]), "No prefix was resumed twice since you look.");
}

function requests(state) {
  return table([["Time", "tight"], ["Request"], ["Engine"], ["Status"], ["Prompt", "n"], ["Reused", "n"], ["First token", "n"], ["Regret", "n"]], state.recent.slice(0, RECENT_SHOWN).map((one) => [
    clock(one.at), h("a", { href: `#request/${encodeURIComponent(one.id)}`, "data-key": `request ${one.id}`, title: clean(one.id, 200) }, clean(one.id, 40)),
    one.worker ? clean(one.worker, 28) : "–", fate(one), one.prompt_tokens < 0 ? "–" : count(one.prompt_tokens),
    reused(one), seconds(one.ttft_s), seconds(one.regret_s),
  ]), "No request came yet.");
}

function reused(one) {
  if (one.hit_tokens === null) return "–";
  const wide = Math.round(48 * Math.min(1, one.hit_tokens / Math.max(1, one.prompt_tokens)));
  return h("span", { class: "share" }, count(one.hit_tokens), svg("svg", { width: 48, height: 6, "aria-hidden": "true" },
    svg("rect", { class: "track", width: 48, height: 6, rx: 3 }), wide ? svg("rect", { class: "fill t-hbm", width: wide, height: 6, rx: 3 }) : null));
}

function fate(one) {
  if (one.refused) return h("span", { class: "badge bad" }, "refused");
  if (!one.status) return h("span", { class: "badge" }, "running");
  const steps = one.fell ? h("span", { class: "soft small" }, ` ${count(one.fell)} fallback${one.fell > 1 ? "s" : ""}`) : null;
  return [h("span", { class: `badge ${one.status < 400 ? "good" : one.status === 499 ? "warn" : "bad"}` }, one.status), steps];
}

function pairs(state) {
  return table([["Prefill → decode", "tight"], ["State"], ["Over", "tight"], ["Hand-offs", "n"], ["Error", "n"]], state.pairs.map((pair) => [
    `${clean(pair.prefill, 24)} → ${clean(pair.decode, 24)}`,
    [h("span", { class: `badge ${pair.state === "ok" ? "good" : pair.state === "degraded" ? "bad" : ""}` }, pair.state), pair.why ? h("div", { class: "soft small" }, clean(pair.why, 300)) : null],
    label(pair) || "–", count(pair.hand_offs), seconds(pair.hand_off_error_s),
  ]), "No pair has handed anything over.");
}

function tenants(state) {
  if (!state.tenants_on) return h("p", { class: "soft" }, "This gateway knows no tenants: ", h("code", null, "[tenants]"), " is not set.");
  const size = (limit) => (limit === null ? "–" : bytes(limit));
  return table([["Tenant"], ["Shares within"], ["Retention"], ["dram", "n"], ["disk", "n"], ["Requests", "n"], ["Reused", "n"]], state.tenants.map((tenant) => [
    clean(tenant.name, 32), tenant.share, tenant.ttl_s ? `${tenant.retention}, ${seconds(tenant.ttl_s)}` : tenant.retention,
    size(tenant.dram_bytes), size(tenant.disk_bytes), count(tenant.requests), percent(tenant.prompt_tokens ? tenant.hit_tokens / tenant.prompt_tokens : null),
  ]), "The file of tenants names none.");
}

function engines(state) {
  const node = new Map(state.agents.flatMap((agent) => agent.workers.map((worker) => [worker, agent.name])));
  const held = (counts) => Object.entries(counts).map(([tier, n]) => `${tier} ${short(n)}`).join(", ") || "–";
  const rows = state.engines.map((engine) => [
    clean(engine.name, 32), engine.role, [engine.up ? h("span", { class: "badge good" }, "up") : h("span", { class: "badge bad" }, "down"), engine.draining ? " drains" : ""],
    clean(node.get(engine.name) ?? "–", 32), clean(engine.models.join(", ") || "–", 48), clean(engine.software || "–", 32), held(engine.held), count(engine.in_flight),
  ]).concat(state.agents.map((agent) => [
    clean(agent.name, 32), "node", agent.up ? h("span", { class: "badge good" }, "up") : h("span", { class: "badge bad" }, "down"),
    agent.store ? `store ${clean(agent.store, 24)}` : "–", "–", "agent", held(agent.held), "–",
  ]));
  return table([["Name"], ["Role"], ["State"], ["Node"], ["Models"], ["Software"], ["Blocks held"], ["In flight", "n"]], rows, "No engine is configured.");
}
