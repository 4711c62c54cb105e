// The page: who may look, what is shown, light or dark.

import { clean, h, replace } from "./dom.js";
import { picture } from "./explain.js";
import { clock } from "./format.js";
import { Live, ask, hasToken, keep } from "./live.js";
import { Overview } from "./overview.js";

const by = (id) => document.getElementById(id);
const THEMES = ["auto", "light", "dark"];
const HEALTH_MS = 4000;

const overview = new Overview(by("overview"));
const live = new Live(heard, said);
let state = null;
let health = null;
let healthAt = -Infinity;
let explained = null;

function heard(news) {
  state = news;
  if (performance.now() - healthAt > HEALTH_MS) askHealth();
  show();
}

async function askHealth() {
  healthAt = performance.now();
  try {
    health = { flags: [], details: {}, ...await ask("../health") };
  } catch { /* the stream says what is wrong with the connection */ }
  show();
}

function said(kind, text) {
  const words = { live: "live", lost: `connection lost, trying again: ${clean(text, 120)}`, refused: "", paused: "paused" };
  by("live").textContent = words[kind];
  by("live").className = `soft ${kind}`;
  if (kind !== "live") by("live").title = "";
  if (kind === "refused") refused(text);
  if (kind === "live") {
    by("door").hidden = true;
    by("leave").hidden = !hasToken();
  }
}

function show() {
  if (!state) return;
  by("version").textContent = state.version;
  status();
  const request = asked();
  by("overview").hidden = request !== null;
  by("request").hidden = request === null;
  if (request === null) overview.update(state, health);
  const from = state.log_from === null || state.log_from > state.began_at ? state.began_at : state.log_from;
  by("foot").textContent = `Told every ${state.period_s} s, to ${state.viewers} of at most ${state.viewers_max} browsers. Nothing is kept or computed for this page while nobody looks: `
    + `charts go back to what the decision log still knew when somebody began to (${clock(from)}), tenants and prefixes are counted since ${clock(state.began_at)}.`;
}

function status() {
  const pill = by("status");
  if (!health) return;
  pill.textContent = health.flags.length ? `${health.ready ? "" : "not ready, "}${health.flags.length} degraded` : health.ready ? "ok" : "not ready";
  pill.className = `pill ${health.flags.length || !health.ready ? "bad" : "good"}`;
}

// -- who looks -----------------------------------------------------------------------------------

function refused(why) {
  state = null;
  by("overview").hidden = by("request").hidden = true;
  by("door").hidden = false;
  by("door-why").textContent = hasToken() ? `That token was not taken: ${why}` : "What this page shows is for those who may read it.";
  by("token").focus();
}

by("door-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep(by("token").value.trim());
  by("token").value = "";
  live.start();
});

by("leave").addEventListener("click", () => {
  keep("");
  live.stop();
  location.reload();
});

by("pause").addEventListener("click", () => {
  const paused = by("pause").getAttribute("aria-pressed") !== "true";
  by("pause").setAttribute("aria-pressed", String(paused));
  by("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) live.stop();
  else live.start();
});

// -- one request ---------------------------------------------------------------------------------

function asked() {
  const found = /^#request\/(.+)$/.exec(location.hash);
  if (!found) return null;
  try { return decodeURIComponent(found[1]); } catch { return found[1]; }
}

async function explain() {
  const id = asked();
  explained = null;
  if (id === null) {
    show();
    return;
  }
  const host = by("request");
  by("overview").hidden = true;
  host.hidden = false;
  try {
    const told = await ask(`page/explain/${encodeURIComponent(id)}`);
    if (asked() !== id) return;
    explained = told;
    drawExplained();
    if (told.running) setTimeout(() => { if (asked() === id) explain(); }, 1000);
  } catch (error) {
    if (error.status === 401 || error.status === 403) return;
    replace(host, h("div", { class: "summary" }, h("p", { class: "back" }, h("a", { href: "#" }, "← Overview")), h("h1", null, "No such request"), h("p", null, clean(error.message, 400))));
  }
}

function drawExplained() {
  if (explained) replace(by("request"), picture(explained, by("main").clientWidth - 48));
}

by("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = by("find-id").value.trim();
  if (id) location.hash = `request/${encodeURIComponent(id)}`;
});
addEventListener("hashchange", () => { explain(); scrollTo(0, 0); });
addEventListener("resize", drawExplained);

// -- light or dark -------------------------------------------------------------------------------

function theme(chosen) {
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  by("theme").textContent = `Theme: ${chosen}`;
  try {
    if (chosen === "auto") localStorage.removeItem("kvatlas-theme");
    else localStorage.setItem("kvatlas-theme", chosen);
  } catch { /* storage may be forbidden: then it holds for this page */ }
}

by("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "auto";
  theme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
by("theme").textContent = `Theme: ${document.documentElement.dataset.theme ?? "auto"}`;

live.start();
explain();
