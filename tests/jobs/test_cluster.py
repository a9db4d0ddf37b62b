"""Jobs over several hosts, which are network namespaces of this machine (launch/cluster.sh): lockstep, and nobody left
behind, with real TCP in between."""

import datetime
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

import jobs
from jobs import PATIENCE, Job, JobTest, processes, until

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "launch" / "cluster.sh"
RUNTIME = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp"))

DEADLINE = 4  # seconds without progress
SLACK = 15  # seconds more until every rank has left, those that are cut off and leave alone included
END = 60  # seconds more until mpirun has ended too

# Three hosts of two ranks each. Rank 0 speaks for all, and rank 2, the first one on another host, is its deputy.
RANKS = 6
HOSTS = {0: "node0", 1: "node0", 2: "node1", 3: "node1", 4: "node2", 5: "node2"}


def on_host(node):
    return [rank for rank, host in HOSTS.items() if host == node]


def why_not():
    """Why there can be no cluster here; None where there can."""
    if os.geteuid() != 0:
        return "needs root"
    cluster = Cluster("why")
    made = cluster("up", "--nodes", 1)
    cluster("down")
    if made.returncode == 64:
        return made.stderr.strip()
    return None


def needs_a_cluster(test):
    if reason := why_not():
        print(f"skipped: {reason}", file=sys.stderr)
        test.skipTest(reason)


class Cluster:
    """`name` is this process's own: tests may run side by side."""

    def __init__(self, name):
        self.name = f"test{os.getpid()}{name}"
        self.state = RUNTIME / f"holdfast-cluster-{self.name}"

    def command(self, *words):
        return [str(word) for word in (SCRIPT, "--name", self.name, *words)]

    def __call__(self, *words, timeout=60, **settings):
        return subprocess.run(self.command(*words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=timeout, check=False, **settings)

    def do(self, *words):
        done = self(*words)
        if done.returncode != 0:
            raise AssertionError(f"{words}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def received(self, node):
        """Bytes that came in from other hosts."""
        (line,) = [line for line in self.do("exec", node, "cat", "/proc/net/dev").splitlines() if "eth0:" in line]
        return int(line.split(":")[1].split()[0])

    def left(self):
        """What is there of it."""
        mounts = [line for line in pathlib.Path("/proc/mounts").read_text().splitlines() if str(self.state) in line]
        return mounts + [str(path) for path in RUNTIME.glob(self.state.name)]


class ClusterTest(JobTest):
    def setUp(self):
        needs_a_cluster(self)
        super().setUp()
        self.cluster = Cluster("jobs")
        self.addCleanup(self.check_removed)

    def check_removed(self):
        self.cluster.do("down")
        self.assertEqual([], self.cluster.left())

    def start(self, ranks, command, run_dir=None, watch_ranks=False):
        assert not watch_ranks
        job = Job(self.cluster.command("run", "-np", ranks, *command), self.folder)
        self.addCleanup(job.mpirun.poll)
        self.addCleanup(jobs.kill, job.marker)
        job.run_dir = run_dir
        return job

    def start_training(self, *options, ranks=RANKS, steps=1_000_000, deadline=DEADLINE, mpirun=()):
        """A job that is in the middle of its attempts. `mpirun`: more options of it."""
        run_dir = self.new_run_dir()
        command = self.trainer(*options, run_dir=run_dir, steps=steps, policy=f"attempt_deadline_seconds: {deadline}")
        job = self.start(ranks, [*mpirun, *command], run_dir)
        job.wait_for_attempts()
        time.sleep(1)
        return job

    def assert_missing(self, job, departure, ranks, absence, pids=None):
        self.assertFalse(departure["alone"], departure)
        said = [(m["rank"], m["host"], m["absence"]) for m in departure["missing"]]
        self.assertEqual([(rank, HOSTS[rank], absence) for rank in ranks], said, job)
        if pids:
            self.assertEqual([pids[rank] for rank in ranks], [m["pid"] for m in departure["missing"]], job)


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


class Script(unittest.TestCase):
    """What the script itself promises."""

    def setUp(self):
        needs_a_cluster(self)
        self.cluster = Cluster("script")
        self.addCleanup(self.check_removed)

    def check_removed(self):
        self.cluster.do("down")
        self.assertEqual([], self.cluster.left())

    def refuse(self, *words, says, **settings):
        done = self.cluster(*words, **settings)
        self.assertEqual(64, done.returncode, done)
        self.assertIn(says, done.stderr)

    def knock(self, node, address, seconds=1):
        """How long a host takes to refuse a connection; None when nothing comes back."""
        script = ("import socket, sys, time\n"
                  "s, start = socket.socket(), time.monotonic()\n"
                  "s.settimeout(float(sys.argv[2]))\n"
                  "try: s.connect((sys.argv[1], 9))\n"
                  "except ConnectionRefusedError: print(time.monotonic() - start)\n"
                  "except OSError: pass")
        said = self.cluster.do("exec", node, sys.executable, "-c", script, address, seconds)
        return float(said) if said else None

    def test_hosts_have_names_and_addresses_and_reach_each_other_only(self):
        self.cluster.do("up", "--nodes", 3)
        self.assertEqual("node2\n", self.cluster.do("exec", "node2", "hostname"))
        self.assertIsNotNone(self.knock("node0", "10.77.0.3"))
        routes = self.cluster.do("exec", "node0", "ip", "route").splitlines()
        self.assertEqual(["10.77.0.0/24"], [route.split()[0] for route in routes])

    def test_no_packet_reaches_a_host_that_is_cut_until_it_is_healed(self):
        self.cluster.do("up", "--nodes", 3)
        for _ in range(2):
            self.cluster.do("cut", "node1")
        self.assertIsNone(self.knock("node0", "10.77.0.2"))
        self.assertIsNone(self.knock("node1", "10.77.0.3"))
        self.assertIsNotNone(self.knock("node0", "10.77.0.3"))
        for _ in range(2):
            self.cluster.do("heal", "node1")
        self.assertIsNotNone(self.knock("node1", "10.77.0.3", seconds=5))

    def test_two_clusters_know_nothing_of_each_other(self):
        other = Cluster("other")
        self.addCleanup(other.do, "down")
        self.cluster.do("up", "--nodes", 2)
        other.do("up", "--nodes", 3)
        self.assertIsNone(self.knock("node0", "10.77.0.3"), "it has two hosts, the other one has three")
        self.cluster.do("down")
        self.assertEqual("node2\n", other.do("exec", "node2", "hostname"))

    def test_ranks_are_spread_block_by_block_or_as_mpirun_is_told(self):
        self.cluster.do("up", "--nodes", 3)
        show = ("sh", "-c", "echo $OMPI_COMM_WORLD_RANK $(hostname)")
        for ranks, options, hosts in ((5, (), "00112"), (4, ("--map-by", "node"), "0120"), (2, (), "01")):
            said = self.cluster.do("run", "-np", ranks, *options, *show)
            self.assertEqual([f"{rank} node{host}" for rank, host in enumerate(hosts)], sorted(said.splitlines()))

    def test_run_returns_what_mpirun_returns(self):
        self.cluster.do("up", "--nodes", 2)
        self.assertEqual(7, self.cluster("run", "-np", 2, "sh", "-c", "exit 7").returncode)

    def test_down_ends_what_runs_there(self):
        self.cluster.do("up", "--nodes", 2)
        with tempfile.TemporaryDirectory() as folder:
            job = Job(self.cluster.command("run", "-np", 2, "sleep", 1000), folder)
            self.addCleanup(jobs.kill, job.marker)
            until(lambda: [*processes(job.marker).values()].count("sleep 1000 ") == 2, 60, "two processes run")
            self.cluster.do("down")
            self.assertEqual({}, processes(job.marker))
            job.mpirun.wait(10)
        self.assertEqual([], self.cluster.left())
        self.cluster.do("down")

    def test_a_cluster_that_is_up_is_not_made_again(self):
        self.cluster.do("up", "--nodes", 1)
        self.refuse("up", "--nodes", 2, says="is up")
        self.assertEqual("node0\n", self.cluster.do("exec", "node0", "hostname"))

    def interrupt_up(self, number):
        up = subprocess.Popen(self.cluster.command("up", "--nodes", 200), stdout=subprocess.DEVNULL)
        self.addCleanup(up.wait)
        self.addCleanup(up.kill)
        until(lambda: (self.cluster.state / "node3.net").exists(), 30, "it is half-way")
        up.send_signal(number)
        return up.wait(30)

    def test_an_interrupted_up_leaves_nothing(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with self.subTest(number.name):
                self.assertEqual(1, self.interrupt_up(number))
                self.assertEqual([], self.cluster.left())

    def test_what_a_killed_up_left_is_removed_by_the_next_one(self):
        self.assertEqual(-signal.SIGKILL, self.interrupt_up(signal.SIGKILL))
        self.assertNotEqual([], self.cluster.left())
        self.cluster.do("up", "--nodes", 2)
        self.assertEqual("node1\n", self.cluster.do("exec", "node1", "hostname"))

    def test_what_a_killed_up_left_is_removed_by_down(self):
        self.interrupt_up(signal.SIGKILL)
        self.cluster.do("down")
        self.assertEqual([], self.cluster.left())

    def test_an_up_that_fails_half_way_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            fake = pathlib.Path(folder) / "ip"
            fake.write_text(f'#!/bin/sh\ncase "$*" in *node2*) exit 5;; esac\nexec {shutil.which("ip")} "$@"\n')
            fake.chmod(0o755)
            done = self.cluster("up", "--nodes", 4, env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
        self.assertNotIn(done.returncode, (0, 64))
        self.assertEqual([], self.cluster.left())

    def test_delay_is_there_or_refused(self):
        done = self.cluster("up", "--nodes", 2, "--delay", "20ms")
        if done.returncode == 0:
            self.assertGreater(self.knock("node0", "10.77.0.2"), 0.02)
        else:
            self.assertEqual(64, done.returncode, done)
            self.assertIn("netem", done.stderr)
            self.assertEqual([], self.cluster.left())

    def test_wrong_usage_is_refused(self):
        for words, says in (((), "which command"), (("start",), "which command"), (("up",), "--nodes"),
                            (("up", "--nodes", 0), "--nodes"), (("up", "--nodes", 251), "--nodes"),
                            (("up", "--nodes"), "value"), (("up", "--nodes", 2, "--loss", 5), "--loss"),
                            (("up", "--nodes", 2, "--loss", "101%"), "--loss"),
                            (("up", "--nodes", 2, "--delay", 1), "--delay"), (("up", "--hosts", 2), "--hosts"),
                            (("down", "now"), "now"), (("cut",), "one host"), (("cut", "node0"), "no cluster"),
                            (("run", "hostname"), "-np"), (("run", "-np", 2, "hostname"), "no cluster")):
            with self.subTest(words):
                self.refuse(*words, says=says)
        self.cluster.do("up", "--nodes", 1)
        for node in ("node1", "switch", "../node0", ""):
            self.refuse("cut", node, says="there is no host")
        self.cluster.name = "../x"
        self.refuse("down", says="letters and digits")
        self.cluster.name = self.cluster.state.name.rpartition("-")[2]


class ScriptAnywhere(unittest.TestCase):
    """What the script says where it cannot work."""

    def run_with(self, fakes, path=("/usr/sbin", "/usr/bin", "/bin")):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="holdfast-fakes-"))
        self.addCleanup(shutil.rmtree, folder)
        for name, body in fakes.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        env = {**os.environ, "PATH": ":".join((str(folder), *path))}
        return subprocess.run([shutil.which("bash"), SCRIPT, "up", "--nodes", "2"], env=env, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60, check=False)

    def test_help(self):
        done = subprocess.run([SCRIPT, "--help"], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
        for word in ("up --nodes", "run -np", "cut NODE", "heal NODE", "down", "--loss", "--delay", "root", "iptables"):
            self.assertIn(word, done.stdout)

    def test_without_root(self):
        done = self.run_with({"id": "echo 1000"})
        self.assertEqual(64, done.returncode)
        self.assertIn("needs root", done.stderr)

    def test_without_iproute2(self):
        done = self.run_with({"id": "echo 0"}, path=())
        self.assertEqual(64, done.returncode)
        self.assertIn("install the package iproute2", done.stderr)


def setUpModule():
    """A test that was killed leaves its cluster behind, with the number of its process in the name."""
    for state in RUNTIME.glob("holdfast-cluster-test*"):
        left = re.fullmatch(r"test(\d+)\w+", state.name.rpartition("-")[2])
        if left and not pathlib.Path(f"/proc/{left[1]}").exists():
            subprocess.run([SCRIPT, "--name", left[0], "down"], timeout=60, check=False)


if __name__ == "__main__":
    unittest.main()
