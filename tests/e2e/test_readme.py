"""Every command block of the README does what it says; what is too large to be run here has a test that is named."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
from rig import OPENAI, Exchange, Rig, answer, configuration, eventually, upstream_table

from aiogw import config

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.rst").read_text()
BLOCKS = [block.rstrip() for block in re.findall(r"::\n\n((?:    .*\n|\n)+)", README)]
COMMAND = re.compile(r"\s+# .*|^\s+")
COMMANDS = [
    COMMAND.sub("", line)
    for block in BLOCKS
    for line in block.splitlines()
    if re.match(r"    (aiogw|scripts/|\(|journalctl)", line)
]
# By whom the others are run.
ELSEWHERE = {
    "scripts/demo": "scripts/verify",
    "scripts/test": ".ci/run",
    "scripts/install-service": "tests/test_install_service.py",
    "aiogw top --admin http://127.0.0.1:9464": "tests/e2e/test_status.py",
}
HERE = [command for command in COMMANDS if command not in ELSEWHERE]


async def run(command: str, directory: Path) -> tuple[int | None, str]:
    """In a shell with this aiogw on its path; the exit code and what was printed."""
    bin_ = directory / "bin"
    bin_.mkdir(exist_ok=True)
    (bin_ / "aiogw").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m aiogw "$@"\n')
    (bin_ / "aiogw").chmod(0o755)
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", command),
        cwd=ROOT,
        env=os.environ | {"PATH": f"{bin_}:{os.environ['PATH']}"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, said.decode()


def test_there_are_commands_and_each_is_somewhere() -> None:
    """None is forgotten, and what is said to be run elsewhere is."""
    assert len(HERE) > 8
    assert set(ELSEWHERE) <= set(COMMANDS)
    for command, place in ELSEWHERE.items():
        name = "top" if " top " in command else command.rpartition("/")[2]
        assert name in (ROOT / place).read_text()


@pytest.mark.parametrize("command", HERE)
async def test_a_command(rig: Rig, command: str, tmp_path: Path) -> None:
    """It ends well, with the addresses and files of this machine in the place of those it names."""
    upstream = await rig.upstream(served)
    gateway = await rig.daemon(upstream, server={"log_format": "text"})
    await rig.ask(gateway, OPENAI, 1, "x-request-id: r-1")
    await eventually(lambda: any("r-1" in line for line in gateway.lines))
    host, port = gateway.admin_address
    (tmp_path / "gateway.log").write_text("\n".join(gateway.lines) + "\n")
    here = re.sub(r"http://127\.0\.0\.1:9464", f"http://{host}:{port}", command)
    here = here.replace("http://vllm:8000", upstream.url).replace("/etc/aiogw/keys", str(tmp_path))
    here = re.sub(r"\bID gateway\.log|\breq_\w+", f"r-1 {tmp_path}/gateway.log", here)
    here = here.removeprefix("journalctl -u aiogw -o cat | ")
    if command == "aiogw --config etc/gateway.toml":
        shipped = tomllib.loads((ROOT / "etc" / "gateway.toml").read_text())
        shipped["server"] |= {"listen": "127.0.0.1:0", "admin_listen": "127.0.0.1:0"}
        await rig.start(configuration(shipped["upstreams"], **shipped["server"]), process=True)
        return  # at the end the rig sends SIGTERM, and looks at the exit code
    code, said = await run(here, tmp_path)
    assert code == 0, said
    # Lines that are copied by hand are not sent back with an excuse.
    assert "usage:" not in said


def served(exchange: Exchange) -> None:
    if exchange.request.method == "GET":
        exchange.answer(b'{"object":"list","data":[{"id":"reasoning","object":"model","max_model_len":4096}]}')
    else:
        answer(exchange)


def test_a_block_of_configuration(tmp_path: Path) -> None:
    """It is taken as it stands, its file apart."""
    (block,) = [block for block in BLOCKS if "[auth]" in block]
    key = tmp_path / "alice"
    key.write_text("k" * 40)
    key.chmod(0o600)
    text = re.sub(r"^    ", "", block, flags=re.MULTILINE).replace("/etc/aiogw/keys/alice", str(key))
    whole = tomllib.loads(configuration({"reasoning": upstream_table("http://a")}))
    whole["auth"] = tomllib.loads(text)["auth"]
    assert config.loads(tomli_w.dumps(whole)).auth.mode == "keys"
