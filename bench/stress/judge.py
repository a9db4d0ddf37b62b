"""Holds what a round left behind to its plan. Nothing here runs or reads anything: record in, findings out."""

import collections
import dataclasses
import re

REPLAYED = "REPRODUCED"
SHARED = ("parameters", "optimizer", "ema", "buffers", "attempts", "updates")
# The one reason for which a bundle may be without tensors: the incident followed others faster than the disk.
QUEUE = "one bundle with tensors is still being written and another waits"


@dataclasses.dataclass
class Segment:
    """Attempts [begin, end) of an epoch; `leg`: index of the job."""
    epoch: int
    leg: int
    begin: int = 0
    end: int = 0


class Judge:
    def __init__(self, the_round, record):
        self.round, self.record = the_round, record
        self.failures, self.segments = [], None
        self.counts = collections.Counter()
        self.skips = collections.Counter()  # by cause
        self.by_attempt = collections.defaultdict(list)
        for fault in the_round.faults:
            self.by_attempt[fault.attempt].append(fault)

    def fail(self, text):
        self.failures.append(f"round {self.round.name}: {text}")

    def named(self, *names):
        return [event for event in self.record["events"] if event["event"] in names]

    # ---- what was made

    def course(self):
        """The epochs, from the record, and where a job was interrupted, from the plan."""
        if self.segments is not None:
            return self.segments
        self.segments = segments = []
        legs = iter([i for i, leg in enumerate(self.round.legs) if leg.end != "refused"])
        for event in self.record["events"]:
            kind = event["event"]
            if kind == "run_started":
                leg = next(legs, None)
                if leg is None:
                    self.fail(f"epoch {event['epoch']} was not planned")
                    break
                planned = self.round.legs[leg]
                if event["epoch"] != planned.epoch:
                    self.fail(f"job {leg} began epoch {event['epoch']}, planned {planned.epoch}")
                segments.append(Segment(event["epoch"], leg, 0, planned.at))
            elif not segments:
                self.fail(f"{kind} before a start")
                break
            elif kind == "restored":
                segments[-1].begin = event["attempt"]
            elif kind == "rolled_back":
                segments[-1].end = event["from_attempt"]
                after = Segment(event["epoch"], segments[-1].leg, event["attempt"], self.round.steps)
                segments.append(after)
            elif kind in ("run_finished", "stopped", "aborted"):
                if event["attempt"] != segments[-1].end:
                    self.fail(f"job {segments[-1].leg}: {kind} at attempt {event['attempt']}, planned "
                              f"{segments[-1].end}")
                segments[-1].end = event["attempt"]
        return segments

    def omitted(self):
        """Attempts whose updates are left out in the end: of each its last epoch counts."""
        made = {}
        for segment in self.course():
            made.update(dict.fromkeys(range(segment.begin, segment.end), segment.epoch))
        return sorted(attempt for attempt, epoch in made.items() if self.due(attempt, epoch, "skip"))

    def due(self, attempt, epoch, *outcomes):
        return [fault for fault in self.by_attempt.get(attempt, ()) if fault.epoch in (None, epoch) and
                fault.outcome in outcomes]

    # ---- the judgement

    def judge(self):
        self.jobs()
        if len(self.record["legs"]) < len(self.round.legs):
            return self
        segments = self.course()
        if len({segment.leg for segment in segments}) != len([l for l in self.round.legs if l.end != "refused"]):
            self.fail("the record does not hold each start")
            return self
        for segment in segments:
            self.epoch(segment)
        self.without_cause({segment.epoch: segment for segment in segments})
        self.proofs()
        self.replicas()
        self.ledger()
        self.bundles()
        return self

    def jobs(self):
        self.counts["rounds"] += 1
        for number, (leg, said) in enumerate(zip(self.round.legs, self.record["legs"])):
            where = f"job {number}"
            self.counts["jobs"] += 1
            self.counts["survivors"] += len(said["survivors"])
            if said["survivors"]:
                self.fail(f"{where}: survivors: {', '.join(said['survivors'])}")
            if said["late"]:
                self.fail(f"{where}: {said['late']}")
            if said["code"] != leg.code:
                self.fail(f"{where}: exit code {said['code']}, planned {leg.code}")
                continue
            if not said["acknowledged"]:
                self.fail(f"{where}: holdfast ack was refused")
            self.counts["resumes"] += number > 0 and leg.end != "refused"
            self.counts["refused starts"] += leg.end == "refused"
            self.counts["kills"] += bool(leg.action) and leg.action[0] == "kill"
            self.counts["cuts"] += bool(leg.action) and leg.action[0] == "cut"
            self.counts["stuck ranks"] += leg.end == "left" and not leg.action
            self.counts["slow ranks"] += leg.slow is not None
            self.counts["orderly stops"] += leg.end == "stopped"
            self.counts["aborts"] += leg.end == "aborted"
            self.counts["lossy jobs"] += leg.loss is not None
            self.counts["segments sent again"] += said["sent_again"]
            if leg.loss and said["sent_again"] <= 0:
                self.fail(f"{where}: no packet was lost at {leg.loss} %")
            self.digests(where, leg, said["digests"])
            self.missing(where, leg, said["departures"])
        if len(self.record["legs"]) < len(self.round.legs):
            self.fail(f"{len(self.round.legs) - len(self.record['legs'])} jobs were not begun")

    def digests(self, where, leg, digests):
        if leg.end != "finished":
            return
        if sorted(digests) != list(range(self.round.ranks)):
            self.fail(f"{where}: digests of ranks {sorted(digests)} only")
            return
        wrong = [rank for rank in digests if any(digests[rank][part] != digests[0][part] for part in SHARED)]
        self.counts["digests compared"] += len(digests)
        self.counts["mismatches"] += len(wrong)
        if wrong:
            self.fail(f"{where}: digests of ranks {wrong} differ from rank 0's")

    def missing(self, where, leg, departures):
        """Who was missing, by everyone who had to say so and by nobody else."""
        said = {d["reported_by"]: None if d["alone"] else tuple(m["rank"] for m in d["missing"]) for d in departures}
        if leg.end == "killed":
            # mpirun may be faster than the others, which have a second.
            for reporter, ranks in said.items():
                if ranks != leg.missing[0]:
                    self.fail(f"{where}: rank {reporter} misses {ranks}, killed was {leg.missing[0]}")
        elif said != leg.departures:
            self.fail(f"{where}: who misses whom is {said}, planned {leg.departures}")
        if leg.missing:
            for departure in departures:
                absences = {m["absence"] for m in departure["missing"]}
                if absences - {leg.missing[1]}:
                    self.fail(f"{where}: {leg.missing[0]} is {absences}, planned {leg.missing[1]}")

    def epoch(self, segment):
        """All that was put into these attempts was found, each in its place."""
        leg = self.round.legs[segment.leg]
        self.counts["attempts"] += segment.end - segment.begin
        events = [event for event in self.record["events"] if event["epoch"] == segment.epoch]
        skipped = collections.defaultdict(list)
        for event in events:
            if event["event"] == "attempt_skipped":
                skipped[event["attempt"]].append(event)
        self.counts["updates"] += segment.end - segment.begin - len(skipped)
        ends = [event for event in events if event["event"] == "aborted"]
        for attempt in range(segment.begin, segment.end + 1):
            faults = self.due(attempt, segment.epoch, "skip")
            aborts = self.due(attempt, segment.epoch, "abort")
            is_last = attempt == segment.end
            if is_last and leg.end == "aborted" and leg.code in (80, 81) and segment.epoch == leg.epoch:
                self.found(segment.epoch, attempt, faults + aborts, ends, leg.code)
            elif faults and not is_last:
                self.found(segment.epoch, attempt, faults, skipped.get(attempt, []), None)
        # Made in an attempt, and found in the next one.
        for attempt in range(segment.begin, segment.end):
            for fault in self.due(attempt, segment.epoch, "rollback", "diverge_rollback", "diverge_abort"):
                self.undone(segment, fault, events)

    def undone(self, segment, fault, events):
        self.counts["faults injected"] += 1
        place = f"epoch {segment.epoch} attempt {fault.attempt}: {fault.option[1]}"
        name = "aborted" if fault.outcome == "diverge_abort" else "rolling_back"
        found = [event for event in events if event["event"] == name and event["attempt"] == fault.attempt + 1]
        if len(found) != 1 or segment.end != fault.attempt + 1:
            self.fail(f"not attributed: {place} led to {len(found)} {name}")
            return
        (event,) = found
        if fault.outcome == "rollback":
            # In the parameter, and in what is made of it.
            seen = {(o["rank"], o["tensor"], o["index"], o["nan"] > 0, o["pos_inf"], o["neg_inf"])
                    for o in event["origins"]}
            ranks = range(self.round.ranks) if fault.rank is None else [fault.rank]
            wanted = {(rank, fault.tensor, fault.index, True, 0, 0) for rank in ranks}
            good = event["stage"] == "optimizer" and seen == wanted
        else:
            self.counts["divergences found"] += 1
            alone = f"rank {fault.rank} (host {self.round.host(fault.rank)})"
            if self.round.ranks > 2:
                wanted = f"replicas differ: {alone} against the other {self.round.ranks - 1}, first in {fault.tensor}"
            else:
                wanted = f"against each other, first in {fault.tensor}"
            good = re.search(re.escape(wanted) + "($|[^.0-9A-Za-z])", event["reason"])
        if not good:
            self.fail(f"not attributed: {place} was put down to: {event['reason']}")
            return
        self.counts["faults attributed"] += 1
        self.counts["rollbacks"] += name == "rolling_back"

    def found(self, epoch, attempt, faults, events, code):
        """The faults of one attempt against the one event there must be of it."""
        self.counts["faults injected"] += len(faults)
        place = f"epoch {epoch} attempt {attempt}"
        if len(events) != 1 or events[0]["attempt"] != attempt:
            self.fail(f"not attributed: {place}: {len(events)} records of {', '.join(f.option[1] for f in faults)}")
            return
        (event,) = events
        if code is not None and event["exit_code"] != code:
            self.fail(f"{place}: ended with {event['exit_code']}, planned {code}")
        values = [fault for fault in faults if fault.what != "error"]
        errors = [fault for fault in faults if fault.what == "error"]
        stage = (values or errors)[0].stage
        if event["stage"] != stage:
            self.fail(f"{place}: stage {event['stage']}, planned {stage}")
        origins = {origin["rank"]: origin for origin in event["origins"]}
        good = 0
        for fault in faults:
            wrong = self.wrong_error(fault, event) if fault.what == "error" else self.wrong_origin(fault, origins)
            good += not wrong
            if wrong:
                self.fail(f"not attributed: {place}: {fault.option[1]}: {wrong}")
        self.counts["faults attributed"] += good
        ranks = {fault.rank for fault in values}
        if None not in ranks and set(origins) != ranks:
            self.fail(f"{place}: origins {sorted(origins)}, planned {sorted(ranks)}")
        if not errors and event.get("error"):
            self.fail(f"{place}: an exception nobody threw: {event['error']['what']}")
        cause = "exception" if not values else values[0].what
        if self.calibration(event):
            cause = "calibration"
        if code is None:
            self.skips[cause] += 1

    def wrong_error(self, fault, event):
        error = event.get("error")
        if not error:
            return "no exception is on record"
        seen = (error["rank"], error["host"], error["stage"])
        wanted = (fault.rank, self.round.host(fault.rank), fault.stage)
        return "" if seen == wanted else f"put down to {seen}"

    def wrong_origin(self, fault, origins):
        if fault.rank is None:
            bad = sum(o["pos_inf"] + o["neg_inf"] for o in origins.values())
            good = bad > 0 and all(o["stage"] == fault.stage for o in origins.values())
            return "" if good else f"put down to {list(origins.values())}"
        origin = origins.get(fault.rank)
        if origin is None:
            return f"rank {fault.rank} is no origin; {sorted(origins)} are"
        wanted = {"host": self.round.host(fault.rank), "stage": fault.stage, "tensor": fault.tensor,
                  "index": fault.index, "micro_batch": fault.micro}
        if fault.what == "value":
            wanted |= {name: int(name == fault.bad) for name in ("nan", "pos_inf", "neg_inf")}
        wrong = {key: origin[key] for key, value in wanted.items() if origin[key] != value}
        if fault.bad and not origin[fault.bad]:
            wrong[fault.bad] = 0
        return f"put down to {wrong}" if wrong else ""

    def calibration(self, event):
        return self.round.calibrates and event["stage"] in ("backward", "reduction") and (
            event["pos_inf"] + event["neg_inf"] > 0)

    def without_cause(self, segments):
        """Skips, rollbacks and aborts that nothing was planned for, or in attempts that were not to be made."""
        for event in self.named("attempt_skipped"):
            made = segments.get(event["epoch"])
            if not self.due(event["attempt"], event["epoch"], "skip") or not made or not (
                    made.begin <= event["attempt"] < made.end):
                self.skips["without a cause"] += 1
                self.fail(f"epoch {event['epoch']} attempt {event['attempt']}: a skip without a cause: "
                          f"{event['reason']}")
        planned = sum(fault.outcome in ("rollback", "diverge_rollback") for fault in self.round.faults)
        if (seen := len(self.named("rolled_back"))) != planned:
            self.fail(f"{seen} rollbacks, planned {planned}")
        planned = sum(leg.end == "aborted" for leg in self.round.legs)
        if (seen := len(self.named("aborted"))) != planned:
            self.fail(f"{seen} aborts, planned {planned}")
        self.counts["incidents"] += len(self.named("attempt_skipped", "rolling_back", "aborted"))

    def agreed(self, segment):
        """Proofs of these attempts in which all replicas agree. One rides in each attempt that is decided: also in the
        one that ends the job, or that makes it go back, and in the end of a run."""
        made = segment.end - segment.begin
        spoilt = self.due(segment.end - 1, segment.epoch, "rollback", "diverge_rollback", "diverge_abort")
        if spoilt:
            # What all ranks wrote alike they still have alike.
            return made + all(fault.outcome == "rollback" and fault.rank is None for fault in spoilt)
        return made + (self.round.legs[segment.leg].end not in ("killed", "left"))

    def proofs(self):
        """As many as rank 0 counted; from 0 in each job."""
        for number, (leg, said) in enumerate(zip(self.round.legs, self.record["legs"])):
            segments = [segment for segment in self.course() if segment.leg == number]
            if leg.end == "refused" or not segments:
                continue
            where, seen = f"job {number}", said["proofs"]
            if not seen or seen["epoch"] != segments[-1].epoch:
                self.fail(f"{where}: no metrics of epoch {segments[-1].epoch}: {seen}")
                continue
            planned = sum(map(self.agreed, segments))
            self.counts["proofs of replicas"] += seen["agreed"]
            if leg.end in ("killed", "left"):
                # Its metrics may be a second old, in which many attempts were made; they must agree with themselves.
                good = seen["attempts"] <= seen["agreed"] <= planned
                self.counts["proofs not counted, jobs cut short"] += planned - seen["agreed"]
            else:
                good = seen["agreed"] == planned
            if not good:
                self.fail(f"{where}: {seen['agreed']} proofs in which all replicas agreed, planned {planned}; "
                          f"{seen['attempts']} attempts by the same metrics")

    def replicas(self):
        """Each proof that failed must be one that was planned."""
        planned = {(fault.epoch, fault.attempt + 1) for fault in self.round.faults if
                   fault.outcome.startswith("diverge")}
        for event in self.named("rolling_back", "aborted"):
            if "replicas differ" in event["reason"] and (event["epoch"], event["attempt"]) not in planned:
                self.counts["mismatches"] += 1
                self.fail(f"epoch {event['epoch']} attempt {event['attempt']}: {event['reason']}")
        for event in self.named("checkpoint_failed", "checkpoint_refused"):
            near = any(epoch == event["epoch"] for epoch, _ in planned)
            if event["event"] == "checkpoint_refused" or ("do not agree" in event["reason"] and not near):
                self.counts["mismatches"] += 1
                self.fail(f"checkpoint {event['generation']}: {event['reason']}")
        if not self.record["checkpoints_clean"]:
            self.fail("a checkpoint is not clean")
        reference = self.record["reference"]
        if self.round.reference:
            self.counts["reference runs"] += 1
            last = self.record["legs"][-1]["digests"]
            if not reference or reference != last:
                self.counts["mismatches"] += 1
                self.fail("the state in the end is not that of a run on one host which omits the bad attempts")

    def ledger(self):
        ledger, omitted = {int(a): origin for a, origin in self.record["ledger"].items()}, self.omitted()
        if sorted(ledger) != omitted:
            self.fail(f"the ledger holds {sorted(set(ledger) ^ set(omitted))} or lacks them")
        for event in self.named("run_finished"):
            if event["update"] != self.round.steps - len(omitted):
                self.fail(f"{event['update']} updates in the end, planned {self.round.steps - len(omitted)}")

    def bundles(self):
        record = self.record
        events = self.named("evidence_written")
        written = {event["bundle"] for event in events}
        for event in self.named("evidence_failed"):
            self.fail(f"no evidence: {event['reason']}")
        self.counts["bundles written"] += len(written)
        for event in events:
            if QUEUE in event.get("left_out", ""):
                self.counts["bundles without tensors, disk too slow"] += 1
            elif event["bundle"] in record["compact"] and record["kinds"].get(event["bundle"]) == "NON_FINITE":
                self.fail(f"bundle {event['bundle']} has no tensors")
        for name in sorted(written - set(record["bundles"])):
            self.fail(f"bundle {name} is not there")
        for name, clean in record["bundles"].items():
            self.counts["bundles verified"] += clean
            if not clean:
                self.fail(f"bundle {name} is not clean")
        lost = {leg.epoch for leg in self.round.legs if leg.end in ("killed", "left")}
        for event in self.named("attempt_skipped", "rolling_back", "aborted"):
            name = f"e{event['epoch']:04}-a{event['attempt']:010}"
            calibration = event["event"] == "attempt_skipped" and self.calibration(event)
            if name not in written | set(record["bundles"]) and not calibration and (
                    event["epoch"] not in lost):
                self.fail(f"no evidence of {name}")
        if record["replayable"] and not record["replays"]:
            self.fail("nothing was replayed")
        for name, result in record["replays"].items():
            self.counts["bundles replayed"] += 1
            if result != REPLAYED:
                self.fail(f"replay of {name}: {result}")
