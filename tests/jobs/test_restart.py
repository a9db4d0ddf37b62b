"""What a run remembers when it is started again: budgets, alerts, where it was, and that nobody answered for its end."""

import gzip
import os
import signal
import time
import unittest

from jobs import PATIENCE, JobTest, holdfast, processes, strict_json, until

NO_CHECKPOINTS = ["--checkpoint-interval", 0]


class Restart(JobTest):
    def acknowledge(self, run_dir, code=0, owner="ana", note="shard 3 was replaced", **options):
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        done = holdfast("ack", run_dir, "--owner", owner, "--note", note, *words)
        self.assertEqual(code, done.returncode, done)
        return done

    def test_case_31_budgets_persist_across_restarts(self):
        """Without checkpoints. A run that is killed, and one that ends in order: neither forgets a skip."""
        run_dir = self.new_run_dir()
        settings = {"run_dir": run_dir, "ranks": 2, "policy": "max_total_skips: 2"}
        self.train(*NO_CHECKPOINTS, "--inject", "nan@backward,rank=1,attempt=1", "--inject",
                   "kill@forward,rank=0,attempt=4", code=137, steps=8, **settings)
        # Clean attempts since the skip are forgotten and made again; the skip is not.
        job = self.train(*NO_CHECKPOINTS, "--resume", "--inject", "inf@loss,rank=0,attempt=6", steps=8, **settings)
        self.assertRegex(job.out, r"(?m)^resumed: epoch 2, attempt 3, 2 updates, 1 skips so far$")
        self.assertIn("\nno checkpoint: weights start anew\n", job.out)
        self.assertIn("done: 8 attempts, 6 updates, 2 skipped", job.out)
        job = self.train(*NO_CHECKPOINTS, "--resume", "--inject", "nan@backward,rank=1,attempt=9", steps=12, code=81,
                         **settings)
        events = self.assert_record(job, "run_started", "attempt_skipped", "run_started", "attempt_skipped",
                                    "run_finished", "run_started", "aborted")
        self.assertEqual([1, 1, 2, 2, 2, 3, 3], [event["epoch"] for event in events])
        self.assertEqual([0, 1, 3, 6, 8, 8, 9], [event["attempt"] for event in events])
        self.assertEqual([None, 0], [events[i]["resumed_from"]["exit_code"] for i in (2, 5)])
        self.assertIn("2 of 2 in total", events[-1]["reason"])

    def test_case_31_a_checkpoint_holds_the_budgets(self):
        settings = {"run_dir": self.new_run_dir(), "ranks": 2, "policy": "max_total_skips: 1"}
        self.train("--inject", "nan@backward,rank=1,attempt=1", steps=3, **settings)
        job = self.train("--resume", "--inject", "nan@backward,rank=1,attempt=5", code=81, **settings)
        self.assertRegex(job.out, r"(?m)^resumed: epoch 2, attempt 3, 2 updates, 1 skips so far$")
        (aborted,) = job.named("aborted")
        self.assertIn("1 of 1 in total", aborted["reason"])

    def test_an_abort_is_not_restarted_until_it_is_acknowledged(self):
        run_dir = self.new_run_dir()
        settings = {"run_dir": run_dir, "ranks": 2, "policy": "on_first: ABORT"}
        self.train("--inject", "nan@backward,rank=1,attempt=2", code=81, **settings)
        job = self.train_both_ways("--resume", code=87, **settings)
        self.assertIn(f"holdfast ack {run_dir} --owner WHO --note TEXT", job.err)
        self.assertIn("Nothing was trained", job.err)
        self.acknowledge(run_dir, code=64, owner="")
        self.acknowledge(run_dir, code=64, note=" ")
        self.assertEqual(64, holdfast("ack", run_dir, "--owner", "ana").returncode)
        done = self.acknowledge(run_dir, owner="ana\x1b[31m", ticket="https://bugs/1")
        self.assertIn("acknowledged by ana\\x1b[31m: exit code 81 at attempt 2", done.stdout)
        self.assertIn("nothing to acknowledge", self.acknowledge(run_dir, code=64).stderr)
        job = self.train("--resume", **settings)
        events = self.assert_record(job, "run_started", "aborted", "acknowledged", "run_started", "restored",
                                    "run_finished")
        self.assertEqual(("ana\x1b[31m", "shard 3 was replaced", "https://bugs/1"),
                         tuple(events[2][key] for key in ("owner", "note", "ticket")))
        self.assertEqual((2, 2), (events[3]["epoch"], events[3]["attempt"]))
        self.assertEqual((2, 0), (events[4]["epoch"], events[4]["attempt"]))

    def test_case_31_identical_failures_are_not_requeued(self):
        """An exception at the third attempt after each start: a scheduler may try again, but not for ever. Without
        checkpoints, which would be fallen back to first."""
        run_dir = self.new_run_dir()
        for start in range(3):
            job = self.train(*NO_CHECKPOINTS, "--resume", "--inject",
                             f"throw@forward,rank=1,attempt={2 * (start + 1)}", ranks=2, code=80, run_dir=run_dir)
            self.assertEqual(start == 2, "do not requeue" in job.err, job)
        job = self.train(*NO_CHECKPOINTS, "--resume", ranks=2, code=87, run_dir=run_dir)
        self.assertRegex(job.err, r"do not requeue: the run in \S+ failed 3 times in a row at the same place")
        self.acknowledge(run_dir)
        self.train(*NO_CHECKPOINTS, "--resume", ranks=2, run_dir=run_dir)

    def test_a_rate_rule_ends_the_job(self):
        rule = "rate_rules { name: 'tight' window_attempts: 6 max_skips: 1 least_attempts: 3 action: ABORT }"
        job = self.train("--inject", "nan@backward,rank=1,every=3", ranks=2, code=81, policy=rule)
        *_, aborted = self.assert_record(job, "run_started", "attempt_skipped", "aborted")
        self.assertEqual(5, aborted["attempt"])
        self.assertIn("rate rule 'tight' allows 1 skips in 6 attempts", aborted["reason"])
        self.assertIn("'tight'", job.err)

    def test_the_samples_of_a_skipped_attempt_are_on_the_ledger(self):
        job = self.train("--accumulate", 2, "--inject", "nan@backward,rank=1,attempt=3", ranks=2, batch=3, steps=5)
        (line,) = [strict_json(line) for line in (job.run_dir / "dropped.jsonl").read_text().splitlines()]
        self.assertEqual((1, 3, 1), (line["epoch"], line["attempt"], line["origin"]))
        self.assertEqual([0, 1], [rank["rank"] for rank in line["ranks"]])
        samples = [sample for rank in line["ranks"] for sample in rank["samples"]]
        self.assertEqual(12, len(set(samples)), "ranks share no sample within a pass")
        labels = gzip.decompress((self.data / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
        self.assertEqual([labels[sample] for sample in samples],
                         [label for rank in line["ranks"] for label in rank["classes"]])

    def test_a_damaged_state_is_refused_and_left_alone(self):
        run_dir = self.train(ranks=1, steps=2).run_dir
        state = run_dir / "state"
        self.assertEqual(0o600, state.stat().st_mode & 0o777)
        damaged = state.read_bytes()[:-1]
        state.write_bytes(damaged)
        record = (run_dir / "events.jsonl").read_bytes()
        job = self.train("--resume", ranks=1, steps=4, run_dir=run_dir, code=64)
        self.assertIn(str(state), job.err)
        self.assertIn("damaged", job.err)
        self.assertEqual((damaged, record), (state.read_bytes(), (run_dir / "events.jsonl").read_bytes()))

    def test_a_run_that_was_stopped_finds_that_another_took_its_folder(self):
        self.take_over(state_interval_attempts=1)

    def test_a_run_that_writes_nothing_finds_within_a_second_or_so_that_another_took_its_folder(self):
        seconds = self.take_over(state_interval_attempts=10**9)
        # A round of the thread that looks, an attempt, and mpirun's end, which sleeps for two when a rank has failed.
        self.assertLess(seconds, 10)

    def take_over(self, state_interval_attempts):
        """Returns the seconds from the old run's awakening to its end."""
        run_dir = self.new_run_dir()
        policy = f"state_interval_attempts: {state_interval_attempts} attempt_deadline_floor_seconds: 3600"
        options = ["--checkpoint-interval", 10**6]
        old = self.start(1, self.trainer(*options, run_dir=run_dir, steps=10**6, policy=policy), run_dir)
        until((run_dir / "checkpoints" / "e0001-a0000000000").exists, PATIENCE, "the first checkpoint")
        (rank,) = [pid for pid, command in processes(old.marker).items() if "guarded_train" in command.split()[0]]
        os.kill(rank, signal.SIGSTOP)
        # The lock is still held, by a process that cannot give it back.
        job = self.train("--resume", ranks=1, run_dir=run_dir, policy=policy, code=64)
        self.assertIn("in use", job.err)
        (run_dir / "lock").unlink()
        job = self.start(1, self.trainer("--resume", *options, run_dir=run_dir, steps=10**6, policy=policy), run_dir)
        until(lambda: job.named("restored"), PATIENCE, "the other run")
        awake = time.monotonic()
        os.kill(rank, signal.SIGCONT)
        self.assertEqual(83, old.wait().code, old)
        seconds = time.monotonic() - awake
        self.assertIn("another run has taken over", old.err)
        job.mpirun.send_signal(signal.SIGUSR1)
        self.assertEqual(86, job.wait().code, job)
        events = self.assert_record(job, "run_started", "run_started", "restored", "stopped")
        self.assertEqual([1, 2, 2, 2], [event["epoch"] for event in events])
        return seconds

    def test_a_run_whose_data_have_ended_is_at_its_end_when_it_is_resumed(self):
        run_dir = self.new_run_dir()
        ends = (*NO_CHECKPOINTS, "--data-ends", "1=3")
        job = self.train(*ends, ranks=2, run_dir=run_dir)
        self.assertIn("done: 3 attempts, 3 updates, 0 skipped", job.out)
        job = self.train("--resume", *ends, ranks=2, run_dir=run_dir)
        self.assertIn("done: 3 attempts, 3 updates, 0 skipped", job.out)
        events = self.assert_record(job, "run_started", "run_finished", "run_started", "run_finished")
        self.assertEqual([0, 3, 3, 3], [event["attempt"] for event in events])
        # With more data it goes on, also where one rank alone was told of them.
        job = self.train("--resume", *ends, ranks=2, run_dir=run_dir, other_rank=(1, ((*NO_CHECKPOINTS, "--resume"), {})))
        self.assertIn("done: 8 attempts, 8 updates, 0 skipped", job.out)
        job = self.train(*NO_CHECKPOINTS, "--resume", ranks=2, run_dir=run_dir, steps=12,
                         other_rank=(1, ((*NO_CHECKPOINTS, "--resume", "--data-ends", "1=8"), {"steps": 12})))
        self.assertIn("done: 8 attempts, 8 updates, 0 skipped", job.out)


if __name__ == "__main__":
    unittest.main()
