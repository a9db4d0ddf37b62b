"""Values that become non-finite by themselves, as they do in practice, are put down to the stage they come from."""

import unittest

from jobs import JobTest

BATCH = 4
LICENCE = "/usr/share/common-licenses/GPL-3"


class NaturalFaultTest(JobTest):
    def assert_reduced(self, event, attempt, ranks):
        """At reduction each rank looks at its own share of the sum, so every bad element is found once, in order."""
        self.assertEqual((attempt, "reduction", 0), (event["attempt"], event["stage"], event["nan"]), event)
        self.assertTrue(event["origins"], event)
        offsets, total = {}, 0
        for tensor, elements in self.PARAMETERS.items():
            offsets[tensor] = total
            total += elements
        for name in ("pos_inf", "neg_inf"):
            self.assertEqual(event[name], sum(origin[name] for origin in event["origins"]), event)
        for origin in event["origins"]:
            self.assertLess(origin["index"], self.PARAMETERS[origin["tensor"]], event)
            position = offsets[origin["tensor"]] + origin["index"]
            share, rest = divmod(total, ranks)
            begin = share * origin["rank"] + min(rest, origin["rank"])
            self.assertIn(position, range(begin, begin + share + (origin["rank"] < rest)), event)
        self.assertIsInstance(event["loss"], float, event)

    def assert_sum_overflows_in_each_precision(self):
        for precision in ("fp32", "bf16", "fp16"):
            with self.subTest(precision):
                job = self.train("--precision", precision, "--fault", "sum-overflow,attempt=0", "--print-digests",
                                 ranks=2, steps=4)
                skip, *more = job.skips()  # in fp16 the scale may have to fall further
                self.assert_reduced(skip, 0, 2)
                self.assertEqual(0 if precision == "fp16" else 1, skip["total"], skip)
                self.assertTrue(precision == "fp16" or not more, job)
                self.assert_lockstep(job, 2, attempts=4, updates=3 - len(more))

    def assert_like_omitted(self, job, attempts, *options, **settings):
        omitted = [word for attempt in attempts for word in ("--omit-update", attempt)]
        reference = self.train(*options, *omitted, **settings)
        self.assertEqual([], reference.skips(), reference)
        self.assert_same_state(job, reference)

    def assert_counts(self, event, stage, rank, tensor, index, bad, **facts):
        (origin,) = event["origins"]
        self.assertEqual((stage, rank, tensor, index),
                         (event["stage"], origin["rank"], origin["tensor"], origin["index"]), event)
        self.assertEqual(bad, event["nan"] + event["pos_inf"] + event["neg_inf"], event)
        self.assertEqual(facts, {name: origin["facts"][name] for name in facts}, event)

    def assert_dead_unit_is_skipped_ahead(self, tensor):
        """check_update: BEFORE. The gradients are fine, and nothing that the optimizer would make is written."""
        options = ["--optimizer", "adamw", "--eps", 0]
        settings = {"ranks": 2, "policy": "check_update: BEFORE max_consecutive_skips: 3"}
        job = self.train(*options, "--fault", "dead-unit", "--print-digests", steps=3, **settings)
        events = self.assert_record(job, "run_started", *["attempt_skipped"] * 3, "run_finished")
        for attempt, event in enumerate(events[1:-1]):
            self.assert_optimizer_made_it(event, attempt, tensor)
            self.assertEqual((attempt + 1, attempt + 1, 0), (event["consecutive"], event["total"], event["update"]))
            # Of the elements that each rank previewed only its own share.
            self.assertEqual(event["nan"], sum(origin["nan"] for origin in event["origins"]), event)
            self.assertIsInstance(event["loss"], float, event)
        self.assert_lockstep(job, 2, attempts=3, updates=0)
        self.assertEqual(0, job.parameters()[1], job)
        # Without BEFORE nothing looks at an update that is left out.
        self.assert_like_omitted(job, range(3), *options, "--fault", "dead-unit", "--print-digests", ranks=2, steps=3)

        job = self.train(*options, "--fault", "dead-unit", steps=5, code=81, **settings)
        aborted = self.assert_record(job, "run_started", *["attempt_skipped"] * 3, "aborted")[-1]
        self.assert_optimizer_made_it(aborted, 3, tensor)
        self.assertEqual((81, 3, 3, 0), tuple(aborted[key] for key in ("exit_code", "consecutive", "total", "update")))

    def assert_dead_unit_is_found_behind(self, tensor):
        """check_update: AFTER, the default. It is too late for a skip, and there is nothing to go back to."""
        job = self.train_both_ways("--optimizer", "adamw", "--eps", 0, "--fault", "dead-unit",
                                   "--checkpoint-interval", 0, ranks=2, steps=5, code=85)
        aborted = self.assert_record(job, "run_started", "aborted")[-1]
        # Found in the first attempt's update, it comes with the record of the second.
        self.assert_optimizer_made_it(aborted, 1, tensor)
        self.assertEqual((85, 1), (aborted["exit_code"], aborted["update"]), aborted)
        self.assertEqual([(0, tensor, 0), (1, tensor, 0)],
                         [(o["rank"], o["tensor"], o["index"]) for o in aborted["origins"]], aborted)
        # Of one replica, though every rank has found the same.
        self.assertEqual([aborted["nan"]] * 2, [origin["nan"] for origin in aborted["origins"]], aborted)
        for words in ("after an update there is", "rolled back", "no checkpoint"):
            self.assertIn(words, aborted["reason"])
            self.assertIn(words, job.err)

    def assert_optimizer_made_it(self, event, attempt, tensor):
        keys = ("attempt", "stage", "pos_inf", "neg_inf")
        self.assertEqual((attempt, "optimizer", 0, 0), tuple(event[key] for key in keys), event)
        self.assertGreater(event["nan"], 0, event)
        first = event["origins"][0]
        self.assertEqual((0, tensor, 0), (first["rank"], first["tensor"], first["index"]), event)


class FashionMnistFaults(NaturalFaultTest):
    PIXELS = 28 * 28
    CLASSES = 10

    def test_each_fault_is_put_down_to_its_stage(self):
        options = ["--local-denominator", "--print-digests"]
        job = self.train(*options, "--fault", "corrupt-record,attempt=1,rank=1",
                         "--fault", "activation-overflow,attempt=3,rank=2", "--fault", "empty-target-mask,attempt=5",
                         "--fault", "dropped-square-root,attempt=7,rank=1", "--fault", "sum-overflow,attempt=9",
                         ranks=3, steps=11, batch=BATCH)
        record, activation, mask, root, total = self.assert_record(
            job, "run_started", *["attempt_skipped"] * 5, "run_finished")[1:-1]
        self.assertEqual([1, 3, 5, 7, 9], [skip["attempt"] for skip in job.skips()], job)
        # Of the last record every pixel: 0/0 or x/0.
        self.assert_counts(record, "input", 1, "input", (BATCH - 1) * self.PIXELS, self.PIXELS, targets=BATCH)
        self.assertEqual(0, record["neg_inf"], record)
        (origin,) = activation["origins"]
        # The layer's batch statistics spread it over the whole batch; they are scanned with the output.
        self.assertEqual(("forward", 2, "output", 0),
                         (activation["stage"], origin["rank"], origin["tensor"], origin["index"]), activation)
        self.assertGreaterEqual(activation["nan"], BATCH * self.CLASSES, activation)
        self.assert_skip(mask, 5, "loss", [(0, "loss", 0, {"nan": 1})], loss="nan")
        self.assert_counts(mask, "loss", 0, "loss", 0, 1, targets=0)
        # Behind the root are all layers but the classifier: backward meets conv1 last, in the layout it is the first.
        behind = sum(elements for tensor, elements in self.PARAMETERS.items() if not tensor.startswith("classifier"))
        self.assert_skip(root, 7, "backward", [(1, "conv1.weight", 0, {"nan": behind})])
        self.assertIsInstance(root["loss"], float, root)
        self.assert_reduced(total, 9, 3)
        self.assertEqual(5, total["total"], total)
        self.assert_lockstep(job, 3, attempts=11, updates=6)
        self.assertEqual(0, job.parameters()[1], job)
        self.assert_like_omitted(job, (1, 3, 5, 7, 9), *options, ranks=3, steps=11, batch=BATCH)

    def test_each_fault_is_put_down_to_its_stage_in_fp16(self):
        """All but the last are defects, and charged; that in backward with the update that ends its streak. The last is
        what a loss scale is for."""
        job = self.train("--precision", "fp16", "--local-denominator", "--print-digests",
                         "--fault", "corrupt-record,attempt=7,rank=1", "--fault", "activation-overflow,attempt=9",
                         "--fault", "empty-target-mask,attempt=11,rank=1", "--fault", "dropped-square-root,attempt=13",
                         "--fault", "sum-overflow,attempt=15", ranks=2, steps=17, batch=BATCH)
        skips = {skip["attempt"]: skip for skip in job.skips()}
        real = [attempt for attempt in skips if attempt < 7]
        self.assertEqual([*real, 7, 9, 11, 13, 15], list(skips), job)
        self.assertEqual([("input", [1], 1), ("forward", [0], 2), ("loss", [1], 3), ("backward", [0], 3)],
                         [(skips[a]["stage"], [o["rank"] for o in skips[a]["origins"]], skips[a]["total"])
                          for a in (7, 9, 11, 13)], job)
        self.assertEqual(("conv1.weight", 0), tuple(skips[13]["origins"][0][k] for k in ("tensor", "index")), job)
        charged = [event for event in job.events if event["event"] == "calibration_charged"]
        self.assertEqual([(14, 1, 4)], [(e["attempt"], e["skips"], e["total"]) for e in charged], job)
        self.assert_reduced(skips[15], 15, 2)
        self.assertEqual((1, 0, 4), tuple(skips[15][key] for key in ("pending", "consecutive", "total")), job)
        self.assertEqual((4, len(real) + 1), (job.events[-1]["skips"], job.events[-1]["calibration_skips"]), job)
        self.assert_lockstep(job, 2, attempts=17, updates=12 - len(real))

    def test_a_sum_overflows_in_each_precision(self):
        self.assert_sum_overflows_in_each_precision()

    def test_the_micro_batch_is_named(self):
        options = ["--accumulate", 2, "--print-digests"]
        job = self.train(*options, "--fault", "corrupt-record,attempt=1,rank=1,micro=1",
                         "--fault", "activation-overflow,every=3,micro=0", ranks=2, steps=4)
        self.assertEqual([(1, "input", 1, 1), (2, "forward", 0, 0)],
                         [(s["attempt"], s["stage"], s["origins"][0]["rank"], s["origins"][0]["micro_batch"])
                          for s in job.skips()], job)
        self.assert_like_omitted(job, (1, 2), *options, ranks=2, steps=4)

    def test_case_14_a_dead_unit_is_skipped_ahead(self):
        self.assert_dead_unit_is_skipped_ahead("conv2.weight")

    def test_case_14_a_dead_unit_is_found_behind(self):
        self.assert_dead_unit_is_found_behind("conv2.weight")

    def test_a_fault_that_cannot_be_set_up_is_refused(self):
        for fault, ranks in (("masked-attention-row", 1), ("dead-unit", 1), ("sum-overflow", 1), ("no-such-fault", 1),
                             ("corrupt-record,rank=2", 2)):
            with self.subTest(fault):
                job = self.train("--fault", fault, ranks=ranks, code=64)
                self.assertIn(f"--fault {fault}", job.err)


class GptFaults(NaturalFaultTest):
    CONTEXT = 64
    WIDTH = 64
    BYTES = 256
    BLOCK = {"norm1.weight": WIDTH, "norm1.bias": WIDTH, "attention.qkv.weight": 3 * WIDTH * WIDTH,
             "attention.qkv.bias": 3 * WIDTH, "attention.projection.weight": WIDTH * WIDTH,
             "attention.projection.bias": WIDTH, "norm2.weight": WIDTH, "norm2.bias": WIDTH,
             "mlp.expand.weight": 4 * WIDTH * WIDTH, "mlp.expand.bias": 4 * WIDTH,
             "mlp.contract.weight": 4 * WIDTH * WIDTH, "mlp.contract.bias": WIDTH}
    PARAMETERS = {"token_embedding.weight": BYTES * WIDTH, "position_embedding.weight": CONTEXT * WIDTH,
                  **{f"blocks.0.{name}": elements for name, elements in BLOCK.items()},
                  **{f"blocks.1.{name}": elements for name, elements in BLOCK.items()},
                  "norm.weight": WIDTH, "norm.bias": WIDTH, "head.weight": BYTES * WIDTH}

    def trainer(self, *options, **settings):
        words = super().trainer(*options, data=LICENCE, **settings)
        words[words.index("fashion-mnist")] = "gpt"
        return words

    def test_each_fault_is_put_down_to_its_stage(self):
        options = ["--local-denominator", "--print-digests"]
        job = self.train(*options, "--fault", "corrupt-record,attempt=1,rank=1",
                         "--fault", "activation-overflow,attempt=3,rank=2", "--fault", "empty-target-mask,attempt=5",
                         "--fault", "masked-attention-row,attempt=7,rank=1", "--fault", "sum-overflow,attempt=9",
                         ranks=3, steps=11, batch=BATCH)
        record, activation, mask, row, total = self.assert_record(
            job, "run_started", *["attempt_skipped"] * 5, "run_finished")[1:-1]
        self.assertEqual([1, 3, 5, 7, 9], [skip["attempt"] for skip in job.skips()], job)
        self.assertEqual(sum(self.PARAMETERS.values()), job.parameters()[0])
        # The last record's embedding divided by 0.
        size = self.CONTEXT * self.WIDTH
        self.assert_counts(record, "input", 1, "input", (BATCH - 1) * size, size)
        self.assert_counts(activation, "forward", 2, "output", 0, BATCH * self.CONTEXT * self.BYTES)
        self.assert_skip(mask, 5, "loss", [(0, "loss", 0, {"nan": 1})], loss="nan")
        self.assert_counts(mask, "loss", 0, "loss", 0, 1, targets=0)
        self.assert_masked_row(row)
        self.assert_reduced(total, 9, 3)
        self.assertEqual(5, total["total"], total)
        self.assert_lockstep(job, 3, attempts=11, updates=6)
        self.assertEqual(0, job.parameters()[1], job)
        self.assert_like_omitted(job, (1, 3, 5, 7, 9), *options, ranks=3, steps=11, batch=BATCH)

    def assert_masked_row(self, event):
        """The row's weights are NaN, so by way of the values what made these gets no gradient: in the first block the
        value part of qkv and norm1, every position, and the bytes that the last record holds."""
        (origin,) = event["origins"]
        self.assertEqual((7, "backward", 1, "token_embedding.weight"),
                         (event["attempt"], event["stage"], origin["rank"], origin["tensor"]), event)
        first_byte, column = divmod(origin["index"], self.WIDTH)
        self.assertEqual(0, column, event)
        self.assertIn(first_byte, b"\n !\"'()*,-./0123456789", event)  # the least byte of a piece of English text
        fixed = self.CONTEXT * self.WIDTH + 2 * self.WIDTH + self.WIDTH * self.WIDTH + self.WIDTH
        bytes_of_it, rest = divmod(event["nan"] - fixed, self.WIDTH)
        self.assertEqual(0, rest, event)
        self.assertIn(bytes_of_it, range(5, self.CONTEXT + 1), event)
        self.assertEqual((0, 0), (event["pos_inf"], event["neg_inf"]), event)
        self.assertIsInstance(event["loss"], float, event)

    def test_a_sum_overflows_in_each_precision(self):
        self.assert_sum_overflows_in_each_precision()

    def test_case_13_no_targets_on_one_rank_and_a_local_denominator(self):
        options = ["--local-denominator", "--print-digests"]
        job = self.train(*options, "--fault", "empty-target-mask,attempt=1,rank=2", steps=3)
        (skip,) = job.skips()
        self.assert_skip(skip, 1, "loss", [(2, "loss", 0, {"nan": 1})], loss="nan")
        self.assertEqual(0, skip["origins"][0]["facts"]["targets"], skip)
        self.assert_lockstep(job, 4, attempts=3, updates=2)
        self.assert_like_omitted(job, (1,), *options, steps=3)

    def test_case_13_no_targets_on_one_rank_and_the_global_denominator(self):
        job = self.train("--fault", "empty-target-mask,attempt=1,rank=2", "--print-digests", steps=3)
        self.assert_record(job, "run_started", "run_finished")
        self.assert_lockstep(job, 4, attempts=3, updates=3)
        self.assertEqual(0, job.parameters()[1], job)

    def test_no_targets_on_any_rank_is_found_with_the_global_denominator(self):
        job = self.train("--fault", "empty-target-mask,attempt=1,rank=all", "--print-digests", ranks=2, steps=3)
        (skip,) = job.skips()
        self.assert_skip(skip, 1, "loss", [(rank, "loss", 0, {"nan": 1}) for rank in range(2)], loss="nan")
        self.assert_lockstep(job, 2, attempts=3, updates=2)

    def test_case_14_a_dead_unit_is_skipped_ahead(self):
        """Bytes that the text does not hold, 0 first of all."""
        self.assert_dead_unit_is_skipped_ahead("token_embedding.weight")

    def test_case_14_a_dead_unit_is_found_behind(self):
        self.assert_dead_unit_is_found_behind("token_embedding.weight")

    def test_a_finding_ahead_of_the_update_makes_no_device_a_suspect(self):
        """Every rank would make the same update: in whose share it is bad says nothing of a device."""
        job = self.train("--optimizer", "adamw", "--eps", 0, "--fault", "dead-unit", ranks=2, steps=5,
                         policy="check_update: BEFORE suspect_after_incidents: 1")
        self.assertEqual(["optimizer"] * 5, [skip["stage"] for skip in job.skips()], job)
        for skip in job.skips():
            self.assertFalse(any(origin["hardware_suspect"] for origin in skip["origins"]), skip)

    def test_a_fault_that_cannot_be_set_up_is_refused(self):
        job = self.train("--fault", "dropped-square-root", ranks=1, code=64)
        self.assertIn("--fault dropped-square-root", job.err)


if __name__ == "__main__":
    unittest.main()
