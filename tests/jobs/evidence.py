"""Bundles of incidents, as jobs leave them in RUN_DIR/incidents, and attempts that are made again from them."""

import concurrent.futures
import itertools
import os
import re
import subprocess

from jobs import BIN, PATIENCE, JobTest, strict_json

REPRODUCED, DIFFERENT, NOT_REPRODUCED, NOT_REPLAYABLE = range(4)  # exit codes of --replay
RESULTS = ("REPRODUCED", "DIFFERENT", "NOT_REPRODUCED", "NOT_REPLAYABLE")


LICENCE = "/usr/share/common-licenses/GPL-3"
BATCH = 4
ALL_IN_FULL = ("max_total_skips: 1000 max_consecutive_skips: 1000 on_error: SKIP check_update: BEFORE "
               "evidence { full_incidents: 100 }")


class EvidenceTest(JobTest):
    def trainer(self, *options, workload="fashion-mnist", **settings):
        if workload == "gpt":
            settings["data"] = LICENCE
        words = super().trainer(*options, **settings)
        words[words.index("fashion-mnist")] = workload
        return words

    def capture(self, *options, policy=ALL_IN_FULL, ranks=2, batch=BATCH, **settings):
        return self.train("--checkpoint-interval", 0, "--evaluate", 1, *options, policy=policy, ranks=ranks,
                          batch=batch, **settings)

    def bundles(self, job):
        """{attempt: folder}, and nothing else is there."""
        found = {}
        for path in sorted((job.run_dir / "incidents").iterdir()):
            name = re.fullmatch(r"e0001-a(\d{10})", path.name)
            self.assertTrue(name and path.is_dir(), path)
            found[int(name[1])] = path
        return found

    def manifest(self, bundle):
        return strict_json((bundle / "manifest.json").read_text())

    def parts(self, bundle):
        """{rank: what it contributed}"""
        return {part["rank"]: part for part in self.manifest(bundle)["parts"]}

    def origin_ranks(self, bundle):
        return [rank for rank, part in self.parts(bundle).items() if part["is_origin"]]

    def holdfast(self, *words, code=0):
        done = subprocess.run([BIN / "holdfast", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True, timeout=PATIENCE, check=False)
        self.assertEqual(code, done.returncode, done)
        return done.stdout

    def assert_whole(self, job, count):
        """Every byte of every bundle of the run is what was written."""
        said = strict_json(self.holdfast("incident", "verify", job.run_dir, "--json"))
        self.assertEqual((True, [True] * count), (said["clean"], [bundle["clean"] for bundle in said["bundles"]]), said)

    def launch(self, words):
        """guarded_train, without mpirun."""
        return subprocess.run([str(word) for word in (BIN / "guarded_train", *words)], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False)

    def replay(self, bundle, *settings, options=()):
        return self.launch(["--replay", bundle, *(word for text in settings for word in ("--set", text)), *options])

    def assert_replay(self, code, done):
        self.assertEqual((code, RESULTS[code]), (done.returncode, done.stdout.split("\n")[0].rpartition(": ")[2]), done)
        if code != NOT_REPLAYABLE:
            self.assertIn("\nweights   untouched\n", done.stdout)

    def assert_replays(self, *wanted):
        """Each: (exit code, bundle, setting...)."""
        with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count(), 8)) as pool:
            done = list(pool.map(lambda one: self.replay(*one[1:]), wanted))
        for (code, bundle, *settings), one in zip(wanted, done):
            with self.subTest(bundle=bundle.name, settings=settings):
                self.assert_replay(code, one)
        return done

    def failures(self, job):
        return [event for event in job.events if event["event"] == "evidence_failed"]

    def assert_like_omitted(self, job, attempts, *options, **settings):
        """Neither the incidents nor what was kept of them have changed anything."""
        omitted = [word for attempt in attempts for word in ("--omit-update", attempt)]
        reference = self.train("--checkpoint-interval", 0, "--evaluate", 1, "--print-digests", *omitted, *options,
                               **{"ranks": 2, "batch": BATCH, **settings})
        self.assert_same_state(job, reference)


# Attempts between two incidents: a bundle is written meanwhile, and does not wait behind another.
APART = 6


def attempts(count):
    """Of the incidents."""
    return list(range(1, 1 + count * APART, APART))


def steps(count):
    return 1 + count * APART


def injections(stages, rank=1):
    """One value in each of attempts(): options."""
    values = itertools.cycle(("nan", "inf", "-inf"))
    options = []
    for attempt, stage in zip(attempts(len(stages)), stages):
        by_all = stage in ("reduction", "optimizer")
        options.append(f"--inject={next(values)}@{stage}{'' if by_all else f',rank={rank}'},attempt={attempt}")
    return options
