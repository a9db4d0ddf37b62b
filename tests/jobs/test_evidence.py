"""What a job keeps of an incident, in RUN_DIR/incidents."""

import array
import ctypes
import gzip
import os
import shutil
import signal
import struct
import subprocess
import unittest

from evidence import (APART, BATCH, NOT_REPLAYABLE, NOT_REPRODUCED, REPRODUCED, EvidenceTest, attempts, injections, steps)
from jobs import HOST, strict_json, wait_for_stop

SEED = 1  # the trainer's default


def named(values):
    return {value["name"]: value["value"] for value in values}


def read_tensors(path):
    """A safetensors file as {name: (dtype, shape, bytes)}."""
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = strict_json(whole[8:8 + size].decode("utf-8"))
    header.pop("__metadata__", None)
    data = whole[8 + size:]
    return {name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in header.items()}


class Sampler:
    """launch/train/sampler.h, from its description: which samples a rank has, and the key of its random numbers."""

    ALL = (1 << 64) - 1

    def __init__(self, size, ranks):
        self.share = size // ranks
        key = self.mix(self.mix(SEED ^ 0x7065726d75746174) ^ 0)  # of the first pass over the data
        self.order = list(range(size))
        for i in range(size, 1, -1):
            other = self.mix(key ^ i) % i
            self.order[i - 1], self.order[other] = self.order[other], self.order[i - 1]

    @classmethod
    def mix(cls, x):
        x = (x + 0x9e3779b97f4a7c15) & cls.ALL
        x = ((x ^ (x >> 30)) * 0xbf58476d1ce4e5b9) & cls.ALL
        x = ((x ^ (x >> 27)) * 0x94d049bb133111eb) & cls.ALL
        return x ^ (x >> 31)

    def batch(self, rank, attempt):
        assert (attempt + 1) * BATCH <= self.share, "of the first pass only"
        begin = rank * self.share + attempt * BATCH
        return self.order[begin:begin + BATCH]

    def rng_key(self, rank, attempt):
        return self.mix(self.mix(self.mix(self.mix(SEED) ^ rank) ^ attempt) ^ 0)


class Bundles(EvidenceTest):
    """What is kept, of whom."""

    def pixels(self, ids):
        """What the trainer makes of images, in floats of 32 bits."""
        def rounded(value):
            return ctypes.c_float(value).value

        mean, deviation = rounded(0.2860), rounded(0.3530)
        known = [rounded(rounded(rounded(pixel / 255) - mean) / deviation) for pixel in range(256)]
        images = gzip.decompress((self.data / "train-images-idx3-ubyte.gz").read_bytes())[16:]
        return array.array("f", [known[pixel] for i in ids for pixel in images[i * 784:(i + 1) * 784]]).tobytes()

    def labels(self, ids):
        labels = gzip.decompress((self.data / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
        return array.array("q", [labels[i] for i in ids]).tobytes()

    def assert_batch(self, bundle, sampler, rank, attempt):
        """It is the one that the sampler gives this rank for this attempt, number by number."""
        ids = sampler.batch(rank, attempt)
        facts = named(self.parts(bundle)[rank]["facts"])
        self.assertEqual((",".join(map(str, ids)), str(sampler.rng_key(rank, attempt))),
                         (facts["samples.0"], facts["rng_key.0"]))
        tensors = read_tensors(bundle / f"rank-{rank:05}.safetensors")
        self.assertEqual(("F32", [BATCH, 1, 28, 28], self.pixels(ids)), tensors["batch.0/images"])
        self.assertEqual(("I64", [BATCH], self.labels(ids)), tensors["batch.0/labels"])

    def test_case_26_the_ranks_that_saw_it(self):
        job = self.capture("--inject", "nan@backward,rank=7,attempt=1,tensor=conv2.weight,index=last",
                           "--inject", "inf@forward,rank=3,attempt=5,index=5",
                           "--inject", "inf@forward,rank=6,attempt=5,index=9", ranks=8, steps=7)
        one, two = self.bundles(job).values()
        sampler = Sampler(self.TRAIN_SAMPLES, 8)
        last = self.PARAMETERS["conv2.weight"] - 1
        self.assertEqual([(7, "conv2.weight", last, 1, 0)], self.places(one))
        self.assertEqual([7], self.origin_ranks(one))
        self.assert_batch(one, sampler, 7, 1)
        self.assertEqual([(3, "output", 5, 0, 1), (6, "output", 9, 0, 1)], self.places(two))
        self.assertEqual([3, 6], self.origin_ranks(two))
        for rank in (3, 6):
            self.assert_batch(two, sampler, rank, 5)
        # Of rank 0 its state; of nobody else anything.
        self.assertEqual(["manifest.json", "manifest.pb", "rank-00000.safetensors", "rank-00003.safetensors",
                          "rank-00006.safetensors", "report.json", "report.md"],
                         sorted(path.name for path in two.iterdir()))
        self.assert_whole(job, 2)

    def places(self, bundle):
        return [tuple(origin[key] for key in ("rank", "tensor", "index", "nan", "pos_inf"))
                for origin in self.manifest(bundle)["origins"]]

    def test_case_33_one_device_three_times(self):
        job = self.capture("--inject", "nan@backward,rank=2,every=5,tensor=norm1.bias,index=1", ranks=4, steps=16)
        bundles = list(self.bundles(job).values())
        self.assertEqual(3, len(bundles))
        for count, bundle in enumerate(bundles, 1):
            (origin,) = self.manifest(bundle)["origins"]
            self.assertEqual((2, HOST, "norm1.bias", 1), tuple(origin[k] for k in ("rank", "host", "tensor", "index")))
            self.assertIn(HOST, origin["device"])
            self.assertEqual(count == 3, origin["hardware_suspect"])
            report = (bundle / "report.md").read_text()
            (row,) = [line for line in report.splitlines() if line.startswith(f"| 2 | `{HOST}` | `{origin['device']}`")]
            self.assertEqual(count == 3, row.endswith("| **yes** |"), row)
            if count < 3:
                self.assertTrue(row.endswith("| no |"), row)
        boundary = strict_json((bundles[2] / "report.json").read_text())["boundary"]
        self.assertEqual((2, HOST, origin["device"]), tuple(boundary[key] for key in ("rank", "host", "device")))

    def test_case_28_classes_of_a_loss_in_strict_json(self):
        job = self.capture(*injections(("loss",) * 3), steps=steps(3))
        for bundle, loss, counts in zip(self.bundles(job).values(), ("nan", "inf", "-inf"),
                                        ((1, 0, 0), (0, 1, 0), (0, 0, 1)), strict=True):
            manifest = self.manifest(bundle)
            self.assertEqual((loss, *counts), tuple(manifest[key] for key in ("loss", "nan", "pos_inf", "neg_inf")))
            strict_json((bundle / "report.json").read_text())
            self.holdfast("incident", "validate", bundle / "report.json")
        self.assert_whole(job, 3)

    def test_later_incidents_are_compact(self):
        job = self.capture(*injections(("loss",) * 3), steps=steps(3),
                           policy="max_consecutive_skips: 100 evidence { full_incidents: 1 }")
        full, *compact = self.bundles(job).values()
        self.assertEqual([False, True, True], [self.manifest(bundle)["compact"] for bundle in (full, *compact)])
        for bundle in compact:
            self.assertEqual(["manifest.json", "manifest.pb", "report.json", "report.md"],
                             sorted(path.name for path in bundle.iterdir()))
        _, done = self.assert_replays((REPRODUCED, full), (NOT_REPLAYABLE, compact[0]))
        self.assertIn("\nmissing   the batch of rank 1 (the bundle is compact: it holds no tensors)\n",
                      done.stdout)
        self.assert_whole(job, 3)

    def test_what_is_damaged_is_not_replayed(self):
        job = self.capture(*injections(("loss",)), steps=3)
        (bundle,) = self.bundles(job).values()
        damaged = []
        for path in sorted(bundle.iterdir()):
            copy = self.folder / f"damaged-{path.name}" / bundle.name
            shutil.copytree(bundle, copy)
            whole = bytearray(path.read_bytes())
            whole[len(whole) // 2] ^= 1
            (copy / path.name).write_bytes(whole)
            damaged.append(copy)
        self.assertEqual(6, len(damaged))
        shutil.copytree(bundle, self.folder / "whole" / bundle.name)
        *done, _ = self.assert_replays(*((NOT_REPLAYABLE, copy) for copy in damaged),
                                       (REPRODUCED, self.folder / "whole" / bundle.name))
        for copy, one in zip(damaged, done):
            self.assertIn(copy.parent.name.removeprefix("damaged-"), one.stdout)
            self.assertFalse((copy / "experiments.jsonl").exists())

    def test_each_experiment_is_on_record_once(self):
        job = self.capture(*injections(("loss",)), steps=3)
        (bundle,) = self.bundles(job).values()
        for code, *settings in ((REPRODUCED,), (NOT_REPRODUCED, "injected=off"), (REPRODUCED,),
                                (NOT_REPRODUCED, "injected=off"), (REPRODUCED, "eps=1e-7")):
            self.assert_replay(code, self.replay(bundle, *settings))
        self.assert_replay(NOT_REPLAYABLE, self.replay(bundle, "eps=small"))
        lines = [strict_json(line) for line in (bundle / "experiments.jsonl").read_text().splitlines()]
        recorded = "loss loss[0]: 1 NaN, 0 +Inf, 0 -Inf"
        self.assertEqual([([], "REPRODUCED", recorded), (["injected=off"], "NOT_REPRODUCED", "everything was finite"),
                          (["eps=1e-7"], "REPRODUCED", recorded)],
                         [(line["set"], line["result"], line["found"]) for line in lines])
        self.assertEqual({self.manifest(bundle)["content_id"]}, {line["input"] for line in lines})
        self.assert_whole(job, 1)

    def test_an_abort_leaves_a_whole_bundle(self):
        job = self.capture("--inject", "nan@loss,rank=1,attempt=1", policy="on_first: ABORT", steps=3, code=81)
        self.assert_whole(job, 1)
        (bundle,) = self.bundles(job).values()
        manifest = self.manifest(bundle)
        self.assertEqual(("ABORT", 81), (manifest["action"], manifest["exit_code"]))
        self.assertEqual("HOLD", strict_json((bundle / "report.json").read_text())["decision"])
        self.assert_replays((REPRODUCED, bundle))

    def test_calibration_leaves_no_bundle(self):
        job = self.capture("--precision", "fp16", "--inject", "inf@backward,rank=1,attempt=1", policy="", steps=4)
        self.assertIn(1, [skip["attempt"] for skip in job.skips()], job)
        self.assertEqual(0, job.events[-1]["skips"], job)
        self.assertEqual({}, self.bundles(job))


class Failures(EvidenceTest):
    """Evidence that cannot be written is on record, and costs the training nothing."""

    def mount(self, folder, options):
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True, text=True,
                              check=False)
        if done.returncode != 0:
            print(f"skipped: {done.stderr.strip()}")
            self.skipTest("cannot mount a file system here")
        self.addCleanup(subprocess.run, ["umount", "-l", folder], check=True)

    def test_case_27_a_full_disk(self):
        run_dir = self.new_run_dir()
        self.mount(run_dir, "size=1m")
        job = self.capture(*injections(("loss", "backward", "forward") * 4), "--print-digests", run_dir=run_dir,
                           steps=steps(12))
        failures = self.failures(job)
        self.assertTrue(failures, job)
        for event in failures:
            self.assertIn("no space in ", event["reason"])
            self.assertIn(f"holdfast: no evidence of {event['bundle']}: ", job.err)
        written = [event["bundle"] for event in job.events if event["event"] == "evidence_written"]
        self.assertEqual(written, [bundle.name for bundle in self.bundles(job).values()])
        self.assertEqual(12, len(written) + len(failures), job)
        self.assert_whole(job, len(written))
        self.assertEqual(attempts(12), [skip["attempt"] for skip in job.skips()], job)
        self.assert_like_omitted(job, attempts(12), steps=steps(12))

    def test_case_27_a_folder_that_cannot_be_written(self):
        """From the middle of the run on."""
        run_dir = self.new_run_dir()
        options = ["--checkpoint-interval", 0, "--evaluate", 1, "--print-digests"]
        faults = [f"--inject=nan@loss,rank=1,attempt={attempt}" for attempt in (3, 3 + APART)]
        job = self.start(2, self.trainer(*options, *faults, "--inject=stop@input,rank=0,attempt=2", run_dir=run_dir,
                                         steps=5 + APART), run_dir)
        rank_0 = wait_for_stop(job, 2)
        self.mount(run_dir / "incidents", "ro")
        os.kill(rank_0, signal.SIGCONT)
        self.assertEqual(0, job.wait().code, job)
        self.assertEqual([3, 3 + APART], [skip["attempt"] for skip in job.skips()], job)
        failures = self.failures(job)
        self.assertEqual([3, 3 + APART], [event["attempt"] for event in failures], job)
        for event in failures:
            self.assertIn("Read-only file system", event["reason"])
            self.assertIn(f"holdfast: no evidence of {event['bundle']}: ", job.err)
        self.assertEqual({}, self.bundles(job))
        self.assert_like_omitted(job, (3, 3 + APART), steps=5 + APART)

    def test_what_a_killed_run_leaves_is_whole(self):
        run_dir = self.new_run_dir()
        options = (*injections(("loss", "backward", "loss")), "--inject", "kill@input,rank=0,attempt=14,epoch=1")
        self.capture(*options, run_dir=run_dir, steps=16, code=137)
        resumed = self.capture(*options, "--resume", run_dir=run_dir, steps=16)
        names = sorted(path.name for path in (run_dir / "incidents").iterdir())
        for name in names:  # nothing that was half written
            self.assertRegex(name, r"^e000[12]-a\d{10}$")
        self.assertTrue(set(names) >= {"e0001-a0000000001", "e0001-a0000000007"}, names)
        self.assert_whole(resumed, len(names))


if __name__ == "__main__":
    unittest.main()
