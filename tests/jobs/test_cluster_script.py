"""launch/cluster.sh: what it promises of the hosts that it makes, and that it leaves nothing behind."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import jobs
from cluster import SCRIPT, Cluster, needs_a_cluster, setUpModule
from jobs import Job, processes, until

__all__ = ["setUpModule"]

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


if __name__ == "__main__":
    unittest.main()
