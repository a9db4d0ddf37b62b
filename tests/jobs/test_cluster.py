"""Jobs over several hosts, which are network namespaces of this machine (launch/cluster.sh): lockstep, and nobody left
behind, with real TCP in between."""

import datetime
import os
import random
import signal
import time
import unittest

from cluster import DEADLINE, HOSTS, RANKS, ClusterTest, setUpModule
from jobs import PATIENCE, processes, until

__all__ = ["setUpModule"]

SLACK = 15  # seconds more until every rank has left, those that are cut off and leave alone included
END = 60  # seconds more until mpirun has ended too


def on_host(node):
    return [rank for rank, host in HOSTS.items() if host == node]


class ThreeHosts(ClusterTest):
    def setUp(self):
        super().setUp()
        self.cluster.do("up", "--nodes", 3)

    def check_killed(self, node, reporter):
        """All ranks of a host are killed: the others say who, in the second that mpirun leaves them."""
        job = self.start_training(deadline=60)
        pids = job.pids()
        for rank in on_host(node):
            os.kill(pids[rank], signal.SIGKILL)
        job.wait()
        self.assertEqual(128 + signal.SIGKILL, job.code, job)
        (departure,) = job.departures()
        self.assertEqual(reporter, departure["reported_by"])
        self.assert_missing(job, departure, on_host(node), "died", pids)

    def check_stopped(self, rank):
        job = self.train("--inject", f"stop@forward,rank={rank},attempt=5", ranks=RANKS, code=84,
                         policy=f"attempt_deadline_seconds: {DEADLINE}")
        (departure,) = job.departures()
        self.assertEqual(2 if rank == 0 else 0, departure["reported_by"])
        self.assert_missing(job, departure, [rank], "silent")
        self.assertEqual({5}, {survivor["attempt"] for survivor in departure["survivors"]}, departure)


class Several(ThreeHosts):
    """Hosts that reach each other."""

    def test_every_rank_on_every_host_skips(self):
        before = self.cluster.received("node1")
        skipped = self.train("--inject", "nan@backward,rank=3,attempt=4", "--print-digests", ranks=RANKS)
        gradients = 8 * 4 * sum(self.PARAMETERS.values())
        self.assertGreater(self.cluster.received("node1") - before, gradients, "the gradients went another way")
        self.assert_lockstep(skipped, RANKS, attempts=8, updates=7)
        (event,) = skipped.skips()
        self.assertEqual([(4, 3, "node1")], [(event["attempt"], o["rank"], o["host"]) for o in event["origins"]])

        omitted = self.train("--omit-update", 4, "--print-digests", ranks=RANKS)
        for rank in range(RANKS):
            for what in ("parameters", "optimizer", "ema", "buffers", "rng"):
                self.assertEqual(omitted.digests[rank][what], skipped.digests[rank][what], f"{what} of rank {rank}")

    def test_a_rank_delayed_inside_the_deadline_changes_nothing(self):
        job = self.start_training("--print-digests", steps=150, deadline=10)
        pid = job.pids()[3]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2)
        self.assertIsNone(job.mpirun.poll(), f"it ended too early to tell\n{job}")
        os.kill(pid, signal.SIGCONT)
        self.assertEqual(0, job.wait().code, job)
        self.assert_lockstep(job, RANKS, attempts=150, updates=150)
        self.assertEqual([], job.departures())

    def test_the_ranks_of_the_deputys_host_are_killed(self):
        self.check_killed("node1", reporter=0)

    def test_the_ranks_of_rank_0s_host_are_killed(self):
        self.check_killed("node0", reporter=2)

    def test_rank_0_stops(self):
        self.check_stopped(0)

    def test_the_deputy_stops(self):
        self.check_stopped(2)

    def test_rank_5_stops(self):
        self.check_stopped(5)


class Cut(ClusterTest):
    def give_up(self):
        """TCP's patience is what mpirun waits for once the ranks have left."""
        for node in sorted(set(HOSTS.values())):
            self.cluster.do("exec", node, "sh", "-c", "echo 3 >/proc/sys/net/ipv4/tcp_retries2")

    def check_cut(self, node, missing, alone=(), hasten=True):
        """`missing`: {reporter: ranks}. `alone`: the ranks that reach neither rank 0 nor the deputy."""
        self.cluster.do("up", "--nodes", 3)
        job = self.start_training()
        pids = job.pids()
        self.cluster.do("cut", node)
        cut = datetime.datetime.now(datetime.timezone.utc)
        until(lambda: not job.pids(), DEADLINE + SLACK, "the ranks leave by themselves, on both sides")

        departures = job.departures()
        self.assertEqual(sorted([*missing, *alone]), sorted(d["reported_by"] for d in departures), job)
        for departure in departures:
            reporter = departure["reported_by"]
            if reporter in alone:
                self.assertEqual((True, []), (departure["alone"], departure["missing"]))
                continue
            self.assert_missing(job, departure, missing[reporter], "silent", pids)
            after = datetime.datetime.fromisoformat(departure["time"].replace("Z", "+00:00")) - cut
            self.assertLess(after.total_seconds(), DEADLINE + 5, departure)

        if hasten:
            self.give_up()
        self.assertEqual(84, job.mpirun.wait(END if hasten else 3 * END), job)
        until(lambda: not processes(job.marker), END, "Open MPI's daemons end")
        job.wait()


class CutOff(Cut):
    """Hosts that do not reach each other any more."""

    def test_a_host_is_cut_off(self):
        self.check_cut("node2", {0: [4, 5]}, alone=(4, 5))

    def test_the_deputys_host_is_cut_off(self):
        self.check_cut("node1", {0: [2, 3], 2: [0, 1, 4, 5]})

    def test_rank_0s_host_is_cut_off(self):
        self.check_cut("node0", {0: [2, 3, 4, 5], 2: [0, 1]})

    def test_a_cut_that_heals_within_the_deadline_changes_nothing(self):
        self.cluster.do("up", "--nodes", 2)
        job = self.start_training("--print-digests", ranks=4, steps=1000, deadline=30)
        self.cluster.do("cut", "node1")
        received = self.cluster.received("node0")
        time.sleep(3)
        # Less than the gradient of a single attempt: what was under way when the cut came.
        self.assertLess(self.cluster.received("node0") - received, 10_000)
        self.assertIsNone(job.mpirun.poll(), f"it ended too early to tell\n{job}")
        self.cluster.do("heal", "node1")
        self.assertEqual(0, job.wait().code, job)
        self.assert_lockstep(job, 4, attempts=1000, updates=1000)
        self.assertEqual([], job.departures())


class Lossy(ClusterTest):
    # What can go wrong in an attempt and be skipped.
    VALUES = [f"{value}@{stage}" for value in ("nan", "inf", "-inf", "snan")
              for stage in ("input", "forward", "loss", "backward")]
    ERRORS = [f"throw@{stage}" for stage in ("input", "forward", "loss", "backward")]

    def check_random_faults(self, attempts, timeout=PATIENCE):
        """A tenth of the attempts go wrong, some of them on two ranks."""
        self.cluster.do("up", "--nodes", 3, "--loss", "0.5%")
        chance = random.Random(1)
        # No more than three in a row: more would be against the policy.
        bad = [attempt for attempt in chance.sample(range(attempts), attempts // 10) if attempt % 4]
        faults = []
        for attempt in bad:
            for rank in chance.sample(range(RANKS), chance.choice((1, 1, 2))):
                faults += ["--inject", f"{chance.choice(self.VALUES + self.ERRORS)},rank={rank},attempt={attempt}"]
        job = self.train(*faults, "--print-digests", ranks=RANKS, steps=attempts, timeout=timeout,
                         policy=f"max_total_skips: {attempts} on_error: SKIP")
        self.assert_lockstep(job, RANKS, attempts, attempts - len(bad))
        self.assertEqual(sorted(bad), [skip["attempt"] for skip in job.skips()])
        self.assertEqual([], job.departures())
        self.assertGreater(self.sent_again("node1"), attempts // 50, "no packet was lost")

    def sent_again(self, node):
        """TCP segments."""
        names, values = [line.split() for line in self.cluster.do("exec", node, "cat", "/proc/net/snmp").splitlines()
                         if line.startswith("Tcp:")]
        return int(dict(zip(names, values))["RetransSegs"])


class Losses(Lossy):
    """Hosts whose packets get lost."""

    def test_random_faults_over_a_network_that_loses_packets(self):
        self.check_random_faults(100)


class SlowSeveral(ThreeHosts):
    def test_rank_1_stops(self):
        self.check_stopped(1)

    def test_rank_3_stops(self):
        self.check_stopped(3)

    def test_rank_4_stops(self):
        self.check_stopped(4)

    def test_the_ranks_of_another_host_are_killed(self):
        self.check_killed("node2", reporter=0)


class SlowCutOff(Cut):
    def test_mpirun_ends_by_itself_with_the_settings_that_every_cluster_has(self):
        self.check_cut("node1", {0: [2, 3], 2: [0, 1, 4, 5]}, hasten=False)

    def test_a_cut_that_mpirun_notices_first_is_on_record_before_it_kills_the_ranks(self):
        """SIGTERM, and SIGKILL at most a second later, long before the deadline."""
        self.cluster.do("up", "--nodes", 3)
        keepalive = [word for name, value in (("time", 3), ("intvl", 1), ("probes", 3))
                     for word in ("--mca", f"oob_tcp_keepalive_{name}", value)]
        job = self.start_training(deadline=60, mpirun=keepalive)
        pids = job.pids()
        self.cluster.do("cut", "node1")
        self.assertEqual(205, job.mpirun.wait(END), job)
        until(lambda: not processes(job.marker), END, "Open MPI's daemons end")
        departures = {departure["reported_by"]: departure for departure in job.departures()}
        self.assertIn(0, departures, job)
        for reporter, missing in ((0, [2, 3]), (2, [0, 1, 4, 5])):
            if reporter in departures:
                self.assert_missing(job, departures[reporter], missing, "silent", pids)


class SlowLosses(Lossy):
    def test_a_thousand_attempts_with_random_faults_over_a_network_that_loses_packets(self):
        self.check_random_faults(1000, timeout=900)


if __name__ == "__main__":
    unittest.main()
