"""bench/stress.sh: trouble is a finding and leaves nothing behind, and a short run of it passes."""

import contextlib
import importlib.util
import io
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest
import unittest.mock

import jobs
from cluster import RUNTIME, needs_a_cluster
from jobs import ROOT, processes, strict_json, until
from stress_round import SEED, STEPS, GoodRecord, judge, plan, run

# The program itself, which is none of this name.
SPEC = importlib.util.spec_from_file_location("stress", ROOT / "bench" / "stress" / "__main__.py")
stress = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(stress)


class Survivors(unittest.TestCase):
    def test_a_process_that_outlives_its_job_is_found_and_ended(self):
        with tempfile.TemporaryDirectory() as folder:
            runner = run.Runner(run.Cluster(1), None, pathlib.Path(folder), None, time.monotonic() + 60, 0)
            job = runner.start(["sh", "-c", "setsid sleep 1000 & exit 0"])
            self.addCleanup(jobs.kill, job.marker)
            job.mpirun.wait(20)
            grace, run.GRACE = run.GRACE, 0.2
            try:
                (left,) = runner.survivors()
            finally:
                run.GRACE = grace
            self.assertIn("sleep 1000", left)
            self.assertEqual({}, processes(job.marker))


class Unreadable(unittest.TestCase):
    def test_a_job_that_leaves_no_record_is_a_finding(self):
        with tempfile.TemporaryDirectory() as folder:
            the_round = plan.make_round(SEED, 0, 2, 2, STEPS, "values")
            runner = run.Runner(run.Cluster(1), None, pathlib.Path(folder), the_round, time.monotonic() + 60, 0)
            runner.leg = lambda number, leg: runner.record["legs"].append(
                {**GoodRecord(the_round).legs[0], "late": None}) or True
            runner.job = type("Job", (), {"run_dir": None})()
            record = runner.run(lambda seen: self.fail("no reference then"), None)
        failures = judge.Judge(the_round, record).judge().failures
        self.assertIn("there is no events.jsonl", failures[0])


class Troubles(unittest.TestCase):
    """What goes wrong beside the jobs is a finding, and the figures are reported all the same."""

    def main(self, play, *words, up=lambda *_, **__: None):
        """Exit code, output and, if it is there, what --json says. `play` takes the place of a round's jobs."""
        with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
            said = pathlib.Path(folder) / "said.json"
            for target, name, value in ((stress, "missing", lambda _: ""), (stress.signal, "signal", lambda *_: None),
                                        (tempfile, "tempdir", folder), (run.jobs, "small_data", lambda *_: None),
                                        (run.Cluster, "do", up), (run.Runner, "run", play)):
                patches.enter_context(unittest.mock.patch.object(target, name, value))
            out = patches.enter_context(contextlib.redirect_stdout(io.StringIO()))
            patches.enter_context(contextlib.redirect_stderr(out))
            code = stress.main(["--attempts", str(STEPS), "--json", str(said), *words])
            return code, out.getvalue(), strict_json(said.read_text()) if said.exists() else None

    def test_trouble_in_a_later_round_fails_with_its_reason_and_all_figures(self):
        for trouble in (RuntimeError("launch/cluster.sh cut node1: no such host"),
                        subprocess.TimeoutExpired(["cluster.sh", "heal"], 120), ValueError("line 3 of departures"),
                        PermissionError("departures.jsonl"), AssertionError("NaN in departures.jsonl")):
            def play(runner, _omitted, _draw, trouble=trouble):
                if runner.round.number == 1:
                    raise trouble
                runner.record.update(GoodRecord(runner.round).record())
                return runner.record
            with self.subTest(trouble):
                code, out, said = self.main(play)
                self.assertEqual(1, code, out)
                self.assertRegex(out, r"\nstress: FAIL .*round 1:kill: it could not be played: ")
                self.assertRegex(out, r"\nrounds +2\n")
                self.assertFalse(said["passed"])
                self.assertIn(repr(trouble), said["reasons"][0])
                self.assertEqual([0, 1], [played["round"] for played in said["rounds"]])
                self.assertEqual([], said["rounds"][0]["failures"])
                self.assertGreater(said["figures"]["faults attributed"], 4)
                self.assertEqual(["round1"], [pathlib.Path(kept).name for kept in said["kept"]])

    def test_a_record_that_cannot_be_judged(self):
        def play(runner, _omitted, _draw):
            runner.record.update(GoodRecord(runner.round).record())
            del next(event for event in runner.record["events"] if "origins" in event)["origins"]
            return runner.record
        code, out, said = self.main(play, "--only", "0")
        self.assertEqual(1, code, out)
        self.assertIn("round 0:values: its record cannot be judged: KeyError('origins')", said["reasons"])

    def test_without_hosts_nothing_is_begun(self):
        def up(*_, **settings):
            if settings.get("check", True):
                raise RuntimeError("launch/cluster.sh up: needs root")
        code, out, said = self.main(None, up=up)
        self.assertEqual((64, None), (code, said), out)


class StressTest(unittest.TestCase):
    def setUp(self):
        needs_a_cluster(self)
        self.marker = f"stress-test-{os.getpid()}-{id(self)}"
        self.addCleanup(self.clean)

    def start(self, *words):
        """The marker is handed on to all processes but those of jobs, which have their own."""
        command = [str(word) for word in (ROOT / "bench" / "stress.sh", *words)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, start_new_session=True, env={**os.environ, jobs.MARKER: self.marker})

    def state(self, started):
        return RUNTIME / f"holdfast-cluster-stress{started.pid}"

    def clean(self):
        jobs.kill(self.marker)

    def assert_passes(self, *words, timeout):
        with tempfile.TemporaryDirectory() as folder:
            said = pathlib.Path(folder) / "said.json"
            started = self.start("--json", said, *words)
            try:
                out, _ = started.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                started.send_signal(signal.SIGTERM)
                out, _ = started.communicate(timeout=60)
                self.fail(f"not in time\n{out}")
            self.assertEqual(0, started.returncode, out)
            self.assertRegex(out.rstrip().splitlines()[-1], r"^stress: PASS ")
            self.assertFalse(self.state(started).exists(), out)
            return strict_json(said.read_text()), out


class ShortRun(StressTest):
    def test_a_round_with_a_kill_a_resume_and_a_rollback(self):
        said, out = self.assert_passes("--only", 1, "--replays", 1, "--attempts", 60, timeout=300)
        figures = said["figures"]
        self.assertTrue(said["passed"], out)
        self.assertEqual((1, 1, 1, 0, 0, 1), tuple(figures[name] for name in (
            "kills", "resumes", "rollbacks", "mismatches", "survivors", "bundles replayed")), out)
        self.assertGreater(figures["faults injected"], 4)
        self.assertEqual(figures["faults injected"], figures["faults attributed"])
        # In all attempts of the last job but for the one of which the update was undone.
        self.assertGreaterEqual(figures["proofs of replicas"], 60 - figures["proofs not counted, jobs cut short"])

    def test_ctrl_c_ends_the_jobs_and_takes_the_hosts_down(self):
        started = self.start("--only", 0)
        state = self.state(started)
        # Files of processes, since a job has a marker of its own.
        trains = lambda: [pid for pid, command in self.on_hosts(state).items() if "guarded_train" in command]
        until(trains, jobs.PATIENCE, "ranks at work")
        started.send_signal(signal.SIGINT)
        out, _ = started.communicate(timeout=60)
        self.assertEqual(130, started.returncode, out)
        self.assertFalse(state.exists(), out)
        self.assertEqual({}, self.on_hosts(state))

    def on_hosts(self, state):
        cluster = run.Cluster(1)
        cluster.state = state
        return cluster.processes()


class SlowRuns(StressTest):
    def test_a_minute_at_default_settings(self):
        said, out = self.assert_passes(timeout=400)
        self.assertGreaterEqual(len(said["rounds"]), 2, out)

    def test_one_host_and_two_at_once(self):
        others = self.start("--minutes", 0.5, "--hosts", 2, "--ranks-per-host", 1)
        self.assert_passes("--minutes", 0.5, "--hosts", 1, "--ranks-per-host", 2, timeout=400)
        out, _ = others.communicate(timeout=200)
        self.assertEqual(0, others.returncode, out)


class Refusals(unittest.TestCase):
    def test_wrong_usage_is_refused(self):
        for words, says in ((("--hosts", "0"), "above 0"), (("--hosts", "1", "--ranks-per-host", "1"), "2 ranks"),
                            (("--minutes", "0"), "--minutes"), (("--attempts", "5"), "--attempts"),
                            (("--seeds", "1"), "--seeds"), (("--seed", "x"), "--seed")):
            with self.subTest(words):
                done = subprocess.run([ROOT / "bench" / "stress.sh", *words], capture_output=True, text=True, timeout=60,
                                      check=False)
                self.assertEqual((64, ""), (done.returncode, done.stdout), done)
                self.assertIn(says, done.stderr)


if __name__ == "__main__":
    unittest.main()
