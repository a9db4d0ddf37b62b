"""The figures of all rounds together, for people."""

ROWS = ("rounds", "jobs", "attempts", "updates", None, "incidents", "rollbacks", "aborts", "orderly stops", "kills", "cuts",
        "stuck ranks", "slow ranks", "resumes", "refused starts", "lossy jobs", "segments sent again",
        "proofs of replicas", "proofs not counted, jobs cut short", "digests compared", "reference runs", "divergences found", "mismatches", "survivors",
        "bundles written", "bundles without tensors, disk too slow", "bundles verified", "bundles replayed",
        "faults injected", "faults attributed")


def figures(counts, skips, seconds):
    rows = {}
    for row in ROWS:
        if row is None:
            rows["skips"] = sum(skips.values())
            for cause in ("value", "natural", "exception", "calibration", "without a cause"):
                rows[f"skips: {cause}"] = skips[cause]
        else:
            rows[row] = counts[row]
    rows["wall time, s"] = round(seconds, 1)
    rows["attempts per second"] = round(counts["attempts"] / seconds, 1) if seconds else 0.0
    return rows


def text(rows):
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {value:>9}" for name, value in rows.items())
