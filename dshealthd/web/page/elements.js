// Elements. Text always becomes text nodes, so data can never become markup.

export function h(name, attributes, ...children) {
  const svg = ["svg", "path", "title"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "value" || key === "at") element.style.setProperty(`--${key}`, value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Makes `old` look like `fresh` and keeps equal nodes, so that the selection, focus and scroll position survive an update. What a person
// has opened or closed stays so, until `data-open` changes.
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
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((child, index) => (index < before.length ? patch(before[index], child) : old.append(child)));
  before.slice(after.length).forEach((child) => child.remove());
}
