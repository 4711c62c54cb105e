// Charts over the last minutes: one column per bucket. The legend is the readout: it tells the sums
// or means of all that is shown, or the values under the pointer or the arrow keys.

import { card, h, replace, svg } from "./dom.js";
import { clock, steps } from "./format.js";

const HEIGHT = 172;
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 8, 10, 22];

/** `series`: {name, label, class}; `kind`: "stack" or "lines" (the series whose class begins with
 * "area" is drawn as columns); `value(bucket, index)` → number or null; `whole(buckets, index)` for
 * the legend; `show(value)` as text. */
export class TimeChart {
  constructor({ id, title, kind, series, value, whole, show, empty }) {
    Object.assign(this, { kind, series, value, whole, show, empty });
    this.legend = h("ul", { class: "legend" });
    this.plot = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": title });
    this.said = h("p", { class: "hidden", "aria-live": "polite" });
    this.element = card(title, { id, note: "", class: "chart" }, this.plot, this.legend, this.said);
    this.when = this.element.querySelector(".note");
    this.at = null; // slot under the pointer
    this.slots = [];
    this.plot.addEventListener("pointermove", (event) => this.point(this.slotAt(event)));
    this.plot.addEventListener("pointerleave", () => this.point(null));
    this.plot.addEventListener("blur", () => this.point(null));
    this.plot.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  /** Take in a state and draw it. */
  update(state) {
    const newest = Math.floor((state.at - state.first_bucket_at) / state.bucket_s);
    const found = new Map(state.buckets.map((bucket) => [bucket.index, bucket]));
    this.slots = Array.from({ length: state.buckets_max }, (_, i) => {
      const index = newest - state.buckets_max + 1 + i;
      return { at: state.first_bucket_at + index * state.bucket_s, bucket: found.get(index) ?? null };
    });
    this.step = state.bucket_s;
    this.draw();
  }

  slotAt(event) {
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    const slot = Math.floor(share * this.slots.length);
    return slot >= 0 && slot < this.slots.length ? slot : null;
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === "Escape") this.point(null);
    if (!(event.key in moves) || !this.slots.length) return;
    event.preventDefault();
    const from = this.at ?? this.slots.length - (event.key === "ArrowLeft" ? 0 : 1);
    this.point(Math.min(this.slots.length - 1, Math.max(0, from + moves[event.key])), true);
  }

  point(slot, aloud = false) {
    if (slot === this.at) return;
    this.at = slot;
    this.draw();
    if (aloud) this.said.textContent = `${this.when.textContent}: ${this.legend.innerText}`;
  }

  draw() {
    const width = Math.max(240, this.plot.clientWidth);
    const values = this.slots.map(({ bucket }) =>
      bucket ? this.series.map((_, i) => this.value(bucket, i)) : this.series.map(() => null));
    const tops = values.map((row) => this.kind === "stack"
      ? row.reduce((sum, v) => sum + (v ?? 0), 0) : Math.max(0, ...row.map((v) => v ?? 0)));
    const ticks = steps(Math.max(0, ...tops));
    const top = ticks[ticks.length - 1];
    const x = (slot) => LEFT + (slot / this.slots.length) * (width - LEFT - RIGHT);
    const y = (v) => HEIGHT - BOTTOM - (v / top) * (HEIGHT - TOP - BOTTOM);
    const nothing = tops.every((v) => !v);
    replace(this.plot, svg("svg", { width, height: HEIGHT, "aria-hidden": "true" },
      this.grid(nothing ? [0] : ticks, width, y), this.times(width, x),
      nothing ? svg("text", { x: LEFT + (width - LEFT - RIGHT) / 2, y: HEIGHT / 2, class: "none", "text-anchor": "middle" }, this.empty)
        : this.kind === "stack" ? this.columns(values, x, y, this.series.map((_, i) => i))
          : [this.columns(values, x, y, this.areas()), this.lines(values, x, y)],
      this.at === null ? null : svg("rect", { class: "cursor", x: x(this.at), y: TOP, width: Math.max(1, x(1) - x(0)), height: HEIGHT - TOP - BOTTOM })));
    this.tell(values);
  }

  areas() {
    return this.series.flatMap((one, i) => (one.area ? [i] : []));
  }

  grid(ticks, width, y) {
    return ticks.map((tick) => [
      svg("line", { class: tick ? "grid" : "base", x1: LEFT, x2: width - RIGHT, y1: Math.round(y(tick)) + 0.5, y2: Math.round(y(tick)) + 0.5 }),
      svg("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, this.show(tick)),
    ]);
  }

  times(width, x) {
    const span = this.slots.length * (this.step ?? 0);
    if (!span) return null;
    const last = this.slots.length;
    return [0, 0.5, 1].map((share) => svg("text", {
      x: x(share * last), y: HEIGHT - 6, "text-anchor": share === 0 ? "start" : share === 1 ? "end" : "middle",
    }, share === 1 ? "now" : `−${Math.round((1 - share) * span / 60)} min`));
  }

  columns(values, x, y, which) {
    const wide = x(1) - x(0);
    const gap = wide > 4 ? 1 : 0;
    return which.length === 0 ? null : values.map((row, slot) => {
      let from = 0;
      return which.map((i) => {
        const v = row[i];
        if (!v) return null;
        const [low, high] = [y(from), y(from + v)];
        from += v;
        return svg("rect", { class: `fill ${this.series[i].class}`, x: x(slot), width: Math.max(1, wide - gap), y: high, height: Math.max(0.5, low - high) });
      });
    });
  }

  lines(values, x, y) {
    const half = (x(1) - x(0)) / 2;
    return this.series.map((one, i) => {
      if (one.area) return null;
      const parts = [];
      let open = false;
      values.forEach((row, slot) => {
        if (row[i] === null) { open = false; return; }
        parts.push(`${open ? "L" : "M"}${(x(slot) + half).toFixed(1)} ${y(row[i]).toFixed(1)}`);
        open = true;
      });
      const dots = values.map((row, slot) => {
        const alone = row[i] !== null && values[slot - 1]?.[i] == null && values[slot + 1]?.[i] == null;
        return alone ? svg("circle", { class: `fill ${one.class}`, cx: x(slot) + half, cy: y(row[i]), r: 2 }) : null;
      });
      return [svg("path", { class: `line ${one.class}`, d: parts.join("") }), dots];
    });
  }

  tell(values) {
    const here = this.at === null ? null : values[this.at];
    const buckets = this.slots.flatMap(({ bucket }) => (bucket ? [bucket] : []));
    replace(this.legend, this.series.map((one, i) => {
      const all = this.whole(buckets, i);
      const v = here ? here[i] : all;
      return one.rare && !all ? null : h("li", null, h("i", { class: `swatch ${one.area || this.kind === "stack" ? "" : "thin"} ${one.class}` }), one.label,
        h("b", null, v === null ? "–" : this.show(v)));
    }));
    const at = this.at === null ? null : this.slots[this.at]?.at;
    this.when.textContent = at === null || at === undefined ? "" : `${clock(at)} to ${clock(at + this.step)}`;
  }
}
