"""Configuration: defaults, and one clear sentence for each thing that can be wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpupoold.conf import load, set_up_logging, unknown_options
from gpupoold.errors import ConfigurationError


def loaded(root, text: str):
    path = root / "g.conf"
    path.write_text(text)
    return load(["--config-file", str(path)], defaults=False)[1]


def test_defaults():
    settings = load([], defaults=False)[1]
    assert settings.state_dir == "/var/lib/gpupool"
    assert settings.api_socket == "/run/gpupool/gpupoold.sock"
    assert settings.broker_socket == "/run/gpupool/broker.sock"
    assert settings.session_socket == "/run/gpupool/session.sock"
    assert settings.driver_directory == ""
    assert settings.broker_tcp_listen == ""
    assert settings.placement_policy == "pack"
    assert settings.cdi_dir == "/var/run/cdi"
    assert settings.container_library_dirs == ("/usr/lib/x86_64-linux-gnu", "/usr/lib64")


def test_values_are_taken(root):
    settings = loaded(
        root,
        "[DEFAULT]\nhost = gpu-a\nrun_dir = /r/\n[gpus]\ndriver_directory = /d/\n"
        "placement_policy = spread\nmemory_reserve_mib = 0\n[broker]\ntcp_listen = [::1]:0\n"
        "worker_environment = A:1,B:two\nworker_user = root\n",
    )
    assert (settings.host, settings.run_dir, settings.driver_directory) == ("gpu-a", "/r", "/d")
    assert (settings.placement_policy, settings.memory_reserve_mib) == ("spread", 0)
    assert settings.broker_tcp_listen == "[::1]:0"
    assert settings.worker_environment == {"A": "1", "B": "two"}


WRONG = [
    ("DEFAULT", "debug", "7"),
    ("DEFAULT", "use_syslog", "maybe"),
    ("DEFAULT", "event_limit", "many"),
    ("DEFAULT", "event_limit", "5"),
    ("DEFAULT", "host", "not a host name"),
    ("DEFAULT", "run_dir", "relative/path"),
    ("DEFAULT", "state_dir", "x"),
    ("DEFAULT", "run_dir", "/" + "long/" * 30),
    ("gpus", "memory_reserve_mib", "-1"),
    ("gpus", "memory_reserve_mib", "2G"),
    ("gpus", "placement_policy", "random"),
    ("gpus", "driver_directory", "usr/lib"),
    ("gpus", "health_interval", "0"),
    ("containers", "cdi_dir", "var/run/cdi"),
    ("containers", "library_dirs", "/usr/lib64,lib"),
    ("containers", "library_dirs", ""),
    ("api", "tcp_listen", "0.0.0.0:5000"),
    ("api", "max_connections", "lots"),
    ("broker", "tcp_listen", "0.0.0.0:5000"),
    ("broker", "tcp_listen", "192.0.2.1:1"),
    ("broker", "tcp_listen", "127.0.0.1"),
    ("broker", "tcp_listen", "127.0.0.1:70000"),
    ("broker", "tcp_listen", "localhost:1"),
    ("broker", "warm_workers", "1.5"),
    ("broker", "warm_context", "perhaps"),
    ("broker", "worker_user", "no-such-user-here"),
    ("broker", "worker_environment", "nocolon"),
]


@pytest.mark.parametrize(("group", "option", "value"), WRONG)
def test_a_wrong_value_names_option_file_and_line(root, group, option, value):
    with pytest.raises(ConfigurationError) as caught:
        loaded(root, f"# a comment\n[{group}]\n{option} = {value}\n")
    sentence = str(caught.value)
    assert f"[{group}] {option}" in sentence
    assert f"{root}/g.conf, line 3" in sentence
    assert "\n" not in sentence
    assert caught.value.exit_status == 2


def test_options_that_do_not_exist_are_told(root):
    path = root / "g.conf"
    path.write_text(
        "[DEFAULT]\ndebug = true\nhots = a\nuse_stderr = true\n[gpus]\ndriver_dir = /x\n"
        "# memory = 1\n[elsewhere]\nanything = 1\n[broker]\nwarm_workers = 2\n"
        "worker_environment = A:1,\n B:2\n"
    )
    conf, _ = load(["--config-file", str(path)], defaults=False)
    assert unknown_options(conf) == [
        f"{path}, line 3: there is no option hots in [DEFAULT]",
        f"{path}, line 6: there is no option driver_dir in [gpus]",
    ]


def test_a_file_that_is_not_there(root):
    with pytest.raises(ConfigurationError, match=r"not found.*nothere\.conf"):
        load(["--config-file", str(root / "nothere.conf")], defaults=False)


def test_a_file_that_is_no_configuration(root):
    with pytest.raises(ConfigurationError) as caught:
        loaded(root, "[DEFAULT]\nthis is not a setting\n")
    assert f"{root}/g.conf" in str(caught.value)


def test_the_sample_lists_every_option(root):
    from pathlib import Path

    from gpupoold.conf import opts

    sample = Path(__file__).parents[3] / "etc" / "gpupoold" / "gpupoold.conf.sample"
    lines = sample.read_text().splitlines()
    for group in opts.GROUPS:
        start = lines.index(f"[{group.GROUP}]")
        for option in group.OPTIONS:
            assert any(line.startswith(f"#{option.name} =") for line in lines[start:]), option.name


def test_a_file_that_is_not_utf8(root):
    path = root / "g.conf"
    path.write_bytes(b"[DEFAULT]\nhost = \xff\n")
    with pytest.raises(ConfigurationError, match="not UTF-8: byte 0xff"):
        load(["--config-file", str(path)], defaults=False)


def test_a_directory_instead_of_a_file(root):
    with pytest.raises(ConfigurationError, match=r"cannot be read|not found|parsed"):
        load(["--config-file", str(root)], defaults=False)


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ("log_file = /nowhere/at/all.log", "/nowhere"),
        ("log_dir = /proc/nowhere", "/proc/nowhere"),
        ("log_config_append = /nowhere.ini", "nowhere.ini"),
        ("default_log_levels = x", "logging cannot be set up"),
        ("use_syslog = true\nsyslog_log_facility = kitchen", "facility must be one of"),
    ],
)
def test_logging_that_cannot_be_set_up(root, lines, names):
    path = root / "g.conf"
    path.write_text(f"[DEFAULT]\n{lines}\n")
    conf, _ = load(["--config-file", str(path)], defaults=False)
    with pytest.raises(ConfigurationError, match=names):
        set_up_logging(conf)


def test_a_debug_log_is_of_gpupoold_and_not_of_grpc(root):
    path = root / "g.conf"
    path.write_text("[DEFAULT]\ndebug = true\n")
    # A process of its own: oslo.log's defaults are the process's, and other tests set them.
    program = (
        "import sys, logging; from gpupoold.conf import load, set_up_logging\n"
        "set_up_logging(load(['--config-file', sys.argv[1]], defaults=False)[0])\n"
        "print(*(logging.getLogger(n).getEffectiveLevel() for n in ('grpc.x', 'gpupoold.x')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["30", "10"]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("node-1.example", "node-1.example"),
        ("node_1", "node_1"),
        ("(none)", "localhost"),
        ("", "localhost"),
    ],
)
def test_a_host_without_a_name_is_configured(name: str, taken: str) -> None:
    from gpupoold.conf.base import host_name

    assert host_name(name) == taken
