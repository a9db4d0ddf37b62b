"""What cannot be trained is refused on every rank before the first step: exit code 64, and what is wrong is named."""

import gzip
import shutil
import unittest

from jobs import PATIENCE, JobTest, idx_bytes, small_data

IMAGE = 28 * 28
HEADER = 16  # of an image file; 8 of a label file
AT_ONCE = 6  # jobs: mpirun sleeps for two seconds when a rank has failed


class RefusalTest(JobTest):
    def assert_all_refused(self, *cases, ranks=2):
        """Each case: (texts that stderr must hold, options, settings of JobTest.trainer())."""
        for i in range(0, len(cases), AT_ONCE):
            jobs = []
            for says, options, settings in cases[i:i + AT_ONCE]:
                run_dir = self.new_run_dir()
                jobs.append((says, self.start(ranks, self.trainer(*options, run_dir=run_dir, **settings), run_dir)))
            for says, job in jobs:
                with self.subTest(says):
                    self.assert_refused(says, job)

    def assert_refused(self, says, job):
        self.assertEqual(64, job.wait(PATIENCE).code, job)
        for text in says:
            self.assertIn(text, job.err, job)
        self.assertIn("Nothing was trained", job.err, job)
        self.assertNotIn("attempt ", job.out, job)
        self.assertFalse(job.run_dir.exists(), job)


class Data(RefusalTest):
    IMAGES = "train-images-idx3-ubyte.gz"
    LABELS = "train-labels-idx1-ubyte.gz"

    def setUp(self):
        super().setUp()
        self.copies = 0

    def damaged(self, name, change):
        """A copy of the data in which `change` was made to the bytes of one file, still compressed."""
        self.copies += 1
        folder = self.folder / f"damaged{self.copies}"
        shutil.copytree(self.data, folder)
        path = folder / name
        path.write_bytes(change(path.read_bytes()))
        return {"data": folder}

    def edited(self, name, change):
        """The same, made to the bytes inside, compressed again."""
        def inside(packed):
            return gzip.compress(bytes(change(bytearray(gzip.decompress(packed)))), 1)
        return self.damaged(name, inside)

    def test_missing_folder_or_files(self):
        nowhere = self.folder / "nowhere"
        cases = [([str(nowhere)], [], {"data": nowhere})]
        for path in sorted(self.data.iterdir()):
            settings = self.damaged(path.name, lambda content: content)
            (settings["data"] / path.name).unlink()
            cases.append(([path.name.removesuffix(".gz")], [], settings))
        self.assert_all_refused(*cases)

    def test_damaged_files(self):
        def flip(position):
            def change(content):
                content = bytearray(content)
                content[position(len(content))] ^= 0x40
                return content
            return change

        self.assert_all_refused(
            ([self.IMAGES], [], self.damaged(self.IMAGES, lambda c: c[:len(c) // 2])),
            ([self.LABELS], [], self.damaged(self.LABELS, lambda c: b"")),
            ([self.IMAGES], [], self.damaged(self.IMAGES, flip(lambda size: size // 2))),
            ([self.IMAGES], [], self.damaged(self.IMAGES, flip(lambda size: size - 8))),  # the checksum
            ([self.LABELS], [], self.damaged(self.LABELS, lambda c: b"<html>not found</html>")))

    def test_records_that_are_not_what_the_header_says(self):
        def with_bytes(position, value):
            def change(content):
                content[position:position + len(value)] = value
                return content
            return change

        one_less = self.TRAIN_SAMPLES - 1
        self.assert_all_refused(
            ([self.IMAGES, "record 700"], [], self.edited(self.IMAGES, lambda c: c[:HEADER + 700 * IMAGE + 100])),
            ([self.IMAGES, "magic"], [], self.edited(self.IMAGES, with_bytes(0, (2049).to_bytes(4, "big")))),
            ([self.IMAGES], [], self.edited(self.IMAGES, with_bytes(4, (2**32 - 1).to_bytes(4, "big")))),
            ([self.IMAGES], [], self.edited(self.IMAGES, lambda c: c + b"\x01")),
            (["train", str(self.TRAIN_SAMPLES), str(one_less)], [],
             self.edited(self.LABELS, lambda c: idx_bytes([2049, one_less], c[8:-1]))))

    def test_records_that_cannot_be_trained_on(self):
        def blank(content):
            content[HEADER + 123 * IMAGE:HEADER + 124 * IMAGE] = bytes(IMAGE)
            return content

        def label_10(content):
            content[8 + 77] = 10
            return content

        self.assert_all_refused(([self.IMAGES, "record 123"], [], self.edited(self.IMAGES, blank)),
                                (["t10k-images", "record 12"], [], self.edited(
                                    "t10k-images-idx3-ubyte.gz",
                                    lambda c: c[:HEADER + 12 * IMAGE] + bytes(IMAGE) + c[HEADER + 13 * IMAGE:])),
                                ([self.LABELS, "record 77"], [], self.edited(self.LABELS, label_10)))

    def test_fewer_samples_than_ranks(self):
        one = small_data(self.folder / "one", train_samples=1, test_samples=1)
        self.assert_all_refused((["too small"], [], {"data": one}))

    def test_damage_that_one_rank_alone_sees_ends_all(self):
        settings = self.damaged(self.IMAGES, lambda c: c[:-100])
        job = self.train_both_ways(other_rank=(2, ([], settings)), code=64)
        for text in ("rank 2", str(settings["data"]), self.IMAGES):
            self.assertIn(text, job.err, job)
        self.assertFalse(job.run_dir.exists(), job)

    def test_files_that_are_not_compressed_are_as_good(self):
        plain = self.folder / "plain"
        plain.mkdir()
        for path in self.data.iterdir():
            (plain / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
        packed, unpacked = (self.train("--print-digests", ranks=2, steps=2, data=data) for data in (self.data, plain))
        self.assert_same_state(unpacked, packed)


class Settings(RefusalTest):
    def test_policies(self):
        missing = self.folder / "no.policy"
        self.assert_all_refused(
            (["max_total_skip"], [], {"policy": "max_total_skip: 3"}),
            (["onFrist"], [], {"policy": '{"onFrist": "SKIP"}'}),
            (["attempt_deadline_seconds"], [], {"policy": "attempt_deadline_seconds: nan"}),
            ([str(missing)], ["--policy", missing], {}))

    def test_ranks_with_different_policies(self):
        job = self.train(other_rank=(1, ([], {"policy": "max_total_skips: 7"})), code=83)
        self.assertRegex(job.err, r"rank 1: policy or checkpoint interval are not those of rank 0", job)

    def test_faults(self):
        specs = ("nan@everywhere,attempt=1", "nan@backward,attempt=8", "nan@backward,attempt=1,rank=2",
                 "nan@backward,attempt=1,tensor=conv1.*,index=144", "nan@backward,attempt=1,micro=1",
                 "nan@optimizer,attempt=1,micro=0")
        self.assert_all_refused(*(([f"'{spec}'"], ["--inject", spec], {}) for spec in specs))

    def test_options(self):
        self.assert_all_refused(*(([option], [option, *value], {}) for option, *value in (
            ("--steps", "0"), ("--workload", "mnist"), ("--omit-update", "8"), ("--lr", "nan"), ("--eps", "nan"),
            ("--seed", "-1"), ("--warmup", "18446744073709551616"), ("--checkpoint-interval", "-1"),
            ("--checkpoint-keep-every", "-1"), ("--checkpoint-quota", "-1"), ("--no-such-option",))))

    def test_data_that_end_on_a_rank_that_is_not_there(self):
        for text in ("2=5", "4294967296=5"):
            job = self.train_both_ways("--data-ends", "0=9", "--data-ends", text, ranks=2, code=64)
            self.assertIn(f"--data-ends {text}: there are 2 ranks", job.err, job)
            self.assertIn("Nothing was trained", job.err, job)
            self.assertFalse(job.run_dir.exists(), job)

    def test_help_names_every_option(self):
        job = self.start(1, self.trainer("--help", run_dir=self.new_run_dir())).wait()
        self.assertEqual(0, job.code, job)
        for option in ("workload", "data", "steps", "batch", "accumulate", "optimizer", "eps", "seed", "policy",
                       "run-dir", "resume", "guard", "inject", "omit-update", "print-digests"):
            self.assertRegex(job.out, rf"--{option}\b.*\w")


class RunFolder(RefusalTest):
    def refuse(self, run_dir, *says):
        job = self.start(2, self.trainer(run_dir=run_dir)).wait()
        self.assertEqual(64, job.code, job)
        for text in says:
            self.assertIn(text, job.err, job)

    def test_one_that_was_used(self):
        first = self.train(ranks=2, steps=2)
        record = first.events
        self.refuse(first.run_dir, str(first.run_dir), "earlier run")
        self.assertEqual(record, first.events)

    def test_one_that_another_job_is_using(self):
        run_dir = self.new_run_dir()
        first = self.start(2, self.trainer("--inject", "hang@forward,attempt=1", run_dir=run_dir), run_dir)
        first.wait_for_start()
        self.refuse(run_dir, str(run_dir), "in use", "pid=")
        first.mpirun.terminate()
        first.wait()
        self.assert_record(first, "run_started")

    def test_one_that_cannot_be_made(self):
        (self.folder / "file").write_text("")
        self.refuse(self.folder / "file" / "run", str(self.folder / "file"))

    def test_it_is_private(self):
        job = self.train(ranks=1, steps=1)
        self.assertEqual(0o700, job.run_dir.stat().st_mode & 0o777)
        self.assertEqual(0o600, (job.run_dir / "events.jsonl").stat().st_mode & 0o777)


if __name__ == "__main__":
    unittest.main()
