"""Messages and collectives in progress on the device, with a stream per communicator, as torch gives NCCL's.
Until the calling stream waits for a call (`Done.wait`), its input may change and its output be missing."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tests.rehearsal.streams import Clock, merge
from tests.rehearsal.watch import Watch


class Done:
    """A message or collective under way.  Like torch's, it holds its tensors until somebody waits for it."""

    def __init__(self, watch: Watch, clock: Clock, holds: Sequence[Tensor], finish: Callable[[], None] | None = None):
        self._watch, self._clock, self._holds, self._finish = watch, clock, list(holds), finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        """The stream waits, and the host where it is given a time for it."""
        streams = self._watch.streams
        if timeout is not None:
            self._watch.waits_for("wait with a time")
        if self._finish is not None:
            self._finish()
        self._finish, self._holds = None, []
        merge(streams.clocks[streams.current], self._clock)
        return True

    def is_completed(self) -> bool:
        return True


class Several:
    def __init__(self) -> None:
        self.all: list[Done] = []

    def wait(self) -> bool:
        return all(each.wait() for each in self.all)


class Channels:
    def __init__(self, watch: Watch):
        self._watch = watch
        self._streams: dict[str, int] = defaultdict(watch.streams.new)
        self._together: Several | None = None

    def begin(
        self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor], finish: Callable[[], None] | None = None
    ) -> Done:
        """Tensors of the device are read and written by a communicator, behind what the present stream has been given."""
        streams = self._watch.streams
        read, written = ([each for each in tensors if isinstance(each, FakeTensor)] for tensors in (reads, writes))
        if not read and not written:
            return Done(self._watch, {}, [], finish)
        stream = self._streams[name]
        merge(streams.clocks[stream], streams.clocks[streams.current])
        with streams.on(stream):
            self._watch.uses(read, written)
        return Done(self._watch, dict(streams.clocks[stream]), [*read, *written], finish)

    def over(self, done: Done, async_op: bool) -> Done | None:
        if self._together is not None:
            self._together.all.append(done)
            return None
        if async_op:
            return done
        done.wait()
        return None

    @contextmanager
    def together(self, async_ops: bool) -> Iterator[Several]:
        """The collectives within are waited for by what this gives, or at its end."""
        found = self._together = Several()
        try:
            yield found
        finally:
            self._together = None
        if not async_ops:
            found.wait()
