"""A run that is interrupted goes on as if it had not been: checkpoints, resuming from them, and what is wrong with
them."""

import os
import shutil
import signal
import subprocess
import unittest

from checkpoints import CheckpointTest
from jobs import PATIENCE, generations, holdfast, processes, until

class InterruptedTest(CheckpointTest):
    """Four ranks and accumulation. Attempts 2 to 4 are skipped, and attempt 8."""

    SKIPS = [word for rank, attempt in ((1, 2), (3, 3), (0, 4), (2, 8))
             for word in ("--inject", f"nan@backward,rank={rank},attempt={attempt},micro=1")]
    SETTINGS = {"ranks": 4}

    def reference(self):
        reference = self.train("--accumulate", 2, *self.SKIPS, **self.SETTINGS)
        self.assert_lockstep(reference, 4, 10, 6)
        return reference

    def check_kill(self, reference, *kills):
        for rank, stage, attempt in kills:
            with self.subTest(kill=f"rank {rank} at {stage} of attempt {attempt}"):
                killed = self.train("--accumulate", 2, *self.SKIPS, "--inject",
                                    f"kill@{stage},rank={rank},attempt={attempt},epoch=1", code=137, **self.SETTINGS)
                job = self.resume(killed.run_dir, "--accumulate", 2, *self.SKIPS, **self.SETTINGS)
                self.assert_same_run(job, reference)

    def check_stop(self, reference, *attempts):
        for attempt in attempts:
            goes_on_at = {2: 5, 3: 5, 4: 5, 8: 9}.get(attempt, attempt)
            with self.subTest(stop=attempt):
                stopped = self.stop_at(attempt, "--accumulate", 2, *self.SKIPS, goes_on_at=goes_on_at, **self.SETTINGS)
                job = self.resume(stopped.run_dir, "--accumulate", 2, *self.SKIPS, **self.SETTINGS)
                self.assertRegex(job.out, rf"(?m)^resumed: epoch 2, attempt {goes_on_at}, ")
                self.assert_same_run(job, reference)


class Resume(InterruptedTest):
    def test_case_25_a_run_that_was_killed_after_skips_ends_as_if_it_had_not_been(self):
        """Samples, random numbers of each rank, budgets: all that the state of the weights depends on."""
        self.check_kill(self.reference(), (0, "optimizer", 7), (3, "backward", 9))

    def test_a_run_that_was_stopped_goes_on_at_that_attempt_as_if_it_had_not_been(self):
        """Between two saves, and at an attempt that is skipped: just behind it."""
        self.check_stop(self.reference(), 7, 8)


class SlowResume(InterruptedTest):
    def test_a_run_killed_at_any_attempt_ends_as_if_it_had_not_been(self):
        self.check_kill(self.reference(), *((attempt % 4, stage, attempt) for stage, attempt in zip(
            ("forward", "backward", "reduction", "input", "loss", "optimizer", "forward", "backward"), range(1, 9))))

    def test_a_run_stopped_at_any_attempt_goes_on_as_if_it_had_not_been(self):
        self.check_stop(self.reference(), *range(1, 8))

    def test_eight_ranks_resume_as_if_they_had_not_been_killed(self):
        options = ["--accumulate", 2, *self.SKIPS]
        reference = self.train(*options, ranks=8)
        killed = self.train(*options, "--inject", "kill@backward,rank=7,attempt=8,epoch=1", ranks=8, code=137)
        self.assert_same_run(self.resume(killed.run_dir, *options, ranks=8), reference)

    def test_whatever_ends_a_run_and_however_often_it_ends_as_if_nothing_had(self):
        """Two SIGKILLs of all its processes at once, then `holdfast stop`, then SIGUSR1 to mpirun."""
        settings = {"steps": 1200, "batch": 4}  # long enough to be stopped on a fast machine
        skips = ["--inject", "nan@backward,rank=1,every=37"]
        policy = "rate_rules { name: 'many' window_attempts: 100 max_skips: 50 }"
        reference = self.train(*skips, interval=20, policy=policy, **settings)
        run_dir = self.new_run_dir()
        for interruption in ("kill", "kill", "stop", "signal"):
            command = self.trainer(*self.OPTIONS, *skips, "--checkpoint-interval", 20, "--resume", run_dir=run_dir,
                                   policy=policy, **settings)
            before = published(run_dir)
            job = self.start(2, command, run_dir)
            until(lambda: job.mpirun.poll() is not None or published(run_dir) >= before + 2, PATIENCE,
                  "two more checkpoints")
            self.assertIsNone(job.mpirun.poll(), job)
            if interruption == "kill":
                for pid in processes(job.marker):
                    os.kill(pid, signal.SIGKILL)
            elif interruption == "stop":
                self.assertEqual(0, holdfast("stop", run_dir).returncode)
            else:
                job.mpirun.send_signal(signal.SIGUSR1)
            self.assertEqual(-9 if interruption == "kill" else 86, job.wait().code, job)
        job = self.train(*skips, "--resume", interval=20, policy=policy, run_dir=run_dir, **settings)
        self.assertRegex(job.out, r"(?m)^resumed: epoch 5, attempt [1-9]")
        self.assert_same_run(job, reference)


def published(run_dir):
    """How many checkpoints so far, by the record of a run that may be writing it."""
    path = run_dir / "events.jsonl"
    return path.read_text().count('{"event":"checkpoint_published"') if path.exists() else 0


class OtherState(CheckpointTest):
    def test_case_21_the_loss_scaler_goes_on_in_the_middle_of_its_interval(self):
        """Halved at attempt 1, so it grows at attempt 7, the sixth clean one; saved at 6, or at 3."""
        options = ["--precision", "fp16", "--inject", "inf@backward,rank=1,attempt=1"]
        policy = "loss_scale { initial: 512 growth_interval: 6 }"
        reference = self.train(*options, policy=policy)
        changes = [(1, 512, 256), (7, 256, 512)]
        self.assertEqual(changes, [(e["attempt"], e["from"], e["to"]) for e in reference.named("scale_changed")])
        for _ in range(5):  # on a busy disk none may be there yet but that of the beginning
            killed = self.train(*options, "--inject", "kill@loss,rank=0,attempt=7,epoch=1", policy=policy, code=137)
            if published(killed.run_dir) > 1:
                break
        job = self.resume(killed.run_dir, *options, policy=policy)
        self.assertEqual([(1, *changes[0]), (2, *changes[1])],
                         [(e["epoch"], e["attempt"], e["from"], e["to"]) for e in job.named("scale_changed")])
        self.assert_same_run(job, reference)

    def test_a_gpt_with_dropout_resumes_as_if_it_had_not_been_killed(self):
        options = ["--inject", "nan@backward,rank=1,attempt=1"]
        settings = {"workload": "gpt", "data": "/usr/share/common-licenses", "steps": 5, "batch": 1, "interval": 2}
        reference = self.train(*options, **settings)
        killed = self.train(*options, "--inject", "kill@forward,rank=1,attempt=3,epoch=1", code=137, **settings)
        self.assert_same_run(self.resume(killed.run_dir, *options, **settings), reference)

    def test_another_number_of_ranks_goes_on_with_the_same_replicas(self):
        saved = self.train(ranks=4, steps=4)
        same = ("parameters", "optimizer", "ema", "buffers", "attempts", "updates")
        job = self.resume(saved.run_dir, ranks=2, steps=4)
        self.assertIn("\nresumed: epoch 2, attempt 4, 4 updates, 0 skips so far\n", job.out)
        self.assertEqual(4, job.named("restored")[-1]["generation_ranks"])
        for rank in range(2):
            self.assertEqual([saved.digests[0][part] for part in same], [job.digests[rank][part] for part in same])
        job = self.resume(saved.run_dir, ranks=3, steps=6)
        self.assertIn("\nresumed: epoch 3, attempt 4, 4 updates, 0 skips so far\n", job.out)
        self.assert_lockstep(job, 3, 6, 6)


class Damage(CheckpointTest):
    """A checkpoint that cannot be trusted is not: the one before it is restored, and the reason is said."""

    def verify(self, run_dir, code=0):
        done = holdfast("checkpoint", "verify", run_dir)
        self.assertEqual(code, done.returncode, done)

    def test_case_22_killed_while_a_generation_is_written(self):
        reference = self.train()
        killed = self.train("--inject", "kill@forward,rank=0,attempt=6,epoch=1", code=137)
        self.assertNotIn("e0001-a0000000006", killed.generations())
        self.assert_same_run(self.resume(killed.run_dir), reference)
        self.assertEqual([], list((killed.run_dir / "checkpoints").glob(".*")))

    def test_case_22_each_kind_of_damage_is_refused_and_set_aside(self):
        """A generation for each, and the one before them is restored."""
        def cut(path, size):
            os.truncate(path, path.stat().st_size + size if size < 0 else size)

        def flip(path, at):
            data = bytearray(path.read_bytes())
            data[at] ^= 1
            path.write_bytes(data)

        kinds = [(name, damage, *where) for name in ("manifest.pb", "replicated.safetensors", "rank-00001.safetensors")
                 for damage, *where in ((cut, -1), (cut, 0), (flip, 20))]
        kinds += [("replicated.safetensors", flip, -1), ("rank-00000.safetensors", flip, -5)]
        kinds += [("rank-00001.safetensors", lambda path: path.unlink())]
        reference = self.train("--checkpoint-keep", 50, steps=120)
        run_dir = self.folder / "damaged"
        shutil.copytree(reference.run_dir, run_dir)
        names = generations(run_dir)
        self.assertGreater(len(names), len(kinds), reference)
        left = {}
        for name, (file, damage, *where) in zip(reversed(names), kinds):
            damage(run_dir / "checkpoints" / name / file, *where)
            left[name] = contents(run_dir / "checkpoints" / name)
        self.verify(run_dir, code=1)
        job = self.train("--resume", "--checkpoint-keep", 50, steps=120, run_dir=run_dir)
        restored = job.named("restored")[-1]
        self.assertEqual(names[-len(kinds) - 1], restored["generation"])
        self.assertEqual(len(kinds), len(restored["refused"]))
        for name, (file, *_), why in zip(reversed(names), kinds, restored["refused"]):
            self.assertIn(f"{name} refused: ", why)
            self.assertIn(file.split(".")[0], why)
            self.assertIn(f"holdfast: {name} refused: ", job.err, "people are told, too")
        aside = run_dir / "checkpoints" / "set-aside"
        self.assertEqual(sorted(left), sorted(path.name for path in aside.iterdir()))
        for name, files in left.items():
            self.assertEqual(files, contents(aside / name), name)
        self.assert_same_run(job, reference)
        self.verify(run_dir)

    def test_no_generation_is_left_that_is_clean(self):
        run_dir = self.train(steps=4).run_dir
        names = generations(run_dir)
        for name in names:
            os.truncate(run_dir / "checkpoints" / name / "manifest.pb", 100)
        job = self.train("--resume", run_dir=run_dir, code=85)
        for name in names:
            self.assertIn(f"{name} refused: ", job.err)
        self.assertEqual(sorted(names), sorted(path.name for path in (run_dir / "checkpoints" / "set-aside").iterdir()))
        self.assertIn("nobody has acknowledged it", self.train("--resume", run_dir=run_dir, code=87).err)
        self.assertEqual(0, holdfast("ack", run_dir, "--owner", "ana", "--note", "restored the folder").returncode)
        for name in names[:1]:
            self.assertIn("none is there any more", self.train("--resume", run_dir=run_dir, code=85).err)

    def test_case_23_an_abort_is_not_taken_for_the_end(self):
        reference = self.train(interval=1)
        job = self.train("--inject", "nan@backward,rank=1,attempt=2", policy="on_first: ABORT", interval=1, code=81)
        self.assertLessEqual(job.generations()[-1], "e0001-a0000000002")
        self.verify(job.run_dir)
        self.assertEqual(0, holdfast("ack", job.run_dir, "--owner", "ana", "--note", "mended").returncode)
        self.assert_same_state(self.resume(job.run_dir, interval=1), reference)

    def test_case_24_what_is_not_finite_becomes_no_generation(self):
        """In the middle of a run, and after its last update."""
        for attempt in (4, 9):
            with self.subTest(attempt=attempt):
                job = self.train("--inject", f"nan@optimizer,attempt={attempt}", policy="on_spoilt_state: END_RUN",
                                 interval=1, code=85)
                self.assertLessEqual(job.generations()[-1], f"e0001-a{attempt:010}")
                self.assertEqual([], list((job.run_dir / "checkpoints").glob(".*")))
                self.verify(job.run_dir)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Disk(CheckpointTest):
    def test_case_27_a_full_disk_costs_checkpoints_and_nothing_else(self):
        reference = self.train()
        disk = self.folder / "disk"
        disk.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "holdfast-test", disk],
                                 capture_output=True, text=True)
        if mounted.returncode != 0:
            self.skipTest(f"no small file system without the right to mount one: {mounted.stderr.strip()}")
        self.addCleanup(subprocess.run, ["umount", "--lazy", disk], check=True)
        job = self.train(run_dir=disk / "run")
        self.assert_same_state(job, reference)
        failed = job.named("checkpoint_failed")
        self.assertIn("no space", failed[-1]["reason"])
        self.assertIn("training goes on", job.err)
        old = job.generations()
        self.assertIn("e0001-a0000000000", old)
        self.assertEqual(0, holdfast("checkpoint", "verify", job.run_dir).returncode)
        self.assert_same_state(self.resume(job.run_dir), reference)

    def test_a_quota_that_is_too_small_costs_checkpoints_and_nothing_else(self):
        reference = self.train()
        job = self.train("--checkpoint-quota", "100K")
        self.assert_same_state(job, reference)
        self.assertIn("quota", job.named("checkpoint_failed")[0]["reason"])
        self.assertEqual([], job.generations())
        job = self.train("--resume", run_dir=job.run_dir)
        self.assertRegex(job.out, r"(?m)^resumed: epoch 2, attempt 0, 0 updates, 0 skips so far$")
        self.assertIn("\nno checkpoint: weights start anew\n", job.out)
        self.assert_same_state(job, reference)


if __name__ == "__main__":
    unittest.main()
