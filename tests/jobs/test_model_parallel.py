"""Eight ranks with data, tensor and pipeline parallelism, killed and started again."""

import re
import signal
import unittest

from jobs import BIN, JobTest, holdfast, strict_json

ATTEMPTS = 40


class ModelParallel(JobTest):
    def run_job(self, run_dir, *dies):
        command = [str(BIN / "model_parallel_rank"), "train", str(run_dir), str(ATTEMPTS), *map(str, dies)]
        return self.start(8, command, run_dir).wait()

    def states(self, job):
        self.assertEqual(0, job.code, job)
        found = {int(rank): rest for rank, rest in re.findall(r"^state rank=(\d+) (.*)$", job.out, re.MULTILINE)}
        self.assertEqual(list(range(8)), sorted(found), job)
        return found

    def test_killed_and_started_again_it_ends_bit_for_bit_like_one_that_was_not(self):
        calm = self.run_job(self.new_run_dir())
        expected = self.states(calm)
        # Every seventh attempt is skipped, for a rank of its own each time.
        skipped = [(event["attempt"], event["origins"][0]["rank"]) for event in calm.skips()]
        self.assertEqual([(attempt, attempt // 7) for attempt in range(3, ATTEMPTS, 7)], skipped)
        for rank in (0, 5):
            run_dir = self.new_run_dir()
            killed = self.run_job(run_dir, rank, 27)
            self.assertIn(killed.code, (84, 128 + signal.SIGKILL), killed)
            again = self.run_job(run_dir)
            self.assertEqual(expected, self.states(again), again)
            (restored,) = again.named("restored")
            self.assertLessEqual(restored["attempt"], 27)

    @unittest.skipUnless((BIN / "holdfast").exists(), "without CLI11 there is no command line tool")
    def test_a_checkpoint_says_which_group_it_is_of_and_is_verified_without_the_ranks(self):
        job = self.run_job(self.new_run_dir())
        self.assertEqual(0, job.code, job)
        newest = job.generations()[-1]
        verified = holdfast("checkpoint", "verify", job.run_dir)
        self.assertEqual(0, verified.returncode, verified.stdout)
        shown = strict_json(holdfast("checkpoint", "show", job.run_dir, newest, "--json").stdout)
        groups = ["pp=0,tp=0", "pp=0,tp=1", "pp=1,tp=0", "pp=1,tp=1"]
        shared = {tensor["name"]: tensor["replica_group"] for tensor in shown["tensors"]
                  if tensor["rank"] is None and tensor["kind"] == "tensor"}
        self.assertEqual({f"stage{pp}.half{tp}.{layer}": f"pp={pp},tp={tp}" for pp in (0, 1) for tp in (0, 1)
                          for layer in ("column", "row")}, shared)
        shards = sorted((tensor["replica_group"], tensor["shard_offset"], tensor["rank"])
                        for tensor in shown["tensors"] if tensor["name"] == "exp_avg")
        self.assertEqual([(group, half * 24, number + 4 * half) for number, group in enumerate(groups)
                          for half in (0, 1)], shards)
        text = holdfast("checkpoint", "show", job.run_dir, newest).stdout
        self.assertIn("all ranks of pp=1,tp=0", text)
        self.assertIn("rank 6 of pp=1,tp=0, elements 24-47 of 48", text)


if __name__ == "__main__":
    unittest.main()
