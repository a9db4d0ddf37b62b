"""See bench/stress.sh."""

import argparse
import collections
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback

import judge
import plan
import run
import table

LEAST = 6  # seconds that a job is thought to take before one has been seen


def options(words):
    def above_0(text):
        if (number := int(text)) < 1:
            raise argparse.ArgumentTypeError("a number above 0")
        return number

    parser = argparse.ArgumentParser(prog="stress.sh", description="See bench/stress.sh --help.", exit_on_error=False)
    parser.add_argument("--hosts", type=above_0, default=2)
    parser.add_argument("--ranks-per-host", type=above_0, default=2)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--attempts", type=above_0)
    parser.add_argument("--replays", type=int, default=4)
    parser.add_argument("--only", type=int, default=-1)
    parser.add_argument("--json", type=pathlib.Path)
    try:
        given, unknown = parser.parse_known_args(words)
    except (argparse.ArgumentError, SystemExit) as error:
        raise SystemExit(refuse(str(error))) from None
    if unknown:
        raise SystemExit(refuse(f"unknown option: {unknown[0]}"))
    if given.hosts * given.ranks_per_host < 2 or given.hosts > 64:
        raise SystemExit(refuse("--hosts, --ranks-per-host: 2 ranks at least, on 64 hosts at most"))
    if given.attempts is None:
        given.attempts = 200 if given.hosts * given.ranks_per_host <= 8 else 100
    if given.attempts < 60:
        raise SystemExit(refuse("--attempts: 60 at least"))
    if not 0 < given.minutes <= 24 * 60:
        raise SystemExit(refuse("--minutes: more than 0, at most a day"))
    return given


def refuse(why):
    print(f"stress.sh: {why}", file=sys.stderr)
    return 64


def missing(hosts):
    for program in ("guarded_train", "holdfast"):
        if not (run.jobs.BIN / program).exists():
            return f"{run.jobs.BIN / program} is not there: build the project first"
    for program, package in ((run.jobs.MPIEXEC, "openmpi-bin"), ("protoc", "protobuf-compiler")):
        if shutil.which(program) is None:
            return f"{program} is missing: install the package {package}"
    if hosts > 1 and shutil.which("iptables") is None:
        return "iptables is missing, which loses packets: install the package iptables"
    return ""


class Stress:
    def __init__(self, given, scratch):
        self.given, self.scratch = given, scratch
        self.cluster = run.Cluster(given.hosts)
        self.begin = time.monotonic()
        self.last_start = self.begin + given.minutes * 60
        self.counts, self.skips = collections.Counter(), collections.Counter()
        self.failures, self.kept, self.rounds, self.a_job = [], [], [], LEAST
        self.runner = None

    def jobs(self, the_round):
        return len(the_round.legs) + the_round.reference

    def waits(self, the_round):
        """Seconds in which a round only waits for a deadline, and for mpirun to notice."""
        return plan.DEADLINE + 10 if the_round.kind in ("cut", "stuck") else 0

    def fits(self, the_round):
        """Whether it would end in time, by how long the slowest jobs so far have taken."""
        guess = self.a_job * self.jobs(the_round) + self.waits(the_round)
        return time.monotonic() + guess <= self.last_start

    def play(self, number):
        given = self.given
        the_round = plan.make_round(given.seed, number, given.hosts, given.ranks_per_host, given.attempts)
        if number > 0 and given.only < 0 and not self.fits(the_round):
            return False
        begin = time.monotonic()
        folder = self.scratch / f"round{number}"
        folder.mkdir()
        self.runner = run.Runner(self.cluster, self.scratch / "data", folder, the_round, self.last_start + 40,
                                 given.replays)
        record = self.runner.record
        judged = judge.Judge(the_round, record)
        goes_on = self.attempt(judged, "it could not be played", lambda: self.runner.run(
            lambda seen: judge.Judge(the_round, seen).omitted(), random.Random(f"{given.seed}/{number}/replays")))
        self.runner.give_up()
        self.attempt(judged, "its record cannot be judged", judged.judge)
        seconds = time.monotonic() - begin
        self.a_job = max(self.a_job, (seconds - self.waits(the_round)) / self.jobs(the_round))
        self.add(the_round, judged, seconds)
        if judged.failures:
            (folder / "record.json").write_text(json.dumps(record, indent=1))
            self.kept.append(str(folder))
        else:
            shutil.rmtree(folder)
        return goes_on  # after what was not foreseen nobody knows in which state the hosts are

    def attempt(self, judged, what, work):
        """Whatever goes wrong is a finding of the round: the figures of all rounds are reported in any case."""
        try:
            work()
            return True
        except Exception as error:  # of the cluster, of files that cannot be read, of this program
            traceback.print_exc()
            judged.fail(f"{what}: {error!r:.500}")
            return False

    def add(self, the_round, judged, seconds):
        self.counts += judged.counts
        self.skips += judged.skips
        self.failures += judged.failures
        self.rounds.append({"round": the_round.number, "kind": the_round.kind, "seconds": round(seconds, 1),
                            "failures": judged.failures})
        print(f"round {the_round.name:14} {dict(zip(the_round.options[::2], the_round.options[1::2]))['--precision']} "
              f"{judged.counts['attempts']:5} attempts, {judged.counts['faults attributed']} of "
              f"{judged.counts['faults injected']} faults found, {seconds:.1f} s"
              f"{'' if not judged.failures else '  FAILED'}", flush=True)
        for failure in judged.failures:
            print(f"  {failure}", flush=True)

    def play_all(self):
        run.jobs.small_data(self.scratch / "data", 2048, 100)
        self.cluster.do("up", "--nodes", self.given.hosts)
        if self.given.only >= 0:
            self.play(self.given.only)
            return
        number = 0
        while self.play(number):
            number += 1

    def report(self):
        rows = table.figures(self.counts, self.skips, time.monotonic() - self.begin)
        print(f"\n{table.text(rows)}")
        reasons = list(self.failures)
        if self.counts["faults injected"] == 0:
            reasons.append("nothing was put in")
        for place in self.kept:
            print(f"kept: {place}")
        if self.given.json:
            self.given.json.write_text(json.dumps({
                "passed": not reasons, "reasons": reasons, "hosts": self.given.hosts,
                "ranks": self.given.hosts * self.given.ranks_per_host, "seed": self.given.seed, "figures": rows,
                "rounds": self.rounds, "kept": self.kept}, indent=1) + "\n")
        what = f"{self.given.hosts} hosts, {self.given.hosts * self.given.ranks_per_host} ranks, seed {self.given.seed}"
        if not reasons:
            print(f"stress: PASS {what}: {self.counts['faults attributed']} of {self.counts['faults injected']} faults "
                  f"attributed, 0 mismatches, 0 survivors")
            return 0
        print(f"stress: FAIL {what}: {len(reasons)} findings: " + "; ".join(reasons[:3]) +
              ("; ..." if len(reasons) > 3 else ""))
        return 1


def main(words):
    given = options(words)
    if why := missing(given.hosts):
        return refuse(why)
    os.environ["OMP_NUM_THREADS"] = "1"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, run.signalled)
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="holdfast-stress-"))
    stress = Stress(given, scratch)
    try:
        stress.play_all()
        return stress.report()
    except KeyboardInterrupt as interrupt:
        print(f"stress: interrupted by {interrupt}", file=sys.stderr)
        return 130
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return refuse(str(error))  # there are no hosts to begin with
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if stress.runner:
            stress.runner.give_up()
        try:
            stress.cluster.do("down", check=False)
        except subprocess.TimeoutExpired:
            print(f"stress.sh: launch/cluster.sh --name {stress.cluster.name} down: not in time", file=sys.stderr)
        if not stress.kept:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
