#!/usr/bin/python3
"""Draws bench/data/verdict.png from what verdict.sh --save and simulate.sh --save left there: what a verdict takes over the
ranks, and how it compares with the bare all-reduce. Needs python3-matplotlib."""

import csv
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

DATA = pathlib.Path(__file__).resolve().parent / "data"


def rows(name):
    path = DATA / name
    return list(csv.DictReader(path.open(), delimiter="\t")) if path.exists() else []


def series(table, kind, what, **where):
    """(ranks, value) of each matching row."""
    return sorted((int(row["ranks"]), float(row["value"])) for row in table
                  if row["kind"] == kind and row["what"] == what and all(row[k] == v for k, v in where.items()))


def draw(axes, points, label, **style):
    if points:
        axes.plot(*zip(*points), label=label, **style)


def main():
    measured, simulated = rows("verdict.tsv"), rows("simulated.tsv")
    figure, (times, ratios) = plt.subplots(1, 2, figsize=(11, 4.5))

    for hosts, style in (("1", "o-"), ("2", "s-")):
        points = series(measured, "verdict", "verdict_ns", hosts=hosts)
        draw(times, [(r, t / 1000) for r, t in points], f"clean, measured, {hosts} host{'s' * (hosts > '1')}, 2 cores",
             color="tab:blue", marker=style[0], linestyle="-" if hosts == "1" else ":")
    draw(times, series(simulated, "clean", "verdict_us"), "clean, simulated", color="tab:green", marker="^")
    draw(times, series(simulated, "badpath:1", "network_us"), "1 bad rank, simulated, network only", color="tab:orange",
         marker="^", linestyle="--")
    every = sorted({(int(row["ranks"]), float(row["value"])) for row in simulated
                    if row["kind"] == "badpath:" + row["ranks"] and row["what"] == "network_us"})
    draw(times, every, "all ranks bad, simulated, network only", color="tab:red", marker="^", linestyle="--")
    times.set(xscale="log", yscale="log", xlabel="ranks", ylabel="microseconds", title="From decide() to the decision")

    for hosts, marker in (("1", "o"), ("2", "s")):
        points = [(r, v) for r, v in series(measured, "verdict", "ratio", hosts=hosts) if r > 1]
        draw(ratios, points, f"measured, {hosts} host{'s' * (hosts > '1')}", color="tab:blue", marker=marker,
             linestyle="-" if hosts == "1" else ":")
    points = [(r, v) for r, v in series(measured, "verdict", "control", hosts="1") if r > 1]
    draw(ratios, points, "measured, all-reduce over itself", color="tab:gray", marker="x", linestyle=":")
    draw(ratios, series(simulated, "clean", "ratio"), "simulated", color="tab:green", marker="^")
    ratios.axhline(1.10, color="black", linewidth=0.8, linestyle="--", label="bar, 4 ranks and more")
    ratios.set(xscale="log", xlabel="ranks", title="Clean verdict over bare all-reduce")

    for axes in (times, ratios):
        ticks = [2, 4, 16, 64, 256, 1024, 4096]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(DATA / "verdict.png", dpi=80)


if __name__ == "__main__":
    main()
