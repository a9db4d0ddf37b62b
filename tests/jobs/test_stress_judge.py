"""bench/stress.sh: its judge finds what was doctored into a good record, and its plans are what they should be."""

import unittest

from stress_round import HOSTS, PER_HOST, SEED, STEPS, GoodRecord, judge, plan

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
        self.assert_found("has no tensors", lambda record: record["compact"].append(name(record)))
        self.assert_found("nothing was replayed", lambda record: record["replays"].clear())

    def test_a_bundle_without_tensors_is_counted_when_the_disk_was_too_slow(self):
        record = self.good("values")
        event = self.one(record, "evidence_written")
        event["left_out"] = f"all tensors left out: {judge.QUEUE}"
        record["compact"].append(event["bundle"])
        verdict = judge.Judge(self.rounds["values"], record).judge()
        self.assertEqual([], verdict.failures)
        self.assertEqual(1, verdict.counts["bundles without tensors, disk too slow"])


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


if __name__ == "__main__":
    unittest.main()
