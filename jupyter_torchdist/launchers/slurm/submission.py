"""One attempt of a job in Slurm: its state, the way to its nodes, its end."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from ...protocol.errors import ChannelError, LaunchError
from ...protocol.options.launcher import SLURM
from ...protocol.plan import NodePlan, Plan, Reach
from ...protocol.wire.channel import Channel
from ..base import ENDED, QUEUED, RUNNING, EngineState
from ..booted import ProcessChannel
from .commands import LOOK, MARK, Commands, Question, environ, words
from .script import AWAIT, HOLD, LIMIT, job_name

FAST, SLOW = 1.0, 5.0
"""Seconds between two questions for the state: in the queue, and while the job runs."""

_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")

_ENDS = {
    "TIMEOUT": LIMIT,
    "CANCELLED": "it was cancelled in Slurm (scancel)",
    "NODE_FAIL": "a node failed (NODE_FAIL)",
    "PREEMPTED": "Slurm gave its nodes to a job of higher priority (PREEMPTED)",
    "OUT_OF_MEMORY": "it used more memory than it had asked for (OUT_OF_MEMORY); -O mem=… asks for more",
    "DEADLINE": "its deadline in Slurm has passed",
    "BOOT_FAIL": "a node did not start (BOOT_FAIL)",
}

_TAKEN = ("NODE_FAIL", "PREEMPTED", "BOOT_FAIL")


class SlurmChannel(ProcessChannel):
    """Frames over a step of the job."""

    program = "Slurm's client"
    remedy = "--host-option python=PATH names the Python of the nodes"

    def __init__(self, commands: Commands, job: str, host: str, name: str, reach: Reach) -> None:
        self._commands, self._job = commands, job
        self.environ = environ()
        super().__init__(host, replace(reach, setup=f"{AWAIT.format(name=name)}{reach.setup}"))

    def way(self, command: str) -> list[str]:
        step = ["srun", "--unbuffered", f"--jobid={self._job}", "--overlap", "--nodes=1", "--ntasks=1"]
        return self._commands.started(*step, f"--nodelist={self.host}", "--chdir=/", "sh", "-c", command)

    @property
    def shell(self) -> str:
        return f"srun --jobid={self._job} --overlap --nodelist={self.host}"

    def end(self) -> None:
        """srun ends its step before itself."""
        self.process.terminate()
        try:
            self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            super().end()


class SlurmSubmission:
    """``job``: its number in Slurm."""

    def __init__(self, plan: Plan, job: str) -> None:
        self._plan = plan
        self._job = job
        self._commands = Commands(plan.login)
        self._nodes: Sequence[str] = ()
        self._state = EngineState(QUEUED)
        self._partition = ""
        self._queue: Question | None = None
        self._question = self._asking()

    def _asking(self) -> Question:
        asks = ("squeue", "--noheader", f"--jobs={self._job}", "--states=all", "-o", "%T|%r|%N|%P")
        return Question(self._commands, *asks)

    @property
    def token(self) -> dict[str, Any]:
        return {"job": self._job}

    @property
    def directory(self) -> str:
        """The name of the directory in which ``HOLD`` waits on each node."""
        return f"{SLURM}-{self._job}"

    @property
    def hosts(self) -> Sequence[str]:
        return self._nodes

    # -- where it stands

    def state(self) -> EngineState:
        """The first answer comes with a later call: until then the job is queued."""
        pause = FAST if self._state.word == QUEUED else SLOW
        if self._state.word != ENDED and (answer := self._question.answer(pause)) is not None:
            code, said = answer
            if code and "Invalid job id" not in said:
                raise LaunchError(words(said), LOOK)
            self._state = self._understood([] if code else [line.split("|") for line in said.splitlines()])
        if self._state.word == QUEUED and self._partition:
            self._state = replace(self._state, position=self._position())
        return self._state

    def _understood(self, rows: Sequence[Sequence[str]]) -> EngineState:
        if not rows:
            return EngineState(ENDED, reason="Slurm does not know the job any more")
        word, reason, nodes, self._partition = rows[0]
        if word in _WAITS:
            return replace(self._state, word=QUEUED, reason=_reason(word, reason))
        if word in _RUNS:
            self._nodes = self._nodes or expanded(self._commands, nodes)
            return EngineState(RUNNING)
        return EngineState(ENDED, reason=_ENDS.get(word, f"its script ended ({word}, {reason})"), again=word in _TAKEN)

    def _position(self) -> int | None:
        """Place among the jobs that wait for the partition, by priority."""
        if self._queue is None:
            asks = ("--states=PENDING", f"--partition={self._partition}", "--sort=-p,i", "-o", "%A")
            self._queue = Question(self._commands, "squeue", "--noheader", *asks)
        answer = self._queue.answer(SLOW)
        if answer is None:
            return self._state.position
        jobs = list(dict.fromkeys(answer[1].split()))
        return jobs.index(self._job) + 1 if self._job in jobs else None

    # -- the nodes

    def connect(self, node: NodePlan) -> Channel:
        index = [one.name for one in self._plan.nodes].index(node.name)
        if index >= len(self._nodes):
            raise ChannelError("Slurm has not said which nodes the job has")
        self._question.hurry()  # a lost connection may be the end of the job
        return SlurmChannel(self._commands, self._job, self._nodes[index], self.directory, node.reach)

    def shared(self, node: NodePlan) -> bool:
        """Files of a network's file system come later than the news of them, so all goes through the channel."""
        return False

    def cancel(self) -> None:
        self._question.close()
        if self._queue is not None:
            self._queue.close()
        with contextlib.suppress(LaunchError):  # it has ended
            self._commands.run("scancel", self._job)


class StepSubmission(SlurmSubmission):
    """A step of an allocation, of which nothing else is touched. ``step``: its name."""

    def __init__(
        self, plan: Plan, step: str, srun: subprocess.Popen[bytes] | None = None, said: IO[bytes] | None = None
    ) -> None:
        self._step = step
        self._srun = srun
        self._said = said
        super().__init__(plan, plan.allocation)
        self._nodes = [node.host for node in plan.nodes]

    @classmethod
    def start(cls, plan: Plan, attempt: int) -> StepSubmission:
        """srun goes on when the driver has ended, and ends with the step."""
        step = f"{job_name(plan.job)}.{attempt}"
        command = [*shlex.split(plan.request), HOLD.format(name=_directory(plan, step))]
        command[1:1] = [f"--job-name={step}"]
        said = tempfile.TemporaryFile()  # noqa: SIM115  # a pipe would end srun with this process
        with open(os.devnull, "r+b") as nothing:
            srun = subprocess.Popen(
                Commands(plan.login).started(*command), stdin=nothing, stdout=nothing, stderr=said, env=environ(),
                cwd="/", start_new_session=True,
            )  # fmt: skip
        return cls(plan, step, srun, said)

    @classmethod
    def find(cls, plan: Plan, token: Mapping[str, Any]) -> StepSubmission:
        """Raises ``LaunchError`` when no step is known of the job."""
        steps = [
            name
            for _, name in _steps(plan.allocation, Commands(plan.login))
            if name.rpartition(".")[0] == job_name(plan.job)
        ]
        step = token.get("step") or (steps[-1] if steps else "")
        if not step:
            raise LaunchError(f"allocation {plan.allocation} has no step of job {plan.job}", "run the cell again")
        return cls(plan, step)

    def _asking(self) -> Question:
        return Question(self._commands, *_asks_for_steps(self._job))

    @property
    def token(self) -> dict[str, Any]:
        return {"job": self._job, "step": self._step}

    @property
    def directory(self) -> str:
        return _directory(self._plan, self._step)

    def _understood(self, rows: Sequence[Sequence[str]]) -> EngineState:
        if any(name == self._step for _, name in rows):
            return EngineState(RUNNING)
        if self._srun is not None and self._srun.poll() is None and self._state.word == QUEUED:
            return EngineState(QUEUED, reason="waiting for its step in the allocation")
        said = ""
        if self._said is not None:
            self._said.seek(0)
            said = self._said.read().decode("utf-8", "replace").rpartition(MARK)[2]
        return EngineState(ENDED, reason=words(said) or f"allocation {self._job} or its step has ended")

    def cancel(self) -> None:
        self._question.close()
        with contextlib.suppress(LaunchError):  # it has ended
            for number, name in _steps(self._job, self._commands):
                if name == self._step:
                    self._commands.run("scancel", "--signal=TERM", number)  # without it, it is SIGKILL for a step


def _directory(plan: Plan, step: str) -> str:
    return f"{SLURM}-{plan.allocation}-{step.rpartition('-')[2]}"


def _asks_for_steps(job: str) -> tuple[str, ...]:
    return "squeue", "--noheader", "--steps", f"--jobs={job}", "-o", "%i|%j"


def _steps(job: str, commands: Commands) -> list[tuple[str, str]]:
    """Number and name of the steps of an allocation."""
    said = commands.run(*_asks_for_steps(job))
    return [(number, name) for number, _, name in (line.partition("|") for line in said.splitlines())]


def expanded(commands: Commands, nodes: str) -> list[str]:
    """``node[1-2]`` → the names of the nodes."""
    return commands.run("scontrol", "show", "hostnames", nodes).split()


def _reason(word: str, reason: str) -> str:
    """Slurm's reason, with what it means where its name does not say it."""
    meant = {
        "Resources": "waiting for nodes to become free (Resources)",
        "Priority": "jobs of higher priority come first (Priority)",
        "None": "",
    }
    return meant.get(reason, reason) if word == "PENDING" else f"{word}: {reason}"
