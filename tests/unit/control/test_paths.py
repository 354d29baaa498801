"""Where programs find the client's libraries."""

from __future__ import annotations

from gpupoold import paths

NAMES = {"libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", "libnvidia-ml.so"}


def installed(root, monkeypatch, *names):
    client = root / "native" / "client"
    client.mkdir(parents=True)
    for name in names:
        (client / name).write_text(name)
    monkeypatch.setenv(paths.ENVIRONMENT, str(root / "native"))
    return client


def test_an_installation_with_all_names_is_used_as_it_is(root, monkeypatch):
    client = installed(root, monkeypatch, *NAMES)
    assert paths.search_directory(str(root)) == client


def test_missing_names_are_links_to_one_library_each(root, monkeypatch):
    client = installed(root, monkeypatch, "libcuda.so.1", "libnvidia-ml.so.1")
    for _ in range(2):  # made, then found
        found = paths.search_directory(str(root))
        assert found == root / "client"
        assert {path.name for path in found.iterdir()} == NAMES
        assert {path.resolve() for path in found.glob("libcuda.so*")} == {client / "libcuda.so.1"}
        assert {path.resolve() for path in found.glob("libnvidia-ml.so*")} == {
            client / "libnvidia-ml.so.1"
        }


def test_links_of_another_installation_are_replaced(root, monkeypatch):
    (root / "client").mkdir()
    for name in NAMES:
        (root / "client" / name).symlink_to("/nonexistent/old")
    client = installed(root, monkeypatch, "libcuda.so.1", "libnvidia-ml.so.1")
    found = paths.search_directory(str(root))
    assert {path.resolve().parent for path in found.iterdir()} == {client}


def test_a_run_directory_that_cannot_be_written_does_not_stop_programs(root, monkeypatch):
    client = installed(root, monkeypatch, "libcuda.so.1", "libnvidia-ml.so.1")
    assert paths.search_directory(str(root / "missing")) == client
