// One request as a picture: every candidate on a line of tokens and a line of seconds, and what came
// of it.

import { card, clean, h, svg } from "./dom.js";
import { clock, count, percent, seconds, steps } from "./format.js";

const SHOWN = 32;
const SIDES = 400; // what the columns beside the pictures and the space between take
const WORDS = {
  wait: "wait in its queue", load: "load from lower tiers", recompute: "recompute the rest",
  hand_off: "hand over to the decode half", crowd: "slowed by others", charge: "what it takes from others",
};
const NAMES = { unreported: "not reported" };

/** What `GET page/explain/ID` tells, drawn `width` pixels wide. */
export function picture(told, width) {
  const shown = told.candidates.slice(0, SHOWN);
  return [
    summary(told),
    shown.length ? candidates(told, shown, width) : null,
    outcome(told, width),
    card("As text", { id: "as-text" }, h("pre", { tabindex: "0", "aria-labelledby": "as-text-title" }, told.text)),
  ];
}

function summary(told) {
  const fate = told.refused ? `refused: ${told.refused}` : told.running ? "still running"
    : `status ${told.status}${told.prefilled_by ? `, prefilled by ${clean(told.prefilled_by)}, decoded` : ""} on ${clean(told.worker)}`;
  const prompt = told.prompt_tokens < 0 ? "a prompt of unknown length" : `${count(told.prompt_tokens)} prompt tokens`;
  return h("div", { class: "summary" },
    h("p", { class: "back" }, h("a", { href: "#", "data-key": "back" }, "← Overview")),
    h("h1", null, h("span", { class: "soft" }, "Request "), h("code", { title: clean(told.id, 200) }, clean(told.id, 64))),
    h("p", null, `${prompt}, policy ${told.policy}, ${clock(told.at)}; ${fate}.`,
      told.ttft_slo_s ? ` Objective: first token within ${seconds(told.ttft_slo_s)}.` : "",
      told.unkeyed ? ` Routed by load alone: ${told.unkeyed}.` : ""));
}

// -- candidates ----------------------------------------------------------------------------------

function candidates(told, shown, width) {
  const room = Math.max(520, width - SIDES);
  const line = Math.round(room * 0.44);
  const price = room - line;
  const reference = Math.max(told.ttft_s ?? 0, ...shown.map((plan) => plan.total_s));
  const ticks = steps(reference, 4);
  const seen = told.terms.filter((_, i) => shown.some((plan) => plan.price_s[i] > 0));
  const tokens = Math.max(1, told.prompt_tokens, ...shown.map((plan) => plan.expected_tokens));
  const rows = shown.map((plan, i) => h("tr", { class: plan.taken ? "taken" : null },
    h("th", { scope: "row" }, h("span", { class: "pick", "aria-hidden": "true" }, plan.taken ? "→" : ""), clean(plan.worker, 22), plan.half ? h("span", { class: "soft tag" }, "prefill") : null,
      h("div", { class: "soft small" }, `${count(plan.in_flight)} in flight${plan.confidence === null ? "" : `, believed ${percent(plan.confidence)}`}`)),
    h("td", null, tokenLine(plan, tokens, line)),
    h("td", null, priceLine(told, plan, ticks[ticks.length - 1], price)),
    h("td", { class: "n" }, h("b", null, seconds(plan.total_s)),
      h("div", { class: "soft small" }, i === 0 ? "the cheapest in order" : plan.why))));
  const more = told.considered - shown.length;
  return card("What each engine would have cost", { id: "candidates", note: `${count(told.considered)} considered${more > 0 ? `, ${count(more)} not drawn` : ""}` },
    h("div", { class: "keys" }, key(tierKeys(shown), "t-", sign("pin", "resumes here")), key(seen.map((term) => [term, WORDS[term]]), "p-", sign("dash", "predicted first token"), told.ttft_s === null ? null : sign("real", "the first token as it came"))),
    h("div", { class: "wide", tabindex: "0", role: "group", "aria-labelledby": "candidates-title" }, h("table", { class: "plans" },
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Engine"), h("th", { scope: "col" }, "Where it can resume the prompt", axis([0, tokens / 2, tokens], tokens, line, (v) => count(Math.round(v)))),
        h("th", { scope: "col" }, "Price", axis(ticks, ticks[ticks.length - 1], price, seconds)), h("th", { scope: "col", class: "n" }, "In all"))),
      h("tbody", null, rows))));
}

function tierKeys(shown) {
  const names = ["hbm", "dram", "disk", "object", "peer"];
  const held = names.filter((_, tier) => shown.some((plan) => (plan.tier_tokens[tier] ?? 0) > 0));
  const coming = shown.some((plan) => plan.expected_tokens > plan.resume_tokens) ? [["coming", "being computed there now"]] : [];
  return [...held.map((name) => [name, name === "object" ? "held in a store" : name === "peer" ? "held by a peer" : `held in ${name}`]), ...coming, ["computed", "to compute"]];
}

function key(pairs, prefix, ...signs) {
  return h("ul", { class: "legend" }, pairs.map(([name, label]) => h("li", null, h("i", { class: `swatch ${prefix}${name}` }), label)), signs);
}

const SIGNS = {
  pin: () => [svg("path", { class: "mark", d: "M6 3V14" }), svg("path", { class: "flag", d: "M2 0h8l-4 5z" })],
  dash: () => svg("path", { class: "mark thin", d: "M6.5 0V14" }),
  real: () => svg("path", { class: "real", d: "M6 1l5 6l-5 6l-5 -6z" }),
};

function sign(name, label) {
  return h("li", null, svg("svg", { class: "sign", width: 12, height: 14, "aria-hidden": "true" }, SIGNS[name]()), label);
}

function axis(ticks, top, width, show) {
  return svg("svg", { class: "axis", width, height: 16, "aria-hidden": "true" }, ticks.map((tick) =>
    svg("text", { x: tick <= 0 ? 1 : tick >= top ? width - 1 : (tick / top) * width, y: 11, "text-anchor": tick <= 0 ? "start" : tick >= top ? "end" : "middle" }, show(tick))));
}

function tokenLine(plan, tokens, width) {
  const x = (n) => (n / tokens) * (width - 2) + 1;
  const tiers = ["hbm", "dram", "disk", "object", "peer"];
  let at = 0;
  const parts = [svg("rect", { class: "fill t-computed", x: 1, y: 8, width: width - 2, height: 14, rx: 2 })];
  const add = (kind, n) => {
    if (n <= 0) return;
    parts.push(svg("rect", { class: `fill ${kind}`, x: x(at), y: 8, width: Math.max(1, x(at + n) - x(at)), height: 14 }));
    at += n;
  };
  const split = plan.tier_tokens.length ? plan.tier_tokens : [plan.resume_tokens];
  tiers.forEach((tier, i) => add(`t-${tier}`, split[i] ?? 0));
  add("t-hbm", plan.resume_tokens - at);
  add("t-coming", plan.expected_tokens - at);
  const mark = x(plan.expected_tokens);
  const right = mark > width - 74;
  const words = `resumes at ${count(plan.expected_tokens)} of ${count(tokens)} tokens; ${split.map((n, i) => (n ? `${count(n)} from ${tiers[i]}` : "")).filter(Boolean).join(", ") || "nothing held"}`
    + (plan.chain_tokens > plan.expected_tokens ? `; matching blocks alone reach ${count(plan.chain_tokens)}` : "");
  return svg("svg", { width, height: 40, role: "img", "aria-label": words }, svg("title", null, words), parts,
    plan.chain_tokens > plan.expected_tokens ? svg("line", { class: "chain", x1: x(plan.chain_tokens), x2: x(plan.chain_tokens), y1: 6, y2: 24 }) : null,
    svg("path", { class: "mark", d: `M${mark} 4V26` }), svg("path", { class: "flag", d: `M${mark - 4} 1h8l-4 5z` }),
    svg("text", { x: right ? mark - 4 : mark + 4, y: 36, "text-anchor": right ? "end" : "start", class: "small" }, count(plan.expected_tokens)));
}

function priceLine(told, plan, top, width) {
  const x = (s) => (s / top) * (width - 2) + 1;
  let at = 0;
  const parts = told.terms.map((term, i) => {
    const s = plan.price_s[i];
    if (!(s > 0)) return null;
    const part = svg("rect", { class: `fill p-${term}`, x: x(at), y: 8, width: Math.max(1, x(at + s) - x(at)), height: 14 });
    at += s;
    return part;
  });
  const words = told.terms.map((term, i) => (plan.price_s[i] > 0 ? `${WORDS[term]} ${seconds(plan.price_s[i])}` : "")).filter(Boolean).join(", ");
  const first = plan.taken && told.ttft_s !== null ? x(told.ttft_s) : null;
  const right = first !== null && first > width - 120;
  return svg("svg", { width, height: 40, role: "img", "aria-label": `${seconds(plan.total_s)}: ${words || "nothing"}` }, svg("title", null, words || "nothing"),
    svg("line", { class: "base", x1: 1, x2: width - 1, y1: 22.5, y2: 22.5 }), parts,
    svg("path", { class: "mark thin", d: `M${x(plan.ttft_s)} 5V25` }),
    first === null ? null : [svg("path", { class: "real", d: `M${first} 1l5 6l-5 6l-5 -6z`, transform: "translate(0 8)" }),
      svg("text", { x: right ? first - 8 : first + 8, y: 36, "text-anchor": right ? "end" : "start", class: "small" }, `really ${seconds(told.ttft_s)}`)]);
}

// -- what came of it -----------------------------------------------------------------------------

function outcome(told, width) {
  if (told.running || told.refused) return null;
  const taken = told.candidates.find((plan) => plan.taken);
  const judged = told.error_s !== null && told.regret_s !== null && told.ttft_s !== null;
  const facts = [
    ["First token", seconds(told.ttft_s), judged ? `predicted ${seconds(told.ttft_s - told.error_s)}` : told.ttft_s === null ? "not streamed: not seen" : ""],
    ["Regret", judged ? seconds(told.regret_s) : "–", judged ? (told.regret_s ? "the best other plan was priced sooner" : "no other plan was priced sooner") : ""],
    ["Reused", told.cached_tokens === null ? "not reported" : `${count(told.cached_tokens)} tokens`,
      taken ? `${count(taken.expected_tokens)} were expected` : ""],
    ["Whole answer", seconds(told.e2e_s), told.completion_tokens === null ? "" : `${count(told.completion_tokens)} tokens`],
  ];
  if (told.hand_off) facts.push(["Hand-off", told.hand_off.took_s === null ? "–" : seconds(told.hand_off.took_s), `foreseen ${seconds(told.hand_off.foreseen_s)}`]);
  return card("What really happened", { id: "outcome" },
    h("dl", { class: "tiles" }, facts.map(([name, value, note]) => h("div", { class: "tile" }, h("dt", null, name), h("dd", null, h("b", null, value), h("span", { class: "soft small" }, note))))),
    came(told, width),
    told.fell.length ? h("ol", { class: "fell" }, told.fell.map((step) => h("li", null, clean(step, 300)))) : null);
}

function came(told, width) {
  const all = told.came_from.reduce((sum, n) => sum + n, 0);
  if (!all) return null;
  const room = Math.max(400, width - 44);
  let at = 0;
  const parts = told.sources.map((source, i) => {
    const n = told.came_from[i];
    if (!n) return null;
    const part = svg("rect", { class: `fill t-${source}`, x: (at / all) * room, y: 0, width: Math.max(1, (n / all) * room), height: 18 }, svg("title", null, `${source}: ${count(n)}`));
    at += n;
    return part;
  });
  const said = told.sources.flatMap((source, i) => (told.came_from[i] ? [[source, `${NAMES[source] ?? source} ${count(told.came_from[i])} (${percent(told.came_from[i] / all)})`]] : []));
  return h("div", { class: "came" }, h("h3", null, "Where the prompt's tokens came from"),
    h("div", { class: "wide" }, svg("svg", { width: room, height: 18, role: "img", "aria-label": said.map(([, words]) => words).join(", ") }, parts)), key(said, "t-"));
}
