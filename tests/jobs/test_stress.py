"""bench/stress.sh: its judge finds what was doctored into a good record, and a short run of it passes."""

import contextlib
import copy
import importlib.util
import io
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import jobs
from jobs import ROOT, processes, strict_json, until
from test_cluster import RUNTIME, needs_a_cluster

sys.path.insert(0, str(ROOT / "bench" / "stress"))
import judge  # noqa: E402
import plan  # noqa: E402
import run  # noqa: E402

# The program itself, which is none of this name.
SPEC = importlib.util.spec_from_file_location("stress", ROOT / "bench" / "stress" / "__main__.py")
stress = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(stress)

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
                "bundles": {name: True for name in names}, "kinds": {}, "replays": {names[0]: "REPRODUCED"},
                "checkpoints_clean": True,
                "reference": copy.deepcopy(self.legs[-1]["digests"]) if self.round.reference else None}


class Judge(unittest.TestCase):
    def setUp(self):
        self.rounds = {kind: plan.make_round(SEED, number, HOSTS, PER_HOST, STEPS, kind)
                       for number, kind in enumerate(plan.KINDS)}
        for the_round in self.rounds.values():
            the_round.reference = not the_round.calibrates

    def good(self, kind):
        return GoodRecord(self.rounds[kind]).record()

    def failures(self, kind, record):
        return judge.Judge(self.rounds[kind], record).judge().failures

    def assert_found(self, says, doctor, kinds=plan.KINDS):
        """`doctor` changes a good record; false when there is nothing in it to change."""
        done = 0
        for kind in kinds:
            record = self.good(kind)
            if doctor(record) is not False:
                done += 1
                with self.subTest(kind):
                    self.assertRegex("\n".join(self.failures(kind, record)), says)
        self.assertGreater(done, 0, "nothing was doctored")

    def one(self, record, name, wanted=lambda event: True):
        return next((event for event in record["events"] if event["event"] == name and wanted(event)), None)

    def change_origin(self, **fields):
        def doctor(record):
            planned = lambda event: len(event["origins"]) == 1 and event["origins"][0]["tensor"]
            if (event := self.one(record, "attempt_skipped", planned)) is None:
                return False
            event["origins"][0].update(fields)
            return True
        return doctor

    def test_a_record_of_what_was_planned_is_accepted(self):
        for kind, the_round in self.rounds.items():
            with self.subTest(kind):
                judged = judge.Judge(the_round, self.good(kind)).judge()
                self.assertEqual([], judged.failures)
                self.assertEqual(judged.counts["faults injected"], judged.counts["faults attributed"])
                self.assertGreaterEqual(judged.counts["faults attributed"], 5)
                self.assertEqual(judged.counts["attempts"], judged.counts["updates"] + judged.skips.total())

    def test_a_fault_that_is_not_on_record(self):
        def doctor(record):
            record["events"].remove(self.one(record, "attempt_skipped"))
        self.assert_found(r"not attributed: epoch \d attempt \d+: 0 records", doctor)

    def test_a_fault_that_is_not_attributed_is_not_counted(self):
        record = self.good("values")
        self.change_origin(tensor="norm9.weight")(record)
        counts = judge.Judge(self.rounds["values"], record).judge().counts
        self.assertEqual(counts["faults injected"] - 1, counts["faults attributed"])

    def test_a_fault_that_is_put_down_to_another_place(self):
        for field, value in (("rank", 99), ("host", "node9"), ("stage", "nowhere"), ("tensor", "x"), ("index", -1),
                             ("micro_batch", 77)):
            with self.subTest(field):
                self.assert_found("not attributed", self.change_origin(**{field: value}))

    def test_a_fault_of_another_class(self):
        def doctor(record):
            planned = lambda event: len(event["origins"]) == 1 and event["origins"][0]["nan"] == 1
            if (event := self.one(record, "attempt_skipped", planned)) is None:
                return False
            event["origins"][0].update(nan=0, pos_inf=1)
            return True
        self.assert_found("not attributed", doctor)

    def test_another_rank_that_is_blamed_too(self):
        def doctor(record):
            planned = lambda event: event["origins"] and event["origins"][0]["tensor"]
            if (event := self.one(record, "attempt_skipped", planned)) is None:
                return False
            event["origins"].append({**event["origins"][0], "rank": 99})
            return True
        self.assert_found("origins .*99", doctor)

    def test_an_exception_that_is_put_down_to_another_rank(self):
        def doctor(record):
            if (event := self.one(record, "attempt_skipped", lambda event: "error" in event)) is None:
                return False
            event["error"]["rank"] += 1
            return True
        self.assert_found("not attributed: .*throw", doctor)

    def test_an_event_that_names_another_stage(self):
        def doctor(record):
            self.one(record, "attempt_skipped")["stage"] = "nowhere"
        self.assert_found("stage nowhere", doctor)

    def test_a_skip_without_a_cause(self):
        def doctor(record):
            skips = {event["attempt"] for event in record["events"]}
            event = dict(self.one(record, "attempt_skipped"))
            event["attempt"] = next(attempt for attempt in range(20) if attempt not in skips)
            record["events"].insert(2, event)
        self.assert_found("without a cause", doctor)

    def test_a_skip_in_an_attempt_that_was_not_to_be_made(self):
        """Planned for this attempt, but the job was interrupted before it."""
        def doctor(record):
            late = [event for event in record["events"] if event["event"] == "attempt_skipped"][-1]
            if late["epoch"] == 1:
                return False
            record["events"].insert(1, {**late, "epoch": 1})
            return True
        self.assert_found("without a cause", doctor)

    def test_updates_that_do_not_add_up(self):
        def doctor(record):
            self.one(record, "run_finished")["update"] -= 1
        self.assert_found("updates in the end, planned", doctor)

    def test_a_rollback_without_a_cause(self):
        def doctor(record):
            event = dict(self.one(record, "run_started"), event="rolled_back", from_attempt=STEPS, epoch=9)
            record["events"].append(event)
        self.assert_found("rollbacks, planned", doctor)

    def test_a_divergence_that_names_another_rank(self):
        def doctor(record):
            for event in record["events"]:
                if "replicas differ" in event.get("reason", ""):
                    event["reason"] = event["reason"].replace("replicas differ: rank ", "replicas differ: rank 1")
                    return True
            return False
        self.assert_found("not attributed", doctor)

    def test_a_divergence_that_was_not_planned(self):
        def doctor(record):
            event = dict(self.one(record, "attempt_skipped"), event="aborted",
                         reason="replicas differ: rank 1 (host node0) against the other 5, first in conv1.weight")
            record["events"].append(event)
        self.assert_found("replicas differ", doctor)

    def test_a_checkpoint_on_which_replicas_do_not_agree(self):
        def doctor(record):
            record["events"].append({"event": "checkpoint_failed", "epoch": 9, "attempt": 10, "generation": "e1",
                                     "reason": "replicas do not agree on it"})
        self.assert_found("do not agree", doctor)

    def test_a_digest_that_differs(self):
        for part in judge.SHARED:
            def doctor(record):
                record["legs"][-1]["digests"][3][part] = "2"
            self.assert_found(r"digests of ranks \[3\] differ", doctor)

    def test_a_digest_that_is_missing(self):
        self.assert_found("digests of ranks", lambda record: record["legs"][-1]["digests"].pop(3) and None)

    def test_a_reference_that_ended_elsewhere(self):
        def doctor(record):
            if record["reference"] is None:
                return False
            record["reference"][0]["rng"] = "another"
            return True
        self.assert_found("omits the bad attempts", doctor)

    def test_a_survivor(self):
        for number in (0, -1):
            def doctor(record):
                record["legs"][number]["survivors"].append("123 guarded_train")
            self.assert_found("survivors: 123 guarded_train", doctor)

    def test_another_exit_code(self):
        for number in (0, -1):
            def doctor(record):
                record["legs"][number]["code"] = 1
            self.assert_found("exit code 1, planned", doctor)

    def test_a_job_that_was_late_or_not_begun(self):
        def late(record):
            record["legs"][0]["late"] = "not in time"
        self.assert_found("not in time", late)
        self.assert_found("jobs were not begun", lambda record: record["legs"].pop() and None)

    def test_who_was_missing(self):
        def nobody(record):
            if self.one(record, "run_started") is None or not record["legs"][0]["departures"]:
                return False
            record["legs"][0]["departures"].clear()
            return True
        self.assert_found("who misses whom", nobody, ("cut", "stuck"))

        def another(record):
            missing = record["legs"][0]["departures"][0]["missing"]
            missing[0]["rank"] = 99
        self.assert_found("99", another, ("kill", "cut", "stuck"))

        def otherwise(record):
            record["legs"][0]["departures"][0]["missing"][0]["absence"] = "late"
        self.assert_found("late", otherwise, ("kill", "stuck"))

        def somebody(record):
            record["legs"][-1]["departures"].append({"reported_by": 0, "alone": True, "missing": []})
        self.assert_found("who misses whom", somebody)

    def test_the_proofs_are_those_that_were_counted(self):
        for kind, the_round in self.rounds.items():
            with self.subTest(kind):
                record = self.good(kind)
                counts = judge.Judge(the_round, record).judge().counts
                seen = [leg["proofs"]["agreed"] for leg in record["legs"] if leg["proofs"]]
                self.assertEqual(sum(seen), counts["proofs of replicas"])
                cut_short = sum(leg.end in ("killed", "left") for leg in the_round.legs)
                self.assertEqual(4 * cut_short, counts["proofs not counted, jobs cut short"])

    def test_a_proof_too_few_or_too_many(self):
        for more in (-1, 1):
            def doctor(record):
                record["legs"][-1]["proofs"]["agreed"] += more
            self.assert_found(r"proofs in which all replicas agreed, planned \d+", doctor)

    def test_proofs_of_a_job_that_was_cut_short(self):
        cut_short = ("kill", "cut", "stuck")

        def too_many(record):
            record["legs"][0]["proofs"]["agreed"] += 5
        self.assert_found("proofs in which all replicas agreed", too_many, cut_short)

        def fewer_than_its_attempts(record):
            record["legs"][0]["proofs"]["agreed"] -= 1
        self.assert_found("attempts by the same metrics", fewer_than_its_attempts, cut_short)

    def test_metrics_that_are_missing_or_of_another_job(self):
        self.assert_found("no metrics of epoch", lambda record: record["legs"][-1].update(proofs=None))

        def older(record):
            record["legs"][-1]["proofs"]["epoch"] -= 1
        self.assert_found("no metrics of epoch", older)

    def test_losses_that_were_none(self):
        def doctor(record):
            lossy = [leg for leg in record["legs"] if leg["sent_again"]]
            for leg in lossy:
                leg["sent_again"] = 0
            return bool(lossy)
        self.assert_found("no packet was lost", doctor)

    def test_a_refused_acknowledgement_and_an_unclean_checkpoint(self):
        def acknowledgement(record):
            record["legs"][-1]["acknowledged"] = False
        self.assert_found("ack was refused", acknowledgement, ("budget", "diverge"))
        self.assert_found("a checkpoint is not clean", lambda record: record.update(checkpoints_clean=False))

    def test_a_record_without_its_beginning(self):
        self.assert_found("before a start", lambda record: record["events"].pop(0) and None)
        self.assert_found("does not hold each start", lambda record: record["events"].clear())

    def test_an_epoch_or_an_end_that_was_not_planned(self):
        def epoch(record):
            self.one(record, "run_started")["epoch"] = 9
        self.assert_found("began epoch 9", epoch)

        def end(record):
            self.one(record, "run_finished")["attempt"] -= 1
        self.assert_found("run_finished at attempt", end)

    def test_the_ledger(self):
        self.assert_found("the ledger", lambda record: record["ledger"].popitem() and None)
        self.assert_found("the ledger", lambda record: record["ledger"].update({0: 0}))

    def test_evidence(self):
        def name(record):
            return list(record["bundles"])[-1]
        self.assert_found("is not clean", lambda record: record["bundles"].update({name(record): False}))
        self.assert_found("is not there", lambda record: record["bundles"].pop(name(record)) and None)
        self.assert_found("replay of .*: DIFFERENT", lambda record: record["replays"].update({name(record): "DIFFERENT"}))

        def lost(record):
            gone = name(record)
            record["events"] = [event for event in record["events"] if event.get("bundle") != gone]
            del record["bundles"][gone]
        self.assert_found("no evidence of", lost, [kind for kind in plan.KINDS if kind != "calibration"])

        def failed(record):
            record["events"].append({"event": "evidence_failed", "epoch": 1, "attempt": 1, "bundle": "e0001-a0000000001",
                                     "reason": "no space"})
        self.assert_found("no evidence: no space", failed)


class Plan(unittest.TestCase):
    def test_a_plan_depends_on_its_seed_and_number_alone(self):
        def text(seed, number):
            return repr(plan.make_round(seed, number, 4, 4, 120))
        self.assertEqual(text(1, 3), text(1, 3))
        self.assertEqual(4, len({text(1, 3), text(2, 3), text(1, 4), text(2, 4)}))

    def test_all_that_can_go_wrong_is_planned_before_long(self):
        seen = set()
        for number in range(40):
            the_round = plan.make_round(1, number, 2, 2, 120)
            seen |= {the_round.kind, *(str(word) for word in the_round.options)}
            for fault in the_round.faults:
                self.assertTrue(0 <= fault.attempt < 120 and (fault.rank is None or 0 <= fault.rank < 4), fault)
                seen |= {(fault.what, fault.stage), fault.bad, fault.outcome}
            per_attempt = {}
            for fault in the_round.faults:
                if fault.outcome == "skip":
                    per_attempt.setdefault(fault.attempt, []).append(fault)
            seen |= {len(faults) for faults in per_attempt.values()}
        wanted = {*plan.KINDS, "fp32", "bf16", "fp16", "sgd", "adamw", "nan", "pos_inf", "neg_inf", 1, 2, 3, 4,
                  *(("value", stage) for stage in plan.STAGES), *(("natural", stage) for stage in plan.STAGES[:5]),
                  *(("error", stage) for stage in plan.STAGES[:4]), "rollback", "diverge_rollback", "diverge_abort",
                  "abort", "skip"}
        self.assertEqual(set(), wanted - seen)

    def test_an_element_lies_in_the_share_of_one_rank(self):
        self.assertEqual(0, plan.owner("conv1.weight", 0, 6))
        self.assertEqual(5, plan.owner("classifier.bias", 9, 6))
        share = 20538 // 6
        self.assertEqual([0, 1], [plan.owner("conv2.weight", index - 176, 6) for index in (share - 1, share)])
        self.assertEqual([0, 1], [plan.owner("conv2.weight", index - 176, 4) for index in (20538 // 4, 20538 // 4 + 1)])


class Survivors(unittest.TestCase):
    def test_a_process_that_outlives_its_job_is_found_and_ended(self):
        with tempfile.TemporaryDirectory() as folder:
            runner = run.Runner(run.Cluster(1), None, pathlib.Path(folder), None, time.monotonic() + 60, 0)
            job = runner.start(["sh", "-c", "setsid sleep 1000 & exit 0"])
            self.addCleanup(jobs.kill, job.marker)
            job.mpirun.wait(20)
            grace, run.GRACE = run.GRACE, 0.2
            try:
                (left,) = runner.survivors()
            finally:
                run.GRACE = grace
            self.assertIn("sleep 1000", left)
            self.assertEqual({}, processes(job.marker))


class Unreadable(unittest.TestCase):
    def test_a_job_that_leaves_no_record_is_a_finding(self):
        with tempfile.TemporaryDirectory() as folder:
            the_round = plan.make_round(SEED, 0, 2, 2, STEPS, "values")
            runner = run.Runner(run.Cluster(1), None, pathlib.Path(folder), the_round, time.monotonic() + 60, 0)
            runner.leg = lambda number, leg: runner.record["legs"].append(
                {**GoodRecord(the_round).legs[0], "late": None}) or True
            runner.job = type("Job", (), {"run_dir": None})()
            record = runner.run(lambda seen: self.fail("no reference then"), None)
        failures = judge.Judge(the_round, record).judge().failures
        self.assertIn("there is no events.jsonl", failures[0])


class Troubles(unittest.TestCase):
    """What goes wrong beside the jobs is a finding, and the figures are reported all the same."""

    def main(self, play, *words, up=lambda *_, **__: None):
        """Exit code, output and, if it is there, what --json says. `play` takes the place of a round's jobs."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
            said = pathlib.Path(folder) / "said.json"
            for target, name, value in ((stress, "missing", lambda _: ""), (stress.signal, "signal", lambda *_: None),
                                        (tempfile, "tempdir", folder), (run.jobs, "small_data", lambda *_: None),
                                        (run.Cluster, "do", up), (run.Runner, "run", play)):
                patches.enter_context(unittest.mock.patch.object(target, name, value))
            out = patches.enter_context(contextlib.redirect_stdout(io.StringIO()))
            patches.enter_context(contextlib.redirect_stderr(out))
            code = stress.main(["--attempts", str(STEPS), "--json", str(said), *words])
            return code, out.getvalue(), strict_json(said.read_text()) if said.exists() else None

    def test_trouble_in_a_later_round_fails_with_its_reason_and_all_figures(self):
        for trouble in (RuntimeError("launch/cluster.sh cut node1: no such host"),
                        subprocess.TimeoutExpired(["cluster.sh", "heal"], 120), ValueError("line 3 of departures"),
                        PermissionError("departures.jsonl"), AssertionError("NaN in departures.jsonl")):
            def play(runner, _omitted, _draw, trouble=trouble):
                if runner.round.number == 1:
                    raise trouble
                runner.record.update(GoodRecord(runner.round).record())
                return runner.record
            with self.subTest(trouble):
                code, out, said = self.main(play)
                self.assertEqual(1, code, out)
                self.assertRegex(out, r"\nstress: FAIL .*round 1:kill: it could not be played: ")
                self.assertRegex(out, r"\nrounds +2\n")
                self.assertFalse(said["passed"])
                self.assertIn(repr(trouble), said["reasons"][0])
                self.assertEqual([0, 1], [played["round"] for played in said["rounds"]])
                self.assertEqual([], said["rounds"][0]["failures"])
                self.assertGreater(said["figures"]["faults attributed"], 4)
                self.assertEqual(["round1"], [pathlib.Path(kept).name for kept in said["kept"]])

    def test_a_record_that_cannot_be_judged(self):
        def play(runner, _omitted, _draw):
            runner.record.update(GoodRecord(runner.round).record())
            del next(event for event in runner.record["events"] if "origins" in event)["origins"]
            return runner.record
        code, out, said = self.main(play, "--only", "0")
        self.assertEqual(1, code, out)
        self.assertIn("round 0:values: its record cannot be judged: KeyError('origins')", said["reasons"])

    def test_without_hosts_nothing_is_begun(self):
        def up(*_, **settings):
            if settings.get("check", True):
                raise RuntimeError("launch/cluster.sh up: needs root")
        code, out, said = self.main(None, up=up)
        self.assertEqual((64, None), (code, said), out)


class StressTest(unittest.TestCase):
    def setUp(self):
        needs_a_cluster(self)
        self.marker = f"stress-test-{os.getpid()}-{id(self)}"
        self.addCleanup(self.clean)

    def start(self, *words):
        """The marker is handed on to all processes but those of jobs, which have their own."""
        command = [str(word) for word in (ROOT / "bench" / "stress.sh", *words)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, start_new_session=True, env={**os.environ, jobs.MARKER: self.marker})

    def state(self, started):
        return RUNTIME / f"holdfast-cluster-stress{started.pid}"

    def clean(self):
        jobs.kill(self.marker)

    def assert_passes(self, *words, timeout):
        with tempfile.TemporaryDirectory() as folder:
            said = pathlib.Path(folder) / "said.json"
            started = self.start("--json", said, *words)
            try:
                out, _ = started.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                started.send_signal(signal.SIGTERM)
                out, _ = started.communicate(timeout=60)
                self.fail(f"not in time\n{out}")
            self.assertEqual(0, started.returncode, out)
            self.assertRegex(out.rstrip().splitlines()[-1], r"^stress: PASS ")
            self.assertFalse(self.state(started).exists(), out)
            return strict_json(said.read_text()), out


class ShortRun(StressTest):
    def test_a_round_with_a_kill_a_resume_and_a_rollback(self):
        said, out = self.assert_passes("--only", 1, "--replays", 1, "--attempts", 60, timeout=300)
        figures = said["figures"]
        self.assertTrue(said["passed"], out)
        self.assertEqual((1, 1, 1, 0, 0, 1), tuple(figures[name] for name in (
            "kills", "resumes", "rollbacks", "mismatches", "survivors", "bundles replayed")), out)
        self.assertGreater(figures["faults injected"], 4)
        self.assertEqual(figures["faults injected"], figures["faults attributed"])
        # In all attempts of the last job but for the one of which the update was undone.
        self.assertGreaterEqual(figures["proofs of replicas"], 60 - figures["proofs not counted, jobs cut short"])

    def test_ctrl_c_ends_the_jobs_and_takes_the_hosts_down(self):
        started = self.start("--only", 0)
        state = self.state(started)
        # Files of processes, since a job has a marker of its own.
        trains = lambda: [pid for pid, command in self.on_hosts(state).items() if "guarded_train" in command]
        until(trains, jobs.PATIENCE, "ranks at work")
        started.send_signal(signal.SIGINT)
        out, _ = started.communicate(timeout=60)
        self.assertEqual(130, started.returncode, out)
        self.assertFalse(state.exists(), out)
        self.assertEqual({}, self.on_hosts(state))

    def on_hosts(self, state):
        cluster = run.Cluster(1)
        cluster.state = state
        return cluster.processes()


class SlowRuns(StressTest):
    def test_a_minute_at_default_settings(self):
        said, out = self.assert_passes(timeout=400)
        self.assertGreaterEqual(len(said["rounds"]), 2, out)

    def test_one_host_and_two_at_once(self):
        others = self.start("--minutes", 0.5, "--hosts", 2, "--ranks-per-host", 1)
        self.assert_passes("--minutes", 0.5, "--hosts", 1, "--ranks-per-host", 2, timeout=400)
        out, _ = others.communicate(timeout=200)
        self.assertEqual(0, others.returncode, out)


class Refusals(unittest.TestCase):
    def test_wrong_usage_is_refused(self):
        for words, says in ((("--hosts", "0"), "above 0"), (("--hosts", "1", "--ranks-per-host", "1"), "2 ranks"),
                            (("--minutes", "0"), "--minutes"), (("--attempts", "5"), "--attempts"),
                            (("--seeds", "1"), "--seeds"), (("--seed", "x"), "--seed")):
            with self.subTest(words):
                done = subprocess.run([ROOT / "bench" / "stress.sh", *words], capture_output=True, text=True, timeout=60,
                                      check=False)
                self.assertEqual((64, ""), (done.returncode, done.stdout), done)
                self.assertIn(says, done.stderr)


if __name__ == "__main__":
    unittest.main()
