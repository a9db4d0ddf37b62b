"""Replicas stay bit-identical through a skip, and the event names where it began: for each number of ranks, each
optimizer, the fault on each rank in turn."""

import unittest

from jobs import JobTest

KINDS = [("nan", "nan"), ("inf", "pos_inf"), ("-inf", "neg_inf"), ("snan", "nan")]
POSITIONS = [("first", lambda n: 0), ("middle", lambda n: n // 2), ("last", lambda n: n - 1)]


class Lockstep(JobTest):
    def check(self, ranks, optimizer):
        tensors = list(self.PARAMETERS.items())
        injections, omissions, wanted = [], [], []
        for i in range(max(ranks, len(KINDS))):
            attempt, rank = 1 + 2 * i, i % ranks
            kind, value_class = KINDS[i % len(KINDS)]
            position, index = POSITIONS[i % len(POSITIONS)]
            tensor, elements = tensors[i % len(tensors)]
            injections += ["--inject",
                           f"{kind}@backward,rank={rank},attempt={attempt},tensor={tensor},index={position}"]
            omissions += ["--omit-update", attempt]
            wanted.append((attempt, (rank, tensor, index(elements), {value_class: 1})))
        attempts = 2 * len(wanted) + 1
        updates = attempts - len(wanted)
        options = ["--optimizer", optimizer, "--warmup", 3, "--clip", 1, "--seed", 7, "--print-digests"]

        job = self.train(*options, *injections, ranks=ranks, steps=attempts)
        self.assert_lockstep(job, ranks, attempts, updates)
        events = self.assert_record(job, "run_started", *["attempt_skipped"] * len(wanted), "run_finished")
        for i, (attempt, origin) in enumerate(wanted):
            self.assert_skip(events[1 + i], attempt, "backward", [origin], consecutive=1, total=i + 1,
                             update=attempt - i)
        self.assertEqual((attempts, updates), (events[-1]["attempt"], events[-1]["update"]))

        reference = self.train(*options, *omissions, ranks=ranks, steps=attempts)
        self.assert_record(reference, "run_started", "run_finished")
        self.assert_same_state(job, reference)

    def test_an_update_that_is_not_omitted_shows_in_the_digests(self):
        """What the comparisons above rest on."""
        options = ["--optimizer", "adamw", "--print-digests"]
        whole, short = (self.train(*options, *more, steps=4) for more in ([], ["--omit-update", 1]))
        all_updates = self.assert_lockstep(whole, 4, 4, 4)
        one_less = self.assert_lockstep(short, 4, 4, 3)
        for part in ("parameters", "optimizer", "ema", "buffers"):
            self.assertNotEqual(all_updates[part], one_less[part], part)
        self.assertEqual([whole.digests[rank]["rng"] for rank in range(4)],
                         [short.digests[rank]["rng"] for rank in range(4)])


def _add(ranks, optimizer):
    setattr(Lockstep, f"test_{optimizer}_np{ranks}", lambda self: self.check(ranks, optimizer))


for _ranks in (1, 2, 4, 8):
    for _optimizer in ("sgd", "adamw"):
        _add(_ranks, _optimizer)

if __name__ == "__main__":
    unittest.main()
