// Light, dark, or as the system has it. Charts are drawn with colours that are read from the page.

const ORDER = ["auto", "light", "dark"];
const KEY = "torchfleet-theme";

export function startTheme(button, onChange) {
  const show = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[name];
    button.setAttribute("aria-label", `Colours: ${name}. Change`);
  };
  let name = ORDER.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "auto";
  show(name);
  button.addEventListener("click", () => {
    name = ORDER[(ORDER.indexOf(name) + 1) % ORDER.length];
    localStorage.setItem(KEY, name);
    show(name);
    onChange();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", onChange);
}

const probe = document.createElement("span");
probe.hidden = true;

/** The colour that a variable of the style sheet stands for now. */
export function colour(name) {
  if (!probe.isConnected) document.body.append(probe);
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
}
