"""What goes wrong in each round, all of it from the seed.

A round is one run: one job, or several that resume it. A job is frozen at a known attempt before it is interrupted, so
that what each epoch must have met is known beforehand.
"""

import dataclasses
import random

BATCH = 4
PIXELS, CLASSES = 28 * 28, 10
INTERVAL = 10  # attempts between two checkpoints
APART = 6  # attempts between two incidents: a bundle is written meanwhile, and does not wait behind another
DEADLINE = 10  # seconds without progress, in jobs that lose a rank; all slow and nobody missing is no loss
PATIENT = 240  # seconds, in those that do not

# Parameters of the network in the order they are laid out, and their elements.
PARAMETERS = {"conv1.weight": 16 * 9, "norm1.weight": 16, "norm1.bias": 16, "conv2.weight": 32 * 16 * 9,
              "norm2.weight": 32, "norm2.bias": 32, "classifier.weight": 10 * 32 * 7 * 7, "classifier.bias": 10}
TOTAL = sum(PARAMETERS.values())
CLASS = {"nan": "nan", "snan": "nan", "inf": "pos_inf", "-inf": "neg_inf"}

STAGES = ("input", "forward", "loss", "backward", "reduction", "optimizer")
KINDS = ("values", "kill", "cut", "stop", "budget", "diverge", "calibration", "stuck", "error")


@dataclasses.dataclass
class Fault:
    """`outcome`: what the guard makes of it: skip, rollback (what was written, found one attempt later), divergence,
    abort. `tensor`, `index` and `bad` (class) are None where many values arise, or any of them may be first."""
    option: tuple
    what: str  # value, natural or error
    attempt: int
    stage: str
    rank: int | None  # None: several ranks see parts of it
    tensor: str | None = None
    index: int | None = None
    bad: str | None = None
    micro: int | None = None
    epoch: int | None = None  # None: each time the attempt is made
    outcome: str = "skip"


@dataclasses.dataclass
class Leg:
    """One start. `end`: finished, aborted, stopped, killed, left, refused. `at`: the attempt in which it ends."""
    epoch: int
    code: int = 0
    end: str = "finished"
    at: int = 0
    policy: str = ""
    options: tuple = ()
    ack: bool = False
    freeze: tuple | None = None  # (rank, stage): stopped in attempt `at`, before `action` happens
    action: tuple | None = None  # (kill, rank), (cut, host), (signal, rank, name)
    missing: tuple | None = None  # (ranks, absence) that the others name
    slow: tuple | None = None  # (rank, attempt, seconds)
    loss: float | None = None  # percent of packets
    departures: dict = dataclasses.field(default_factory=dict)  # {reporter: ranks it misses; None: it is alone}


@dataclasses.dataclass
class Round:
    number: int
    kind: str
    hosts: int
    per_host: int
    steps: int
    options: tuple
    policy: str
    faults: list
    legs: list
    reference: bool
    calibrates: bool = False

    @property
    def ranks(self):
        return self.hosts * self.per_host

    def host(self, rank):
        return f"node{rank // self.per_host}"

    def on_host(self, host):
        return tuple(range(host * self.per_host, (host + 1) * self.per_host))

    @property
    def name(self):
        return f"{self.number}:{self.kind}"


def owner(tensor, index, ranks):
    """The rank in whose share of all parameters an element lies."""
    position = index
    for name, elements in PARAMETERS.items():
        if name == tensor:
            break
        position += elements
    share, rest = divmod(TOTAL, ranks)
    for rank in range(ranks):
        if position < share * (rank + 1) + min(rest, rank + 1):
            return rank
    raise AssertionError((tensor, index))


class Planner:
    def __init__(self, seed, number, hosts, per_host, steps, kind=None):
        self.draw = random.Random(f"{seed}/{number}")
        kinds = [k for k in KINDS if hosts > 1 or k != "cut"]
        kind = kind or kinds[number % len(kinds)]
        turn = number // len(kinds) + number
        self.precision = "fp16" if kind == "calibration" else ("fp32", "bf16", "fp16")[turn % 3]
        self.optimizer = ("sgd", "adamw")[turn % 2]
        self.before = kind in ("values", "calibration", "budget", "stuck")
        self.accumulate = 2 if self.draw.random() < 0.25 else 1
        scaling = "on" if kind == "calibration" else "off"
        options = ("--precision", self.precision, "--loss-scaling", scaling, "--optimizer", self.optimizer,
                   "--accumulate", self.accumulate, "--seed", self.draw.randrange(1, 10**6))
        self.round = Round(number, kind, hosts, per_host, steps, options, self.policy(), [], [],
                           reference=kind != "calibration" and (number < 2 or number % 2 == 0),
                           calibrates=kind == "calibration")
        self.ranks = hosts * per_host
        self.taken = set()  # attempts that are not to have another fault

    def policy(self):
        check = "BEFORE" if self.before else "AFTER"
        return (f"max_consecutive_skips: 100000 proof_interval_attempts: 1 check_update: {check} "
                "loss_scale { initial: 64 } evidence { full_incidents: 1000 }")

    def rank(self):
        return self.draw.randrange(self.ranks)

    def reserve(self, *attempts):
        self.taken.update(attempts)

    # ---- faults

    def value(self, attempt, stage, rank, kind, micro):
        """One value in one tensor of one rank; at reduction and optimizer in what all ranks have alike."""
        bad, where, ranks = CLASS[kind], "", f",rank={rank}"
        if stage in ("backward", "reduction", "optimizer"):
            tensor = self.draw.choice(list(PARAMETERS))
            index = self.draw.randrange(PARAMETERS[tensor])
            where = f",tensor={tensor}"
        else:
            tensor, size = {"input": ("input", BATCH * PIXELS), "forward": ("output", BATCH * CLASSES),
                            "loss": ("loss", 1)}[stage]
            index = self.draw.randrange(size)
        if stage in ("reduction", "optimizer"):
            ranks, rank = "", owner(tensor, index, self.ranks)
        of_micro = "" if not ranks else f",micro={micro}"
        option = ("--inject", f"{kind}@{stage},attempt={attempt}{ranks}{of_micro}{where},index={index}")
        seen = micro if stage in ("input", "forward", "loss") else None
        return Fault(option, "value", attempt, stage, rank, tensor, index, bad, seen)

    def values(self, attempt, stages):
        """At one stage, on one rank or on several at once, each with a class of its own."""
        stage = self.draw.choice(stages)
        kinds = ("inf", "-inf") if self.round.calibrates and stage == "backward" else tuple(CLASS)
        shared = stage in ("reduction", "optimizer")
        count = 1 if shared or self.draw.random() < 0.5 else self.draw.randint(1, min(4, self.ranks))
        for rank in sorted(self.draw.sample(range(self.ranks), count)):
            micro = self.draw.randrange(self.accumulate)
            self.round.faults.append(self.value(attempt, stage, rank, self.draw.choice(kinds), micro))

    def error(self, attempt, rank, **settings):
        stage = self.draw.choice(STAGES[:4])
        option = ("--inject", f"throw@{stage},attempt={attempt},rank={rank}" +
                  (f",epoch={settings['epoch']}" if "epoch" in settings else ""))
        self.round.faults.append(Fault(option, "error", attempt, stage, rank, **settings))

    def mixed(self, attempt):
        """An exception on one rank, and at the same time values on another."""
        thrower, other = self.draw.sample(range(self.ranks), 2)
        self.error(attempt, thrower)
        stage = self.draw.choice(STAGES[:4])
        self.round.faults.append(self.value(attempt, stage, other, self.draw.choice(tuple(CLASS)), 0))

    def natural(self, attempt):
        rank, micro = self.rank(), self.draw.randrange(self.accumulate)
        name, stage, tensor, index, bad = self.draw.choice((
            ("corrupt-record", "input", "input", (BATCH - 1) * PIXELS, None),
            ("activation-overflow", "forward", "output", 0, None),
            ("empty-target-mask", "loss", "loss", 0, "nan"),
            ("dropped-square-root", "backward", "conv1.weight", 0, "nan"),
            ("sum-overflow", "reduction", None, None, None)))
        if stage == "reduction":
            option, rank, micro = ("--fault", f"{name},attempt={attempt}"), None, None
        else:
            # The denominator is that of the whole attempt: no target in any of its micro-batches.
            micros = range(self.accumulate) if name == "empty-target-mask" else (micro,)
            micro = micros[0]
            option = tuple(word for m in micros for word in (
                "--fault", f"{name},attempt={attempt},rank={rank},micro={m}"))
        seen = micro if stage in ("input", "forward", "loss") else None
        self.round.faults.append(Fault(option, "natural", attempt, stage, rank, tensor, index, bad, seen))

    def sprinkle(self):
        """Skips, in what is left of the attempts."""
        stages = [stage for stage in STAGES if (stage != "optimizer" or self.before) and
                  (stage != "reduction" or not self.round.calibrates)]
        attempt = self.draw.randint(2, APART)
        while attempt < self.round.steps - 1:
            if attempt not in self.taken:
                kind = self.draw.random()
                if kind < 0.15:
                    self.error(attempt, self.rank())
                elif kind < 0.25 and self.ranks > 1:
                    self.mixed(attempt)
                elif kind < 0.45 and not self.round.calibrates:
                    self.natural(attempt)
                else:
                    self.values(attempt, stages)
            attempt += APART + self.draw.randrange(APART)
        # sum-overflow needs ranks to add up.
        if self.ranks == 1:
            self.round.faults = [f for f in self.round.faults if f.rank is not None]

    # ---- rounds

    def leg(self, epoch, **settings):
        leg = Leg(epoch, **settings)
        leg.at = leg.at or self.round.steps
        if "on_error" not in leg.policy:
            leg.policy += " on_error: SKIP"
        if "max_total_skips" not in leg.policy:
            leg.policy += " max_total_skips: 100000"
        if "deadline" not in leg.policy:
            leg.policy += f" attempt_deadline_seconds: {PATIENT}"
        if leg.freeze:
            rank, stage = leg.freeze
            leg.options += ("--inject", f"stop@{stage},rank={rank},attempt={leg.at},epoch={epoch}")
            self.reserve(leg.at, leg.at + 1)
        self.round.legs.append(leg)
        return leg

    def slow(self, leg, begin):
        """A rank that stands still for a while, within its deadline."""
        rank, attempt = self.rank(), self.draw.randrange(begin, self.round.steps - 2)
        leg.slow = (rank, attempt, round(self.draw.uniform(0.3, 1.0), 1))
        leg.options += ("--inject", f"stop@{self.draw.choice(STAGES[:4])},rank={rank},attempt={attempt},"
                        f"epoch={leg.epoch}")
        self.reserve(attempt, attempt + 1)

    def middle(self):
        return self.draw.randint(self.round.steps * 2 // 5, self.round.steps * 3 // 5)

    def spoil(self, leg, after, **fault):
        """What the optimizer writes: not finite, on all ranks alike or on one alone; or wrong on one."""
        attempt = self.draw.randint(after + 5, self.round.steps - 8)
        tensor = self.draw.choice(list(PARAMETERS))
        diverges = fault["outcome"].startswith("diverge")
        rank = self.rank() if diverges or self.draw.random() < 0.5 else None
        kind = "value=1.5" if diverges else "nan"
        option = ("--inject", f"{kind}@optimizer,attempt={attempt},epoch={leg.epoch},tensor={tensor},index=0" +
                  ("" if rank is None else f",rank={rank}"))
        self.reserve(attempt - 1, attempt, attempt + 1)
        self.round.faults.append(Fault(option, "value", attempt, "optimizer", rank, tensor, 0, None if diverges else
                                       "nan", epoch=leg.epoch, **fault))
        return attempt

    def plan(self):
        getattr(self, f"plan_{self.round.kind}")()
        self.sprinkle()
        self.round.faults.sort(key=lambda fault: (fault.attempt, fault.rank or 0))
        return self.round

    def plan_values(self):
        leg = self.leg(1, loss=self.lossy())
        self.slow(leg, 5)

    def lossy(self):
        return self.draw.choice((0.2, 0.5, 1.0)) if self.round.hosts > 1 else None

    def deputy(self):
        return self.round.per_host if self.round.hosts > 1 else 1

    def reporter(self, missing):
        return self.deputy() if missing == 0 else 0

    def plan_kill(self):
        at, victim = self.middle(), self.rank()
        self.leg(1, end="killed", code=137, at=at, freeze=(self.rank(), self.draw.choice(STAGES[:4])),
                 action=("kill", victim), missing=((victim,), "died"))
        leg = self.leg(2, loss=self.lossy())
        self.spoil(leg, at, outcome="rollback")

    def plan_cut(self):
        at, host = self.middle(), self.draw.randrange(self.round.hosts)
        there = self.round.on_host(host)
        others = tuple(rank for rank in range(self.ranks) if rank not in there)
        # Rank 0 speaks for those it reaches, and so does the deputy; who reaches neither leaves alone.
        if host == 0:
            departures = {0: others, self.deputy(): there}
        elif host == 1:
            departures = {0: there, self.deputy(): others}
        else:
            departures = {0: there, **{rank: None for rank in there}}
        self.leg(1, end="left", code=84, at=at, freeze=(self.rank(), self.draw.choice(STAGES[:4])),
                 action=("cut", host), policy=f"attempt_deadline_seconds: {DEADLINE}", departures=departures)
        self.leg(2)

    def plan_stuck(self):
        """A rank that stops and does not come back: its process does not answer, or its main thread hangs."""
        at, rank = self.middle(), self.rank()
        kind, absence = self.draw.choice((("stop", "silent"), ("hang", "stuck")))
        # Not a hang at reduction: the rank is then where the others wait for it, and nobody can be told to be missing.
        stage = self.draw.choice(STAGES[:5] if kind == "stop" else STAGES[:4])
        fault = f"{kind}@{stage},rank={rank},attempt={at},epoch=1"
        self.reserve(at, at + 1)
        reporter = self.reporter(rank) if kind == "stop" else 0
        self.leg(1, end="left", code=84, at=at, options=("--inject", fault), missing=((rank,), absence),
                 policy=f"attempt_deadline_seconds: {DEADLINE}", departures={reporter: (rank,)})
        self.leg(2)

    def plan_stop(self):
        at = self.middle()
        self.leg(1, end="stopped", code=86, at=at, freeze=(self.rank(), self.draw.choice(STAGES[:4])),
                 action=("signal", self.rank(), self.draw.choice(("SIGTERM", "SIGUSR1"))))
        leg = self.leg(2, policy="on_divergence: GO_BACK", loss=self.lossy())
        self.spoil(leg, at, outcome="diverge_rollback")

    def plan_budget(self):
        """The first job may skip so many attempts and no more; the second one makes the last of them again."""
        self.leg(1, end="aborted", code=81)
        self.leg(2, end="refused", code=87)
        self.leg(2, ack=True)

    def plan_diverge(self):
        leg = self.leg(1, end="aborted", code=83)
        leg.at = 1 + self.spoil(leg, self.round.steps // 3, outcome="diverge_abort")
        self.leg(2, end="refused", code=87)
        self.leg(2, ack=True)

    def plan_error(self):
        leg = self.leg(1, end="aborted", code=80, at=self.middle(), policy="on_error: ABORT")
        self.reserve(*range(leg.at + 1))
        self.error(leg.at, self.rank(), epoch=1, outcome="abort")
        self.leg(2)

    def plan_calibration(self):
        self.leg(1, loss=self.lossy())


def make_round(seed, number, hosts, per_host, steps, kind=None):
    planner = Planner(seed, number, hosts, per_host, steps, kind)
    made = planner.plan()
    if made.kind == "budget":
        # Known only once all faults are.
        attempts = sorted({fault.attempt for fault in made.faults})
        last = attempts[len(attempts) // 2]
        made.legs[0].at = last
        made.legs[0].policy = made.legs[0].policy.replace("max_total_skips: 100000",
                                                          f"max_total_skips: {attempts.index(last)}")
    return made
