"""One run on several nodes, as run by the agent of one node."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, replace

from partool.plan.run import LOCK_FILE
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool_runtime.agent.elastic import Hooks, RanksStore, run_ranks
from partool_runtime.agent.failures import FailureLog, signature
from partool_runtime.agent.node_messages import Outcome, Verdict, WaitTimes
from partool_runtime.agent.nodes import Board, NodesError, StoppedError, combined
from partool_runtime.agent.notify import Notifier
from partool_runtime.agent.options import AgentOptions
from partool_runtime.agent.report import AFTER_CHECKPOINT, BEFORE_FIRST_STEP, repeated, shortened, stopped_by, summarise
from partool_runtime.agent.secrets import agents_key
from partool_runtime.agent.status import StatusKeeper
from partool_runtime.agent.stops import left_without_checkpoint, losses
from partool_runtime.agent.supervision import FAILURE_GRACE_S, KILL_TIMEOUT_S, Supervision
from partool_runtime.errors import EXIT_CONFIGURATION, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, ConfigurationError

_REASON_BYTES, _TEXT_BYTES = 1000, 3500
_NOT_SHARED = "a checkpoint is written by all nodes and read back only from a folder that they share (checkpoint.dir)"


@dataclass(frozen=True, slots=True)
class Together:
    """One node's agent in a run on several nodes; only node 0 keeps a ``status``."""

    options: AgentOptions
    timing: WaitTimes
    worker: str
    supervision: Supervision
    status: StatusKeeper | None
    notifier: Notifier

    def run(self, plan: Plan | ConfigurationError) -> Verdict:
        """Run the plan, or report to the other nodes why it cannot run here; returns the result for all nodes."""
        place, run = self.options.place, self.options.run_dir.name
        key = agents_key(self.options.run_dir, _say)
        with Board(place, run, plan.hash if isinstance(plan, Plan) else "", key, timing=self.timing, say=_say) as board:
            store = RanksStore()  # open until all nodes have ended: ranks of other nodes may read the store to the end
            outcome = self._attempt(board, plan, store) if isinstance(plan, Plan) else self._resign(board, plan)
            if place.node_rank == 0:
                verdict = self._judge(board, plan, outcome)
                board.announce(verdict)
                return verdict
            return board.hear(outcome, self._hurry) or _alone(outcome, board.trouble(), begun=board.attempt > 0)

    def _attempt(self, board: Board, plan: Plan, store: RanksStore) -> Outcome:
        """Join the other nodes, run the ranks of this node, and return the outcome on this node."""
        place, supervision = self.options.place, self.supervision
        try:
            board.gather(lambda: bool(supervision.signals))
            if self.status is not None:
                board.begin(self.status.next_attempt(), store.open)
            elif plan.checkpoint.dir is None and not (self.options.run_dir / LOCK_FILE).exists():
                _say(f"note: {self.options.run_dir} is not the folder of that name on node 0: {_NOT_SHARED}")
            attempt = board.attempt
            failures = FailureLog(self.options.run_dir, plan)
            hooks = Hooks(
                lambda: attempt,
                lambda: False,
                lambda: self._look(board),
                lambda: failures.saved_step,
                plan.training.steps,
                self._tell_of_stall,
            )
            run_ranks(
                plan,
                self.options,
                worker=self.worker,
                supervision=supervision,
                hooks=hooks,
                meeting=(board.head, board.store),
            )
        except ConfigurationError as error:
            return self._outcome(EXIT_CONFIGURATION, str(error).splitlines()[0], f"partool: {error}")
        except StoppedError:
            asked = self._asked
            return replace(self._outcome(EXIT_PREEMPTED, stopped_by(asked), asked=asked), early=True)
        except NodesError as error:
            return replace(self._outcome(EXIT_FAILED, str(error), f"partool: {error}"), lost_peer=True)
        where = f" on node {place.node_rank} ({socket.gethostname()})"
        summary = summarise(self.options.run_dir, attempt, supervision, where)
        outcome = self._outcome(supervision.exit_code, summary.reason, summary.text, asked=self._asked)
        kind = signature(summary.what or summary.reason)
        when, early = summary.time or outcome.time, supervision.early
        overdue = left_without_checkpoint(supervision)
        return replace(outcome, time=when, lost_peer=summary.lost_peer, early=early, overdue=overdue, signature=kind)

    def _look(self, board: Board) -> None:
        """Send the state of the ranks here to the other nodes, and receive the states of their ranks."""
        supervision = self.supervision
        trouble, stalled = supervision.stalled or ("ranks" if supervision.failed else ""), bool(supervision.stalled)
        board.report(trouble, supervision.preempted, early=supervision.early, stalled=stalled)
        supervision.standing_elsewhere = board.exchange(supervision.standing, supervision.patient)
        board.relay()
        supervision.patient_elsewhere = board.patient()
        supervision.trouble_elsewhere = board.trouble()
        supervision.stalled_elsewhere = supervision.stalled_elsewhere or board.stalled()
        if supervision.stalled_elsewhere:
            self._tell_of_stall(supervision.trouble_elsewhere or "a rank of another node makes no progress")
        supervision.finished_elsewhere = board.finished()
        supervision.stopped_elsewhere, supervision.early_elsewhere = board.stopping(), board.early()

    def _tell_of_stall(self, reason: str) -> None:
        if self.status is not None:
            self.notifier.stalled(self.status.status, reason)

    def _resign(self, board: Board, error: ConfigurationError) -> Outcome:
        """Wait briefly, so that other nodes learn that this node does not take part, and return its outcome."""
        end = time.monotonic() + self.timing.stranger_s
        while time.monotonic() < end and not board.met and not self.supervision.signals:
            time.sleep(0.05)
        return self._outcome(EXIT_CONFIGURATION, str(error).splitlines()[0], f"partool: {error}")

    def _judge(self, board: Board, plan: Plan | ConfigurationError, mine: Outcome) -> Verdict:
        """On node 0: collect the outcomes of all nodes and decide on the run's result."""
        limit_s = self.supervision.shutdown_timeout_s + FAILURE_GRACE_S + KILL_TIMEOUT_S
        outcomes = board.collect(mine, limit_s, self._hurry)
        verdict = judged(outcomes)
        if self.status is not None and isinstance(plan, Plan) and any(outcome.overdue for outcome in outcomes):
            log, since = FailureLog(self.options.run_dir, plan), self.status.status.started
            lost_work = losses(log, target=plan.launch.target, run_dir=self.options.run_dir, since=since)
            verdict = replace(verdict, text=f"{verdict.text}\n{lost_work}")
        if verdict.code == EXIT_FAILED and isinstance(plan, Plan) and board.attempt:
            first = first_failure(outcomes)
            kind = first.signature or signature(first.reason)
            count = FailureLog(self.options.run_dir, plan).note(board.attempt, kind)
            if count >= plan.launch.same_failure:
                reason = repeated(count, verdict.reason)
                verdict = replace(
                    verdict, code=EXIT_CONFIGURATION, reason=reason, text=f"{verdict.text}\npartool: {reason}"
                )
        if self.status is not None:
            early = ""
            if verdict.code == EXIT_DONE and isinstance(plan, Plan):
                early = FailureLog(self.options.run_dir, plan).ended_early
            self.status.end(verdict.code, verdict.reason or early)
        return verdict

    def _outcome(self, code: int, reason: str, text: str = "", asked: str = "") -> Outcome:
        place = self.options.place
        reason, text = shortened(reason, _REASON_BYTES), shortened(text, _TEXT_BYTES)
        return Outcome(place.node_rank, socket.gethostname(), code, reason, text, time.time(), asked=asked)

    def _hurry(self) -> bool:
        return len(self.supervision.signals) > 1 and "SIGINT" in [number.name for number in self.supervision.signals]

    @property
    def _asked(self) -> str:
        return self.supervision.signals[0].name if self.supervision.signals else ""


def judged(outcomes: list[Outcome]) -> Verdict:
    """Return the result of the run, given its outcome on each node."""
    early = any(outcome.early for outcome in outcomes)
    overdue = next((outcome for outcome in outcomes if outcome.overdue and outcome.code == EXIT_PREEMPTED), None)
    # Ranks that lose a peer which another node's agent has killed end because of the request to stop, too.
    code = combined(outcome.code for outcome in outcomes if not ((early or overdue) and outcome.lost_peer))
    if code == EXIT_DONE:
        remarks = [outcome for outcome in outcomes if outcome.reason]
        return Verdict(code, "; ".join(each.reason for each in remarks), "\n".join(each.text for each in remarks))
    if code == EXIT_PREEMPTED:
        asked = next((outcome for outcome in outcomes if outcome.asked), None)
        reason = stopped_by(f"{asked.asked} to node {asked.node} ({asked.host})" if asked else "")
        if overdue is not None:
            reason = f"{reason}, {overdue.reason.partition(', ')[2]}"
            return Verdict(code, reason, f"partool: {reason}")
        return Verdict(code, reason, f"partool: {reason}, {BEFORE_FIRST_STEP if early else AFTER_CHECKPOINT}")
    first = first_failure(outcomes)
    return Verdict(code, first.reason, first.text, first.node)


def first_failure(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome with the first failure; the loss of a peer counts only if there is no other failure.

    A failure that no retry fixes decides the exit code, so it is the result. Clocks of nodes differ by less than
    the time between failures with different causes, but by more than a rank takes to notice another rank's end.
    """
    failed = [outcome for outcome in outcomes if outcome.code not in (EXIT_DONE, EXIT_PREEMPTED)]
    return min(failed, key=lambda outcome: (outcome.code != EXIT_CONFIGURATION, outcome.lost_peer, outcome.time))


def _alone(mine: Outcome, trouble: str, *, begun: bool) -> Verdict:
    """Return the result for a node without contact to node 0: the run may have failed even if this node succeeded."""
    if mine.code == EXIT_PREEMPTED and not begun:
        return Verdict(mine.code, mine.reason, f"partool: {mine.reason}, before the ranks had started", mine.node)
    code = combined([mine.code, EXIT_FAILED])
    own_reason = mine.reason if mine.code == EXIT_CONFIGURATION or (mine.reason and not mine.lost_peer) else ""
    reason = own_reason or trouble or mine.reason or "left before the other nodes had ended"
    return Verdict(code, reason, mine.text if reason == mine.reason and mine.text else f"partool: {reason}", mine.node)


def _say(message: str) -> None:
    say(f"partool: {message}", err=True)
