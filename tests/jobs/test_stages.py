"""A fault is put down to the stage where it is first seen."""

import unittest

from jobs import JobTest

BATCH = 4
PIXELS = 28 * 28
CLASSES = 10


class Stages(JobTest):
    def test_a_fault_at_each_stage_is_put_down_to_it(self):
        faults = ["nan@input,rank=1,attempt=1,index=last", "inf@forward,rank=2,attempt=2,index=middle",
                  "-inf@loss,rank=3,attempt=3", "snan@backward,rank=0,attempt=4,tensor=norm2.bias,index=5",
                  "nan@reduction,attempt=5,tensor=conv2.weight,index=last"]
        job = self.train(*[w for fault in faults for w in ("--inject", fault)], "--print-digests", batch=BATCH)
        *_, last_of_conv2 = range(self.PARAMETERS["conv2.weight"])
        events = self.assert_record(job, "run_started", *["attempt_skipped"] * 5, "run_finished")
        self.assert_skip(events[1], 1, "input", [(1, "input", BATCH * PIXELS - 1, {"nan": 1})])
        self.assert_skip(events[2], 2, "forward", [(2, "output", BATCH * CLASSES // 2, {"pos_inf": 1})])
        self.assert_skip(events[3], 3, "loss", [(3, "loss", 0, {"neg_inf": 1})], loss="-inf")
        self.assert_skip(events[4], 4, "backward", [(0, "norm2.bias", 5, {"nan": 1})])
        # The sum is on every rank and looked at once: which rank did so depends on how the sum is shared out.
        (origin,) = events[5]["origins"]
        self.assert_skip(events[5], 5, "reduction", [(origin["rank"], "conv2.weight", last_of_conv2, {"nan": 1})],
                         consecutive=5, total=5)

        self.assert_lockstep(job, 4, attempts=8, updates=3)
        omitted = [w for attempt in range(1, 6) for w in ("--omit-update", attempt)]
        self.assert_same_state(job, self.train(*omitted, "--print-digests", batch=BATCH))

    def test_an_overflow_born_in_the_sum_is_found_once_at_reduction(self):
        """Each rank's gradient is finite; their sum is not."""
        job = self.train("--inject", "value=3e38@backward,rank=all,attempt=1,tensor=classifier.weight,index=middle",
                         "--inject", "value=-3e38@backward,rank=all,attempt=3,tensor=conv1.weight,index=first",
                         "--print-digests", steps=5)
        events = self.assert_record(job, "run_started", "attempt_skipped", "attempt_skipped", "run_finished")
        for event, attempt, tensor, index, value_class in (
                (events[1], 1, "classifier.weight", self.PARAMETERS["classifier.weight"] // 2, "pos_inf"),
                (events[2], 3, "conv1.weight", 0, "neg_inf")):
            (origin,) = event["origins"]
            self.assert_skip(event, attempt, "reduction", [(origin["rank"], tensor, index, {value_class: 1})])
        self.assert_lockstep(job, 4, attempts=5, updates=3)
        reference = self.train("--omit-update", 1, "--omit-update", 3, "--print-digests", steps=5)
        self.assert_same_state(job, reference)

    def test_several_ranks_bad_at_once_are_all_named(self):
        job = self.train("--inject", "nan@loss,rank=1,attempt=2", "--inject", "inf@loss,rank=3,attempt=2",
                         "--inject", "nan@backward,rank=0,attempt=2", "--print-digests", steps=4)
        (skip,) = job.skips()
        self.assert_skip(skip, 2, "loss", [(1, "loss", 0, {"nan": 1}), (3, "loss", 0, {"pos_inf": 1})])
        self.assert_lockstep(job, 4, attempts=4, updates=3)


if __name__ == "__main__":
    unittest.main()
