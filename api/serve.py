"""`baton serve`: the life cycle of the server's process, from options to exit code."""

import asyncio
import gc
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn, Protocol, TypeVar

import anyio
import structlog
from aiohttp import web
from anyio.abc import TaskStatus

from baton.actors.runtime.relay import is_device_lost
from baton.api import errors
from baton.api.app import make_app
from baton.api.config import Config, ConfigError
from baton.api.connections.limits import raise_descriptor_limit
from baton.api.connections.listening import place_of
from baton.api.connections.registry import CONNECTIONS
from baton.api.errors import ApiError
from baton.api.generation.gateway import Gateway
from baton.api.generation.served_model import ServedModel
from baton.api.hub.names import default_served_name
from baton.api.machine.signals import Signals, leave
from baton.api.security import GUARD
from baton.api.server import RingView, Server
from baton.api.sessions.store import SESSIONS, SessionStore
from baton.api.telemetry import logs
from baton.api.telemetry.metrics import Metrics
from baton.api.telemetry.spans import open_spans
from baton.api.terminal.console import complain
from baton.api.terminal.progress import ProgressBar
from baton.kernels.runtime.cpp.compiler import RUNNING

T = TypeVar("T")
Progress = Callable[[int, int], None]

SWITCH_INTERVAL_S = 1e-4  # switch interval of Python threads; short, so that the event loop rarely waits
LAST_WRITES_S = 5.0  # time for sending the last answers at shutdown
NEVER_S = 1e7
SIGNALS_IN_ORDER = 2  # the first drains, the second ends all requests; a further one ends the process at once
LAST_SPANS_S = 5.0  # time for exporting the last spans to the collector at shutdown
GRACE_S = 10.0  # time for the ring to drain after --drain-timeout
GRACE_WITH_FILES_S = 60.0  # time for the ring to drain after --drain-timeout if it writes states to files
SWEEPS = 4  # how often idle sessions are looked for within --session-idle-timeout
MAX_BETWEEN_SWEEPS_S = 30.0


class Exit(IntEnum):
    """The process's exit codes."""

    OK = 0
    START_FAILED = 1
    BAD_OPTIONS = 2
    RING_FAILED = 3  # an actor failed more than --restarts times in a minute
    UNCLEAN = 4  # the ring did not drain before its time or a second signal, or slots or pages were missing afterwards
    DEVICE_LOST = 5  # the device failed as a whole, not in a single step


class StartError(Exception):
    """A reason why the model cannot be served; the message is for the user."""


class StoppedError(Exception):
    """The end of a start by a signal."""


class RunningRelay(RingView, Protocol):
    """The interface of the relay for the process, which runs it."""

    async def run(self) -> None:
        """Run the ring until cancelled. Raises the exception that broke it."""


class AllMover(Protocol):
    """The interface of the moves of sessions for the process, which moves all of them when it drains."""

    async def move_all(self, engine: str) -> None:
        """Hand every session and every cached state over to the peer engine of this name."""


class PeerLinks(Protocol):
    """The interface of the links to other engines for the process, which runs them."""

    def serve_sessions(self, sessions: SessionStore, accepts: Callable[[bytes], bool]) -> AllMover:
        """Let sessions move between this server and its peers."""
        ...

    def watched_by(self, metrics: Metrics) -> None:
        """Let the links be counted in the metrics."""

    async def run(self) -> None:
        """Listen for peers and stay connected to the configured ones, until cancelled."""


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, and the function that makes its ring."""

    model: ServedModel
    notes: list[str]  # lines for the log: sizes of weights and pools, and the reasons for these sizes
    build_relay: Callable[[Gateway], RunningRelay]  # makes the ring; must be called inside the event loop
    close: Callable[[], None] | None = None  # to be called after the ring has ended
    peering: PeerLinks | None = None  # the links to other engines; None without peers


Load = Callable[[Config, Progress], LoadedModel]


def serve(config: Config, load: Load, signals: Signals) -> NoReturn:
    """Serve until a signal comes, then drain, and leave the process with its exit code."""
    logs.configure(config.log_format, config.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_descriptor_limit()
    use_uvloop = sys.platform != "win32"

    async def live() -> NoReturn:
        # Do not end the loop: it would wait for threads that nothing needs any more.
        end_process(await Process(config, load, signals).run())

    try:
        anyio.run(live, backend_options={"use_uvloop": use_uvloop})
    except ConfigError as error:
        complain(error)
    except Exception:
        traceback.print_exc()
    end_process(Exit.START_FAILED)


def end_process(code: Exit) -> NoReturn:
    """End the compilers that still run, and the process."""
    RUNNING.end_all()
    leave(code)


class Process:
    """One run of the server: it opens the port, loads the model, runs the ring, and drains it."""

    def __init__(self, config: Config, load: Load, signals: Signals) -> None:
        self._config = config
        self._load = load
        self._log = structlog.get_logger()
        self._signals = signals
        self._received = 0  # number of signals received
        self._stop = asyncio.Event()
        self._scope = anyio.CancelScope()  # cancels everything except the last writes
        self._failure: Exit | None = None
        name, *others = config.served_model_name or [default_served_name(config.model)]
        metrics = Metrics(name)
        self._server = Server(config, Gateway(config.request_timeout, metrics), metrics, name, other_names=(*others,))
        self._server.spans = open_spans(config, name)
        self._app = make_app(self._server)
        self._sessions = self._app[SESSIONS]

    async def run(self) -> Exit:
        """Open the port, load the model, serve until a signal comes, drain, and return the exit code."""
        runner = web.AppRunner(
            self._app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=LAST_WRITES_S,
            keepalive_timeout=NEVER_S,  # aiohttp ends no idle connection; `Connections.watch` does.
        )
        loop = asyncio.get_running_loop()
        self._signals.deliver_to(lambda number: self._receive(loop, number))
        await runner.setup()
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._app[CONNECTIONS].watch)
                    code = await self._serve(tasks, runner)
                    await runner.cleanup()
                    tasks.cancel_scope.cancel()
                    return code
            return Exit.UNCLEAN  # The scope ends without a code only if a second signal cancels it.
        finally:
            await runner.cleanup()
            with anyio.CancelScope(shield=True):
                await self._sessions.close_files()
            await self._close_spans()

    async def _close_spans(self) -> None:
        """Export the last spans, waiting at most LAST_SPANS_S for the collector."""
        if self._server.spans is not None:
            with anyio.move_on_after(LAST_SPANS_S, shield=True):
                await in_daemon_thread(self._server.spans.close)

    async def _open_port(self, runner: web.AppRunner) -> None:
        """Start to listen. Until the model is loaded, /ready and everything that needs the model answer 503."""
        try:
            assert runner.server is not None
            url = await self._app[CONNECTIONS].listen(runner.server, self._config)
        except OSError as error:
            raise StartError(f"cannot listen on {place_of(self._config)}: {error.strerror or error}") from None
        except ConfigError as error:
            raise StartError(str(error)) from None
        self._log.info("listening", url=url, model=self._server.name)

    async def _serve(self, tasks: anyio.abc.TaskGroup, runner: web.AppRunner) -> Exit:
        """Open the port, load the model, restore sessions, run the ring, and drain it after a signal."""
        loaded = None
        try:
            await self._unless_stopped(self._open_port(runner))
            loaded = await self._unless_stopped(self._load_model())
            await self._unless_stopped(self._sessions.restore(loaded.model.vocab_size))
        except StartError as error:
            complain(error)
            return Exit.START_FAILED
        except StoppedError:
            if loaded is not None and loaded.close is not None:
                loaded.close()
            self._log.info("ended before it was ready")
            return Exit.OK
        server = self._server
        await tasks.start(self._run_ring, loaded)
        server.gateway.name_all()
        tasks.start_soon(self._sweep_sessions)
        moves = None
        if loaded.peering is not None:
            moves = loaded.peering.serve_sessions(self._sessions, self._app[GUARD].accepts)
            loaded.peering.watched_by(server.metrics)
            tasks.start_soon(loaded.peering.run)
        # The loaded model lives until the end. Freeze it, so that later garbage collections do not traverse it.
        gc.collect()
        gc.freeze()
        server.model = loaded.model
        server.phase = "ready"
        self._log.info("ready", model=server.name, max_model_len=loaded.model.max_model_len)
        await self._stop.wait()
        server.phase = "draining"
        if self._failure is not None:
            return self._failure
        until = time.monotonic() + self._config.drain_timeout
        if moves is not None and self._config.drain_to is not None:
            await self._hand_over(moves, self._config.drain_to, until)
        return await self._drain(until)

    async def _hand_over(self, moves: AllMover, engine: str, until: float) -> None:
        """Hand sessions and states over to a peer (--drain-to), until a time at most; meanwhile refuse requests."""
        self._log.info("handing over", engine=engine, sessions=len(self._sessions))
        self._server.gateway.draining = True
        with anyio.move_on_after(until - time.monotonic()):
            await moves.move_all(engine)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Do a part of the start. Raises StoppedError if a signal comes before its end."""
        part, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({part, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not part.done():
                raise StoppedError
            return part.result()
        finally:
            part.cancel()
            stopping.cancel()
            await asyncio.wait({part, stopping})

    async def _load_model(self) -> LoadedModel:
        """Load the model in a thread."""
        bar = ProgressBar("loading")
        try:
            loaded = await in_daemon_thread(lambda: self._load(self._config, bar.update))
        finally:
            bar.close()
        for note in loaded.notes:
            self._log.info("sized", note=note)
        return loaded

    async def _run_ring(self, loaded: LoadedModel, *, task_status: TaskStatus[None]) -> None:
        """Run the ring. If it fails, answer every open request with an error and stop the process."""
        relay = loaded.build_relay(self._server.gateway)
        self._server.relay = relay
        self._server.metrics.watch_ring(relay)
        task_status.started()
        try:
            await relay.run()
        except Exception as broken:
            self._log.critical("the ring failed", exc_info=True)
            lost = is_device_lost(broken)
            self._failure = Exit.DEVICE_LOST if lost else Exit.RING_FAILED
            self._server.phase = "draining"
            what = "device" if lost else "engine"
            self._server.gateway.lose_ring(errors.internal(f"the {what} failed and the server is shutting down"))
            self._stop.set()
        finally:
            if loaded.close is not None:
                loaded.close()

    async def _sweep_sessions(self) -> None:
        """Call `SessionStore.sweep` at intervals, which suspends or closes unused sessions, until cancelled."""
        pause = min(self._config.session_idle_timeout / SWEEPS, MAX_BETWEEN_SWEEPS_S)
        while True:
            await asyncio.sleep(pause)
            await self._sessions.sweep()

    async def _drain(self, until: float) -> Exit:
        """Let open requests finish until a time, then drain the ring and check that every slot and page is free."""
        self._log.info("draining", open_requests=self._server.gateway.open_requests)
        grace = GRACE_S if self._config.session_dir is None else GRACE_WITH_FILES_S
        try:
            astray = await self._server.gateway.drain(max(until - time.monotonic(), 0), grace)
        except (TimeoutError, ApiError):
            self._log.error("the ring did not drain")
            return self._failure if self._failure is not None else Exit.UNCLEAN
        if astray:
            self._log.error("astray after the drain", what=astray)
            return Exit.UNCLEAN
        self._log.info("drained")
        return Exit.OK

    def _receive(self, loop: asyncio.AbstractEventLoop, number: int) -> None:
        """Pass a signal on to the event loop. End the process at the third one: the loop may have stopped."""
        self._received += 1
        if self._received > SIGNALS_IN_ORDER:
            end_process(Exit.UNCLEAN)
        loop.call_soon_threadsafe(self._obey, number)

    def _obey(self, number: int) -> None:
        """Drain at the first signal; end all requests at the second."""
        if self._stop.is_set():
            self._server.gateway.fail_all(errors.draining())
            self._scope.cancel()
            return
        self._log.info("signal", name=signal.Signals(number).name)
        self._stop.set()


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, so that the process can end while it still runs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not done.done():
            set_outcome()

    def post(set_outcome: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, set_outcome)

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            caught = error
            post(lambda: done.set_exception(caught))
        else:
            post(lambda: done.set_result(result))

    threading.Thread(target=run, name="load", daemon=True).start()
    return await done
