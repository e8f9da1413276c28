"""The picture of benchmarks.scale: AUC and speed over the number of workers."""

from __future__ import annotations

from collections.abc import Mapping


def plot(found: Mapping[tuple[str, int, bool], tuple[float, float]], path: str) -> None:
    """`found`: by mode, workers and whether simulated, (AUC, samples/s). Simulated ones are hollow, real ones full."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    modes = list(dict.fromkeys(mode for mode, _, _ in found))
    for panel, place, label in zip(panels, (0, 1), ("test AUC", "samples/s, all workers"), strict=True):
        for number, mode in enumerate(modes):
            color = f"C{number}"
            best = {n: found.get((mode, n, False), found[mode, n, sim])[place] for m, n, sim in found if m == mode}
            counts = sorted(best)
            panel.plot(counts, [best[n] for n in counts], color=color, label=mode)
            for n, simulated in sorted((n, sim) for m, n, sim in found if m == mode):
                face = "white" if simulated else color
                panel.plot(n, found[mode, n, simulated][place], "o", color=color, markerfacecolor=face)
        panel.set_xscale("log", base=2)
        panel.set_xticks(sorted({n for _, n, _ in found}), [str(n) for n in sorted({n for _, n, _ in found})])
        panel.set_xlabel("workers (full: real processes, hollow: simulated)")
        panel.set_ylabel(label)
        panel.grid(alpha=0.3)
    panels[1].set_yscale("log", base=2)
    panels[1].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
