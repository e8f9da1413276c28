// Smoothed lines, as TensorBoard has them: an exponential mean whose first values are corrected for its start at zero.

const KEY = "torchfleet-smoothing";
const MOST = 0.99;

/** The running mean of the numbers; null stays null. `weight`: 0 leaves the numbers as they are, below 1. */
export function smoothed(values, weight) {
  if (!weight) return values;
  const numbers = values.filter((value) => value !== null);
  if (numbers.every((value) => value === numbers[0])) return values; // a constant would be changed by rounding alone
  let mean = 0, share = 1;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return value;
    mean = weight * mean + (1 - weight) * value;
    share *= weight;
    return mean / (1 - share);
  });
}

/** A slider that keeps its weight in this browser. `onChange` is called after each change. */
export class Smoothing {
  constructor(slider, shown, onChange) {
    this._slider = slider;
    this._shown = shown;
    const kept = Number(localStorage.getItem(KEY));
    this._set(kept > 0 && kept <= MOST ? kept : 0);
    slider.addEventListener("input", () => {
      this._set(Number(slider.value));
      localStorage.setItem(KEY, String(this.weight));
      onChange();
    });
  }

  _set(weight) {
    this.weight = weight;
    this._slider.value = String(weight);
    this._shown.textContent = weight ? weight.toFixed(2) : "off";
  }
}
