"""Hosts that are network namespaces of this machine (launch/cluster.sh), and jobs over several of them."""

import os
import pathlib
import re
import subprocess
import sys
import time

import jobs
from jobs import Job, JobTest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "launch" / "cluster.sh"
RUNTIME = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp"))

DEADLINE = 4  # seconds without progress


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


def setUpModule():
    """A test that was killed leaves its cluster behind, with the number of its process in the name."""
    for state in RUNTIME.glob("holdfast-cluster-test*"):
        left = re.fullmatch(r"test(\d+)\w+", state.name.rpartition("-")[2])
        if left and not pathlib.Path(f"/proc/{left[1]}").exists():
            subprocess.run([SCRIPT, "--name", left[0], "down"], timeout=60, check=False)
