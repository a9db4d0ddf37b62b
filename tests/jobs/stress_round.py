"""Rounds of bench/stress.sh and what they leave behind when all goes well."""

import copy
import sys

from jobs import ROOT

sys.path.insert(0, str(ROOT / "bench" / "stress"))
import judge  # noqa: E402
import plan  # noqa: E402, F401
import run  # noqa: E402, F401

SEED, HOSTS, PER_HOST, STEPS = 7, 3, 2, 120


class GoodRecord:
    """What a round leaves behind when all goes as planned, made up from the plan."""

    def __init__(self, the_round):
        self.round, self.events, self.legs, self.ledger = the_round, [], [], {}
        begin = 0
        for number, leg in enumerate(the_round.legs):
            said = {"code": leg.code, "digests": {}, "survivors": [], "departures": self.departures(leg), "late": None,
                    "sent_again": 5 if leg.loss else 0, "acknowledged": True, "proofs": None}
            self.legs.append(said)
            if leg.end == "refused":
                continue
            self.event("run_started", leg.epoch, begin)
            if number > 0:
                self.event("restored", leg.epoch, begin)
            self.attempts(leg, leg.epoch, begin)
            begin = leg.at if leg.end in ("stopped", "aborted") else leg.at // 10 * 10
            if leg.code == 83:
                begin = (leg.at - 1) // 10 * 10
        digest = {part: "1" for part in judge.SHARED}
        self.legs[-1]["digests"] = {rank: {**digest, "rng": str(rank)} for rank in range(the_round.ranks)}

    def departures(self, leg):
        absence = leg.missing[1] if leg.missing else "silent"
        planned = {0: leg.missing[0]} if leg.end == "killed" else leg.departures
        return [{"reported_by": reporter, "alone": ranks is None,
                 "missing": [{"rank": rank, "absence": absence} for rank in ranks or ()]}
                for reporter, ranks in planned.items()]

    def event(self, name, epoch, attempt, **fields):
        self.events.append({"event": name, "epoch": epoch, "attempt": attempt, **fields})

    def incident(self, name, epoch, attempt, faults, code=0, reason="planned"):
        origins, error = [], {}
        for fault in faults:
            if fault.what == "error":
                error = {"error": {"rank": fault.rank, "host": self.round.host(fault.rank), "stage": fault.stage,
                                   "what": "thrown"}}
                continue
            ranks = [fault.rank or 0]
            if fault.outcome == "rollback" and fault.rank is None:
                ranks = range(self.round.ranks)
            for rank in ranks:
                bad = {name: int(name == (fault.bad or "pos_inf")) for name in ("nan", "pos_inf", "neg_inf")}
                origins.append({"rank": rank, "host": self.round.host(rank), "stage": fault.stage, "index": fault.index,
                                "tensor": fault.tensor, "micro_batch": fault.micro, **bad})
        stages = [origin["stage"] for origin in origins] or [fault.stage for fault in faults]
        sums = {name: sum(origin[name] for origin in origins) for name in ("nan", "pos_inf", "neg_inf")}
        self.event(name, epoch, attempt, stage=stages[0], origins=origins, exit_code=code, reason=reason, **sums, **error)
        self.event("evidence_written", epoch, attempt, bundle=f"e{epoch:04}-a{attempt:010}")

    def attempts(self, leg, epoch, begin):
        attempt, decided, differed = begin, 0, 0
        while attempt < leg.at:
            decided += 1
            faults = [f for f in self.round.faults if f.attempt == attempt and f.epoch in (None, epoch)]
            skips = [fault for fault in faults if fault.outcome == "skip"]
            self.ledger.pop(attempt, None)
            if skips:
                self.incident("attempt_skipped", epoch, attempt, skips)
                self.ledger[attempt] = skips[0].rank
            undone = [fault for fault in faults if fault.outcome in ("rollback", "diverge_rollback")]
            attempt += 1
            if undone:
                self.incident("rolling_back", epoch, attempt, undone, reason=self.differ(undone[0]))
                decided += 1
                differed += undone[0].outcome == "diverge_rollback" or undone[0].rank is not None
                epoch, back = epoch + 1, (attempt - 1) // 10 * 10
                self.event("rolled_back", epoch, back, from_attempt=attempt)
                attempt = back
        if leg.end == "finished":
            self.event("run_finished", epoch, leg.at, update=leg.at - len(self.ledger))
        elif leg.end == "stopped":
            self.event("stopped", epoch, leg.at)
        elif leg.end == "aborted":
            at = leg.at - 1 if leg.code == 83 else leg.at
            faults = [f for f in self.round.faults if f.attempt == at and f.epoch in (None, epoch)]
            self.incident("aborted", epoch, leg.at, faults, leg.code, self.differ(faults[0]))
            differed += leg.code == 83
        # The end is decided as attempts are. Of a job that is cut short the last metrics are old.
        if leg.end in ("killed", "left"):
            decided -= 4
        else:
            decided += 1
        attempts = decided - (leg.end == "finished")
        self.legs[-1]["proofs"] = {"epoch": epoch, "attempts": attempts, "agreed": decided - differed}

    def differ(self, fault):
        if not fault.outcome.startswith("diverge"):
            return "planned"
        return (f"replicas differ: rank {fault.rank} (host {self.round.host(fault.rank)}) against the other "
                f"{self.round.ranks - 1}, first in {fault.tensor}")

    def record(self):
        names = [event["bundle"] for event in self.events if event["event"] == "evidence_written"]
        return {"legs": self.legs, "events": self.events, "ledger": self.ledger,
                "bundles": {name: True for name in names}, "kinds": dict.fromkeys(names, "NON_FINITE"), "compact": [],
                "replayable": 1, "replays": {names[0]: "REPRODUCED"},
                "checkpoints_clean": True,
                "reference": copy.deepcopy(self.legs[-1]["digests"]) if self.round.reference else None}
