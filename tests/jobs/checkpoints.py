"""Runs with checkpoints, and what two of them are compared by."""

import os
import signal

from jobs import JobTest, generations, wait_for_stop

class CheckpointTest(JobTest):
    """Runs of ten attempts with a checkpoint before attempts 0, 3, 6 and 9, and one at the end."""

    INTERVAL = 3
    OPTIONS = ["--optimizer", "adamw", "--clip", 1, "--warmup", 3, "--decay", "exponential", "--decay-rate", 0.9,
               "--evaluate", 10, "--print-digests"]

    def train(self, *options, steps=10, ranks=2, interval=INTERVAL, **settings):
        return super().train(*self.OPTIONS, "--checkpoint-interval", interval, *options, steps=steps, ranks=ranks,
                             **settings)

    def assert_same_run(self, job, reference):
        """State, random numbers, budgets, rate windows, loss scale, counters, and what was left out."""
        self.assert_same_state(job, reference)
        self.assertEqual(reference.memory(), job.memory())
        self.assertEqual(reference.ledger(), job.ledger())

    def resume(self, run_dir, *options, **settings):
        """Resumes a run to its end, from the newest of its checkpoints."""
        *_, newest = generations(run_dir)
        job = self.train("--resume", *options, run_dir=run_dir, **settings)
        self.assertIn(f"\nrestored: {newest}\n", job.out)
        *_, restored = job.named("restored")
        self.assertEqual((newest, []), (restored["generation"], restored["refused"]))
        return job

    def stop_at(self, attempt, *options, ranks, goes_on_at=None):
        """An orderly stop that is asked for in the middle of this attempt; one that is skipped is still made."""
        run_dir = self.new_run_dir()
        command = self.trainer(*self.OPTIONS, "--checkpoint-interval", self.INTERVAL, *options, "--inject",
                               f"stop@input,rank=0,attempt={attempt},epoch=1", run_dir=run_dir, steps=10)
        job = self.start(ranks, command, run_dir)
        rank_0 = wait_for_stop(job, attempt)
        os.kill(rank_0, signal.SIGUSR1)
        os.kill(rank_0, signal.SIGCONT)
        self.assertEqual(86, job.wait().code, job)
        self.assertEqual(f"e0001-a{goes_on_at or attempt:010}", job.generations()[-1], job)
        return job
