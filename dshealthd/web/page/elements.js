// Elements. Text always becomes text nodes, so data can never become markup.

// Control characters but for white space, and what reverses or hides text (bidi, zero width), are shown as `dshealthd status` shows them.
const HIDING = /(?![\n\t])[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu;
const visible = (text) => text.replace(HIDING, (character) => `\\u${character.codePointAt(0).toString(16).padStart(4, "0")}`);

export function h(name, attributes, ...children) {
  const svg = ["svg", "path", "title"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "value" || key === "at") element.style.setProperty(`--${key}`, value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  const shown = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  element.append(...shown.map((child) => (child instanceof Node ? child : visible(String(child)))));
  return element;
}

const keyOf = (node) => node.dataset?.key;

// Makes `old` look like `fresh` and keeps equal nodes, so that the selection, focus and scroll position survive an update. What a person
// has opened or closed stays so, until `data-open` changes. Of several nodes, those with the same `data-key` are the same.
export function patch(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return void old.replaceWith(fresh);
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (name === "style") old.style.cssText = fresh.style.cssText;
    else if (name === "open" && old.dataset.open === fresh.dataset.open) continue;
    else if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const after = [...fresh.childNodes];
  const wanted = new Set(after.map(keyOf));
  [...old.childNodes].forEach((child) => wanted.has(keyOf(child)) || child.remove());
  const keyed = new Map([...old.childNodes].map((child) => [keyOf(child), child]));
  let place = old.firstChild;
  for (const child of after) {
    const key = keyOf(child);
    const same = key === undefined ? (place && keyOf(place) === undefined ? place : null) : keyed.get(key);
    keyed.delete(key);
    if (same && same === place) place = place.nextSibling;
    else old.insertBefore(same || child, place);
    if (same) patch(same, child);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}
