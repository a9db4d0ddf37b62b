"""A trainer without MPI: the guard rides on Gloo through callbacks, the ranks are plain processes."""

import os
import pathlib
import re
import signal
import unittest

from jobs import BIN, Job, JobTest, processes, until

# Starts the ranks and says with which code each ended.
LAUNCHER = """
ranks=$1 store=$2; shift 2; mkdir "$store"
for rank in $(seq 0 $((ranks - 1))); do
  (code=0; RANK=$rank WORLD_SIZE=$ranks "$0" "$store" "$@" || code=$?; echo "rank $rank ended with $code") &
done
wait
"""


class Gloo(JobTest):
    def start_ranks(self, ranks, *options):
        run_dir = self.new_run_dir()
        command = ["sh", "-c", LAUNCHER, BIN / "gloo_minimal", ranks, self.folder / f"store{self._run_dirs}", run_dir, *options]
        job = Job(command, self.folder)
        job.run_dir = run_dir
        return job

    def codes(self, job):
        return {int(rank): int(code) for rank, code in re.findall(r"^rank (\d+) ended with (\d+)$", job.out, re.MULTILINE)}

    def check(self, ranks):
        job = self.start_ranks(ranks).wait()
        self.assertEqual(dict.fromkeys(range(ranks), 0), self.codes(job), job)
        _, skip, finished = self.assert_record(job, "run_started", "attempt_skipped", "run_finished")
        (origin,) = skip["origins"]
        self.assertEqual((50, ranks - 1, "loss"), (skip["attempt"], origin["rank"], origin["stage"]))
        self.assertEqual((200, 199), (finished["attempt"], finished["update"]))
        (error,) = re.findall(r"^updates 199 of 200 attempts, largest error of a weight (\S+)$", job.out, re.MULTILINE)
        self.assertLess(float(error), 1e-3, job)

    def test_np1(self):
        self.check(1)

    def test_np2(self):
        self.check(2)

    def test_np4(self):
        self.check(4)

    def test_a_rank_that_is_killed_ends_the_others_with_84(self):
        for victim in (0, 2):
            with self.subTest(victim=victim):
                job = self.start_ranks(3)
                job.wait_for_start()
                until(job.skips, 60, "the attempt that is skipped")
                os.kill(self.pid_of(job, victim), signal.SIGKILL)
                job.wait(timeout=60)
                survivors = dict.fromkeys({0, 1, 2} - {victim}, 84)
                self.assertEqual({**survivors, victim: 137}, self.codes(job), job)
                (departure,) = job.departures()
                self.assertEqual([victim], [rank["rank"] for rank in departure["missing"]], departure)

    def test_an_exception_on_any_rank_ends_all_with_80(self):
        for thrower in (0, 1, 2):
            with self.subTest(thrower=thrower):
                job = self.start_ranks(3, thrower).wait()
                self.assertEqual(dict.fromkeys(range(3), 80), self.codes(job), job)
                aborted = job.events[-1]
                self.assertEqual(("aborted", 100, 80), (aborted["event"], aborted["attempt"], aborted["exit_code"]))
                self.assertIn("asked to throw", aborted["reason"])

    def pid_of(self, job, rank):
        for pid, command in processes(job.marker).items():
            environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if command.startswith(f"{BIN}/gloo_minimal") and f"RANK={rank}".encode() in environ:
                return pid
        raise AssertionError(f"rank {rank} is not there\n{job}")


if __name__ == "__main__":
    unittest.main()
