"""A job that goes back to a checkpoint by itself, while it runs or when it is started again."""

import pathlib
import shutil
import tempfile
import unittest

from checkpoints import CheckpointTest
from jobs import HOST

class KeptRun:
    """What is compared of a job whose folder is gone."""

    def __init__(self, job):
        self.digests, self._memory, self._ledger, self._text = job.digests, job.memory(), job.ledger(), str(job)

    def memory(self):
        return self._memory

    def ledger(self):
        return self._ledger

    def __str__(self):
        return self._text


class GoingBackTest(CheckpointTest):
    """In the running job, to the newest checkpoint: all ranks go on from there.

    Each run has three attempts behind it, and goes on in epoch 2 with the checkpoint behind them on disk: what is begun
    in ten short attempts may not get there in time.
    """

    SPOILT = "nan@optimizer,attempt=5"  # found in attempt 6
    SAVED = "e0001-a0000000003"

    @classmethod
    def setUpClass(cls):
        cls.kept = pathlib.Path(tempfile.mkdtemp(prefix="holdfast-job-"))
        cls.addClassCleanup(shutil.rmtree, cls.kept, ignore_errors=True)
        cls.references = {}

    def begun(self, ranks):
        begun = self.kept / f"begun-{ranks}"
        if not begun.exists():
            shutil.copytree(self.train(ranks=ranks, steps=3).run_dir, begun)
        run_dir = self.new_run_dir()
        shutil.copytree(begun, run_dir)
        return run_dir

    def go_on(self, *faults, ranks=2, **settings):
        injected = [word for fault in faults for word in ("--inject", fault)]
        return self.train("--resume", *injected, ranks=ranks, run_dir=self.begun(ranks), **settings)

    def reference(self, ranks):
        if ranks not in self.references:
            job = self.go_on(ranks=ranks)
            self.assert_lockstep(job, ranks, 10, 10)
            self.references[ranks] = KeptRun(job)
        return self.references[ranks]

    def went_back(self, job):
        """[(epoch, where it was found, generation)]"""
        return [(e["epoch"], e["from_attempt"], e["generation"]) for e in job.named("rolled_back")]

    def check(self, *faults, found_at=6, ranks=2, **settings):
        """The faults come once; afterwards it is as if they had not been."""
        job = self.go_on(*(f"{fault},epoch=2" for fault in faults), ranks=ranks, **settings)
        self.assertEqual([(3, found_at, self.SAVED)], self.went_back(job), job)
        self.assertRegex(job.out, rf"(?m)^rolled back by all ranks from attempt {found_at}: .*; on at attempt 3, "
                                  "epoch 3$")
        self.assertEqual(["rolling_back", "rolled_back"],
                         [e["event"] for e in job.events if e["event"].startswith("roll")])
        (done,) = job.named("rolled_back")
        self.assertEqual((3, 3, 1, 9), tuple(done[key] for key in ("attempt", "update", "rollbacks", "rollbacks_left")))
        self.assert_same_run(job, self.reference(ranks))
        return job


class GoingBack(GoingBackTest):
    def test_case_14_what_the_optimizer_spoilt_is_undone(self):
        job = self.check(self.SPOILT, ranks=4)
        event = job.named("rolling_back")[0]
        self.assertEqual(("optimizer", "conv1.weight"), (event["stage"], event["origins"][0]["tensor"]))

    def test_case_14_what_the_optimizer_spoilt_on_one_rank_is_undone(self):
        job = self.check(f"{self.SPOILT},rank=2,tensor=classifier.bias", ranks=4)
        (origin,) = job.named("rolling_back")[0]["origins"]
        self.assertEqual((2, "classifier.bias", 0), (origin["rank"], origin["tensor"], origin["index"]))

    def test_case_14_what_the_last_update_spoilt_is_undone(self):
        job = self.go_on("nan@optimizer,attempt=9,epoch=2")
        self.assertEqual([(3, 10)], [found[:2] for found in self.went_back(job)])
        self.assert_same_run(job, self.reference(2))

    def test_case_14_what_the_optimizer_would_spoil_is_skipped(self):
        """With check_update: BEFORE; nothing has to be undone."""
        job = self.train("--inject", f"{self.SPOILT},epoch=1", policy="check_update: BEFORE")
        self.assertEqual([], job.named("rolling_back"))
        self.assertEqual([(5, "optimizer")], [(skip["attempt"], skip["stage"]) for skip in job.skips()])
        self.assert_same_state(job, self.train("--omit-update", 5))

    def test_a_rate_rule_goes_back_in_place_of_one_skip_too_many(self):
        rule = "rate_rules { name: 'tight' window_attempts: 6 max_skips: 1 least_attempts: 3 action: ROLL_BACK }"
        job = self.check("nan@backward,rank=0,attempt=4", "nan@backward,rank=1,attempt=5", found_at=5, policy=rule)
        self.assertEqual([4], [skip["attempt"] for skip in job.skips()])
        self.assertIn("rate rule 'tight' allows 1 skips in 6 attempts", job.named("rolling_back")[0]["reason"])

    def test_a_rate_rule_that_goes_back_is_refused_without_checkpoints(self):
        rule = "rate_rules { name: 'tight' window_attempts: 6 max_skips: 1 action: ROLL_BACK }"
        self.assertIn("'tight'", self.train(policy=rule, interval=0, code=64).err)

    def test_without_checkpoints_a_spoilt_state_ends_the_run(self):
        job = self.train("--inject", self.SPOILT, interval=0, code=85)
        self.assertIn("there is no checkpoint to roll back to", job.err)

    def test_data_that_led_to_it_are_left_out_when_asked_for(self):
        """Not made again, counted as skipped, and on the ledger."""
        job = self.go_on(f"{self.SPOILT},epoch=2", policy="rollback_skips_data: true")
        self.assertEqual([(3, 6, self.SAVED)], self.went_back(job))
        self.assertEqual((7, 3), tuple(job.named("rolled_back")[0][key] for key in ("attempt", "update")))
        self.assertIn("\ndone: 10 attempts, 6 updates, 4 skipped\n", job.out)
        self.assertEqual([3, 4, 5, 6], list(job.ledger()))
        for origin, ranks in job.ledger().values():
            self.assertEqual((None, [0, 1]), (origin, [rank["rank"] for rank in ranks]))
        omitted = [word for attempt in (3, 4, 5, 6) for word in ("--omit-update", attempt)]
        self.assert_same_state(job, self.train(*omitted))

    def test_rollbacks_have_a_budget(self):
        job = self.go_on(self.SPOILT, policy="max_rollbacks: 1", code=81)
        self.assertEqual([(3, 6, self.SAVED)], self.went_back(job))
        self.assertIn("rollback budget spent (1 of 1)", job.named("aborted")[-1]["reason"])

    def test_case_31_what_fails_again_and_again_falls_back_further_and_is_not_requeued(self):
        """Twice at the same attempt, then from one generation earlier, and as often again."""
        job = self.go_on(self.SPOILT, policy="max_identical_failures: 2", code=81)
        before = "e0001-a0000000000"
        self.assertEqual([(3, 6, self.SAVED), (4, 6, before), (5, 6, before)], self.went_back(job))
        self.assertIn("do not requeue", job.err)
        self.assertIn("do not requeue", self.train("--resume", run_dir=job.run_dir, code=87).err)

    def test_an_update_that_fails_on_one_rank_is_undone_when_asked_for(self):
        job = self.check("throw@optimizer,rank=1,attempt=5", ranks=4, policy="on_divergence: GO_BACK")
        self.assertEqual(1, job.named("rolling_back")[0]["error"]["rank"])

    def test_an_update_that_fails_on_one_rank_ends_the_run(self):
        job = self.go_on("throw@optimizer,rank=1,attempt=5", code=83)
        self.assertEqual([], job.named("rolling_back"))
        self.assertEqual(self.SAVED, job.generations()[-1])

    # One rank alone gets a finite value that is wrong: nothing but the comparison of replicas can find it.
    WRONG = "value=1.5@optimizer,rank=1,attempt=4,tensor=conv2.weight"

    def test_a_replica_that_differs_ends_the_run_and_is_named(self):
        job = self.go_on(self.WRONG, ranks=4, policy="proof_interval_attempts: 1", code=83)
        aborted = job.named("aborted")[0]
        self.assertEqual(5, aborted["attempt"])
        self.assertEqual(f"replicas differ: rank 1 (host {HOST}) against the other 3, first in conv2.weight",
                         aborted["reason"])
        self.assertEqual(self.SAVED, job.generations()[-1])

    def test_of_two_replicas_that_differ_both_are_named(self):
        job = self.go_on(self.WRONG, policy="proof_interval_attempts: 1", code=83)
        self.assertIn(f"replicas differ: rank 0 (host {HOST}), rank 1 (host {HOST}) against each other, first in "
                      "conv2.weight", job.err)

    def test_a_replica_that_differs_is_mended_when_asked_for(self):
        """Found with the next checkpoint, which does not come about."""
        job = self.check(self.WRONG, ranks=4, policy="on_divergence: GO_BACK proof_interval_attempts: 0")
        (failed,) = [e for e in job.named("checkpoint_failed") if e["generation"] == "e0002-a0000000006"]
        self.assertIn("replicas do not agree on it", failed["reason"])


class SlowGoingBack(GoingBackTest):
    def check_restarts(self, *faults):
        """Submitted again and again, as a scheduler would, until it is refused. Gives the attempts it went on at."""
        run_dir = self.begun(2)
        options = [word for fault in faults for word in ("--inject", fault)]
        places = []
        for start in range(4):
            job = self.train("--resume", *options, run_dir=run_dir, policy="max_identical_failures: 2", code=80)
            places.append(job.named("restored")[-1]["attempt"])
            self.assertEqual(start == 1, "the next start goes back one checkpoint further" in job.err, job)
            self.assertEqual(start == 3, "do not requeue" in job.err, job)
        job = self.train("--resume", *options, run_dir=run_dir, code=87)
        self.assertRegex(job.err, "do not requeue: the run in .* failed 4 times in a row at the same place")
        return places

    def test_case_31_restarts_that_fail_at_one_attempt_fall_back_and_come_to_an_end(self):
        places = self.check_restarts("throw@forward,rank=1,attempt=5")
        self.assertEqual([3, 3, 0], places[:3])  # and then from what was saved since, if that was in time

    def test_case_31_restarts_that_fail_as_long_after_a_restore_fall_back_and_come_to_an_end(self):
        places = self.check_restarts(*(f"throw@forward,rank=1,attempt={attempt},epoch={epoch}"
                                       for epoch, attempt in ((2, 5), (3, 5), (4, 2), (5, 2))))
        self.assertEqual([3, 3, 0, 0], places)


if __name__ == "__main__":
    unittest.main()
