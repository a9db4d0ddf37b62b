"""Gradients in 16 bits: what overflows there is found and never reaches the state, and the loss scale follows it."""

import re
import unittest

from jobs import DATA, JobTest

SCALE = 65536.0  # at which the loss scale starts
LICENCE = "/usr/share/common-licenses/GPL-3"


def scale_model(events, attempts, growth=2000, hysteresis=1, scale=SCALE):
    """The events a run must leave, as (name, attempt, ...), from which of its attempts were skipped and why.

    Each skip: (attempt, scale, skips pending, consecutive, total).
    """
    skipped = {event["attempt"]: event for event in events if event["event"] == "attempt_skipped"}
    wanted = []
    clean = overflows = nans = calibrations = total = consecutive = updates = 0  # pending: overflows and nans
    to_halve = hysteresis
    for attempt in range(attempts):
        event = skipped.get(attempt)
        before = scale
        if event is None:
            if overflows:
                calibrations += overflows
                wanted.append(("calibrated", attempt, overflows, calibrations))
            if nans:
                total += nans
                wanted.append(("calibration_charged", attempt, nans, total))
            overflows = nans = consecutive = 0
            clean += 1
            if clean == growth:
                scale, clean, to_halve = min(2 * scale, 2.0**24), 0, hysteresis
        else:
            gradients = event["stage"] in ("backward", "reduction")
            if not gradients:
                if overflows + nans:
                    total, consecutive = total + overflows + nans, consecutive + overflows + nans
                    wanted.append(("calibration_charged", attempt, overflows + nans, total))
                overflows, nans, total, consecutive = 0, 0, total + 1, consecutive + 1
            elif event["pos_inf"] + event["neg_inf"] > 0:
                overflows += 1
            else:
                nans += 1
            wanted.append(("attempt_skipped", attempt, scale, overflows + nans, consecutive, total))
            if gradients:
                clean, to_halve = 0, to_halve - 1
                if to_halve == 0:
                    scale, to_halve = max(scale / 2, 1.0), hysteresis
        if scale != before:
            wanted.append(("scale_changed", attempt, before, scale))
        updates += event is None
    if overflows + nans:
        total += overflows + nans
        wanted.append(("calibration_charged", attempts, overflows + nans, total))
    wanted.append(("run_finished", attempts, updates, total, calibrations))
    return wanted


def scale_events(events):
    """What happened, in the form of scale_model()."""
    fields = {"calibrated": ("skips", "total"), "calibration_charged": ("skips", "total"),
              "attempt_skipped": ("loss_scale", "pending", "consecutive", "total"), "scale_changed": ("from", "to"),
              "run_finished": ("update", "skips", "calibration_skips")}
    return [(event["event"], event["attempt"], *[event[field] for field in fields[event["event"]]])
            for event in events if event["event"] in fields]


class Precision(JobTest):
    def assert_finite_loss(self, event):
        self.assertIsInstance(event["loss"], float, event)

    def assert_nothing_but_calibration(self, job, scaled_skips):
        """The skips are real overflows, and none is charged."""
        events = job.events
        skips = job.skips()
        self.assertGreaterEqual(len(skips), scaled_skips, job)
        for skip in skips:
            self.assertIn(skip["stage"], ("backward", "reduction"), job)
            self.assertEqual((0, 0, 0), (skip["nan"], skip["consecutive"], skip["total"]), job)
            self.assertGreater(skip["pos_inf"] + skip["neg_inf"], 0, job)
            self.assert_finite_loss(skip)
        self.assertEqual((0, len(skips)), (events[-1]["skips"], events[-1]["calibration_skips"]), job)
        self.assertNotIn("calibration_charged", [event["event"] for event in events], job)

    def test_fp32_a_skip_is_an_omitted_update(self):
        options = ["--precision", "fp32", "--print-digests"]
        job = self.train(*options, "--inject", "inf@backward,rank=1,attempt=2,tensor=norm2.bias,index=5", ranks=3,
                         steps=5)
        self.assert_record(job, "run_started", "attempt_skipped", "run_finished")
        self.assert_skip(job.skips()[0], 2, "backward", [(1, "norm2.bias", 5, {"pos_inf": 1})], total=1)
        self.assert_lockstep(job, 3, attempts=5, updates=4)
        self.assert_same_state(job, self.train(*options, "--omit-update", 2, ranks=3, steps=5))

    def test_case_09_one_bf16_infinity_is_skipped_at_default_settings(self):
        """An infinity; and then a finite value that becomes one in bf16."""
        options = ["--precision", "bf16", "--optimizer", "adamw", "--print-digests"]
        job = self.train(*options, "--inject", "inf@backward,rank=2,attempt=1,tensor=conv2.weight,index=last",
                         "--inject", "value=-3.4e38@backward,rank=3,attempt=3,tensor=classifier.bias,index=7", steps=5)
        first, second = self.assert_record(job, "run_started", *["attempt_skipped"] * 2, "run_finished")[1:3]
        last = self.PARAMETERS["conv2.weight"] - 1
        self.assert_skip(first, 1, "backward", [(2, "conv2.weight", last, {"pos_inf": 1})], total=1)
        self.assert_skip(second, 3, "backward", [(3, "classifier.bias", 7, {"neg_inf": 1})], total=2)
        for event in (first, second):
            self.assert_finite_loss(event)
            self.assertNotIn("loss_scale", event)
        self.assert_lockstep(job, 4, attempts=5, updates=3)
        # The digest of the optimizer is of its moments, that of the parameters of the fp32 master weights.
        self.assert_same_state(job, self.train(*options, "--omit-update", 1, "--omit-update", 3, steps=5))

    def test_a_value_too_large_for_bf16_is_finite_in_fp32(self):
        job = self.train("--inject", "value=-3.4e38@backward,rank=1,attempt=1,tensor=classifier.bias,index=7",
                         "--print-digests", ranks=2, steps=3)
        self.assertEqual([], [skip["stage"] for skip in job.skips()], job)
        self.assert_lockstep(job, 2, attempts=3, updates=3)
        self.assertEqual(0, job.parameters()[1], job)

    def test_fp16_a_skip_is_an_omitted_update(self):
        """With a loss scale: a defect ahead of the gradients leaves it where it is. Without: an infinity too."""
        for scaling, fault, stage, origin in (
                ("auto", "nan@forward,rank=1,attempt=6,index=middle", "forward", (1, "output", 20, {"nan": 1})),
                ("off", "inf@backward,rank=2,attempt=6,tensor=norm1.bias,index=3", "backward",
                 (2, "norm1.bias", 3, {"pos_inf": 1}))):
            with self.subTest(scaling):
                options = ["--precision", "fp16", "--loss-scaling", scaling, "--print-digests"]
                job = self.train(*options, "--inject", fault, ranks=3, steps=9)
                *overflows, skip = job.skips()
                self.assert_skip(skip, 6, stage, [origin], consecutive=1, total=1)
                self.assertEqual(scaling == "auto", "loss_scale" in skip, skip)
                self.assertEqual(scaling == "auto", bool(overflows), job)
                self.assertTrue(all(overflow["attempt"] < 6 for overflow in overflows), job)
                self.assert_lockstep(job, 3, attempts=9, updates=8 - len(overflows))
                self.assert_same_state(job, self.train(*options, "--omit-update", 6, ranks=3, steps=9))

    def test_fp16_a_sum_overflows_where_no_rank_does(self):
        """30000 + 30000 fits, 40000 + 40000 does not; -40000 + -40000 neither. Without a loss scale it is a defect."""
        value = "value={}@backward,rank=all,attempt={},tensor={},index={}"
        options = ["--precision", "fp16", "--loss-scaling", "off", "--print-digests"]
        job = self.train(*options, "--inject", value.format(40000, 1, "classifier.weight", "middle"),
                         "--inject", value.format(-40000, 3, "conv1.weight", "last"),
                         "--inject", value.format(30000, 5, "norm2.weight", 9), ranks=2, steps=6)
        first, second, low = self.assert_record(job, "run_started", "attempt_skipped", "attempt_skipped",
                                                "headroom_low", "run_finished")[1:4]
        for event, attempt, tensor, index, value_class in (
                (first, 1, "classifier.weight", self.PARAMETERS["classifier.weight"] // 2, "pos_inf"),
                (second, 3, "conv1.weight", self.PARAMETERS["conv1.weight"] - 1, "neg_inf")):
            (origin,) = event["origins"]
            self.assert_skip(event, attempt, "reduction", [(origin["rank"], tensor, index, {value_class: 1})])
            self.assert_finite_loss(event)
        self.assertEqual((2, 2), (second["total"], job.events[-1]["skips"]))
        self.assertEqual((5, 60000, 65504), (low["attempt"], low["abs_max"], low["largest"]))
        self.assert_lockstep(job, 2, attempts=6, updates=4)

    def test_fp16_a_sum_that_overflows_lowers_the_scale_and_is_not_charged(self):
        job = self.train("--precision", "fp16", "--print-digests", "--inject",
                         "value=40000@backward,rank=all,attempt=6,tensor=classifier.weight,index=middle", ranks=2,
                         steps=9)
        *overflows, skip = job.skips()
        self.assertTrue(all(overflow["attempt"] < 5 for overflow in overflows), job)
        (origin,) = skip["origins"]
        middle = self.PARAMETERS["classifier.weight"] // 2
        self.assert_skip(skip, 6, "reduction", [(origin["rank"], "classifier.weight", middle, {"pos_inf": 1})],
                         pending=1, consecutive=0, total=0)
        self.assert_nothing_but_calibration(job, 1)
        self.assertEqual(scale_model(job.events, 9), scale_events(job.events), job)
        changed = [event for event in job.events if event["event"] == "scale_changed" and event["attempt"] == 6]
        self.assertEqual([(skip["loss_scale"], skip["loss_scale"] / 2)], [(e["from"], e["to"]) for e in changed], job)
        self.assert_lockstep(job, 2, attempts=9, updates=8 - len(overflows))

    def test_fp16_the_scale_descends_from_its_start_on_real_overflow(self):
        job = self.train("--precision", "fp16", "--print-digests", ranks=2, steps=30)
        self.assert_nothing_but_calibration(job, 1)
        self.assertEqual((0, SCALE), (job.skips()[0]["attempt"], job.skips()[0]["loss_scale"]), job)
        self.assertEqual(scale_model(job.events, 30), scale_events(job.events), job)
        self.assert_lockstep(job, 2, attempts=30, updates=30 - len(job.skips()))
        self.assertEqual(0, job.parameters()[1], job)

    def test_fp16_the_scale_grows_until_it_overflows_and_backs_off(self):
        job = self.train("--precision", "fp16", "--print-digests", ranks=2, steps=60,
                         policy="loss_scale { initial: 64 growth_interval: 3 }")
        self.assert_nothing_but_calibration(job, 2)
        self.assertEqual(scale_model(job.events, 60, growth=3, scale=64.0), scale_events(job.events), job)
        changes = [event["to"] > event["from"] for event in job.events if event["event"] == "scale_changed"]
        self.assertEqual([True] * 8, changes[:8], job)
        self.assertIn(False, changes, job)
        self.assert_lockstep(job, 2, attempts=60, updates=60 - len(job.skips()))

    def test_fp16_headroom_is_that_of_the_gradient_at_scale_1(self):
        """A scaled gradient near the limit is what the scale grows for; one that is there unscaled is a warning."""
        for scale, warnings in ((1024, []), (1, [(2, "gradient", 60000, 65504)])):
            with self.subTest(scale):
                job = self.train("--precision", "fp16", "--inject",
                                 "value=30000@backward,rank=all,attempt=2,tensor=norm2.weight,index=9",
                                 policy=f"loss_scale {{ initial: {scale} }}", ranks=2, steps=4)
                self.assertEqual([], job.skips(), job)
                low = [event for event in job.events if event["event"] == "headroom_low"]
                self.assertEqual(warnings, [(e["attempt"], e["tensor"], e["abs_max"], e["largest"]) for e in low], job)

    def test_fp16_hysteresis_halves_the_scale_at_every_second_overflow(self):
        job = self.train("--precision", "fp16", policy="loss_scale { hysteresis: 2 }", ranks=2, steps=12)
        self.assert_nothing_but_calibration(job, 2)
        self.assertEqual(scale_model(job.events, 12, hysteresis=2), scale_events(job.events), job)
        self.assertIn("scale_changed", [event["event"] for event in job.events], job)

    def test_fp16_too_much_calibration_raises_an_alert(self):
        job = self.train("--precision", "fp16", policy="loss_scale { initial: 16777216 max_calibration_skips: 3 }",
                         ranks=2, steps=16)
        self.assert_nothing_but_calibration(job, 4)
        (alert,) = [event for event in job.events if event["event"] == "alert_raised"]
        self.assertEqual(("calibration_rate", 4, 3), (alert["rule"], alert["skips"], alert["limit"]), job)
        self.assertEqual(job.skips()[3]["attempt"], alert["attempt"], job)

    def test_fp16_the_budget_is_charged_for_defects_and_not_for_calibration(self):
        job = self.train("--precision", "fp16", "--print-digests", "--inject", "nan@forward,rank=1,every=10",
                         policy="loss_scale { growth_interval: 12 }", ranks=2, steps=40)
        defects = [skip for skip in job.skips() if skip["stage"] == "forward"]
        overflows = [skip for skip in job.skips() if skip["stage"] != "forward"]
        self.assertEqual([(9, 1), (19, 2), (29, 3), (39, 4)], [(e["attempt"], e["total"]) for e in defects], job)
        for defect in defects:
            self.assert_skip(defect, defect["attempt"], "forward", [(1, "output", 0, {"nan": 1})], consecutive=1,
                             pending=0)
        self.assertTrue(overflows, job)
        self.assertEqual((4, len(overflows)), (job.events[-1]["skips"], job.events[-1]["calibration_skips"]), job)
        self.assertEqual(scale_model(job.events, 40, growth=12), scale_events(job.events), job)
        self.assert_lockstep(job, 2, attempts=40, updates=36 - len(overflows))

    def test_fp16_a_defect_right_after_an_overflow_charges_both(self):
        """A streak that does not end in an update was none of calibration's business."""
        job = self.train("--precision", "fp16", "--inject", "inf@backward,rank=1,attempt=6",
                         "--inject", "nan@loss,rank=0,attempt=7", ranks=2, steps=10)
        self.assertEqual([(6, 1, 0), (7, 0, 2)], [(e["attempt"], e["pending"], e["total"]) for e in job.skips()[-2:]],
                         job)
        self.assertEqual(scale_model(job.events, 10), scale_events(job.events), job)
        self.assertEqual(2, job.events[-1]["skips"], job)

    def test_fp16_nan_alone_in_backward_charges_the_budget_exactly(self):
        """The scale falls with each, but the updates in between show that this was no cure."""
        job = self.train("--precision", "fp16", "--print-digests", "--inject", "nan@backward,rank=1,every=10",
                         policy="loss_scale { growth_interval: 12 }", ranks=2, steps=45)
        defects = [skip for skip in job.skips() if skip["nan"]]
        overflows = len(job.skips()) - len(defects)
        self.assertEqual([9, 19, 29, 39], [skip["attempt"] for skip in defects], job)
        self.assertEqual((4, overflows), (job.events[-1]["skips"], job.events[-1]["calibration_skips"]), job)
        self.assertEqual(scale_model(job.events, 45, growth=12), scale_events(job.events), job)
        self.assert_lockstep(job, 2, attempts=45, updates=41 - overflows)

    def test_case_20_the_scale_is_exhausted_and_never_0(self):
        job = self.train_both_ways("--precision", "fp16", "--inject", "nan@backward,every=1", ranks=2, steps=40,
                                   code=82)
        halvings = [(e["attempt"], e["from"], e["to"]) for e in job.events if e["event"] == "scale_changed"]
        self.assertEqual([(i, SCALE / 2**i, SCALE / 2**(i + 1)) for i in range(16)], halvings, job)
        self.assertEqual(1.0, halvings[-1][-1])
        skips = job.skips()
        self.assertEqual([(i, SCALE / 2**i, i + 1, 0) for i in range(16)],
                         [(e["attempt"], e["loss_scale"], e["pending"], e["total"]) for e in skips], job)
        (charged,), (aborted,) = job.named("calibration_charged"), job.named("aborted")
        self.assertEqual(("calibration_charged", 16, 16), tuple(charged[key] for key in ("event", "skips", "total")))
        keys = ("event", "attempt", "stage", "exit_code", "code", "loss_scale")
        self.assertEqual(("aborted", 16, "backward", 82, "LOSS_SCALE_EXHAUSTED", 1.0), tuple(aborted[k] for k in keys))
        self.assertIn("loss scale exhausted", aborted["reason"])
        self.assertIn("loss scale exhausted", job.err)

    def test_case_20_infinities_for_ever_exhaust_the_scale_by_default(self):
        job = self.train("--precision", "fp16", "--inject", "inf@backward,rank=1,every=1", ranks=2, steps=40, code=82)
        halvings = [(e["from"], e["to"]) for e in job.events if e["event"] == "scale_changed"]
        self.assertEqual([(SCALE / 2**i, SCALE / 2**(i + 1)) for i in range(16)], halvings, job)
        self.assertEqual([0] * 16, [event["total"] for event in job.skips()], job)
        (aborted,) = job.named("aborted")
        self.assertEqual((16, 82), (aborted["attempt"], aborted["exit_code"]))

    def test_a_spike_is_found_after_a_nan(self):
        """All ranks see the same gradient norm. By default the update goes on; by policy it is skipped."""
        faults = ["--inject", "nan@backward,rank=1,attempt=3", "--inject",
                  "value=1e6@backward,rank=all,attempt=25,tensor=classifier.weight"]
        for action in ("WARN", "SKIP"):
            with self.subTest(action):
                job = self.train(*faults, "--print-digests", policy=f"spike {{ least_attempts: 10 action: {action} }}",
                                 ranks=2, steps=28)
                (spike,) = [event for event in job.events if event["event"] == "spike"]
                self.assertEqual((25, "gradient_norm"), (spike["attempt"], spike["name"]), job)
                self.assertAlmostEqual(1e6, spike["value"], delta=1e3)
                self.assertLess(spike["threshold"], spike["value"])
                skipped = [3, 25] if action == "SKIP" else [3]
                self.assertEqual(skipped, [skip["attempt"] for skip in job.skips()], job)
                self.assertEqual(len(skipped), job.events[-1]["skips"], job)
                self.assert_lockstep(job, 2, attempts=28, updates=28 - len(skipped))
                if action == "SKIP":
                    omitted = [word for attempt in skipped for word in ("--omit-update", attempt)]
                    self.assert_same_state(job, self.train(*omitted, "--print-digests", ranks=2, steps=28))


class GptPrecision(JobTest):
    def trainer(self, *options, **settings):
        words = super().trainer(*options, data=LICENCE, **settings)
        words[words.index("fashion-mnist")] = "gpt"
        return words

    def held_out_loss(self, job):
        (loss,) = re.findall(r"^test accuracy .*, loss (\S+)$", job.out, re.MULTILINE)
        return float(loss)

    def test_gpt_learns_in_each_precision(self):
        barely = self.held_out_loss(self.train(ranks=2, steps=2))
        losses = {}
        for precision in ("fp32", "bf16", "fp16"):
            job = self.train("--precision", precision, "--print-digests", ranks=2, steps=60)
            losses[precision] = self.held_out_loss(job)
            self.assert_lockstep(job, 2, attempts=60, updates=60 - len(job.skips()))
            self.assertEqual(0, job.events[-1]["skips"], job)
            self.assertEqual(0, job.parameters()[1], job)
        for precision, loss in losses.items():
            self.assertLess(loss, barely - 1.0, losses)
            self.assertAlmostEqual(losses["fp32"], loss, delta=0.1, msg=precision)

    def test_gpt_a_skip_is_an_omitted_update_in_each_precision(self):
        for precision in ("fp32", "bf16", "fp16"):
            with self.subTest(precision):
                options = ["--precision", precision, "--print-digests"]
                job = self.train(*options, "--inject", "nan@loss,rank=1,attempt=2", ranks=2, steps=4)
                skip = job.skips()[-1]
                overflows = len(job.skips()) - 1
                self.assert_skip(skip, 2, "loss", [(1, "loss", 0, {"nan": 1})], total=1)
                self.assert_lockstep(job, 2, attempts=4, updates=3 - overflows)
                self.assert_same_state(job, self.train(*options, "--omit-update", 2, ranks=2, steps=4))


class SlowPrecision(JobTest):
    def test_fp16_reaches_the_accuracy_of_fp32(self):
        settings = {"ranks": 2, "steps": 600, "batch": 32, "data": DATA, "timeout": 440}
        job = self.train("--precision", "fp16", "--print-digests", policy="loss_scale { growth_interval: 60 }",
                         **settings)
        skips = job.skips()
        self.assertEqual((0, len(skips)), (job.events[-1]["skips"], job.events[-1]["calibration_skips"]), job)
        self.assertEqual(scale_model(job.events, 600, growth=60), scale_events(job.events), job)
        changes = [event["to"] > event["from"] for event in job.events if event["event"] == "scale_changed"]
        self.assertIn(True, changes, job)
        self.assertFalse(all(changes[changes.index(True):]), "the scale never backed off after it had grown")
        self.assert_lockstep(job, 2, attempts=600, updates=600 - len(skips))
        reference = self.train("--precision", "fp32", **settings)
        self.assertGreater(reference.accuracy(), 0.8, reference)
        self.assertGreaterEqual(job.accuracy(), reference.accuracy() - 0.01, job)


if __name__ == "__main__":
    unittest.main()
