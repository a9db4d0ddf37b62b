"""However a rank leaves, the others do not stay behind: a documented exit code, in bounded time, and no process."""

import os
import signal
import time
import unittest

from jobs import PATIENCE, JobTest, until

DEADLINE = 3  # seconds without progress
# mpirun takes 2 s to end what does not end by itself; the rest is for a busy machine.
SLACK = 15
ATTEMPT = 2


class Leaving(JobTest):
    def leave(self, fault, rank, code, **settings):
        job = self.train("--inject", f"{fault},rank={rank},attempt={ATTEMPT}", code=code,
                         policy=f"attempt_deadline_seconds: {DEADLINE}", **settings)
        self.assertLess(job.seconds_after_start(), DEADLINE + SLACK, job)
        return job

    def check_throw(self, stage, rank):
        job = self.leave(f"throw@{stage}", rank, 80)
        aborted = self.assert_record(job, "run_started", "aborted")[-1]
        self.assertEqual((ATTEMPT, rank, stage),
                         (aborted["attempt"], aborted["error"]["rank"], aborted["error"]["stage"]))

    def check_failed_update(self, rank, steps):
        """The update fails after every rank was told to apply it: replicas differ, and no later attempt hides it."""
        job = self.leave("throw@optimizer", rank, 83, steps=steps)
        aborted = self.assert_record(job, "run_started", "aborted")[-1]
        self.assertEqual((83, rank, "optimizer"),
                         (aborted["exit_code"], aborted["error"]["rank"], aborted["error"]["stage"]))

    def check_stuck(self, fault, rank):
        job = self.leave(fault, rank, 84)
        self.assert_record(job, "run_started")
        absence = "silent" if fault.startswith("stop") else "stuck"
        self.assertRegex(job.err, rf"holdfast: rank \d+: rank {rank} \(host \S+, pid \d+\) is {absence}", job)
        departures = job.departures()
        self.assertEqual(1, len(departures), departures)
        self.assertEqual([(rank, absence)],
                         [(missing["rank"], missing["absence"]) for missing in departures[0]["missing"]])
        survivors = departures[0]["survivors"]
        self.assertEqual([r for r in range(4) if r != rank], [survivor["rank"] for survivor in survivors])
        for survivor in survivors:
            # They can be one attempt further, where they wait for the rank that is stuck.
            self.assertIn(survivor["attempt"], (ATTEMPT, ATTEMPT + 1), departures)
            self.assertIn(survivor["phase"], ("begin", "observe", "reduce", "decide", "update", "outside"), departures)

    def check_exit(self, stage, rank, code):
        job = self.leave(f"exit={code}@{stage}", rank, code)
        self.assert_record(job, "run_started")

    def check_kill(self, stage, rank):
        job = self.leave(f"kill@{stage}", rank, 128 + 9)
        self.assert_record(job, "run_started")

    def test_exit_0_in_the_middle_of_a_run_is_not_success(self):
        command = self.trainer("--inject", f"exit=0@forward,rank=1,attempt={ATTEMPT}", run_dir=self.new_run_dir(),
                               policy=f"attempt_deadline_seconds: {DEADLINE}")
        job = self.start(4, command).wait()
        self.assertNotEqual(0, job.code, job)

    def test_killing_mpirun_leaves_no_rank(self):
        run_dir = self.new_run_dir()
        job = self.start(4, self.trainer(run_dir=run_dir, steps=10**6), run_dir)
        job.wait_for_start()
        job.mpirun.kill()
        self.assertEqual(-9, job.wait().code, job)
        self.assert_record(job, "run_started")

    def test_an_exception_without_the_guard_ends_every_rank(self):
        self.train("--inject", f"throw@forward,rank=2,attempt={ATTEMPT}", "--guard", "off", code=80)

    def test_each_rank_has_the_exit_code_of_a_failed_update(self):
        self.train("--inject", f"throw@optimizer,rank=3,attempt={ATTEMPT}", code=83, watch_ranks=True)


class Terminated(JobTest):
    """SIGTERM to one rank, long before the deadline: a launcher that lost a host sends it, and an operator."""

    def start_training(self, *options, **settings):
        run_dir = self.new_run_dir()
        command = self.trainer(*options, run_dir=run_dir, steps=10**6, policy="attempt_deadline_seconds: 60")
        job = self.start(4, command, run_dir, **settings)
        job.wait_for_attempts()
        return job

    def stop_and_tell(self, job, stopped, told):
        pids = job.pids()
        os.kill(pids[stopped], signal.SIGSTOP)
        os.kill(pids[told], signal.SIGTERM)
        return pids

    def assert_silent(self, job, rank, pid):
        (departure,) = job.departures()
        self.assertEqual([(rank, pid, "silent")],
                         [(missing["rank"], missing["pid"], missing["absence"]) for missing in departure["missing"]])
        self.assertEqual([r for r in range(4) if r != rank], [survivor["rank"] for survivor in departure["survivors"]])
        self.assertFalse(departure["alone"], departure)

    def check_missing(self, stopped, told):
        job = self.start_training(watch_ranks=True)
        pids = self.stop_and_tell(job, stopped, told)
        codes = {rank: 84 for rank in range(4) if rank != stopped}
        until(lambda: job.rank_codes() == codes, 5, f"84 on all but rank {stopped}, but {job.rank_codes()}\n{job}")
        self.assert_silent(job, stopped, pids[stopped])
        os.kill(pids[stopped], signal.SIGKILL)  # mpirun was told to let ranks be
        job.wait()

    def test_sigterm_while_a_rank_is_stopped_is_84(self):
        self.check_missing(stopped=2, told=3)

    def test_sigterm_while_rank_0_is_stopped_is_84(self):
        self.check_missing(stopped=0, told=2)

    def test_sigterm_while_a_rank_is_stopped_is_84_from_mpirun(self):
        job = self.start_training()
        pids = self.stop_and_tell(job, stopped=3, told=0)
        self.assertEqual(84, job.wait(timeout=SLACK).code, job)
        self.assert_silent(job, 3, pids[3])

    def test_a_rank_that_stops_after_sigterm_is_found_too(self):
        job = self.start_training("--inject", f"hang@backward,rank=3,attempt={ATTEMPT}")
        until(lambda: "injecting hang" in job.err, PATIENCE, "the fault")
        pids = job.pids()
        os.kill(pids[0], signal.SIGTERM)
        time.sleep(1)  # all are there, and answer
        os.kill(pids[3], signal.SIGSTOP)
        self.assertEqual(84, job.wait(timeout=SLACK).code, job)
        self.assert_silent(job, 3, pids[3])

    def test_sigterm_while_nobody_is_missing_is_an_orderly_stop(self):
        job = self.start_training(watch_ranks=True)
        os.kill(job.pids()[3], signal.SIGTERM)
        job.wait(timeout=SLACK)
        self.assertEqual({rank: 86 for rank in range(4)}, job.rank_codes(), job)
        self.assert_record(job, "run_started", "stopped")
        self.assertEqual([], job.departures())


def _add(name, check, *arguments):
    setattr(Leaving, f"test_{name}", lambda self: getattr(self, f"check_{check}")(*arguments))


for _stage, _rank in (("input", 0), ("backward", 3), ("reduction", 1)):
    _add(f"throw_at_{_stage}_on_rank_{_rank}", "throw", _stage, _rank)
_add("throw_in_the_optimizer_on_rank_0", "failed_update", 0, 8)
_add("throw_in_the_last_update_on_rank_2", "failed_update", 2, ATTEMPT + 1)
for _stage, _rank in (("forward", 0), ("backward", 3), ("reduction", 2), ("optimizer", 1)):
    _add(f"hang_at_{_stage}_on_rank_{_rank}", "stuck", f"hang@{_stage}", _rank)
for _stage, _rank in (("input", 0), ("reduction", 2)):
    _add(f"stop_at_{_stage}_on_rank_{_rank}", "stuck", f"stop@{_stage}", _rank)
for _stage, _rank, _code in (("forward", 0, 7), ("optimizer", 1, 255)):
    _add(f"exit_{_code}_at_{_stage}_on_rank_{_rank}", "exit", _stage, _rank, _code)
for _stage, _rank in (("input", 0), ("backward", 3), ("optimizer", 1)):
    _add(f"kill_at_{_stage}_on_rank_{_rank}", "kill", _stage, _rank)

if __name__ == "__main__":
    unittest.main()
