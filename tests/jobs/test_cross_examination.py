"""An origin's attempt, made again by another rank while the job runs: data, device, or neither."""

import unittest

from evidence import ALL_IN_FULL, APART, NOT_REPRODUCED, REPRODUCED, EvidenceTest, attempts, steps
from jobs import HOST, strict_json

WORDS = {"DATA_OR_MODEL": "the data or the model is to be looked at, and not the device",
         "SUSPECT_DEVICE": "the device of rank 1 is suspect",
         "TRANSIENT": "it was transient, or depends on something that is not made again"}


class CrossExaminations(EvidenceTest):
    def examined(self, bundle):
        return self.manifest(bundle)["cross_examination"]

    def assert_outcome(self, outcome, bundle, job, origin=1, examiner=0):
        """In the manifest, as an event, in the report and on the screen."""
        examined = self.examined(bundle)
        found = {"DATA_OR_MODEL": (True, True), "SUSPECT_DEVICE": (True, False), "TRANSIENT": (False, False)}[outcome]
        self.assertEqual((outcome, origin, examiner, HOST, "SAME_HOST", *found),
                         tuple(examined.get(key) for key in ("outcome", "origin", "examiner", "examiner_host", "where",
                                                             "origin_found", "examiner_found")), examined)
        self.assertNotIn("why", examined)
        self.assertEqual(found[1], "first_dirty" in examined)
        (event,) = [event for event in job.named("evidence_cross_examined") if event["bundle"] == bundle.name]
        self.assertEqual((outcome, origin, examiner, *found),
                         (event["outcome"], event["origin"]["rank"], event["examiner"]["rank"],
                          event["origin"]["found_again"], event["examiner"]["found_again"]))
        report = (bundle / "report.md").read_text()
        self.assertIn(f"\n`{outcome}`: the attempt of rank {origin} (host `{HOST}`", report)
        self.assertIn(WORDS[outcome], report)
        shown = self.holdfast("incident", "show", bundle)
        self.assertIn(f"\ncross-examination: {outcome}\n", shown)
        self.assertRegex(shown, rf"\n  examiner: rank {examiner} \([^\n]*\), SAME_HOST: {'' if found[1] else 'not '}found\n")

    def check(self, faults, *options, ranks=2, **settings):
        """faults: (option, value without attempt, outcome)."""
        injected = []
        for attempt, (option, fault, _) in zip(attempts(len(faults)), faults):
            injected += [option, f"{fault},attempt={attempt}"]
        job = self.capture(*injected, *options, "--print-digests", ranks=ranks, steps=steps(len(faults)), **settings)
        bundles = list(self.bundles(job).values())
        self.assertEqual(len(faults), len(bundles), job)
        for bundle, (_, fault, outcome) in zip(bundles, faults):
            with self.subTest(fault):
                self.assert_outcome(outcome, bundle, job)
        self.assert_whole(job, len(faults))
        return job, bundles

    def test_a_fault_of_the_device_is_not_found_on_another(self):
        job, bundles = self.check([("--inject", f"nan@{stage},rank=1{more}", "SUSPECT_DEVICE")
                                   for stage, more in (("forward", ""), ("loss", ""),
                                                       ("backward", ",tensor=conv2.weight,index=last"))])
        self.assert_like_omitted(job, attempts(3), steps=steps(3))
        self.assert_replays(*((REPRODUCED, bundle) for bundle in bundles))

    def test_a_fault_of_the_data_or_the_model_is_found_on_another(self):
        job, _ = self.check([("--inject", "nan@input,rank=1", "DATA_OR_MODEL"),
                             ("--fault", "corrupt-record,rank=1", "DATA_OR_MODEL"),
                             ("--fault", "activation-overflow,rank=1", "DATA_OR_MODEL"),
                             ("--fault", "dropped-square-root,rank=1", "DATA_OR_MODEL")], ranks=4)
        self.assert_like_omitted(job, attempts(4), ranks=4, steps=steps(4))

    def test_a_fault_that_does_not_come_again_is_transient(self):
        _, (bundle,) = self.check([("--inject", "inf@backward,rank=1,transient=yes", "TRANSIENT")])
        self.assertIn("when rank 1 made its attempt again it did not find the same", (bundle / "report.md").read_text())
        self.assert_replays((NOT_REPRODUCED, bundle))

    def test_micro_batches_in_sixteen_bits(self):
        self.check([("--inject", "inf@forward,rank=1,micro=1", "SUSPECT_DEVICE"),
                    ("--fault", "corrupt-record,rank=1,micro=1", "DATA_OR_MODEL")],
                   "--accumulate", 2, "--precision", "fp16", "--loss-scaling", "off")

    def test_a_transformer(self):
        self.check([("--inject", "nan@backward,rank=1", "SUSPECT_DEVICE"),
                    ("--fault", "masked-attention-row,rank=1", "DATA_OR_MODEL")], "--local-denominator", workload="gpt")

    def test_faults_of_the_examiner_are_its_own(self):
        """Rank 0 has one of its own in the same attempt, later in it: it must not be taken for that of rank 1."""
        job = self.capture("--inject", "nan@loss,rank=1,attempt=1", "--inject", "nan@backward,rank=0,attempt=1",
                           steps=3)
        (bundle,) = self.bundles(job).values()
        self.assert_outcome("SUSPECT_DEVICE", bundle, job)

    def test_data_are_no_reason_to_suspect_a_device(self):
        job = self.capture("--fault", f"corrupt-record,rank=1,every={APART}", steps=4 * APART,
                           policy=ALL_IN_FULL + " suspect_after_incidents: 2")
        self.assertEqual([False] * 4, [skip["origins"][0]["hardware_suspect"] for skip in job.skips()][:4], job)

    def test_an_abort_is_examined_too(self):
        job = self.capture("--inject", "nan@loss,rank=1,attempt=1", policy="on_first: ABORT", steps=3, code=81)
        (bundle,) = self.bundles(job).values()
        self.assert_outcome("SUSPECT_DEVICE", bundle, job)

    def test_the_policy_forbids_it(self):
        job = self.capture("--inject", "nan@loss,rank=1,attempt=1", policy="evidence { cross_examine: false }", steps=3)
        (bundle,) = self.bundles(job).values()
        self.assertNotIn("cross_examination", self.manifest(bundle))
        self.assertEqual([], job.named("evidence_cross_examined"))

    def test_a_batch_that_is_too_large_is_not_examined(self):
        job = self.capture("--inject", "nan@loss,rank=1,attempt=1", policy="evidence { cross_examine_bytes: 1000 }",
                           steps=3)
        (bundle,) = self.bundles(job).values()
        examined = self.examined(bundle)
        self.assertEqual("NOT_EXAMINED", examined["outcome"])
        self.assertIn("bytes, and may have 1000", examined["why"])
        self.assertIn("`NOT_EXAMINED`: no other rank could tell", (bundle / "report.md").read_text())
        self.assert_replays((REPRODUCED, bundle))


class LayerStatistics(EvidenceTest):
    """Each layer, in the attempts after an incident."""

    def test_they_show_the_attempts_before_the_next_incident_and_change_nothing(self):
        job = self.capture("--inject", "nan@loss,rank=1,attempt=1", "--inject", "nan@backward,rank=1,attempt=7",
                           "--print-digests", steps=20, policy=ALL_IN_FULL.replace(
                               "full_incidents: 100", "full_incidents: 100 layer_statistics_attempts: 8"))
        lines = [strict_json(line) for line in (job.run_dir / "layers.jsonl").read_text().splitlines()]
        self.assertEqual([(1, attempt) for attempt in range(2, 16)],
                         [(line["epoch"], line["attempt"]) for line in lines])
        names = [[(layer["stage"], layer["tensor"]) for layer in line["layers"]] for line in lines]
        self.assertTrue({("forward", "conv1"), ("backward", "conv1/gradient")} <= set(names[0]), names[0])
        self.assertEqual([names[0]] * 14, names)
        first, second = self.bundles(job).values()
        self.assertNotIn("trend", self.parts(first)[1])
        trend = self.parts(second)[1]["trend"]
        self.assertEqual(list(range(2, 8)), [one["attempt"] for one in trend])
        # The attempt itself, as the rerun measured it.
        rerun = {layer["tensor"]: layer for layer in self.parts(second)[1]["layers"]}
        for layer in trend[-1]["layers"]:
            for key in ("elements", "abs_max", "root_mean_square", "nan"):
                self.assertEqual(rerun[layer["tensor"]][key], layer[key], (layer, key))
        self.assert_whole(job, 2)
        self.assert_like_omitted(job, (1, 7), steps=20)

    def test_without_the_policy_there_are_none(self):
        job = self.capture("--inject", "nan@loss,rank=1,attempt=1", steps=4)
        self.assertFalse((job.run_dir / "layers.jsonl").exists())


if __name__ == "__main__":
    unittest.main()
