"""Device code that wants more than its slice has, or that points out of itself: sent by a client of
our own, as a tenant could who doesn't use ours."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.functional import wire
from tests.functional.pool import Pool, wait_for
from tests.functional.wire import Closed, Connection, Lease, Refused, Reply

MIB = 1 << 20
SLICE_MIB = 64
OUT_OF_MEMORY, INVALID_IMAGE, INVALID_PTX, LAUNCH_FAILED = 2, 200, 218, 719
MODULE_LOAD, MODULE_GET_FUNCTION, MEM_ALLOC, LAUNCH_KERNEL = 9, 11, 20, 53
GRAPH_DEFINE, GRAPH_LAUNCH = 100, 103

HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
KERNEL = ".visible .entry k() { ret; }\n"
SHAPE = (1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0)  # one thread
# The driver sets a heap of 8 MiB aside for a context when it first launches such a kernel.
HEAP_MIB, BORNE_MIB = 8, 16
ALLOCATES = (
    HEAD
    + """.extern .func (.param .b64 r) malloc (.param .b64 n);
.visible .entry k() { .reg .b64 %a; .param .b64 p; .param .b64 q; mov.u64 %a, 1024;
st.param.b64 [p], %a; call.uni (q), malloc, (p); ld.param.b64 %a, [q]; ret; }
"""
).encode()


@pytest.fixture(scope="module")
def small_pool(simulated_driver) -> Iterator[Pool]:
    options = {"broker": {"worker_host_memory": "256"}}
    with Pool(driver_directory=simulated_driver, options=options) as pool:
        pool.slice("small", compute=25, memory=SLICE_MIB)
        yield pool


@pytest.fixture
def lease(small_pool: Pool) -> Iterator[Lease]:
    script = "cat $GPUPOOL_LEASE_FILE; exec cat"
    with small_pool.started("small", ["sh", "-c", script]) as holder:
        assert holder.stdout is not None
        yield Lease.parse(holder.stdout.readline())


@dataclass
class Client:
    control: Connection
    device: Connection
    calls: int = 100

    def load(self, image: bytes, index: int = 1, context: int = 1) -> Reply:
        pieces = [image[at : at + MIB] for at in range(0, len(image), MIB)]
        self.calls += 1
        body = struct.pack("<IIQIIiIII", index, 1, len(image), 0, 0, -1, 0, 0, 0)
        self.device.send(
            wire.command(
                MODULE_LOAD, body, call=self.calls, context=context, bulk_count=len(pieces)
            ),
            pieces,
        )
        [reply] = self.device.replies()
        return reply

    def function(self, name: str, index: int = 1, number: int = 1, context: int = 1) -> None:
        text = name.encode()
        body = struct.pack("<IIIIQ", index, 1, number, 1, len(text)) + text
        assert self.device.ask(MODULE_GET_FUNCTION, body, context=context).status == 0

    def launch(self, name: str, index: int = 1, threads: int = 1) -> Reply:
        self.function(name, index)
        shape = (1, 1, 1, threads, *SHAPE[4:])
        return self.device.ask(
            LAUNCH_KERNEL, struct.pack("<IIII12I", 1, 1, 1, 0, *shape), context=1
        )

    def used(self) -> int:
        free, total = struct.unpack("<QQ", self.device.ask(wire.MEM_GET_INFO, context=1).body)
        return total - free


@contextlib.contextmanager
def connected(lease: Lease) -> Iterator[Client]:
    control = Connection(lease).open()
    device = wire.open_device(lease, control.session)
    try:
        assert wire.create_context(device).status == 0
        yield Client(control, device)
    finally:
        device.close()
        control.close()


@pytest.mark.parametrize(
    "text",
    [
        f".global .b8 big[{128 * MIB}];" + KERNEL,
        f".global .b8 big[{64 * MIB}+{64 * MIB}];" + KERNEL,
        f".global .b32 big[1<<25];{KERNEL}",
        f".visible .entry k() {{ .global .b8 big[{128 * MIB}]; ret; }}",
        f".func f() {{ {{ .global .align 16 .v4 .f32 big[{8 * MIB}]; }} ret; }}\n" + KERNEL,
    ],
)
def test_variables_of_every_notation_count(lease: Lease, text: str) -> None:
    with connected(lease) as client:
        assert client.load((HEAD + text).encode()).status == OUT_OF_MEMORY
        assert client.used() == 0
        assert client.load((HEAD + ".global .b8 small[1000];" + KERNEL).encode(), 2).status == 0
        assert 1000 <= client.used() <= 2 * MIB


def test_what_two_readers_of_a_text_disagree_about_counts_all_the_same(lease: Lease) -> None:
    """A linked program's parts are read apart: the comment that one opens ends nowhere in it."""
    parts = [
        HEAD + KERNEL + "/*",
        HEAD + f".visible .global .b8 big[{128 * MIB}];\n// */\n",
    ]
    image = "// gpupool linked program\n"
    for part in parts:
        image += f"//@gpupool-part {len(part)} 0 a\n{part}\n"
    with connected(lease) as client:
        assert client.load(image.encode()).status != 0
        assert client.used() == 0


@pytest.mark.parametrize(
    ("image", "status"),
    [
        (struct.pack("<IIQQ", 0x466243B1, 1, 0x1000, 0), INVALID_IMAGE),
        (struct.pack("<IIQQ", 0x466243B1, 2, 0x1000, 0x1000), INVALID_IMAGE),
        (struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 1 << 40), INVALID_IMAGE),
        (struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01\x33\x07", 2, 190, 1, 0, 0, 1 << 40,
                     0x50, 64, 0, 0, 64, 100, 0), INVALID_IMAGE),
        ((HEAD + KERNEL + "@@@").encode(), INVALID_PTX),
        (("" + HEAD + "".join(f".global .b8 v{i};\n" for i in range(65540))).encode(), INVALID_PTX),
    ],
)  # fmt: skip
def test_images_that_cannot_be_checked_are_refused(lease: Lease, image: bytes, status: int) -> None:
    with connected(lease) as client:
        assert client.load(image).status == status
        assert client.load((HEAD + KERNEL).encode(), 2).status == 0


def test_the_hosts_memory_is_bounded(lease: Lease) -> None:
    """Images that never end: 64 of 256 MiB, of which the slice has room for none."""
    with connected(lease) as client:
        segment = bytes(MIB)
        for index in range(1, 65):
            body = struct.pack("<IIQIIiIII", index, 1, 256 * MIB, 0, 0, -1, 0, 0, 1)
            for _ in range(8):
                client.device.send(
                    wire.command(MODULE_LOAD, body, context=1, bulk_count=1), [segment]
                )
            client.used()
        text = (HEAD + KERNEL).encode()
        assert client.load(text, 100).status == 0


def test_copies_of_a_module_end_the_session_not_the_host(lease: Lease) -> None:
    """Copies of one module: what the driver keeps of them is on the host."""
    text = (HEAD + KERNEL + "// " + "x" * 4 * MIB).encode()
    loaded = 0
    with connected(lease) as client, contextlib.suppress(Closed):
        while loaded < 200 and client.load(text, loaded + 1).status == 0:
            loaded += 1
    assert 8 <= loaded < 80, "256 MiB, and what is every session's own"
    with connected(lease) as client:
        assert client.load((HEAD + KERNEL).encode()).status == 0


def test_endless_recursion_is_a_stack_overflow(lease: Lease) -> None:
    text = HEAD + ".func f() { call.uni f; ret; }\n.visible .entry k() { call.uni f; ret; }\n"
    with connected(lease) as client:
        assert client.load(text.encode()).status == 0
        assert client.launch("k", threads=32).status == 0
        assert client.device.ask(wire.CTX_SYNCHRONIZE, context=1).status == LAUNCH_FAILED


def test_what_graphs_make_the_driver_take_counts_while_the_client_is_silent(lease: Lease) -> None:
    """A heap for each context, all by launches of graphs in one frame, and nothing after it."""
    contexts = 20
    with connected(lease) as client:
        for number in range(1, contexts + 1):
            if number > 1:
                made = struct.pack("<IIIIQQ", number, 1, 0, 0, *wire.ARENA)
                assert client.device.ask(wire.CTX_CREATE, made, context=number).status == 0
            assert client.load(ALLOCATES, number, number).status == 0
            client.function("k", number, number, number)
            launch = struct.pack("<IIII12I", number, 1, 1, 0, *SHAPE)
            node = struct.pack("<IIII", 1, 0, 1, 0) + launch
            body = struct.pack("<IIQII", number, 1, len(node), 1, 0)
            client.device.send(
                wire.command(GRAPH_DEFINE, body, call=number, context=number, bulk_count=1), [node]
            )
            [reply] = client.device.replies()
            assert reply.status == 0
        room = SLICE_MIB - 4 - client.used() // MIB
        assert client.device.ask(MEM_ALLOC, struct.pack("<Q", room * MIB), context=1).status == 0
        client.device.send(
            b"".join(
                wire.command(GRAPH_LAUNCH, struct.pack("<IIII", number, 1, 1, 0), context=number)
                for number in range(1, contexts + 1)
            )
        )
        with pytest.raises(Refused, match="more for this program than its slice has room for"):
            client.device.replies()


def test_what_a_full_slice_bears_is_not_each_sessions(lease: Lease) -> None:
    """Of sessions that each make the driver take a heap, as many go on as the slice bears."""

    def goes_on(client: Client) -> bool:
        assert client.load(ALLOCATES).status == 0
        with contextlib.suppress(Refused):
            return client.launch("k").status == 0
        return False

    with connected(lease) as holder:
        room = SLICE_MIB * MIB - holder.used()
        assert holder.device.ask(MEM_ALLOC, struct.pack("<Q", room), context=1).status == 0
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(connected(lease)) for _ in range(6)]
            assert sum(map(goes_on, clients)) == BORNE_MIB // HEAP_MIB
            assert [goes_on(stack.enter_context(connected(lease))) for _ in range(2)] == [False] * 2

        def again() -> bool:
            with connected(lease) as client:
                return goes_on(client)

        wait_for("what was borne for them to come back", again)
