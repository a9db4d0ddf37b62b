"""What the guard prevents."""

import unittest

from jobs import JobTest

FAULT = ["--inject", "nan@backward,rank=2,attempt=2,tensor=conv2.weight"]


class GuardOff(JobTest):
    def test_the_same_nan_ends_in_nan_weights_without_the_guard(self):
        job = self.train(*FAULT, "--guard", "off", steps=5)
        total, bad = job.parameters()
        self.assertEqual(sum(self.PARAMETERS.values()), total)
        # The gradient's norm is NaN, clipping spreads it: not one weight is left.
        self.assertEqual(total, bad, job)
        self.assertFalse((job.run_dir / "events.jsonl").exists())

        guarded = self.train(*FAULT, steps=5)
        self.assertEqual((total, 0), guarded.parameters(), guarded)

    def test_without_a_fault_guarded_and_unguarded_end_bit_identical(self):
        options = ["--print-digests", "--accumulate", 2]
        guarded, unguarded = (self.train(*options, "--guard", guard, steps=4) for guard in ("on", "off"))
        self.assert_lockstep(guarded, 4, attempts=4, updates=4)
        self.assert_same_state(unguarded, guarded)


if __name__ == "__main__":
    unittest.main()
