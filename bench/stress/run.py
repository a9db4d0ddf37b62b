"""Runs the jobs of a round over the hosts, does to them what is planned, and reads what they leave behind."""

import concurrent.futures
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "jobs"))
import jobs  # noqa: E402

import plan  # noqa: E402

SCRIPT = ROOT / "launch" / "cluster.sh"
PATIENCE = 180  # seconds that a job may take, whatever the machine is busy with
GRACE = 10  # seconds between mpirun's end and that of its last process
LOSSY = 3  # seconds from a job's first record in which packets get lost
LEAVE = plan.DEADLINE + 45  # seconds until all ranks have left that miss one


class Late(Exception):
    """Something that was waited for did not come."""


def signalled(number, _frame):
    raise KeyboardInterrupt(signal.Signals(number).name)


class Cluster:
    def __init__(self, hosts):
        self.hosts = [f"node{host}" for host in range(hosts)]
        self.name = f"stress{os.getpid()}"  # two runs do not meet
        self.state = pathlib.Path(os.environ.get("XDG_RUNTIME_DIR", "/tmp")) / f"holdfast-cluster-{self.name}"

    def command(self, *words):
        return [str(word) for word in (SCRIPT, "--name", self.name, *words)]

    def do(self, *words, check=True):
        # In a group of its own: ^C on the terminal is for this program, which takes the hosts down.
        done = subprocess.run(self.command(*words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=120, check=False, start_new_session=True)
        if check and done.returncode != 0:
            raise RuntimeError(f"launch/cluster.sh {' '.join(map(str, words))}: {done.stderr.strip()}")
        return done

    def lose(self, percent):
        """Each packet that arrives at a host is lost by this chance; None: no more."""
        for host in self.hosts:
            if percent is None:
                self.do("exec", host, "iptables", "-w", "-F", "INPUT")
            else:
                self.do("exec", host, "iptables", "-w", "-A", "INPUT", "-i", "eth0", "-m", "statistic", "--mode",
                        "random", "--probability", f"{percent / 100:.6f}", "-j", "DROP")

    def sent_again(self):
        """TCP segments of all hosts."""
        total = 0
        for host in self.hosts:
            names, values = [line.split() for line in
                             self.do("exec", host, "cat", "/proc/net/snmp").stdout.splitlines()
                             if line.startswith("Tcp:")]
            total += int(dict(zip(names, values))["RetransSegs"])
        return total

    def tcp_patience(self, retries):
        for host in self.hosts:
            self.do("exec", host, "sh", "-c", f"echo {retries} >/proc/sys/net/ipv4/tcp_retries2")

    def processes(self):
        """{pid: command} of whoever is on one of the hosts."""
        namespaces = set()
        for path in self.state.glob("*.net"):
            stat = path.stat()
            namespaces.add((stat.st_dev, stat.st_ino))
        found = {}
        for folder in pathlib.Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                stat = os.stat(folder / "ns" / "net")
                if (stat.st_dev, stat.st_ino) in namespaces:
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(folder.name)] = command
            except OSError:
                continue  # it ended meanwhile
        return found


def until(condition, seconds, what, end):
    limit = min(time.monotonic() + seconds, end)
    while not (found := condition()):
        if time.monotonic() > limit:
            raise Late(f"not in time: {what}")
        time.sleep(0.02)
    return found


class Runner:
    """Of one round, in a folder of its own. `end`: when all has to be over, by the monotonic clock."""

    def __init__(self, cluster, data, folder, the_round, end, replays):
        self.cluster, self.data, self.folder, self.round = cluster, data, folder, the_round
        self.end, self.replays = end, replays
        self.run_dir = folder / "run"
        self.record = {"legs": [], "events": [], "ledger": {}, "bundles": {}, "kinds": {}, "compact": [], "replayable": 0, "replays": {},
                       "checkpoints_clean": True, "reference": None}
        self.job = None
        self.replays_marker = uuid.uuid4().hex

    def command(self, run_dir, leg, name, *options):
        policy = self.folder / f"{name}.policy"
        policy.write_text(f"{self.round.policy} {leg.policy}\n" if leg else "")
        words = (jobs.BIN / "guarded_train", "--workload", "fashion-mnist", "--data", self.data, "--steps",
                 self.round.steps, "--batch", plan.BATCH, "--run-dir", run_dir, "--progress", "off", "--evaluate", 1,
                 "--decay", "exponential", "--local-denominator", "--print-digests", "--policy", policy,
                 *self.round.options, *options)
        return [str(word) for word in words]

    # ---- one job

    def start(self, command):
        self.job = jobs.Job(command, self.folder)
        self.job.run_dir = self.run_dir
        with open(self.folder / "commands", "a", encoding="utf-8") as file:
            print(*self.job.command, file=file)
        return self.job

    def until(self, condition, seconds, what):
        return until(condition, seconds, what, self.end)

    def running(self, what):
        if self.job.mpirun.poll() is not None:
            raise Late(f"the job ended with {self.job.mpirun.returncode} before {what}")

    def frozen(self, rank, attempt):
        """Waits until this rank stands still in this attempt; gives the processes of all ranks."""
        said = re.compile(rf"rank {rank}: injecting stop@\S+ at attempt {attempt}\r?$", re.MULTILINE)

        def stands():
            if not said.search(self.job.err):
                self.running(f"rank {rank} stopped at attempt {attempt}")
                return None
            pids = self.job.pids()
            try:
                state = pathlib.Path(f"/proc/{pids[rank]}/stat").read_text(errors="replace")
            except (KeyError, OSError):
                return None
            return pids if state.rpartition(")")[2].split()[0] == "T" else None

        return self.until(stands, PATIENCE, f"rank {rank} stopped at attempt {attempt}")

    def disturb(self, leg):
        """What is done to a job while it runs."""
        if leg.slow:
            rank, attempt, seconds = leg.slow
            pids = self.frozen(rank, attempt)
            time.sleep(seconds)
            os.kill(pids[rank], signal.SIGCONT)
        if not leg.freeze or not leg.action:
            return
        rank = leg.freeze[0]
        pids = self.frozen(rank, leg.at)
        kind, where, *how = leg.action
        if kind == "kill":
            os.kill(pids[where], signal.SIGKILL)
        elif kind == "signal":
            os.kill(pids[where], signal.Signals[how[0]])
        else:
            self.cluster.do("cut", self.cluster.hosts[where])
        try:
            os.kill(pids[rank], signal.SIGCONT)
        except ProcessLookupError:
            pass  # it is the one that was killed
        if kind == "cut":
            self.until(lambda: not self.job.pids(), LEAVE, "the ranks leave by themselves, on both sides of the cut")
            # What mpirun waits for now is TCP's patience, which is more than this run has.
            self.cluster.tcp_patience(3)

    def while_lossy(self, leg):
        """From before the first packet: with its waits for what is sent again the job takes longer than without."""
        self.cluster.lose(leg.loss)
        begun = f'"event":"run_started","time":"[^"]*","epoch":{leg.epoch},'
        path = self.run_dir / "events.jsonl"
        ended = lambda: self.job.mpirun.poll() is not None
        self.until(lambda: ended() or (path.exists() and re.search(begun, path.read_text())), PATIENCE, "the start")
        limit = time.monotonic() + LOSSY
        self.until(lambda: ended() or time.monotonic() > limit, 2 * LOSSY, "the end of the losses")
        self.cluster.lose(None)

    def proofs(self):
        """What rank 0 counted since the job began, by the metrics it left. They are written once a second, and when a
        job ends in order."""
        path = self.run_dir / "metrics.prom"
        if not path.exists():
            return None
        samples = dict(line.rsplit(" ", 1) for line in path.read_text().splitlines() if not line.startswith("#"))
        names = {"epoch": "epoch", "attempts": "attempts_total", "agreed": "replica_proofs_total"}
        return {name: int(float(samples[f"holdfast_{metric}"])) for name, metric in names.items()}

    def departures(self):
        path = self.run_dir / "departures.jsonl"
        return [jobs.strict_json(line) for line in path.read_text().splitlines()] if path.exists() else []

    def survivors(self):
        """Processes of the job that outlive it for longer than they may; they are ended then."""
        limit = time.monotonic() + GRACE
        while True:
            left = {**jobs.processes(self.job.marker), **self.cluster.processes()}
            if not left or time.monotonic() > limit:
                break
            time.sleep(0.05)
        jobs.kill(self.job.marker)
        return [f"{pid} {command}" for pid, command in left.items()]

    def leg(self, number, leg):
        before = len(self.departures())
        said = {"code": None, "digests": {}, "survivors": [], "departures": [], "sent_again": 0, "late": None,
                "acknowledged": True, "proofs": None}
        self.record["legs"].append(said)
        if leg.ack:
            done = jobs.holdfast("ack", self.run_dir, "--owner", "stress", "--note", "it was planned")
            said["acknowledged"] = done.returncode == 0
        faults = [word for fault in self.round.faults for word in fault.option]
        resume = ("--resume",) if number else ()
        command = self.command(self.run_dir, leg, f"leg{number}", "--checkpoint-interval", plan.INTERVAL, *faults,
                               *leg.options, *resume)
        sent = self.cluster.sent_again() if leg.loss else 0
        try:
            self.start(self.cluster.command("run", "-np", self.round.ranks, *command))
            if leg.loss:
                self.while_lossy(leg)
            self.disturb(leg)
            self.until(lambda: self.job.mpirun.poll() is not None, PATIENCE, "the end of the job")
        except Late as late:
            said["late"] = str(late)
            jobs.kill(self.job.marker)
            self.job.mpirun.wait(GRACE)
        finally:
            self.mend(leg)
        said["code"] = self.job.mpirun.returncode
        said["survivors"] = self.survivors()
        said["sent_again"] = self.cluster.sent_again() - sent if leg.loss else 0
        said["digests"] = self.job.digests
        said["departures"] = self.departures()[before:]
        said["proofs"] = self.proofs()
        return said["late"] is None

    def mend(self, leg):
        if leg.loss:
            self.cluster.lose(None)
        if leg.action and leg.action[0] == "cut":
            self.cluster.do("heal", self.cluster.hosts[leg.action[1]])
            self.cluster.tcp_patience(8)

    # ---- what is left of it

    def read(self):
        self.job.run_dir = self.run_dir
        record = self.record
        if not (self.run_dir / "events.jsonl").exists():
            raise ValueError("there is no events.jsonl")
        record["events"] = self.job.events
        if (self.run_dir / "dropped.jsonl").exists():
            record["ledger"] = {attempt: origin for attempt, (origin, _) in self.job.ledger().items()}
        record["checkpoints_clean"] = jobs.holdfast("checkpoint", "verify", self.run_dir).returncode == 0
        folders = sorted((self.run_dir / "incidents").glob("e*-a*"))
        if folders:
            said = jobs.strict_json(jobs.holdfast("incident", "verify", self.run_dir, "--json").stdout)
            verdicts = [bundle["clean"] for bundle in said["bundles"]]
            record["bundles"] = {folder.name: clean for folder, clean in zip(folders, verdicts, strict=True)}
        for folder in folders:
            manifest = jobs.strict_json((folder / "manifest.json").read_text())
            record["kinds"][folder.name] = manifest["kind"]
            if manifest["compact"]:
                record["compact"].append(folder.name)

    def replay(self, draw):
        """Of those that can be made again, at most so many, by lot."""
        names = sorted(name for name, kind in self.record["kinds"].items()
                       if kind in ("NON_FINITE", "ERROR") and name not in self.record["compact"])
        self.record["replayable"] = min(self.replays, len(names))
        names = sorted(draw.sample(names, min(self.replays, len(names))))

        def one(name):
            command = [str(jobs.BIN / "guarded_train"), "--replay", str(self.run_dir / "incidents" / name)]
            # Each a folder of its own: two that start at once get in each other's way in Open MPI's.
            folder = self.folder / f"replaying-{name}"
            folder.mkdir()
            left = max(5, min(PATIENCE, self.end - time.monotonic()))
            try:
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left,
                                      check=False, start_new_session=True,
                                      env=jobs.environment(self.replays_marker, folder))
            except subprocess.TimeoutExpired:
                return "not in time"
            (self.folder / f"replay-{name}").write_text(done.stdout + done.stderr)
            first = (done.stdout.strip() or "nothing").splitlines()[0]
            return first.rpartition(": ")[2] if first.startswith("replay ") else f"exit code {done.returncode}: {first}"

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            self.record["replays"] = dict(zip(names, pool.map(one, names)))

    def refer(self, omitted):
        """The digests of a job on one host that meets no fault, and leaves these updates out."""
        words = [word for attempt in omitted for word in ("--omit-update", attempt)]
        command = self.command(self.folder / "reference", None, "reference", "--checkpoint-interval", 0, *words)
        self.start([jobs.MPIEXEC, "--oversubscribe", "--bind-to", "none", "-np", str(self.round.ranks), *command])
        try:
            self.until(lambda: self.job.mpirun.poll() is not None, PATIENCE, "the end of the reference")
        except Late:
            pass
        self.survivors()
        self.job.mpirun.wait(GRACE)
        self.record["reference"] = self.job.digests
        shutil.rmtree(self.folder / "reference", ignore_errors=True)

    def run(self, omitted, draw):
        """Gives the record. `omitted`: attempts whose updates the run has left out in the end, if it went as planned."""
        for number, leg in enumerate(self.round.legs):
            if not self.leg(number, leg) or self.record["legs"][-1]["code"] != leg.code:
                break  # what comes next is planned for another end
        try:
            self.read()
        except (AssertionError, KeyError, OSError, ValueError) as error:
            self.record["legs"][-1]["late"] = f"what it left cannot be read: {error!r:.500}"
            return self.record
        self.replay(draw)
        if self.round.reference and len(self.record["legs"]) == len(self.round.legs):
            self.refer(omitted(self.record))
        return self.record

    def give_up(self):
        jobs.kill(self.replays_marker)
        if self.job:
            jobs.kill(self.job.marker)
