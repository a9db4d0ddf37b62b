"""Jobs whose ranks go missing: mpirun's exit code, who is on record as missing, and no process that stays behind.

    watchdog_jobs.py PROGRAM MPIEXEC [Class.method]
"""

import ctypes
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

PROGRAM = sys.argv.pop(1)
MPIEXEC = sys.argv.pop(1)
MARKER = "HOLDFAST_WATCHED_JOB"  # environment variable by which the processes of a job are found again
PATIENCE = 100  # seconds; far more than any job takes
DEADLINE = 4000  # milliseconds


def living(marker):
    """Processes of the job, {pid: state}; a stopped process lives, a zombie does not."""
    wanted = f"{MARKER}={marker}".encode()
    found = {}
    for folder in pathlib.Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if state not in "ZX":
                    found[int(folder.name)] = state
        except OSError:
            pass  # it ended meanwhile, or is not ours to look at
    return found


def die_with_parent():
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class WatchedJobs(unittest.TestCase):
    def run_job(self, ranks, fault, faulty, deadline=DEADLINE):
        """Runs the job to its end. Its exit code, the lines of the record, and what it said on stderr."""
        marker = uuid.uuid4().hex
        with tempfile.TemporaryDirectory() as folder:
            record = pathlib.Path(folder) / "record"
            command = [MPIEXEC, "--oversubscribe", "-np", str(ranks), PROGRAM, str(record), str(deadline), fault,
                       ",".join(str(rank) for rank in faulty)]
            job = subprocess.Popen(command, env={**os.environ, MARKER: marker}, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
            try:
                _, said = job.communicate(timeout=PATIENCE)
                until = time.monotonic() + 10
                while living(marker) and time.monotonic() < until:
                    time.sleep(0.05)
                self.assertEqual({}, living(marker), said)
            finally:
                for pid in living(marker):
                    os.kill(pid, signal.SIGKILL)
                job.wait()
            lines = record.read_text().splitlines() if record.exists() else []
            left = record.with_name("record.left")
            self.let_go = sorted(map(int, left.read_text().split())) if left.exists() else []
        return job.returncode, lines, said

    def check_missing(self, ranks, fault, faulty, how, code=84, place=""):
        """All faulty ranks are on record, once, told by rank 0 or else its deputy; all others are left behind."""
        got, lines, said = self.run_job(ranks, fault, faulty)
        self.assertEqual(code, got, said)
        self.assertEqual(sorted(set(self.let_go)), self.let_go)
        if code == 84:  # else mpirun may be first
            self.assertLessEqual(set(range(ranks)) - set(faulty), set(self.let_go))
        self.assertEqual(1, len(lines), lines)
        reporter = 1 if 0 in faulty and how in ("died", "is silent", "left") else 0
        who = r"rank {} \(host \S+, pid \d+\) " + how + place
        missing = "; ".join(who.format(rank) for rank in faulty)
        self.assertRegex(lines[0], rf"^{reporter}: {missing}(?:\.|$)")
        before_survivors = lines[0].split(" left behind")[0].rpartition(".")[0]
        named = [int(rank) for rank in re.findall(r"rank (\d+) \(", before_survivors)]
        self.assertEqual(list(faulty), named, lines)
        self.assertIn(f". {ranks - len(faulty)} left behind, rank ", lines[0])
        self.assertIn(lines[0].partition(": ")[2], said)

    def check_nothing(self, ranks, fault, faulty):
        code, lines, said = self.run_job(ranks, fault, faulty)
        self.assertEqual((0, [], []), (code, lines, self.let_go), said)
        return said

    def test_without_a_fault_nothing_is_said(self):
        self.assertNotIn("holdfast:", self.check_nothing(4, "none", []))

    def test_a_pause_of_three_deadlines_is_waited_for(self):
        self.assertNotIn("holdfast:", self.check_nothing(3, "pause", [2]))

    def test_a_rank_within_the_deadline_is_waited_for(self):
        self.assertNotIn("holdfast:", self.check_nothing(3, "slow", [1]))

    def test_all_slow_at_one_place_is_a_warning(self):
        said = self.check_nothing(3, "slow_together", [0, 1, 2])
        self.assertIn("holdfast: rank 0: all ranks stand still at attempt 3, phase observe, and nobody is missing; "
                      "waiting", said)

    def test_all_standing_still_for_ever_leave_in_the_end(self):
        code, lines, said = self.run_job(3, "hang_together", [0, 1, 2], deadline=1000)
        self.assertEqual(84, code, said)
        self.assertEqual(1, len(lines), lines)
        self.assertRegex(lines[0], r"^0: every rank stands still at the same place\. 3 left behind, rank 0 ")
        self.assertIn("nobody is missing; waiting", said)

    def test_who_reaches_neither_rank_0_nor_the_deputy_leaves_alone(self):
        code, lines, said = self.run_job(3, "stop", [0, 1])
        self.assertEqual(84, code, said)
        self.assertRegex(lines[0], r"^2 alone: no progress, and neither rank 0 nor its deputy can be reached\.")
        self.assertIn("Neither rank 0 nor its deputy can be reached", said)

    def test_ranks_that_wake_up_do_not_call_those_dead_who_left_without_them(self):
        """mpirun wakes stopped ranks before it ends them."""
        _, lines, said = self.run_job(3, "stop", [0, 1])
        self.assertEqual([], [line for line in lines if "died" in line], said)

    def test_an_exit_0_in_the_middle_is_not_success(self):
        code, lines, said = self.run_job(3, "exit0", [2])
        self.assertNotEqual(0, code, said)
        self.assertEqual(1, len(lines), lines)
        self.assertRegex(lines[0], r"^0: rank 2 \(host \S+, pid \d+\) died")

    def test_two_ranks_that_die_together_are_reported_together(self):
        self.check_missing(5, "kill", [2, 4], "died", code=128 + 9)

    def test_of_two_ranks_that_hang_nobody_else_is_blamed(self):
        """The one that is not overdue yet when the other is may pass for slow."""
        code, lines, said = self.run_job(4, "hang", [1, 3])
        self.assertEqual(84, code, said)
        self.assertEqual(1, len(lines), lines)
        stuck = re.findall(r"rank (\d+) \(host \S+, pid \d+\) is stuck at attempt 3 of epoch 1, phase begin", lines[0])
        self.assertTrue(stuck and set(stuck) <= {"1", "3"}, lines)
        self.assertNotRegex(lines[0], "died|silent|left at")


def _add(name, *arguments, **settings):
    setattr(WatchedJobs, f"test_{name}", lambda self: self.check_missing(*arguments, **settings))


for _rank in range(3):
    _add(f"rank_{_rank}_stopped_is_silent", 3, "stop", [_rank], "is silent")
    _add(f"rank_{_rank}_hanging_is_stuck", 3, "hang", [_rank], "is stuck",
         place=" at attempt 3 of epoch 1, phase begin")
    _add(f"rank_{_rank}_killed_has_died", 3, "kill", [_rank], "died", code=128 + 9)
    _add(f"rank_{_rank}_that_says_goodbye_has_left", 3, "leave", [_rank], "left")
    _add(f"rank_{_rank}_that_exits_with_7_has_died", 3, "exit7", [_rank], "died", code=7)

if __name__ == "__main__":
    unittest.main()
