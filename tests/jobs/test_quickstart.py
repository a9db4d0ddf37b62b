"""The default job, as launch/quickstart.sh runs it, and the statement that the script makes about it."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest
import uuid

from jobs import BIN, PATIENCE, ROOT, environment, kill, processes

# What a run leaves when everything went as it should, in few words; a test changes one thing.
SKIP = {"event": "attempt_skipped", "attempt": 300, "update": 300, "stage": "backward", "nan": 1,
        "origins": [{"rank": 2, "host": "h", "stage": "backward", "tensor": "conv1.weight", "index": 0, "nan": 1}]}
FINISHED = {"event": "run_finished", "attempt": 600, "update": 599}


class Quickstart(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="holdfast-quickstart-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        # A copy, so that run folders do not pile up beside the build.
        (self.folder / "launch").mkdir()
        self.script = shutil.copy(ROOT / "launch" / "quickstart.sh", self.folder / "launch")

    def run_script(self, programs, path=""):
        marker = uuid.uuid4().hex
        self.addCleanup(kill, marker)
        env = environment(marker, self.folder)
        if path:
            env["PATH"] = f"{path}:{env['PATH']}"
        done = subprocess.run([self.script, "--programs", programs], env=env, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=2 * PATIENCE, check=False)
        self.assertEqual({}, processes(marker), done.stdout)
        return done

    def test_the_default_job_skips_once_and_learns(self):
        done = self.run_script(BIN)
        self.assertEqual(0, done.returncode, done.stdout)
        statement = done.stdout[done.stdout.rindex("What happened:"):]
        for text in ("4 ranks", "attempt 300", "rank 2", "stage backward", "599 updates"):
            self.assertIn(text, " ".join(statement.split()), done.stdout)
        (accuracy,) = re.findall(r"test accuracy ([0-9.]+) %", statement)
        self.assertGreaterEqual(float(accuracy), 85.0)
        print(statement)

    def pretend(self, skip=None, finished=None, more=(), accuracy="0.8800"):
        """Runs the script with an mpirun that leaves these events behind."""
        events = [{"event": "run_started"}, {**SKIP, **(skip or {})}, *more, {**FINISHED, **(finished or {})}]
        (self.folder / "events").write_text("".join(json.dumps(event) + "\n" for event in events))
        fakes = self.folder / "fakes"
        fakes.mkdir(exist_ok=True)
        (fakes / "mpirun").write_text(
            '#!/bin/sh\nwhile [ "$1" != --run-dir ]; do shift; done\n'
            f'mkdir -p "$2" && cp "{self.folder}/events" "$2/events.jsonl" && echo "test accuracy {accuracy}"\n')
        os.chmod(fakes / "mpirun", 0o755)
        return self.run_script(fakes, path=fakes)

    def test_the_statement_comes_from_the_record(self):
        done = self.pretend(skip={"origins": [{**SKIP["origins"][0], "host": "elsewhere", "tensor": "a\x1b[2Jb",
                                               "index": 17}]})
        self.assertEqual(0, done.returncode, done.stdout)
        self.assertIn("elsewhere", done.stdout)
        self.assertIn("b[17]", done.stdout)
        self.assertNotIn("\x1b", done.stdout)

    def test_another_event_than_expected_is_not_passed_over(self):
        for says, changes in (("skipped attempts", {"more": [SKIP]}), ("skipped attempt", {"skip": {"attempt": 299}}),
                              ("stage", {"skip": {"stage": "loss"}}), ("NaN count", {"skip": {"nan": 2}}),
                              ("ranks it came from", {"skip": {"origins": []}}),
                              ("ranks it came from", {"skip": {"origins": [{**SKIP["origins"][0], "rank": 1}]}}),
                              ("last event", {"finished": {"event": "aborted"}}),
                              ("updates", {"finished": {"update": 600}}), ("accuracy", {"accuracy": "0.8499"}),
                              ("accuracy", {"accuracy": "nan"}), ("NaN", {"skip": {"loss": float("nan")}})):
            with self.subTest(says):
                done = self.pretend(**changes)
                self.assertEqual(1, done.returncode, done.stdout)
                self.assertRegex(done.stdout, f"NOT AS EXPECTED: .*{says}")
                self.assertNotIn("What happened", done.stdout)


if __name__ == "__main__":
    unittest.main()
