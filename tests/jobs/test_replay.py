"""The fewest samples that still make an attempt fail, and one factor at a time, on what real jobs have recorded."""

import hashlib
import re
import shutil
import subprocess
import unittest

from evidence import BATCH, NOT_REPLAYABLE, NOT_REPRODUCED, REPRODUCED, EvidenceTest
from jobs import BIN, PATIENCE, ROOT, JobTest, strict_json


class Example(JobTest):
    """launch/examples/replay_minimal.cc: no MPI, no libtorch."""

    def run_example(self, *words):
        return subprocess.run([str(word) for word in (BIN / "replay_minimal", *words)], capture_output=True, text=True,
                              timeout=PATIENCE, check=False)

    def test_the_example(self):
        run_dir = self.new_run_dir()
        trained = self.run_example(run_dir)
        self.assertEqual((0, 1), (trained.returncode, trained.stdout.count("attempt 50: ")), trained)
        bundle = run_dir / "incidents" / "e0001-a0000000050"
        self.assertEqual([bundle], list(bundle.parent.iterdir()))
        again = self.run_example("--replay", bundle)
        self.assertEqual((0, f"replay {bundle}: REPRODUCED"), (again.returncode, again.stdout.split("\n")[0]), again)
        shrunk = self.run_example("--shrink", bundle)
        self.assertIn("\nshrunk    1 of 16 samples: 0.11; ", shrunk.stdout)

    def test_it_is_short(self):
        source = ROOT / "launch" / "examples" / "replay_minimal.cc"
        self.assertLess(len(source.read_text().splitlines()), 120)


class Searches(EvidenceTest):
    def search(self, bundle, option, *settings, code=REPRODUCED):
        done = self.replay(bundle, *settings, options=[option])
        self.assert_replay(code, done)
        return done.stdout

    def line(self, text, word):
        found = re.findall(rf"^{word} +(.*)$", text, re.MULTILINE)
        self.assertEqual(1, len(found), text)
        return found[0]

    def factors(self, text):
        rows = re.findall(r"^factor +(\S+=\S+)( \(id \d+\))? +([A-Z_]+) ", text, re.MULTILINE)
        return {factor: result for factor, _, result in rows}

    def log(self, bundle):
        return [strict_json(line) for line in (bundle / "experiments.jsonl").read_text().splitlines()]

    def sample_ids(self, bundle, rank=1, micro=0):
        facts = {fact["name"]: fact["value"] for fact in self.parts(bundle)[rank]["facts"]}
        return facts[f"samples.{micro}"].split(",")

    def test_one_corrupt_record(self):
        """In the second of two micro-batches; all of it is on record, and again changes nothing."""
        job = self.capture("--accumulate", 2, "--fault", "corrupt-record,attempt=1,rank=1,micro=1", batch=16, steps=3)
        (bundle,) = self.bundles(job).values()
        said = self.search(bundle, "--shrink")
        shrunk = f"1 of 32 samples: 1.15 (id {self.sample_ids(bundle, micro=1)[15]}); without any one of them"
        self.assertTrue(self.line(said, "shrunk").startswith(shrunk), said)
        self.assertIn("first dirty input", self.line(said, "layers"))
        log = self.log(bundle)
        self.assertEqual(("shrunk", ["1.15"], 32, True), tuple(log[-1][key] for key in ("event", "samples", "of", "minimal")))
        self.assertEqual({self.manifest(bundle)["content_id"]}, {line["input"] for line in log})
        whole, none = log[:2]
        self.assertEqual(("REPRODUCED", "NOT_REPRODUCED", []), (whole["result"], none["result"], none["kept"]))
        self.assertNotEqual(whole["batch"], none["batch"])
        before = (bundle / "experiments.jsonl").read_bytes()
        self.assertEqual(said, self.search(bundle, "--shrink"))
        self.assertEqual(before, (bundle / "experiments.jsonl").read_bytes())
        self.assert_whole(job, 1)

    def test_no_sample_does_it(self):
        job = self.capture("--inject", "nan@loss,rank=1,attempt=1", steps=3)
        (bundle,) = self.bundles(job).values()
        said = self.search(bundle, "--shrink")
        self.assertEqual(f"0 of {BATCH} samples: it happens with all of them blanked, 2 replays", self.line(said, "shrunk"))
        self.search(bundle, "--shrink", "injected=off", code=NOT_REPRODUCED)
        said = self.search(bundle, "--one-factor")
        self.assertEqual("NOT_REPRODUCED", self.factors(said)["injected=off"], said)
        self.assertEqual("each takes it away: injected=off", self.line(said, "alone"))

    def test_one_factor_of_an_overflow_in_fp16(self):
        """It takes what overflows in one precision only, and where."""
        job = self.capture("--fault", "sum-overflow,attempt=1", "--precision", "fp16", "--loss-scaling", "off", steps=3)
        (bundle,) = self.bundles(job).values()
        said = self.search(bundle, "--one-factor")
        factors = self.factors(said)
        self.assertEqual(("NOT_REPRODUCED", "NOT_REPRODUCED"), (factors["precision=fp32"], factors["natural_faults=off"]), said)
        self.assertTrue(self.line(said, "alone").startswith("each takes it away: precision=fp32, natural_faults=off"), said)
        table = self.log(bundle)[-1]
        self.assertEqual("factors_tried", table["event"])
        self.assertEqual(factors, {row["factor"]: row["result"] for row in table["factors"]})

    def test_one_factor_of_an_optimizer_and_of_a_sample(self):
        # Two in a row: a third might be refused while these are written.
        job = self.capture("--optimizer", "adamw", "--eps", 0, "--fault", "dead-unit", "--fault",
                           "corrupt-record,attempt=1,rank=1", steps=2)
        bundles = self.bundles(job)
        said = self.search(bundles[0], "--one-factor")
        self.assertEqual("NOT_REPRODUCED", self.factors(said)["eps=1e-08"], said)
        said = self.search(bundles[1], "--one-factor")
        self.assertEqual("NOT_REPRODUCED", self.factors(said)[f"sample.0.{BATCH - 1}=0"], said)
        self.assertIn("\nbits      the same in all ", said)

    def test_of_gpt(self):
        """Of a window that is too much for the first block, whatever else is in the batch."""
        job = self.capture("--inject", "inf@forward,rank=1,attempt=1,index=0", "--fault", "corrupt-record,attempt=7,rank=1",
                           workload="gpt", steps=9)
        value, record = self.bundles(job).values()
        self.assertTrue(self.line(self.search(value, "--shrink"), "shrunk").startswith(f"0 of {BATCH} samples"))
        self.assertTrue(self.line(self.search(record, "--shrink"), "shrunk").startswith(f"0 of {BATCH} samples"))

    def test_a_state_beyond_the_quota_is_that_of_the_checkpoint(self):
        """Of the beginning, since an attempt has to be the first after it. Without it the attempt cannot be made."""
        job = self.train("--checkpoint-interval", 1000, "--evaluate", 1, "--inject", "nan@backward,rank=1,attempt=0",
                         policy="check_update: BEFORE evidence { bundle_quota_bytes: 40000 }", ranks=2, batch=BATCH, steps=2)
        (bundle,) = self.bundles(job).values()
        said = self.search(bundle, "--shrink")
        self.assertEqual("of checkpoint e0001-a0000000000", self.line(said, "state"))
        self.assertTrue(self.line(said, "shrunk").startswith(f"0 of {BATCH} samples"), said)
        moved = self.folder / bundle.name
        shutil.copytree(bundle, moved)
        done = self.replay(moved)
        self.assert_replay(NOT_REPLAYABLE, done)
        self.assertRegex(done.stdout, r"\nmissing   the state before the attempt \(\S+\); checkpoint e0001-a0000000000 of the "
                                      r"run is not in ")
        self.assert_replay(REPRODUCED, self.replay(moved, options=["--run-dir", job.run_dir]))

    def test_a_compact_record_with_its_data_and_its_checkpoint(self):
        job = self.train("--checkpoint-interval", 1000, "--evaluate", 1, "--fault", "corrupt-record,attempt=0,rank=1",
                         policy="evidence { full_incidents: 0 }", ranks=2, batch=BATCH, steps=2)
        (bundle,) = self.bundles(job).values()
        self.assert_replay(NOT_REPLAYABLE, self.replay(bundle))
        done = self.replay(bundle, options=["--shrink", "--data", self.data])
        self.assert_replay(REPRODUCED, done)
        self.assertTrue(self.line(done.stdout, "shrunk").startswith(f"1 of {BATCH} samples: 0.{BATCH - 1} "), done)
        other = self.replay(bundle, options=["--data", "/usr/share/common-licenses"])
        self.assert_replay(NOT_REPLAYABLE, other)

    def test_a_checkpoint_that_is_not_the_one_the_bundle_names(self):
        """Same epoch, same attempt, clean, and of another run: told by the digest of its manifest."""
        settings = {"ranks": 2, "batch": BATCH, "policy": "evidence { full_incidents: 0 }"}
        first, other = (self.train("--checkpoint-interval", 1000, "--evaluate", 1, "--seed", seed, steps=2, **settings)
                        for seed in (1, 2))
        job = self.train("--checkpoint-interval", 1000, "--evaluate", 1, "--resume", "--fault",
                         "corrupt-record,attempt=2,rank=1", run_dir=first.run_dir, steps=4, **settings)
        (bundle,) = (job.run_dir / "incidents").iterdir()
        name = "e0001-a0000000002"
        generation = first.run_dir / "checkpoints" / name
        digest = hashlib.sha256((generation / "manifest.pb").read_bytes()).hexdigest()
        (published,) = [event for event in job.events
                        if event["event"] == "checkpoint_published" and event["generation"] == name]
        manifest = strict_json((bundle / "manifest.json").read_text())
        self.assertEqual((name, digest, digest),
                         (manifest["generation"], manifest["generation_sha256"], published["manifest_sha256"]))
        self.assertIn(digest, (bundle / "report.md").read_text())
        self.assert_replay(REPRODUCED, self.replay(bundle, options=["--data", self.data]))
        shutil.rmtree(generation)
        shutil.copytree(other.run_dir / "checkpoints" / name, generation)
        done = self.replay(bundle, options=["--data", self.data])
        self.assert_replay(NOT_REPLAYABLE, done)
        self.assertIn("checkpoint e0001-a0000000002 of the run is another than the one that the bundle names", done.stdout)

    def test_usage(self):
        for options in (["--shrink"], ["--one-factor"]):
            self.assertEqual(64, self.launch(options).returncode, options)
        self.assertEqual(64, self.launch(["--replay", "nowhere", "--shrink", "--one-factor"]).returncode)


if __name__ == "__main__":
    unittest.main()
