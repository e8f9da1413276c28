// Elements. Text is always set as text: names and lines come from the job, and are never read as markup.

/** An element with a class, and children that are elements or texts. */
export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Set a text if it is another one: what does not change is not laid out again. */
export function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

export function setAttribute(target, name, value) {
  if (target.getAttribute(name) !== value) target.setAttribute(name, value);
}

/** Put a child among its siblings by its number; the order is that of the document, for all readers. */
export function insertByOrder(parent, child, order) {
  child.dataset.order = String(order);
  const next = [...parent.children].find((sibling) => Number(sibling.dataset.order) > order);
  parent.insertBefore(child, next ?? null);
}
