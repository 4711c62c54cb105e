// Numbers as people read them, with their units.

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clocks = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** 1,234. */
export function count(value) {
  return known(value) ? plain.format(value) : "–";
}

/** 12.3k, 4.5M: for places without room. */
export function short(value) {
  if (!known(value)) return "–";
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${digits(value / size)}${unit}`;
  }
  return digits(value);
}

/** 0.42 ms, 12 ms, 1.23 s. */
export function seconds(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size < 5e-6) return "0 s";
  if (size < 1e-3) return `${(value * 1e3).toFixed(2)} ms`;
  if (size < 1) return `${digits(value * 1e3)} ms`;
  if (size < 120) return `${digits(value)} s`;
  return size < 7200 ? `${digits(value / 60)} min` : `${digits(value / 3600)} h`;
}

/** 1.5 GB. */
export function bytes(value) {
  return known(value) ? `${short(value).replace(/([kMGT]?)$/, " $1")}B` : "–";
}

/** 42 %. */
export function percent(share) {
  return known(share) ? `${share < 0.0995 && share > 0 ? (share * 100).toFixed(1) : Math.round(share * 100)} %` : "–";
}

/** The time of day here. */
export function clock(at) {
  return known(at) ? clocks.format(new Date(at * 1000)) : "–";
}

/** Round steps of an axis from 0 to a little more than `most`. */
export function steps(most, wanted = 3) {
  if (!(most > 0)) return [0, 1];
  const rough = most / wanted;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * unit).find((n) => n >= rough * 0.999);
  const found = [];
  for (let at = 0; at < most + step * 0.999; at += step) found.push(at);
  return found;
}

function digits(value) {
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? trim(value.toFixed(1)) : trim(value.toFixed(2));
}

function trim(text) {
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}
