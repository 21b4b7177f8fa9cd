"""Rules that map processes of uninstrumented jobs to role, replica and rank. Pure: no files, no clock.

A rule matches a process by regular expressions on its title, command line, environment and Kubernetes labels, and gives
its identity:

    rules:
      - name: my-trainer
        title: "^ray::MyTrainer"          # searched in the first argument, which Ray and setproctitle set
        cmdline: "train\\.py (?P<part>\\w+)"  # searched in all arguments, joined by blanks
        environ: {RANK: "^\\d+$"}           # each must exist and match
        labels: {app: "rl"}               # of the file `labels_file`, as the downward API writes it
        role: trainer
        replica: 0                        # a number, or {NAME}: a group of the expressions, a variable, a label
        rank: "{RANK}|{SLURM_PROCID}"     # the first that is known; default 0
        job: "{MASTER_ADDR}:{MASTER_PORT}|{SLURM_JOB_ID}"   # the first all of whose names are known

A process without a known replica or rank is numbered by start order on its node, as a replica of its own.

`job` distinguishes two jobs on one node whose rules give the same replica: the second gets a number derived from its
`job` text, the same on each node. With `by_job: true` every job does, including the first: for clusters that share
nodes between jobs.

The first matching rule wins, configured rules before the defaults. Children of a discovered process are its helpers
(data loaders, compile workers) and are never discovered themselves. Launchers and shells are therefore never ranks:
srun gives them a rank's environment, and the ranks are their children.

Ray's `setproctitle` overwrites the environment in `/proc/PID/environ` with zeros (seen with Ray 2.60): variables of a
Ray actor are known only if the agent saw the process before it set its title, or with SPT_NOENV=1 in the job.
"""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rolecall.core.errors import ConfigError
from rolecall.core.ids import ID_PATTERN
from rolecall.core.membership import STANDBY_ROLES

RULES_MAX = 64
PATTERN_CHARACTERS_MAX = 500
REPLICA_MAX = 999_999
RANK_MAX = 1 << 20
SLOTS_PER_NODE = 32
"""Processes of one role and node that can be numbered by start order; replica = node's index x this + slot."""
NODE_INDEX_MAX = REPLICA_MAX // SLOTS_PER_NODE - 1
ALTERNATIVES_MAX = 8
JOB_CHARACTERS_MAX = 200

_NAME = re.compile(r"\{([A-Za-z_][A-Za-z0-9_./-]{0,126})\}")
_HELPER = re.compile(
    r"multiprocessing[. ](spawn|forkserver|resource_tracker|semaphore_tracker)|from multiprocessing|"
    r"compile_worker|pt_data_worker|pt_data_pin|torch\.distributed\.(run|launch)\b|-m rolecall|bin/rolecall"
)
"""Helpers that may outlive a training process, launchers, and rolecall itself: never a rank."""
_LAUNCHER = re.compile(
    r"(?:(?:\S*/)?python[\w.-]*(?: -[WX] ?\S+| -[^WX\s]\S*)* )?"  # the interpreter and its options, `-m` among them
    r"(?:(?:\S*/)?(?:torchrun|accelerate(?:-launch)?|deepspeed|ft_launcher|conda)|"
    r"accelerate\.commands\.(?:launch|accelerate_cli)|deepspeed\.launcher\.\w+|"
    r"nvidia_resiliency_ext\.fault_tolerance\.launcher)(?:\s|\Z)"
)
"""Launchers by program, script or module: a rank may name one among its own arguments (`train.py --deepspeed`)."""
_SHELL = re.compile(r"(?:.*/)?-?(?:ba|da|a|k|z|c|tc|fi)?sh\Z")
"""A shell that waits for the process that it started has that process's environment and names its command."""
_PYTHON: Final = r"(^|/)python[\w.-]*(\s|$)"
"""In the first argument: others name it, too (`timeout 9h python train.py`)."""

_MASTER: Final = "{MASTER_ADDR}:{MASTER_PORT}"


def _ray(name: str, role: str, classes: str, **more: Any) -> Mapping[str, Any]:
    """A rule for actors of Ray: their title is `ray::<class>.<method>`, or `ray::<repr>.<method>` for an actor with its
    own __repr__. Class names as of these projects' sources in 2026; they may change."""
    return {"name": name, "title": f"^ray::{classes}", "role": role, **more}


DEFAULTS: Final[tuple[Mapping[str, Any], ...]] = (
    # verl: worker groups pass RANK and the master address to their actors through the runtime environment
    _ray(
        "verl-trainer",
        "trainer",
        r"(WorkerDict|FusedWorker\w*|(Async)?ActorRolloutRefWorker)\b",
        replica=0,
        rank="{RANK}",
        job=_MASTER,
    ),
    _ray("verl-critic", "critic", r"CriticWorker\b", replica=0, rank="{RANK}", job=_MASTER),
    _ray("verl-reward", "reward", r"(RewardModelWorker|RewardLoopWorker|RewardManagerWorker)\b"),
    _ray("verl-rollout", "rollout", r"((vLLM|SGLang|TRTLLM)HttpServer\w*|AsyncvLLMServer|vLLMAsyncRollout)\b"),
    _ray("verl-agent-loop", "agent", r"AgentLoopWorker\w*\b"),
    _ray("verl-controller", "controller", r"(\w*TaskRunner\w*|FullyAsync(Trainer|Rollouter)|main_task)\b"),
    # slime: RANK is set inside the actor and not visible from outside
    _ray("slime-trainer", "trainer", r"(Megatron|FSDP)TrainRayActor\b"),
    _ray("slime-rollout", "rollout", r"SGLangEngine\b"),
    _ray("slime-manager", "controller", r"Rollout(Manager|Controller)\b"),
    # OpenRLHF: RANK is set inside the actor
    _ray("openrlhf-trainer", "trainer", r"PolicyModelActor\b"),
    _ray("openrlhf-critic", "critic", r"CriticModelActor\b"),
    _ray("openrlhf-reference", "reference", r"ReferenceModelActor\b"),
    _ray("openrlhf-reward", "reward", r"RewardModelActor\b"),
    _ray("openrlhf-rollout", "rollout", r"(LLM|Rollout)RayActor\w*\b"),
    _ray("openrlhf-controller", "controller", r"(PPOTrainer(Async)?|TrainingActor|GenerateSamplesActor)\b"),
    # NeMo-RL: RANK and the master address are in the runtime environment, of its engines, too
    _ray(
        "nemo-rl-trainer",
        "trainer",
        r"(DTensor|Megatron)PolicyWorker\w*(\[rank=(?P<rank>\d+)\])?",
        replica=0,
        rank="{rank}|{RANK}",
        job=_MASTER,
    ),
    _ray(
        "nemo-rl-critic",
        "critic",
        r"(DTensor|Megatron)ValueWorker\w*(\[rank=(?P<rank>\d+)\])?",
        replica=0,
        rank="{rank}|{RANK}",
        job=_MASTER,
    ),
    _ray("nemo-rl-rollout", "rollout", r"(Vllm|SGLang)(Async)?GenerationWorker\b"),
    _ray("nemo-rl-controller", "controller", r"(AsyncTrajectoryCollector|SyncRolloutActor)\b"),
    # plain Ray Train
    _ray("ray-train", "trainer", r"_?RayTrainWorker\w*"),
    # torchrun, Kubeflow's PyTorchJob and other launchers that set torch's variables before the start
    {
        "name": "torchrun",
        "title": _PYTHON,
        "environ": {"RANK": r"^\d+$", "WORLD_SIZE": r"^\d+$", "MASTER_ADDR": r"."},
        "role": "trainer",
        "replica": 0,
        "rank": "{RANK}",
        "job": _MASTER,
    },
    # srun without torchrun
    {
        "name": "slurm",
        "title": _PYTHON,
        "environ": {"SLURM_PROCID": r"^\d+$", "SLURM_STEP_ID": r"^\d+$"},
        "role": "trainer",
        "replica": 0,
        "rank": "{SLURM_PROCID}",
        "job": "{SLURM_JOB_ID}.{SLURM_STEP_ID}",
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Input of the rules for one process. `environ`: None if unreadable or overwritten by a title."""

    arguments: tuple[str, ...]
    environ: Mapping[str, str] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.arguments[0] if self.arguments else ""

    @property
    def cmdline(self) -> str:
        return " ".join(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Identity of a process. `replica` None: numbered by start order on its node. `job` empty: unknown."""

    rule: str
    role: str
    replica: int | None
    rank: int
    job: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One validated rule. `replica`, `rank`: alternatives, each a number or the name of a value; `job`: alternatives,
    each a text with names in braces."""

    name: str
    role: str
    title: re.Pattern[str] | None = None
    cmdline: re.Pattern[str] | None = None
    environ: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    labels: Mapping[str, re.Pattern[str]] = field(default_factory=dict)
    replica: tuple[int | str, ...] = ()
    rank: tuple[int | str, ...] = ()
    job: tuple[str, ...] = ()

    def fits_command(self, facts: ProcessFacts) -> bool:
        """Whether title and command line match; otherwise the environment need not be read."""
        if _HELPER.search(facts.cmdline) or _LAUNCHER.match(facts.cmdline) or _SHELL.match(facts.title):
            return False
        if self.title is not None and not self.title.search(facts.title):
            return False
        return self.cmdline is None or self.cmdline.search(facts.cmdline) is not None

    def match(self, facts: ProcessFacts) -> Match | None:
        if not self.fits_command(facts):
            return None
        for wanted, known in ((self.environ, facts.environ or {}), (self.labels, facts.labels)):
            if not all(name in known and pattern.search(known[name]) for name, pattern in wanted.items()):
                return None
        values: dict[str, str] = {**facts.labels, **(facts.environ or {})}
        for pattern, text in ((self.cmdline, facts.cmdline), (self.title, facts.title)):
            if pattern is not None and (found := pattern.search(text)):
                values |= {k: v for k, v in found.groupdict().items() if v is not None}
        rank = _number(self.rank, values, RANK_MAX) if self.rank else 0
        if rank is None:  # indistinguishable from other ranks of its replica: becomes a separate replica
            return Match(rule=self.name, role=self.role, replica=None, rank=0)
        replica = _number(self.replica, values, REPLICA_MAX)
        return Match(rule=self.name, role=self.role, replica=replica, rank=rank, job=_text(self.job, values))

    def names(self) -> Iterator[str]:
        """Variables that this rule may use."""
        yield from self.environ
        yield from (name for name in (*self.replica, *self.rank) if isinstance(name, str))
        for text in self.job:
            yield from _NAME.findall(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """All rules, in order."""

    rules: tuple[Rule, ...]
    node_index: int | None = None
    """Numbers processes of one role across nodes where nothing else does; None: from the node's name. Must be unique
    among the nodes of one job."""
    by_job: bool = False
    """Derives every replica number from the job, where known: for nodes shared by several jobs."""
    labels_file: str = ""
    """Downward API file, as a path inside the process's own file system; empty: labels are not used."""

    def find(self, facts: ProcessFacts) -> Match | None:
        return next((m for m in (rule.match(facts) for rule in self.rules) if m is not None), None)

    def may_find(self, facts: ProcessFacts) -> tuple[Rule, ...]:
        """Rules whose title and command line match."""
        return tuple(rule for rule in self.rules if rule.fits_command(facts))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(name for rule in self.rules for name in rule.names())


def parse_discovery(value: Any, path: str = "jobs.rules") -> Discovery:
    """Parses the configuration; {}: the built-in rules.

    Keys: `rules`, `defaults` (false: omit them), `node_index`, `by_job`, `labels_file`.

    Raises:
        ConfigError: all problems, each `path: reason`.
    """
    problems: list[str] = []
    if not isinstance(value, Mapping):
        raise ConfigError([f"{path}: expected a mapping, got {type(value).__name__}"])
    keys = ("rules", "defaults", "node_index", "by_job", "labels_file")
    problems += [f"{path}.{key}: unknown key" for key in value if key not in keys]
    listed, with_defaults = value.get("rules", []), value.get("defaults", True)
    by_job = value.get("by_job", False)
    for key, flag in (("defaults", with_defaults), ("by_job", by_job)):
        if not isinstance(flag, bool):
            problems.append(f"{path}.{key}: expected true or false, got {flag!r}")
    if not isinstance(listed, Sequence) or isinstance(listed, str) or len(listed) > RULES_MAX:
        problems.append(f"{path}.rules: expected a list of at most {RULES_MAX} rules")
        listed = []
    given = [_rule(item, f"{path}.rules.{n}", problems) for n, item in enumerate(listed)]
    defaults = [_rule(item, f"(default {item['name']})", problems) for item in (DEFAULTS if with_defaults else ())]
    rules = [rule for rule in (*given, *defaults) if rule is not None]
    twice = {rule.name for n, rule in enumerate(rules) if rule.name in {r.name for r in rules[:n]}}
    problems += [f"{path}.rules: duplicate name {name!r}" for name in sorted(twice)]
    if not (given or with_defaults):
        problems.append(f"{path}.rules: at least one rule is required without defaults")
    index = value.get("node_index")
    if index is not None and (type(index) is not int or not 0 <= index <= NODE_INDEX_MAX):
        problems.append(f"{path}.node_index: expected 0 to {NODE_INDEX_MAX}, got {index!r}")
    labels_file = value.get("labels_file", "")
    if not isinstance(labels_file, str) or ".." in labels_file.split("/"):
        problems.append(f"{path}.labels_file: expected a path without '..', got {labels_file!r}")
    if problems:
        raise ConfigError(problems)
    return Discovery(rules=tuple(rules), node_index=index, by_job=by_job, labels_file=labels_file)


def node_index(name: str) -> int:
    """`node-3` -> 3. A name without a number, or with several, is hashed, which may collide."""
    numbers = re.findall(r"\d+", name)
    if len(numbers) == 1 and int(numbers[0]) <= NODE_INDEX_MAX:
        return int(numbers[0])
    return zlib.crc32(name.encode()) % (NODE_INDEX_MAX + 1)


def job_number(job: str) -> int:
    """1 to REPLICA_MAX, the same on each node; two jobs collide with a probability of one in a million."""
    return 1 + zlib.crc32(job.encode()) % REPLICA_MAX


def parse_labels(text: str) -> dict[str, str]:
    """Labels from a Kubernetes downward API file: `key="value"` lines. Others are skipped."""
    found = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and len(value) >= 2 and value[0] == value[-1] == '"':
            found[key.strip()] = value[1:-1].replace('\\"', '"').replace("\\\\", "\\")
    return found


def _rule(item: Any, path: str, problems: list[str]) -> Rule | None:
    if not isinstance(item, Mapping):
        problems.append(f"{path}: expected a mapping, got {type(item).__name__}")
        return None
    before = len(problems)
    keys = ("name", "role", "title", "cmdline", "environ", "labels", "replica", "rank", "job")
    problems += [f"{path}.{key}: unknown key" for key in item if key not in keys]
    name, role = item.get("name", ""), item.get("role", "")
    if not isinstance(name, str) or not ID_PATTERN.fullmatch(name):
        problems.append(f"{path}.name: invalid name {name!r} (lowercase letters, digits, '-')")
    if not isinstance(role, str) or not ID_PATTERN.fullmatch(role) or role in STANDBY_ROLES:
        reserved = " or ".join(map(repr, STANDBY_ROLES))
        problems.append(f"{path}.role: invalid role {role!r} (lowercase letters, digits, '-'; not {reserved})")
    title = _pattern(item.get("title"), f"{path}.title", problems)
    cmdline = _pattern(item.get("cmdline"), f"{path}.cmdline", problems)
    environ = _patterns(item.get("environ", {}), f"{path}.environ", problems)
    labels = _patterns(item.get("labels", {}), f"{path}.labels", problems)
    if len(problems) == before and not (title or cmdline or labels):
        # Otherwise the environment of every process on the node would have to be read.
        problems.append(f"{path}: needs title, cmdline or labels")
    replica = _alternatives(item.get("replica"), f"{path}.replica", REPLICA_MAX, problems)
    rank = _alternatives(item.get("rank"), f"{path}.rank", RANK_MAX, problems)
    job = item.get("job", "")
    if not isinstance(job, str) or len(job) > PATTERN_CHARACTERS_MAX or (job and not _NAME.search(job)):
        problems.append(f"{path}.job: expected a text with {{NAME}}, got {job!r}")
    if len(problems) > before:
        return None
    return Rule(
        name=name,
        role=role,
        title=title,
        cmdline=cmdline,
        environ=environ,
        labels=labels,
        replica=replica,
        rank=rank,
        job=tuple(part.strip() for part in job.split("|") if part.strip())[:ALTERNATIVES_MAX],
    )


def _pattern(value: Any, path: str, problems: list[str]) -> re.Pattern[str] | None:
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= PATTERN_CHARACTERS_MAX:
        problems.append(f"{path}: expected a regular expression of at most {PATTERN_CHARACTERS_MAX} characters")
        return None
    try:
        return re.compile(value)
    except re.error as e:
        problems.append(f"{path}: invalid regular expression: {e}")
        return None


def _patterns(value: Any, path: str, problems: list[str]) -> dict[str, re.Pattern[str]]:
    if not isinstance(value, Mapping):
        problems.append(f"{path}: expected a mapping of names to regular expressions")
        return {}
    found = {str(name): _pattern(text, f"{path}.{name}", problems) for name, text in value.items()}
    return {name: pattern for name, pattern in found.items() if pattern is not None}


def _alternatives(value: Any, path: str, largest: int, problems: list[str]) -> tuple[int | str, ...]:
    if value is None:
        return ()
    found: list[int | str] = []
    for part in str(value).split("|") if isinstance(value, (int, str)) and not isinstance(value, bool) else [""]:
        named = _NAME.fullmatch(part.strip())
        if named:
            found.append(named.group(1))
        elif re.fullmatch(r"[0-9]{1,9}", part.strip()) and int(part) <= largest:
            found.append(int(part))
        else:
            problems.append(f"{path}: expected a number up to {largest} or {{NAME}}, several with '|', got {value!r}")
            return ()
    return tuple(found[:ALTERNATIVES_MAX])


def _number(alternatives: tuple[int | str, ...], values: Mapping[str, str], largest: int) -> int | None:
    """The first alternative that is a number."""
    for one in alternatives:
        if isinstance(one, int):
            return one
        text = values.get(one, "")
        if text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) <= largest:
            return int(text)
    return None


def _text(alternatives: tuple[str, ...], values: Mapping[str, str]) -> str:
    """The first alternative whose names are all known, with their values substituted; empty if there is none."""
    for text in alternatives:
        if all(values.get(name) for name in _NAME.findall(text)):
            return _NAME.sub(lambda m: values[m.group(1)], text)[:JOB_CHARACTERS_MAX]
    return ""
