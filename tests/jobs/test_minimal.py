"""The smallest client: plain MPI and arrays."""

import re
import unittest

from jobs import BIN, ROOT, JobTest

SOURCE = ROOT / "launch" / "examples" / "mpi_minimal.cc"


class Minimal(JobTest):
    def check(self, ranks):
        run_dir = self.new_run_dir()
        job = self.start(ranks, [str(BIN / "mpi_minimal"), str(run_dir)], run_dir).wait()
        self.assertEqual(0, job.code, job)
        _, skip, finished = self.assert_record(job, "run_started", "attempt_skipped", "run_finished")
        (origin,) = skip["origins"]
        self.assertEqual((50, ranks - 1), (skip["attempt"], origin["rank"]))
        self.assertEqual((200, 199), (finished["attempt"], finished["update"]))
        ((updates, attempts, error),) = re.findall(
            r"^updates (\d+) of (\d+) attempts, largest error of a weight (\S+)", job.out, re.MULTILINE)
        self.assertEqual((199, 200), (int(updates), int(attempts)), job)
        self.assertLess(float(error), 1e-3, job)

    def test_np1(self):
        self.check(1)

    def test_np2(self):
        self.check(2)

    def test_np4(self):
        self.check(4)

    def test_it_keeps_no_record_without_a_run_folder(self):
        job = self.start(2, [str(BIN / "mpi_minimal")]).wait()
        self.assertEqual(0, job.code, job)

    def test_it_is_short(self):
        self.assertLess(len(SOURCE.read_text().splitlines()), 120)


if __name__ == "__main__":
    unittest.main()
