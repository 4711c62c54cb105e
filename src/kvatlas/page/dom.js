// Elements from plain values. Text stays text: nothing here, or in any other file, parses markup.

const SVG = "http://www.w3.org/2000/svg";
// What cannot be seen, or turns what follows around, in names that come from outside.
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;

/** A name from outside as it may be shown: what cannot be seen replaced, long ones cut. */
export function clean(text, most = 96) {
  const seen = String(text).replace(UNSEEN, "\ufffd");
  return seen.length > most ? `${seen.slice(0, most - 1)}…` : seen;
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

/** An HTML element. */
export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element. */
export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

/** Put new content into `host`; what had the keyboard there keeps it, by its `data-key`. */
export function replace(host, ...children) {
  const active = document.activeElement;
  const key = active && host.contains(active) ? active.getAttribute("data-key") : null;
  const [top, left] = [host.scrollTop, host.scrollLeft];
  host.replaceChildren(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  host.scrollTop = top;
  host.scrollLeft = left;
  if (key === null) return;
  for (const found of host.querySelectorAll("[data-key]")) {
    if (found.getAttribute("data-key") === key) {
      found.focus({ preventScroll: true });
      return;
    }
  }
}

/** A titled part of the page, with what is said beside the title. */
export function card(title, attributes, ...children) {
  const { note, id, level = "h2", ...more } = attributes ?? {};
  const head = h("div", { class: "head" }, h(level, { id: id ? `${id}-title` : null }, title),
    note === undefined ? null : h("span", { class: "soft note" }, note));
  return h("section", { ...more, id, class: `card ${more.class ?? ""}`,
    "aria-labelledby": id ? `${id}-title` : null }, head, ...children);
}
