"""Faults from the field, by the number under which the project keeps them. Four ranks."""

import re
import unittest

from jobs import JobTest


class Cases(JobTest):
    def assert_ends_within(self, job, seconds):
        """From the first event, so that the time it takes to load programs and data does not count."""
        self.assertLess(job.seconds_after_start(), seconds, job)

    def test_case_01_decision_is_not_rank_0s_alone(self):
        job = self.train("--inject", "nan@loss,rank=3,attempt=2", "--print-digests", steps=4)
        (skip,) = job.skips()
        self.assert_skip(skip, 2, "loss", [(3, "loss", 0, {"nan": 1})], loss="nan")
        self.assert_lockstep(job, 4, attempts=4, updates=3)
        self.assert_same_state(job, self.train("--omit-update", 2, "--print-digests", steps=4))

    def test_case_02_abort_on_the_first_nan_ends_every_rank(self):
        job = self.train_both_ways("--inject", "nan@loss,rank=1,attempt=2", policy="on_first: ABORT", code=81)
        aborted = self.assert_record(job, "run_started", "aborted")[-1]
        self.assertEqual((2, "loss", 81), (aborted["attempt"], aborted["stage"], aborted["exit_code"]))
        self.assertEqual([1], [origin["rank"] for origin in aborted["origins"]])
        self.assert_ends_within(job, 10)

    def test_case_02_an_exception_on_one_rank_ends_every_rank(self):
        job = self.train_both_ways("--inject", "throw@forward,rank=1,attempt=2", code=80)
        aborted = self.assert_record(job, "run_started", "aborted")[-1]
        self.assertEqual((2, "forward", 80), (aborted["attempt"], aborted["stage"], aborted["exit_code"]))
        self.assertEqual((1, "forward"), (aborted["error"]["rank"], aborted["error"]["stage"]))
        self.assertIn("throw@forward", aborted["error"]["what"])
        self.assert_ends_within(job, 10)

    def test_case_02_an_exception_on_one_rank_is_skipped_by_every_rank(self):
        job = self.train("--inject", "throw@forward,rank=1,attempt=2", "--print-digests", policy="on_error: SKIP",
                         steps=4)
        (skip,) = job.skips()
        self.assertEqual((2, "forward", 1), (skip["attempt"], skip["stage"], skip["error"]["rank"]))
        self.assertEqual([], skip["origins"])
        self.assert_lockstep(job, 4, attempts=4, updates=3)
        self.assert_same_state(job, self.train("--omit-update", 2, "--print-digests", steps=4))
        self.assert_ends_within(job, 10)

    def test_case_03_flags_are_reduced_and_not_values(self):
        """NaN on each rank in turn beside losses 1, 2, 3, 4; then four finite losses whose sum is not."""
        injections = []
        for bad in range(4):
            for rank in range(4):
                kind = "nan" if rank == bad else f"value={rank + 1}"
                injections += ["--inject", f"{kind}@loss,rank={rank},attempt={bad}"]
        injections += ["--inject", "value=3e38@loss,rank=all,attempt=5"]
        job = self.train(*injections, "--print-digests", steps=7)
        skips = job.skips()
        self.assertEqual([0, 1, 2, 3], [skip["attempt"] for skip in skips], job)
        for bad, skip in enumerate(skips):
            self.assert_skip(skip, bad, "loss", [(bad, "loss", 0, {"nan": 1})], loss="nan")
        self.assert_lockstep(job, 4, attempts=7, updates=3)

    def test_case_06_every_tensor_is_looked_at_to_its_last_element(self):
        injections, wanted = [], []
        for tensor, elements in self.PARAMETERS.items():
            for position, index in (("first", 0), ("middle", elements // 2), ("last", elements - 1)):
                attempt = len(wanted)
                injections += ["--inject", f"nan@backward,rank=1,attempt={attempt},tensor={tensor},index={position}"]
                wanted.append((attempt, (1, tensor, index, {"nan": 1})))
        job = self.train(*injections, ranks=2, steps=len(wanted) + 1, batch=2,
                         policy=f"max_consecutive_skips: {len(wanted)}")
        skips = job.skips()
        self.assertEqual(len(wanted), len(skips), job)
        for skip, (attempt, origin) in zip(skips, wanted):
            self.assert_skip(skip, attempt, "backward", [origin])

    def test_case_12_a_nan_in_one_micro_batch_is_not_overwritten_by_the_next(self):
        job = self.train("--accumulate", 4, "--inject", "nan@loss,rank=2,attempt=1,micro=1", "--print-digests", steps=3,
                         batch=2)
        (skip,) = job.skips()
        self.assert_skip(skip, 1, "loss", [(2, "loss", 0, {"nan": 1})], loss="nan")
        self.assertEqual(1, skip["origins"][0]["micro_batch"])
        reference = self.train("--accumulate", 4, "--omit-update", 1, "--print-digests", steps=3, batch=2)
        self.assert_same_state(job, reference)

    def test_case_16_a_skip_leaves_no_gradient_behind(self):
        job = self.train("--accumulate", 4, "--inject", "nan@backward,rank=1,attempt=1,micro=2", "--print-digests",
                         steps=3, batch=2)
        (skip,) = job.skips()
        self.assert_skip(skip, 1, "backward", [(1, "conv1.weight", 0, {"nan": 1})])
        self.assert_lockstep(job, 4, attempts=3, updates=2)
        reference = self.train("--accumulate", 4, "--omit-update", 1, "--print-digests", steps=3, batch=2)
        self.assert_same_state(job, reference)

    def test_case_16_the_window_after_a_skipped_first_one_is_a_fresh_runs(self):
        """Nothing was applied before the skip: the next window starts from the initial state."""
        options = ["--accumulate", 4, "--print-digests"]
        job = self.train(*options, "--inject", "inf@backward,rank=0,attempt=0,micro=3", steps=2, batch=2)
        self.assertEqual([0], [skip["attempt"] for skip in job.skips()])
        self.assert_lockstep(job, 4, attempts=2, updates=1)
        self.assert_same_state(job, self.train(*options, "--omit-update", 0, steps=2, batch=2))

    def test_case_17_an_invalid_micro_batch_on_one_rank_shifts_no_window(self):
        options = ["--accumulate", 4, "--print-digests"]
        job = self.train(*options, "--inject", "throw@input,rank=1,attempt=1,micro=2", policy="on_error: SKIP", steps=4,
                         batch=2)
        (skip,) = job.skips()
        self.assertEqual((1, "input", 1), (skip["attempt"], skip["stage"], skip["error"]["rank"]))
        self.assert_lockstep(job, 4, attempts=4, updates=3)
        reference = self.train(*options, "--omit-update", 1, steps=4, batch=2)
        # Rank 1 left its attempt before it drew the random numbers; they are keyed, so the next one's are the same.
        self.assert_same_state(job, reference)

    def test_case_18_batch_statistics_survive_a_skipped_forward(self):
        job = self.train("--inject", "nan@input,rank=0,attempt=5", "--print-digests", steps=7)
        (skip,) = job.skips()
        self.assertEqual((5, "input"), (skip["attempt"], skip["stage"]))
        self.assert_lockstep(job, 4, attempts=7, updates=6)
        self.assert_same_state(job, self.train("--omit-update", 5, "--print-digests", steps=7))

    def test_case_18_an_overflow_inside_forward_does_not_reach_the_batch_statistics(self):
        """The input is finite; the variance of what the first layer makes of it is not. As the last attempt: what it
        leaves is what is evaluated."""
        job = self.train("--inject", "value=3e38@input,rank=0,attempt=5", "--print-digests", steps=6)
        (skip,) = job.skips()
        self.assertEqual((5, "forward", [0]),
                         (skip["attempt"], skip["stage"], [origin["rank"] for origin in skip["origins"]]), job)
        self.assert_lockstep(job, 4, attempts=6, updates=5)
        reference = self.train("--omit-update", 5, "--print-digests", steps=6)
        for part in ("parameters", "buffers"):
            self.assertEqual(reference.digests[0][part], job.digests[0][part], part)
        self.assertEqual(reference.accuracy(), job.accuracy())

    def test_case_19_a_skip_does_not_move_the_schedule(self):
        job = self.train("--lr", 0.1, "--decay", "exponential", "--decay-rate", 0.5, "--print-rates", "--print-digests",
                         "--inject", "nan@backward,attempt=1", steps=4)
        rates = re.findall(r"^rate attempt=(\d+) update=(\d+) learning_rate=(\S+)", job.out, re.MULTILINE)
        self.assertEqual([(0, 0, 0.1), (1, 1, 0.05), (2, 1, 0.05), (3, 2, 0.025)],
                         [(int(attempt), int(update), float(rate)) for attempt, update, rate in rates], job)
        self.assert_lockstep(job, 4, attempts=4, updates=3)

    def test_case_29_a_spent_budget_does_not_look_like_success(self):
        job = self.train_both_ways("--inject", "nan@backward,rank=2,every=1", policy="max_consecutive_skips: 2",
                                   code=81)
        *_, aborted = self.assert_record(job, "run_started", "attempt_skipped", "attempt_skipped", "aborted")
        self.assertEqual((2, 81, 2, 2), tuple(aborted[key] for key in ("attempt", "exit_code", "consecutive", "total")))

    def test_case_29_a_spent_total_budget_does_not_look_like_success(self):
        job = self.train("--inject", "nan@backward,rank=2,every=2", policy='{"maxTotalSkips": 2}', code=81)
        *_, aborted = self.assert_record(job, "run_started", "attempt_skipped", "attempt_skipped", "aborted")
        self.assertEqual((5, 81, 2), tuple(aborted[key] for key in ("attempt", "exit_code", "total")))

    def test_case_32_no_skip_is_silent(self):
        job = self.train("--inject", "nan@loss,rank=1,every=1", "--print-digests", steps=10)
        events = self.assert_record(job, "run_started", *["attempt_skipped"] * 10, "run_finished")
        for attempt, event in enumerate(events[1:-1]):
            self.assert_skip(event, attempt, "loss", [(1, "loss", 0, {"nan": 1})], consecutive=attempt + 1,
                             total=attempt + 1, update=0, loss="nan")
        self.assert_lockstep(job, 4, attempts=10, updates=0)
        self.assertEqual((10, 0), (events[-1]["attempt"], events[-1]["update"]))


if __name__ == "__main__":
    unittest.main()
