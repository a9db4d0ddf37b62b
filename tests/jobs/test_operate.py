"""Looking after a run: metrics while it goes and when it has ended, `holdfast status`, `stop`, `policy check`."""

import contextlib
import fcntl
import json
import os
import pathlib
import re
import socket
import subprocess
import tempfile
import time
import unittest
import urllib.error
import urllib.request

from jobs import BIN, ROOT, JobTest, holdfast, strict_json, until

SAMPLE = re.compile(r'^([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (NaN|[+-]Inf|-?[0-9][0-9.e+-]*)$')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\]|\\.)*)"')


def parse_metrics(text):
    """{name: {labels: value}}, read as strictly as the format is defined."""
    assert text.endswith("\n"), text[-100:]
    found, types = {}, {}
    for line in text.split("\n")[:-1]:
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in types, f"{name} is there twice"
            types[name] = None
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert types[name] is None and kind in ("counter", "gauge"), line
            assert (kind == "counter") == name.endswith("_total"), line
            types[name] = kind
            found[name] = {}
        else:
            match = SAMPLE.match(line)
            assert match, line
            assert match[1] == list(found)[-1], f"{line} is not with its kind"
            labels = tuple(LABEL.findall(match[2] or ""))
            assert labels not in found[match[1]], f"twice: {line}"
            found[match[1]][labels] = float(match[3].replace("Inf", "inf"))
    return found


def total(metrics, name, /, **labels):
    return sum(value for key, value in metrics[name].items() if set(labels.items()) <= set(key))


class Metrics(JobTest):
    def metrics(self, job):
        return parse_metrics((job.run_dir / "metrics.prom").read_text())

    def test_the_metrics_of_a_run_agree_with_its_record(self):
        job = self.train("--precision", "fp16", "--inject", "nan@backward,rank=1,attempt=3", "--inject",
                         "inf@loss,rank=0,attempt=6", "--inject", "value=3e38@reduction,attempt=9", ranks=2, steps=16)
        metrics = self.metrics(job)
        skips = job.skips()
        self.assertEqual({"backward", "loss", "reduction"}, {skip["stage"] for skip in skips}, job)
        self.assertEqual(16, total(metrics, "holdfast_attempts_total"))
        self.assertEqual(16 - len(skips), total(metrics, "holdfast_updates_total"))
        self.assertEqual(len(skips), total(metrics, "holdfast_skips_total"))
        self.assertEqual(len(skips), total(metrics, "holdfast_incidents_total"))
        for stage in {skip["stage"] for skip in skips}:
            self.assertEqual(sum(skip["stage"] == stage for skip in skips),
                             total(metrics, "holdfast_skips_total", stage=stage))
        of_class = [skip for skip in skips if skip["stage"] == "backward" and skip["nan"] and
                    not skip["pos_inf"] + skip["neg_inf"]]
        self.assertTrue(of_class, job)
        self.assertEqual(len(of_class), total(metrics, "holdfast_skips_total", stage="backward", **{"class": "nan"}))
        self.assertEqual(1, total(metrics, "holdfast_skips_total", stage="loss", **{"class": "pos_inf"}))
        calibrated = sum(event["skips"] for event in job.events if event["event"] == "calibrated")
        self.assertEqual(calibrated, total(metrics, "holdfast_calibration_skips_total"))
        scales = [event["to"] for event in job.events if event["event"] == "scale_changed"]
        self.assertEqual(scales[-1], total(metrics, "holdfast_loss_scale"))
        charged = len(skips) - calibrated
        self.assertEqual(100 - charged, total(metrics, "holdfast_skip_budget_left", budget="total"))
        self.assertEqual(0, total(metrics, "holdfast_running"))
        self.assertGreater(total(metrics, "holdfast_watched_value", name="gradient_norm"), 0)
        self.assertGreater(total(metrics, "holdfast_headroom_used_ratio", tensor="gradient"), 0)
        rules = (ROOT / "launch" / "alerts" / "holdfast.rules.yml").read_text()
        used = set(re.findall(r"\bholdfast_\w+", rules))
        self.assertGreaterEqual(len(used), 8)
        self.assertLessEqual(used, set(metrics), "an alert on a metric that does not exist")

    def test_a_port_that_is_in_use_is_refused_by_all_ranks(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            job = self.train("--metrics-port", port, ranks=2, code=64, watch_ranks=True)
        self.assertIn(f"cannot serve metrics on 127.0.0.1 port {port}", job.err)
        self.assertIn("Nothing was trained", job.err)

    def scrape(self, job):
        (url,) = re.findall(r"^metrics: (http://127\.0\.0\.1:\d+/metrics)$", job.out, re.MULTILINE)
        with urllib.request.urlopen(url, timeout=10) as answer:
            self.assertTrue(answer.headers["Content-Type"].startswith("text/plain; version=0.0.4"))
            return parse_metrics(answer.read().decode())

    def test_a_live_run_is_scraped_looked_at_and_stopped(self):
        run_dir = self.new_run_dir()
        command = self.trainer("--metrics-port", 0, "--inject", "nan@backward,rank=1,attempt=2", run_dir=run_dir,
                               steps=10**6)
        job = self.start(2, command, run_dir)
        job.wait_for_attempts()

        until(lambda: total(self.scrape(job), "holdfast_skips_total") == 1, 20, "the skip of attempt 2")
        self.assertEqual(1, total(self.scrape(job), "holdfast_running"))
        (url,) = re.findall(r"^metrics: (\S+)$", job.out, re.MULTILINE)
        with self.assertRaises(urllib.error.HTTPError):
            urllib.request.urlopen(url.replace("/metrics", "/"), timeout=10)

        # Those that connect, ask and never read, and those that never ask, do not hold training up.
        port = int(re.search(r":(\d+)/", url)[1])
        stalled = [socket.create_connection(("127.0.0.1", port)) for _ in range(50)]
        for connection in stalled[::2]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        before = total(self.scrape(job), "holdfast_attempts_total")
        time.sleep(1.5)
        made = total(self.scrape(job), "holdfast_attempts_total") - before
        for connection in stalled:
            connection.close()
        # A step that waited for one of them would take their three seconds. No finer, on a machine that is shared.
        self.assertGreaterEqual(made, 3, "attempts in a second and a half, beside stalled scrapers")

        def ranks_were_heard():
            shown = strict_json(holdfast("status", run_dir, "--json").stdout)
            return shown if all(rank["phase"] for rank in shown["ranks"]) else None

        shown = until(ranks_were_heard, 20, "a report of each rank")
        self.assertEqual("running", shown["state"])
        self.assertEqual([0, 1], [rank["rank"] for rank in shown["ranks"]])
        self.assertEqual(job.pids(), {rank["rank"]: rank["pid"] for rank in shown["ranks"]})
        self.assertGreater(shown["attempts_per_second"], 0)
        self.assertGreaterEqual(shown["replica_proofs"], 1)
        self.assertEqual((2, "backward"), (shown["last_incident"]["attempt"], shown["last_incident"]["stage"]))
        self.assertEqual({"left": 99, "limit": 100}, shown["budgets"]["total"])
        self.assertEqual([], shown["problems"])
        text = holdfast("status", run_dir).stdout
        self.assertRegex(text, r": running, host=\S+ pid=\d+")
        self.assertIn("99 of 100 skips in total, 10 of 10 in a row", text)
        self.assertRegex(text, r"\n  proofs +\d+ since the start in which all replicas agreed\n")
        self.assertRegex(text, r"\n +1 \S+ +\d+ +\d+ +(begin|observe|reduce|decide|update|outside) +\d+\.\d s before")

        done = holdfast("stop", run_dir)
        self.assertEqual(0, done.returncode, done)
        self.assertIn("stopped: exit code 86", done.stdout)
        self.assertEqual(86, job.wait().code, job)
        *_, asked, stopped = self.assert_record(job, "run_started", "attempt_skipped", "stop_requested", "stopped")
        self.assertIn(f"uid={os.getuid()} ", asked["by"])
        shown = strict_json(holdfast("status", run_dir, "--json").stdout)
        self.assertEqual(("stopped", 86, stopped["attempt"], None),
                         (shown["state"], shown["exit_code"], shown["attempt"], shown["holder"]))
        last = self.metrics(job)
        self.assertEqual(stopped["update"], total(last, "holdfast_updates_total"))
        self.assertEqual(0, total(last, "holdfast_running"))
        self.assertEqual(64, holdfast("stop", run_dir).returncode)
        # Who held the folder since and left no record of it has no part in that end: such as a start that was refused.
        with open(run_dir / "lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.truncate(0)
            lock.write("host=a pid=1 run=1\n")
            lock.flush()
            other = subprocess.Popen([BIN / "holdfast", "stop", run_dir], text=True, stdout=subprocess.PIPE)
            until((run_dir / "stop").exists, 20, "the request")
        out, _ = other.communicate(timeout=20)
        self.assertIn("holds no record of its end", out)
        self.assertNotIn("86", out)
        # Nothing of the request is left for whoever resumes.
        self.train("--resume", ranks=1, run_dir=run_dir, steps=stopped["attempt"] + 2)

    def test_a_run_that_lost_a_rank_shows_who_was_missing(self):
        job = self.train("--inject", "hang@forward,rank=1,attempt=3", ranks=2, code=84,
                         policy="attempt_deadline_seconds: 1 ticket: 'RUN-142'")
        shown = strict_json(holdfast("status", job.run_dir, "--json").stdout)
        self.assertEqual(("gone", None), (shown["state"], shown["exit_code"]))
        self.assertEqual([1], [rank["rank"] for rank in shown["departure"]["missing"]])
        text = holdfast("status", job.run_dir).stdout
        self.assertRegex(text, r"rank 1 (stuck|silent) \(host \S+, process \d+\), attempt 3, phase \w+")
        self.assertIn("RUN-142", text)

    def test_an_aborted_run_shows_what_has_to_be_acknowledged(self):
        job = self.train("--inject", "nan@backward,rank=1,attempt=2", ranks=2, code=81, policy="on_first: ABORT")
        text = holdfast("status", job.run_dir).stdout
        self.assertIn(": aborted, exit code 81", text)
        self.assertIn(f"holdfast ack {job.run_dir} --owner", text)
        # What files hold cannot act on the terminal of who reads them.
        events = job.run_dir / "events.jsonl"
        events.write_text(events.read_text().replace("1 non-finite value", "\\u001b[31m\\nred"))
        text = holdfast("status", job.run_dir).stdout
        self.assertNotIn("\x1b", text)
        self.assertIn("\\x1b[31m\\x0ared", text)
        for name in ("state", "events.jsonl"):
            (job.run_dir / name).write_bytes(b"\x00\xff{[" * 100)
            done = holdfast("status", job.run_dir)
            self.assertIn(done.returncode, (0, 64), done)
            self.assertTrue(name in done.stdout + done.stderr, done)


class Commands(unittest.TestCase):
    def setUp(self):
        temp = tempfile.TemporaryDirectory(prefix="holdfast-commands-")
        self.addCleanup(temp.cleanup)
        self.folder = pathlib.Path(temp.name)

    @contextlib.contextmanager
    def locked_folder(self, holder):
        """A run folder that is held, as a run does, but with an earlier holder's name: gives what writes another."""
        path = self.folder / "lock"
        path.write_text(holder)
        with open(path, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield path.write_text

    def stop_in_background(self, *options):
        stop = subprocess.Popen([BIN / "holdfast", "stop", self.folder, *options], text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE)
        self.addCleanup(stop.kill)
        return stop

    def test_a_run_that_is_just_starting_is_asked_under_its_own_name(self):
        for earlier in ("host=a pid=1 run=1\n", "", "host=b pid="):
            with self.subTest(earlier), self.locked_folder(earlier) as write_name:
                stop = self.stop_in_background("--timeout", "0")
                time.sleep(0.1)
                write_name("host=b pid=2 run=2\n")
                out, err = stop.communicate(timeout=20)
                self.assertEqual((1, ""), (stop.returncode, err), out)
                self.assertIn("asked the run to stop: host=b pid=2 run=2\n", out)
                self.assertEqual("host=b pid=2 run=2", (self.folder / "stop").read_text().splitlines()[0])

    def test_a_run_that_does_not_say_its_name_is_not_asked(self):
        with self.locked_folder(""):
            done = holdfast("stop", self.folder)
        self.assertEqual((64, ""), (done.returncode, done.stdout))
        self.assertIn("just starting", done.stderr)
        self.assertIn("try again", done.stderr)
        self.assertFalse((self.folder / "stop").exists())

    def test_a_start_that_was_refused_is_no_run_to_stop(self):
        with self.locked_folder("host=a pid=1 run=1\n"):
            stop = self.stop_in_background()
            time.sleep(0.1)
        out, err = stop.communicate(timeout=20)
        self.assertEqual((64, ""), (stop.returncode, out))
        self.assertIn("no live run holds", err)
        self.assertFalse((self.folder / "stop").exists())

    def test_another_run_in_the_folder_is_not_the_end_of_the_one_that_was_asked(self):
        with self.locked_folder("host=a pid=1 run=1\n") as write_name:
            stop = self.stop_in_background()
            until((self.folder / "stop").exists, 20, "the request")
            write_name("host=b pid=2 run=2\n")
            out, err = stop.communicate(timeout=20)
        self.assertEqual((1, ""), (stop.returncode, err), out)
        self.assertIn("another holds the folder (host=b pid=2 run=2): to stop it, ask again", out)

    def test_policy_check(self):
        good = self.folder / "good"
        good.write_text("max_total_skips: 7")
        done = holdfast("policy", "check", good)
        self.assertEqual(0, done.returncode, done)
        self.assertIn("max_total_skips: 7\nmax_consecutive_skips: 10\n", done.stdout)
        shown = strict_json(holdfast("policy", "check", good, "--json").stdout)
        self.assertEqual((True, "7", "SKIP"),
                         (shown["valid"], shown["policy"]["max_total_skips"], shown["policy"]["on_first"]))
        # What was printed is a policy itself, the same one.
        again = self.folder / "again"
        again.write_text(json.dumps(shown["policy"]))
        self.assertEqual(done.stdout, holdfast("policy", "check", again).stdout)

        bad = self.folder / "bad"
        bad.write_text("max_skips: 7")
        done = holdfast("policy", "check", bad)
        self.assertEqual((64, ""), (done.returncode, done.stdout))
        self.assertIn("max_skips", done.stderr)
        done = holdfast("policy", "check", bad, "--json")
        self.assertEqual(64, done.returncode)
        self.assertIn("max_skips", strict_json(done.stdout)["reason"])
        self.assertEqual(64, holdfast("policy", "check", self.folder / "none").returncode)

    def test_help_and_refusals(self):
        for words in ([], ["status"], ["stop"], ["ack"], ["policy"], ["policy", "check"], ["completion"]):
            done = holdfast(*words, "--help")
            self.assertEqual((0, ""), (done.returncode, done.stderr), words)
            if words != ["policy", "check"]:
                self.assertRegex(done.stdout, r"Examples?[:,]", words)
            self.assertIn("Exit codes:", done.stdout, words)
        for words in (["status"], ["status", self.folder], ["stop", self.folder], ["stop", self.folder / "none"],
                      ["policy"], ["completion", "fish"], ["frob"], []):
            done = holdfast(*words)
            self.assertEqual((64, ""), (done.returncode, done.stdout), words)
            self.assertTrue(done.stderr.startswith("holdfast: "), done)

    def test_completion(self):
        script = holdfast("completion", "bash").stdout
        ask = ('COMP_WORDS=({}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _holdfast; echo "${{COMPREPLY[@]}}"')
        for words, expected in (("holdfast st", "status stop"), ("holdfast policy ch", "check"),
                                ("holdfast policy check --j", "--json"), ("holdfast ack runs/x --no", "--note"),
                                ("holdfast stop --t", "--timeout")):
            done = subprocess.run(["bash", "-c", script + ask.format(words)], capture_output=True, text=True,
                                  timeout=20)
            self.assertEqual((expected, ""), (done.stdout.strip(), done.stderr), words)


if __name__ == "__main__":
    unittest.main()
