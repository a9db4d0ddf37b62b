"""Runs jobs under mpirun and reads what they leave behind.

Environment: HOLDFAST_BIN, the folder of the programs; HOLDFAST_MPIEXEC, mpirun; HOLDFAST_DATA, Fashion-MNIST.
"""

import ast
import ctypes
import datetime
import gzip
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("HOLDFAST_BIN", ROOT / "build" / "bin"))
MPIEXEC = os.environ.get("HOLDFAST_MPIEXEC", "mpirun")
DATA = pathlib.Path(os.environ.get("HOLDFAST_DATA", "/usr/share/datasets/fashion-mnist"))
HOST = socket.gethostname()

MARKER = "HOLDFAST_JOB"  # environment variable by which the processes of a job are found again
CODES = "HOLDFAST_JOB_CODES"  # environment variable: where each_rank_says_its_code() writes
PATIENCE = 150  # seconds; a job that takes longer has failed, whatever the machine is busy with
GRACE = 5  # seconds between mpirun's end and the last rank's


def environment(marker, folder):
    values = dict(os.environ)
    values[MARKER] = marker
    # A rank that is killed leaves its shared memory and mpirun's socket behind: here, and not in /dev/shm and /tmp. A
    # folder of its own, since two mpiruns that start at once fail over who makes theirs.
    own = pathlib.Path(folder) / marker[:8]
    own.mkdir(exist_ok=True)
    values["OMPI_MCA_btl_vader_backing_directory"] = values["TMPDIR"] = str(own)
    values["OMPI_MCA_btl_vader_single_copy_mechanism"] = "none"
    if os.geteuid() == 0:
        values["OMPI_ALLOW_RUN_AS_ROOT"] = values["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return values


def processes(marker):
    """Living processes of the job, {pid: command}; zombies are not alive, stopped processes are."""
    wanted = f"{MARKER}={marker}".encode()
    found = {}
    for folder in pathlib.Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            state = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            if state not in "ZX":
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")
        except OSError:
            continue  # it ended meanwhile, or is not ours to look at
    return found


def kill(marker):
    """Ends what is left of the job. Processes are looked up again each time, so never another's number."""
    for _ in range(100):
        left = processes(marker)
        if not left:
            return
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)


def die_with_parent():
    """In mpirun before exec: SIGTERM when the test's process dies, so that a test that is killed leaves no job."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def each_rank_says_its_code(command):
    """Wraps a rank's command so that its own exit code is kept, in a file."""
    script = f'trap : TERM; "$@"; code=$?; echo $code > "${CODES}.$OMPI_COMM_WORLD_RANK"; exit $code'
    return ["sh", "-c", script, "rank", *command]


def on_rank(rank, its_command, command):
    """A command that is another one on one rank."""
    script = f'[ "$OMPI_COMM_WORLD_RANK" = {rank} ] && exec {shlex.join(its_command)}; exec {shlex.join(command)}'
    return ["sh", "-c", script]


def strict_json(text):
    """json.loads() takes NaN, Infinity and repeated keys, which JSON does not have."""
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    def unique(pairs):
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key is there twice")
        return dict(pairs)

    return json.loads(text, parse_constant=refuse, object_pairs_hook=unique)


DIGEST = re.compile(r"^digest rank=(?P<rank>\d+) parameters=(?P<parameters>[0-9a-f]+) "
                    r"optimizer=(?P<optimizer>[0-9a-f]+) ema=(?P<ema>[0-9a-f]+) buffers=(?P<buffers>[0-9a-f]+) "
                    r"rng=(?P<rng>[0-9a-f]+) attempts=(?P<attempts>\d+) updates=(?P<updates>\d+)\r?$", re.MULTILINE)


def generations(run_dir):
    """Names of the checkpoints that could be restored, oldest first."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob("e*-a*"))


def protoc_decode(message, binary):
    """The text format of a message of coord/state.proto."""
    command = ["protoc", f"--decode=holdfast.{message}", f"-I{ROOT}", "coord/state.proto"]
    return subprocess.run(command, input=binary, capture_output=True, check=True).stdout.decode()


def holdfast(*arguments):
    """Runs the command line tool to its end."""
    return subprocess.run([BIN / "holdfast", *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE)


def until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.05)
    return found


def wait_for_stop(job, attempt):
    """Until rank 0 has stopped itself in this attempt, by a fault: stop@input,rank=0. Gives its pid."""
    until(lambda: f"at attempt {attempt}\n" in job.err, PATIENCE, "the fault")
    rank_0 = job.pids()[0]
    stat = pathlib.Path(f"/proc/{rank_0}/stat")
    until(lambda: stat.read_text(errors="replace").rpartition(")")[2].split()[0] == "T", PATIENCE, "rank 0 stopped")
    return rank_0


class Job:
    """A job that is running, or has ended and been looked after."""

    def __init__(self, command, folder):
        self.command = [str(word) for word in command]
        self.marker = uuid.uuid4().hex
        self.run_dir = None
        self._out = pathlib.Path(folder) / f"{self.marker}.out"
        self._err = pathlib.Path(folder) / f"{self.marker}.err"
        self._codes = pathlib.Path(folder) / f"{self.marker}.code"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            # Files, not pipes: a process that is left behind would keep a pipe open.
            self.mpirun = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                           start_new_session=True, preexec_fn=die_with_parent,
                                           env={**environment(self.marker, folder), CODES: str(self._codes)})

    def wait_for_start(self):
        """Until the first event is on record."""
        until = time.monotonic() + PATIENCE
        while not ((self.run_dir / "events.jsonl").exists() and self.events):
            assert self.mpirun.poll() is None and time.monotonic() < until, f"not started\n{self}"
            time.sleep(0.05)

    def wait_for_attempts(self):
        """Until it says that it is in the middle of them."""
        until(lambda: re.search(r"^attempt \d+/", self.out, re.MULTILINE) or self.mpirun.poll() is not None, PATIENCE,
              "the first attempt")
        assert self.mpirun.poll() is None, self

    def wait(self, timeout=PATIENCE):
        try:
            self.code = self.mpirun.wait(timeout)
        except subprocess.TimeoutExpired:
            left = processes(self.marker)
            kill(self.marker)
            self.mpirun.wait()
            self.code = None
            raise AssertionError(f"not ended after {timeout} s, with {left}\n{self}") from None
        self.ended = datetime.datetime.now(datetime.timezone.utc)
        until = time.monotonic() + GRACE
        while (left := processes(self.marker)) and time.monotonic() < until:
            time.sleep(0.05)
        kill(self.marker)
        if left:
            raise AssertionError(f"mpirun returned {self.code} and left {left}\n{self}")
        return self

    @property
    def out(self):
        return self._out.read_text(errors="replace")

    @property
    def err(self):
        return self._err.read_text(errors="replace")

    def __str__(self):
        return (f"$ {' '.join(self.command)}\nexit code {self.mpirun.returncode}\n"
                f"--- stdout\n{self.out[-6000:]}\n--- stderr\n{self.err[-6000:]}")

    @property
    def digests(self):
        """{rank: {parameters, optimizer, ema, buffers, rng: hex; attempts, updates: int}}"""
        found = {}
        for match in DIGEST.finditer(self.out):
            digest = match.groupdict()
            rank = int(digest.pop("rank"))
            assert rank not in found, f"two digest lines of rank {rank}\n{self}"
            digest["attempts"], digest["updates"] = int(digest["attempts"]), int(digest["updates"])
            found[rank] = digest
        return found

    @property
    def events(self):
        """What RUN_DIR/events.jsonl holds, read as strictly as JSON is defined."""
        text = (self.run_dir / "events.jsonl").read_bytes().decode("utf-8")
        assert not text or text.endswith("\n"), f"the last line is not whole: {text[-200:]!r}"
        return [strict_json(line) for line in text.split("\n")[:-1]]

    def departures(self):
        """What RUN_DIR/departures.jsonl holds."""
        path = self.run_dir / "departures.jsonl"
        return [strict_json(line) for line in path.read_text().splitlines()] if path.exists() else []

    def pids(self):
        """{rank: pid} of the ranks of guarded_train that live."""
        found = {}
        for pid, command in processes(self.marker).items():
            if command.startswith(str(BIN / "guarded_train")):
                try:
                    environ = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
                except OSError:
                    continue  # it ended meanwhile
                if rank := re.search(rb"\0OMPI_COMM_WORLD_RANK=(\d+)", environ):
                    found[int(rank[1])] = pid
        return found

    def skips(self):
        return [event for event in self.events if event["event"] == "attempt_skipped"]

    def named(self, name):
        """The events of this name."""
        return [event for event in self.events if event["event"] == name]

    def generations(self):
        """Names of the checkpoints that could be restored, oldest first."""
        return generations(self.run_dir)

    def ledger(self):
        """{attempt: (origin, ranks)} of what the run left out in the end: going back takes back what was dropped from
        there on."""
        dropped = {}
        for line in map(strict_json, (self.run_dir / "dropped.jsonl").read_text().splitlines()):
            if line["event"] == "went_back":
                dropped = {attempt: what for attempt, what in dropped.items() if attempt < line["attempt"]}
            else:
                assert line["attempt"] not in dropped, f"dropped twice: {line}"
                dropped[line["attempt"]] = (line["origin"], line["ranks"])
        return dropped

    def memory(self):
        """Lines of RUN_DIR/state by field, but for those that tell one course of the same run from another."""
        state = protoc_decode("StateFile", (self.run_dir / "state").read_bytes())
        (payload,) = re.findall(r'^payload: (".*")$', state, re.MULTILINE)
        fields = {}
        for line in protoc_decode("RunState", ast.literal_eval("b" + payload)).splitlines():
            name = re.match(r"\w+", line)
            field = name[0] if name else field  # a message's lines are indented
            fields.setdefault(field, []).append(line)
        course = {"epoch", "holder", "running", "first_attempt", "endings", "incidents", "generation", "rollbacks",
                  "repeated_failure", "fell_back", "run_id", "claimed_epoch", "restored_attempt", "restore_before"}
        unset = [f"{field}: {default}" for field in fields for default in ("0", "false")]
        return {field: lines for field, lines in fields.items()
                if field not in course and not (len(lines) == 1 and lines[0] in unset)}

    def seconds_after_start(self):
        """From the first event to mpirun's end."""
        start = datetime.datetime.fromisoformat(self.events[0]["time"].replace("Z", "+00:00"))
        return (self.ended - start).total_seconds()

    def accuracy(self):
        (accuracy,) = re.findall(r"^test accuracy ([0-9.]+) ", self.out, re.MULTILINE)
        return float(accuracy)

    def parameters(self):
        """(all, not finite) at the end of the run."""
        ((total, bad),) = re.findall(r"^parameters total=(\d+) non_finite=(\d+)", self.out, re.MULTILINE)
        return int(total), int(bad)

    def rank_codes(self):
        """{rank: exit code} of a job that was started with watch_ranks."""
        files = self._codes.parent.glob(f"{self._codes.name}.*")
        return {int(path.suffix[1:]): int(code) for path in files if (code := path.read_text())}


class JobTest(unittest.TestCase):
    """A test that runs jobs, in a folder of its own and on a data set small enough to load at once."""

    maxDiff = None
    TRAIN_SAMPLES = 1024
    TEST_SAMPLES = 100

    # Parameters of the network in the order they are laid out, and their elements.
    PARAMETERS = {"conv1.weight": 16 * 9, "norm1.weight": 16, "norm1.bias": 16, "conv2.weight": 32 * 16 * 9,
                  "norm2.weight": 32, "norm2.bias": 32, "classifier.weight": 10 * 32 * 7 * 7, "classifier.bias": 10}

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="holdfast-job-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.data = small_data(self.folder / "data", self.TRAIN_SAMPLES, self.TEST_SAMPLES)
        self._run_dirs = 0

    def new_run_dir(self):
        self._run_dirs += 1
        return self.folder / f"run{self._run_dirs}"

    def policy_file(self, text, name="policy"):
        path = self.folder / name
        path.write_text(text)
        return path

    def trainer(self, *options, run_dir, policy="", data=None, steps=8, batch=4,
                workload="fashion-mnist"):
        """One rank's command. `policy` is textproto or JSON, not a file."""
        words = [BIN / "guarded_train", "--workload", workload, "--data", data or self.data, "--steps", steps,
                 "--batch", batch, "--run-dir", run_dir, "--progress", "plain", *options]
        if policy:
            words += ["--policy", self.policy_file(policy, f"{pathlib.Path(run_dir).name}.policy")]
        return [str(word) for word in words]

    def start(self, ranks, command, run_dir=None, watch_ranks=False):
        """`watch_ranks`: keep the exit code of each rank. mpirun ends the others, often by SIGKILL within a
        millisecond, as soon as one has returned something else than 0. To see what each returns it has to be told not
        to, and then returns 0 itself."""
        mpirun = [MPIEXEC, "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
        if watch_ranks:
            mpirun += ["--mca", "orte_abort_on_non_zero_status", "0"]
            command = each_rank_says_its_code(command)
        job = Job([*mpirun, *command], self.folder)
        self.addCleanup(job.mpirun.poll)
        self.addCleanup(kill, job.marker)
        job.run_dir = run_dir
        return job

    def train(self, *options, ranks=4, code=0, run_dir=None, other_rank=None, timeout=PATIENCE, watch_ranks=False,
              **settings):
        """Runs guarded_train to its end, which must have this exit code and leave no process.

        `other_rank`: (rank, (options, settings)) of a rank that is started differently.
        """
        run_dir = run_dir or self.new_run_dir()
        command = self.trainer(*options, run_dir=run_dir, **settings)
        if other_rank:
            rank, (other_options, other_settings) = other_rank
            command = on_rank(rank, self.trainer(*other_options, run_dir=run_dir, **other_settings), command)
        job = self.start(ranks, command, run_dir, watch_ranks).wait(timeout)
        if watch_ranks:
            self.assertEqual({rank: code for rank in range(ranks)}, job.rank_codes(), job)
        else:
            self.assertEqual(code, job.code, job)
        return job

    def train_both_ways(self, *options, **settings):
        """The exit code is mpirun's, and each rank's. Returns the job that mpirun ended."""
        self.train(*options, watch_ranks=True, **settings)
        return self.train(*options, **settings)

    def assert_lockstep(self, job, ranks, attempts, updates):
        """Every rank ends with the same state but for its random numbers. Returns rank 0's digests."""
        digests = job.digests
        self.assertEqual(list(range(ranks)), sorted(digests), job)
        shared = [{k: v for k, v in digests[rank].items() if k != "rng"} for rank in range(ranks)]
        for rank in range(ranks):
            self.assertEqual(shared[0], shared[rank], f"rank {rank} differs from rank 0\n{job}")
        self.assertEqual(ranks, len({digest["rng"] for digest in digests.values()}), "ranks share random numbers")
        self.assertEqual((attempts, updates), (shared[0]["attempts"], shared[0]["updates"]), job)
        return shared[0]

    def assert_same_state(self, job, reference):
        """Bit for bit, rank by rank, random numbers and counters included."""
        self.assertTrue(job.digests, job)
        self.assertEqual(reference.digests, job.digests, f"{job}\n=== reference\n{reference}")

    def assert_record(self, job, *names):
        """The events of the run, by name, each with what every event has.

        Some only when asked for. Spikes: the tiny batches of a test that runs for as long as it takes make one now and
        then. Checkpoints and evidence: the disk decides when, and of which checkpoints there are none.
        """
        beside = {"spike", "checkpoint_published", "checkpoint_failed", "evidence_written", "evidence_failed",
                  "evidence_cross_examined"} - set(names)
        events = [event for event in job.events if event["event"] not in beside]
        self.assertEqual(list(names), [event["event"] for event in events], job)
        for event in events:
            self.assertRegex(event["time"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$")
            for key in ("epoch", "attempt", "update"):
                self.assertIs(int, type(event[key]), f"{key} of {event}")
        return events

    def assert_skip(self, event, attempt, stage, origins, **fields):
        """`origins`: [(rank, tensor, index, {nan|pos_inf|neg_inf: count})], by rank."""
        self.assertEqual(("attempt_skipped", attempt, stage), (event["event"], event["attempt"], event["stage"]), event)
        found = [(o["rank"], o["host"], o["stage"], o["tensor"], o["index"],
                  {c: o[c] for c in ("nan", "pos_inf", "neg_inf") if o[c]}) for o in event["origins"]]
        self.assertEqual([(rank, HOST, stage, tensor, index, counts) for rank, tensor, index, counts in origins], found,
                         event)
        for name in ("nan", "pos_inf", "neg_inf"):
            self.assertEqual(sum(counts.get(name, 0) for *_, counts in origins), event[name], event)
        for name, value in fields.items():
            self.assertEqual(value, event[name], event)


def idx_bytes(header, payload):
    return b"".join(number.to_bytes(4, "big") for number in header) + payload


def first_records(source, size, count):
    """The first `count` records of an IDX file: (header after the count, bytes)."""
    with gzip.open(source) as file:
        magic, _ = (int.from_bytes(file.read(4), "big") for _ in range(2))
        sides = [int.from_bytes(file.read(4), "big") for _ in range(magic % 256 - 1)]
        return magic, sides, file.read(size * count)


def small_data(folder, train_samples, test_samples):
    """The first samples of Fashion-MNIST, in the four files of the whole."""
    folder.mkdir(parents=True)
    for split, count in (("train", train_samples), ("t10k", test_samples)):
        for kind, size in (("images-idx3", 28 * 28), ("labels-idx1", 1)):
            name = f"{split}-{kind}-ubyte.gz"
            magic, sides, records = first_records(DATA / name, size, count)
            (folder / name).write_bytes(gzip.compress(idx_bytes([magic, count, *sides], records), 1))
    return folder
