"""An attempt of a job, made again from its bundle in one process: at each stage, in each precision."""

import unittest

from evidence import (APART, BATCH, NOT_REPLAYABLE, NOT_REPRODUCED, REPRODUCED, EvidenceTest, attempts, injections, steps)

STAGES = ("input", "forward", "loss", "backward", "reduction", "optimizer")


# (fault, setting that takes the cause away, if any does). A batch without targets is kept as it is, and so is what the
# loss is divided by.
NATURAL = {
    "fashion-mnist": (("corrupt-record", f"sample.0.{BATCH - 1}=0"), ("activation-overflow", "natural_faults=off"),
                      ("empty-target-mask", None), ("dropped-square-root", "natural_faults=off")),
    "gpt": (("corrupt-record", "natural_faults=off"), ("activation-overflow", "natural_faults=off"),
            ("empty-target-mask", None), ("masked-attention-row", "natural_faults=off"))}


class ReplayTest(EvidenceTest):
    def check_injected(self, workload, precision, stages=STAGES):
        job = self.capture(*injections(stages), "--precision", precision, "--loss-scaling", "off", workload=workload,
                           steps=steps(len(stages)))
        self.assertEqual(list(stages), [skip["stage"] for skip in job.skips()], job)
        bundles = self.bundles(job)
        self.assertEqual(attempts(len(stages)), list(bundles), job)
        done = self.assert_replays(*((REPRODUCED, bundle) for bundle in bundles.values()),
                                   *((NOT_REPRODUCED, bundle, "injected=off") for bundle in bundles.values()))
        for one in done[:len(stages)]:
            self.assertIn("\ninjected  faults that were put in on purpose are put in again\n", one.stdout)
        return job

    def check_natural(self, workload, precision):
        faults = NATURAL[workload]
        options = ["--local-denominator", "--precision", precision, "--loss-scaling", "off"]
        *others, last = attempts(len(faults) + 1)
        for attempt, (fault, _) in zip(others, faults):
            options += ["--fault", f"{fault},attempt={attempt},rank=1"]
        job = self.capture(*options, "--fault", f"sum-overflow,attempt={last}", "--print-digests", workload=workload,
                           steps=last + APART)
        self.assertEqual(["input", "forward", "loss", "backward", "reduction"],
                         [skip["stage"] for skip in job.skips()], job)
        bundles = self.bundles(job)
        self.assertEqual([*others, last], list(bundles), job)
        removed = [(bundles[attempt], setting) for attempt, (_, setting) in zip(others, faults) if setting]
        removed.append((bundles[last], "natural_faults=off"))
        if precision == "fp16":  # the sum of bf16's largest values is too large for fp32, too
            removed.append((bundles[last], "precision=fp32"))
        self.assert_replays(*((REPRODUCED, bundle) for bundle in bundles.values()),
                            *((NOT_REPRODUCED, *one) for one in removed))
        return job

    def check_dead_unit(self, workload, precision):
        job = self.capture("--optimizer", "adamw", "--eps", 0, "--fault", "dead-unit", "--precision", precision,
                           "--loss-scaling", "off", workload=workload, steps=1)
        self.assertEqual(["optimizer"], [skip["stage"] for skip in job.skips()], job)
        bundle = self.bundles(job)[0]
        self.assert_replays((REPRODUCED, bundle), (NOT_REPRODUCED, bundle, "eps=1e-8"))


class Replays(ReplayTest):
    def test_injected_values_of_each_stage(self):
        self.check_injected("fashion-mnist", "fp32")

    def test_injected_values_in_fp16(self):
        self.check_injected("fashion-mnist", "fp16", ("backward", "reduction"))

    def test_injected_values_of_gpt_in_bf16(self):
        self.check_injected("gpt", "bf16", ("input", "backward", "optimizer"))

    def test_natural_faults_change_nothing_but_what_they_hit(self):
        """The digests are those of a run that leaves the same updates out."""
        job = self.check_natural("fashion-mnist", "fp32")
        self.assert_like_omitted(job, attempts(5), "--local-denominator", steps=steps(5))

    def test_a_dead_unit(self):
        self.check_dead_unit("fashion-mnist", "fp32")

    def test_one_factor_at_a_time(self):
        """What is too large for one precision alone, in gradients and in their sum; and a repaired sample is another
        one than the corrupt one."""
        job = self.capture("--inject", "value=-3.4e38@backward,rank=1,attempt=1,tensor=classifier.bias,index=7",
                           "--fault", "sum-overflow,attempt=7", "--fault", "corrupt-record,attempt=13,rank=1",
                           "--precision", "fp16", "--loss-scaling", "off", steps=15)
        value, total, record = self.bundles(job).values()
        self.assert_replays((REPRODUCED, value), (NOT_REPRODUCED, value, "precision=fp32"),
                            (REPRODUCED, value, "precision=bf16"),
                            (REPRODUCED, total), (NOT_REPRODUCED, total, "precision=fp32"),
                            (NOT_REPRODUCED, total, "natural_faults=off"),
                            (REPRODUCED, record, "sample.0.0=0"), (NOT_REPRODUCED, record, f"sample.0.{BATCH - 1}=0"))

    def test_a_loss_that_is_scaled(self):
        """The attempt is made again at its scale; a defect is one at any other, too."""
        job = self.capture("--precision", "fp16", "--inject", "nan@loss,rank=1,attempt=8",
                           "--fault", "dropped-square-root,attempt=14,rank=1", steps=16)
        loss, root = (self.bundles(job)[attempt] for attempt in (8, 14))
        scales = {skip["attempt"]: skip["loss_scale"] for skip in job.skips()}
        for attempt, bundle in ((8, loss), (14, root)):
            self.assertGreater(scales[attempt], 1, job)
            self.assertEqual(scales[attempt], self.manifest(bundle)["loss_scale"])
        self.assert_replays((REPRODUCED, loss), (REPRODUCED, root), (REPRODUCED, root, "loss_scale=1"),
                            (NOT_REPRODUCED, root, "natural_faults=off"))

    def test_an_exception(self):
        job = self.capture("--inject", "throw@forward,rank=1,attempt=1", steps=3)
        (bundle,) = self.bundles(job).values()
        manifest = self.manifest(bundle)
        message = "injected fault throw@forward,rank=1,attempt=1"
        self.assertEqual(("ERROR", "forward", message), tuple(manifest[key] for key in ("kind", "stage", "error")))
        self.assertFalse((bundle / "report.json").exists(), "an exception is outside of the contract")
        again, _ = self.assert_replays((REPRODUCED, bundle), (NOT_REPRODUCED, bundle, "injected=off"))
        self.assertIn(f"\nreplayed  exception at forward: {message}\n", again.stdout)

    def test_an_exception_beside_values_of_another_rank(self):
        """What the rank that contributed has seen itself is made again, and not the other's exception."""
        job = self.capture("--inject", "throw@forward,rank=0,attempt=1", "--inject", "inf@loss,rank=1,attempt=1", steps=3)
        (bundle,) = self.bundles(job).values()
        self.assertEqual([1], self.origin_ranks(bundle))
        again, _ = self.assert_replays((REPRODUCED, bundle), (NOT_REPRODUCED, bundle, "injected=off"))
        self.assertIn("\nrecorded  rank 1, loss loss[0]: 0 NaN, 1 +Inf, 0 -Inf\n", again.stdout)

    def test_the_second_micro_batch(self):
        job = self.capture("--accumulate", 2, "--inject", "nan@loss,rank=1,attempt=1,micro=1",
                           "--fault", "corrupt-record,attempt=7,rank=1,micro=1", steps=9)
        loss, record = self.bundles(job).values()
        self.assertEqual([1, 1], [self.manifest(bundle)["origins"][0]["micro_batch"] for bundle in (loss, record)])
        self.assert_replays((REPRODUCED, loss), (NOT_REPRODUCED, loss, "injected=off"), (REPRODUCED, record),
                            (REPRODUCED, record, f"sample.0.{BATCH - 1}=0"),
                            (NOT_REPRODUCED, record, f"sample.1.{BATCH - 1}=0"))

    def test_what_an_update_wrote_is_not_an_attempt(self):
        job = self.capture("--optimizer", "adamw", "--eps", 0, "--fault", "dead-unit", policy="", steps=3, code=85)
        (bundle,) = self.bundles(job).values()
        self.assertEqual("UPDATE_FAILED", self.manifest(bundle)["kind"])
        (done,) = self.assert_replays((NOT_REPLAYABLE, bundle))
        self.assertIn("what went wrong is the state and not the attempt", done.stdout)


class SlowReplays(ReplayTest):
    """All stages, faults, workloads and precisions."""

    def check_all(self, workload, precision):
        self.check_injected(workload, precision)
        self.check_natural(workload, precision)
        self.check_dead_unit(workload, precision)

    def test_all_of_fashion_mnist_in_fp32(self):
        self.check_all("fashion-mnist", "fp32")

    def test_all_of_fashion_mnist_in_fp16(self):
        self.check_all("fashion-mnist", "fp16")

    def test_all_of_fashion_mnist_in_bf16(self):
        self.check_all("fashion-mnist", "bf16")

    def test_all_of_gpt_in_fp32(self):
        self.check_all("gpt", "fp32")

    def test_all_of_gpt_in_fp16(self):
        self.check_all("gpt", "fp16")

    def test_all_of_gpt_in_bf16(self):
        self.check_all("gpt", "bf16")


if __name__ == "__main__":
    unittest.main()
