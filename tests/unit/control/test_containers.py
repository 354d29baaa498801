"""CDI specifications: their form by the rules of CDI's SPEC.md, and their life with the slices."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpupoold import paths
from gpupoold.guests import cdi
from gpupoold.guests.containers import Containers, SpecFiles, clean_up, client_libraries
from gpupoold.guests.leases import GuestLeases
from gpupoold.guests.region import Regions
from gpupoold.guests.request import GuestRequest

from .test_pool import ALICE, ROOT, Host, until, want

#: what a runtime finds for `--device gpupool/slice=NAME`
Devices = dict[str, dict]


def check_spec(text: str) -> Devices:
    """A reader of its own for schema.json and SPEC.md of CDI 0.5.0; the devices by name."""
    spec = json.loads(text)
    assert set(spec) <= {"cdiVersion", "kind", "devices", "containerEdits"}
    assert spec["cdiVersion"] in ("0.3.0", "0.5.0")
    vendor, _, kind = spec["kind"].partition("/")
    for word in (vendor, kind):
        assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*[A-Za-z0-9]", word)
    devices = {}
    assert spec["devices"]
    for device in spec["devices"]:
        assert set(device) == {"name", "containerEdits"}
        name = device["name"]
        # 0.3.0: begins with a letter; 0.5.0: with a letter or digit. Ends with one in both.
        first = "[A-Za-z]" if spec["cdiVersion"] == "0.3.0" else "[A-Za-z0-9]"
        assert re.fullmatch(first + r"([A-Za-z0-9_.:-]*[A-Za-z0-9])?", name)
        edits = device["containerEdits"]
        assert set(edits) <= {"env", "deviceNodes", "mounts", "hooks"}
        for mount in edits["mounts"]:
            # `type` came with 0.4.0
            assert set(mount) <= {"hostPath", "containerPath", "options"}
            assert os.path.isabs(mount["hostPath"]) and os.path.isabs(mount["containerPath"])
            assert all(isinstance(option, str) for option in mount["options"])
        assert name not in devices
        devices[name] = edits
    return devices


@pytest.fixture
def client(root, monkeypatch):
    """A prefix with a client library, as it is installed."""
    directory = root / "native" / "client"
    directory.mkdir(parents=True)
    (directory / "libcuda.so.1").write_bytes(b"\x7fELF")
    monkeypatch.setenv(paths.ENVIRONMENT, str(root / "native"))
    return directory


@pytest.fixture
def host(root, client):
    made = Host(root, containers_cdi_dir=f"{root}/cdi")
    yield made
    made.stop()
    if made.broker is not None:
        made.broker.close()


@pytest.fixture
def containers(host):
    made = Containers(host.settings, host.pool)
    made.start()
    yield made
    made.stop()


def cdi_dir(host: Host) -> Path:
    return Path(host.settings.cdi_dir)


def devices(host: Host) -> Devices:
    """What a runtime would find; of all files that end in .json."""
    found: Devices = {}
    for file in cdi_dir(host).glob("*.json"):
        try:
            text = file.read_text()
        except FileNotFoundError:  # it went this moment
            continue
        for name, edits in check_spec(text).items():
            assert name not in found, "a conflict makes both unusable"
            found[name] = edits
    return found


def test_a_slice_is_a_device_as_long_as_it_is_there(host, containers, client):
    view = host.pool.create_slice(ALICE, want("train"))
    piece = view.piece
    found = devices(host)
    assert set(found) == {"train", piece.virtual_uuid}
    assert found["train"] == found[piece.virtual_uuid]
    mounts = {
        mount["containerPath"]: (mount["hostPath"], set(mount["options"]))
        for mount in found["train"]["mounts"]
    }
    library = str(client.resolve() / "libcuda.so.1")
    for path in (
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "/usr/lib/x86_64-linux-gnu/libcuda.so",
        "/usr/lib64/libcuda.so.1",
        "/usr/lib64/libcuda.so",
    ):
        assert mounts.pop(path) == (library, {"bind", "ro", "nosuid", "nodev"})
    assert mounts == {
        "/run/gpupool/slice": (
            f"{host.settings.run_dir}/slices/{piece.virtual_uuid}/socket",
            {"bind", "ro", "nosuid", "nodev", "noexec"},
        )
    }
    # The same directory as the broker was told, for the same user.
    [lease] = host.broker.pushed[-1].leases
    assert (lease.socket.name, lease.socket.uid) == (piece.virtual_uuid, ALICE.uid)
    assert lease.uid == ALICE.uid

    host.pool.create_slice(ALICE, want("other"))
    host.pool.delete_slice(ALICE, "train", force=False)
    assert "train" not in devices(host) and "other" in devices(host)
    assert len(list(cdi_dir(host).iterdir())) == 1


def test_a_name_that_is_anothers_uuid_is_no_device(host, containers, caplog):
    victim = host.pool.create_slice(ALICE, want("victim")).piece
    other = host.pool.create_slice(ALICE, want("other")).piece
    with host.pool.store.change() as change:  # as an older gpupoold has let it be
        change.execute("UPDATE slices SET name = ? WHERE id = ?", victim.virtual_uuid, other.id)
    containers.sync()
    containers.sync()
    assert set(devices(host)) == {"victim", victim.virtual_uuid, other.virtual_uuid}
    said = [record for record in caplog.records if "form of a UUID" in record.message]
    assert len(said) == 1 and other.id in said[0].getMessage()


def test_there_is_no_secret_and_everybody_may_read(host, containers):
    view = host.pool.create_slice(ALICE, want("train"))
    [file] = cdi_dir(host).iterdir()
    key = host.pool.store.leases()[0].key
    for form in (key.hex(), key.hex().upper(), str(list(key)), view.lease.id):
        assert form not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o644
    assert cdi_dir(host).stat().st_mode & 0o022 == 0


@pytest.mark.parametrize(
    ("name", "by_name", "version"),
    [
        ("a", True, "0.3.0"),
        ("a.b_c-d", True, "0.3.0"),
        ("7", True, "0.5.0"),
        ("2024-run", True, "0.5.0"),
        ("ends-", False, "0.3.0"),
        ("ends.", False, "0.3.0"),
        ("ends_", False, "0.3.0"),
    ],
)
def test_names_that_cdi_does_not_allow_are_left_to_the_uuid(
    host, containers, name, by_name, version
):
    view = host.pool.create_slice(ROOT, want(name))
    names = {name, view.piece.virtual_uuid} if by_name else {view.piece.virtual_uuid}
    assert set(devices(host)) == names
    [file] = cdi_dir(host).iterdir()
    assert json.loads(file.read_text())["cdiVersion"] == version


def test_a_slice_that_is_not_its_users_is_no_device(host, containers, root):
    """It is a virtual machine's for a time: no socket, no device; then both again."""
    host.pool.create_slice(ALICE, want("a"))
    guests = GuestLeases(host.pool, Regions(str(root), 1, ""), with_region=False)
    guest = guests.grant("u", "vm", GuestRequest(name="a"))
    until(lambda: not devices(host))
    until(lambda: host.broker.pushed[-1].leases[0].consumer.startswith("virtual"))
    assert not host.broker.pushed[-1].leases[0].HasField("socket")
    assert guests.end(guest, "a test")
    until(lambda: "a" in devices(host))
    until(lambda: host.broker.pushed[-1].leases[0].HasField("socket"))


def test_a_slice_for_one_program_is_no_device(host, containers):
    host.pool.start_run(ALICE, "", want(""), "prog")
    host.pool.create_slice(ALICE, want("a"))
    assert len(devices(host)) == 2  # by name and by uuid
    assert [lease.HasField("socket") for lease in host.broker.pushed[-1].leases].count(True) == 1


def test_a_start_puts_in_order_what_it_finds(host, root, client):
    view = host.pool.create_slice(ALICE, want("a"))
    files = SpecFiles(host.settings.cdi_dir, host.settings.state_dir)
    right = files.name(view.piece)
    prefix = right[: -len(f"{view.piece.id}.json")]
    stale = f"{prefix}00000000-0000-0000-0000-000000000000.json"
    half = f".{prefix}{view.piece.id}.0123456789abcdef0123456789abcdef.new"
    # Of others: another vendor's, another gpupoold's, and what only looks like ours.
    other = SpecFiles(host.settings.cdi_dir, "/var/elsewhere").name(view.piece)
    foreign = ["nvidia.yaml", other, f"{prefix}x.json", f"{prefix}{view.piece.id}.json.bak"]
    cdi_dir(host).mkdir()
    for name in (right, stale, half, *foreign):
        (cdi_dir(host) / name).write_text("{")
    containers = Containers(host.settings, host.pool)
    containers.start()
    containers.stop()
    left = {file.name for file in cdi_dir(host).iterdir()}
    assert left == {right, *foreign}
    assert "a" in check_spec((cdi_dir(host) / right).read_text())
    assert all((cdi_dir(host) / name).read_text() == "{" for name in foreign)


def test_the_files_stay_while_nobody_serves(host):
    containers = Containers(host.settings, host.pool)
    containers.start()
    host.pool.create_slice(ALICE, want("a"))
    containers.stop()
    assert "a" in devices(host)


def test_files_are_written_again_when_what_they_mention_changes(host, root, monkeypatch):
    host.pool.create_slice(ALICE, want("a"))
    for number in (1, 2):
        client = root / f"version{number}" / "client"
        client.mkdir(parents=True)
        (client / "libcuda.so.1").write_bytes(b"")
        if number == 2:  # a later version brings it for clients
            (client / "libnvidia-ml.so.1").write_bytes(b"")
        monkeypatch.setenv(paths.ENVIRONMENT, str(client.parent))
        containers = Containers(host.settings, host.pool)
        containers.start()
        containers.stop()
        mounts = {m["containerPath"]: m["hostPath"] for m in devices(host)["a"]["mounts"]}
        for file in ("libcuda.so", "libnvidia-ml.so")[:number]:
            for name in (file, f"{file}.1"):
                assert mounts[f"/usr/lib64/{name}"] == str(client.resolve() / f"{file}.1")
    assert "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1" in mounts
    # Sockets elsewhere: the same files, or the names would be in conflict.
    moved = replace(host.settings, run_dir=f"{root}/moved", container_library_dirs=("/lib",))
    containers = Containers(moved, host.pool)
    containers.start()
    containers.stop()
    mounts = {m["containerPath"]: m["hostPath"] for m in devices(host)["a"]["mounts"]}
    assert mounts["/run/gpupool/slice"].startswith(f"{root}/moved/slices/GPU-")
    assert "/lib/libcuda.so.1" in mounts and "/usr/lib64/libcuda.so.1" not in mounts


def test_a_file_is_exchanged_in_one_step_and_only_if_it_differs(host, containers):
    host.pool.create_slice(ALICE, want("a"))
    [file] = cdi_dir(host).iterdir()
    before = file.stat()
    host.pool.resize_slice(ALICE, "a", 30, 0)
    containers.sync()
    assert file.stat().st_ino == before.st_ino
    with file.open() as held:
        text = held.read()
        file.write_text("{}")
        containers.sync()
        assert file.stat().st_ino != before.st_ino and file.read_text() == text
    file.unlink()
    os.symlink("/etc/passwd", file)  # nobody's place but ours; it is not followed
    containers.sync()
    assert not file.is_symlink() and file.read_text() == text
    assert len(list(cdi_dir(host).iterdir())) == 1


def test_a_directory_that_cannot_be_written_is_told_once(host, root):
    (root / "cdi").write_text("a file")
    containers = Containers(host.settings, host.pool)
    containers.start()
    host.pool.create_slice(ALICE, want("a"))  # goes on without
    containers.sync()
    events, _ = host.pool.events(ROOT, 0, 100)
    [told] = [event for event in events if event.kind == "containers.failed"]
    assert f"{root}/cdi" in told.text
    (root / "cdi").unlink()
    containers.sync()
    assert "a" in devices(host)
    containers.stop()


def test_without_a_client_library_there_is_no_device(host, client):
    (client / "libcuda.so.1").unlink()
    assert client_libraries() == []
    containers = Containers(host.settings, host.pool)
    containers.start()
    host.pool.create_slice(ALICE, want("a"))
    assert not cdi_dir(host).exists()
    events, _ = host.pool.events(ROOT, 0, 100)
    assert any("client library" in e.text for e in events if e.kind == "containers.failed")
    containers.stop()


def test_off(root, client):
    made = Host(root, containers_cdi_dir="")
    made.pool.create_slice(ALICE, want("a"))
    assert not made.broker.pushed[-1].leases[0].HasField("socket")
    made.stop()
    made.broker.close()


def test_what_an_earlier_configuration_wrote_elsewhere_is_removed(host, root, monkeypatch):
    old = root / "etc-cdi"
    monkeypatch.setattr("gpupoold.guests.containers.WELL_KNOWN", (str(old), str(cdi_dir(host))))
    view = host.pool.create_slice(ALICE, want("a"))
    name = SpecFiles(str(old), host.settings.state_dir).name(view.piece)
    for directory in (old, cdi_dir(host)):
        directory.mkdir()
        (directory / name).write_text("{}")
        (directory / "vendor.json").write_text("{}")
    clean_up(host.settings)
    assert [file.name for file in old.iterdir()] == ["vendor.json"]
    assert (cdi_dir(host) / name).exists()


def test_a_device_is_mounted_where_it_is_configured():
    piece = SimpleNamespace(name="a", virtual_uuid="GPU-1")
    spec = cdi.specification(piece, "/r/s", [("/h/libcuda.so.1", "libcuda.so.1")], ["/x", "/y/z"])
    mounts = [m["containerPath"] for m in spec["devices"][0]["containerEdits"]["mounts"]]
    assert mounts == ["/x/libcuda.so.1", "/y/z/libcuda.so.1", "/run/gpupool/slice"]


@pytest.fixture
def places(host, containers):
    """The directories of a slice, as the broker makes them."""
    view = host.pool.create_slice(ALICE, want("a"))
    place = Path(host.settings.slice_socket_directory(view.piece.virtual_uuid))
    place.mkdir(parents=True, mode=0o755)
    place.parent.chmod(0o710)
    place.parent.parent.chmod(0o711)
    containers.sync()
    assert "a" in devices(host)
    return [place.parent.parent, place.parent, place]


@pytest.mark.parametrize("level", [0, 1, 2])
@pytest.mark.parametrize("kind", ["link", "file", "group", "others", "owner"])
def test_what_somebody_could_exchange_is_not_given_to_containers(
    host, containers, places, level, kind
):
    """Root's runtime would mount what lies there, for instance a symbolic link's target."""
    place = places[level]
    aside = place.with_name("aside")
    if kind in ("link", "file"):
        place.rename(aside)
        if kind == "link":
            place.symlink_to(aside)
        else:
            place.write_text("")
    elif kind == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give directories away")
        os.chown(place, 30001, -1)
    else:
        place.chmod(place.stat().st_mode | (0o020 if kind == "group" else 0o002))
    containers.sync()
    assert not devices(host)
    events, _ = host.pool.events(ROOT, 0, 1000)
    [told] = [event for event in events if event.kind == "containers.failed"]
    assert f"{place}: containers are not given it" in told.text
    if kind in ("link", "file"):
        place.unlink()
        aside.rename(place)
    elif kind == "owner":
        os.chown(place, 0, -1)
    else:
        place.chmod(0o711)
    containers.sync()
    assert "a" in devices(host)


def test_one_slices_directory_does_not_keep_the_others_from_containers(host, containers, places):
    host.pool.create_slice(ALICE, want("b"))
    places[2].rmdir()
    places[2].symlink_to("/")
    containers.sync()
    assert set(devices(host)) & {"a", "b"} == {"b"}
    # One that is not there yet is the broker's to make: nobody else can.
    places[2].unlink()
    containers.sync()
    assert set(devices(host)) & {"a", "b"} == {"a", "b"}
