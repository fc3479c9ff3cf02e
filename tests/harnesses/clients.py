"""The command-line harnesses as users install them, and how each is pointed at a session of the chat server.

They are installed from the npm registry, once, into `MOLTFLOW_HARNESSES` or the cache of the user. A harness sees none
of the environment of the tests: its HOME is an empty folder, and all it is told is in its arguments and variables.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

INSTALL_SECONDS = 600
RUN_SECONDS = 120
LOG = "log.txt"
NUM_LOGGED = 300
"""Lines of the log, each the name of the harness and a number of ten digits."""
TASK = "Run the shell command that prints the marker, then say that you are done."


@dataclass(frozen=True)
class Place:
    """The session that a harness talks to, and the tokens at which it compacts its conversation, if it should."""

    url: str
    key: str
    compact_at: int | None = None


@dataclass(frozen=True)
class Harness:
    name: str
    package: str
    version: str
    binary: str
    command: Callable[[Place], list[str]]
    variables: Callable[[Place], dict[str, str]]
    shell_tools: tuple[str, ...]
    """Names that its shell tool has or had."""

    def install(self) -> Path:
        """The program. Installs it if it is not there; raises CalledProcessError when npm cannot."""
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moltflow" / "harnesses"
        folder = Path(os.environ.get("MOLTFLOW_HARNESSES") or cache) / f"{self.name}-{self.version}"
        program, done = folder / "node_modules" / ".bin" / self.binary, folder / ".installed"
        if not done.exists():
            folder.mkdir(parents=True, exist_ok=True)
            npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
            subprocess.run([*npm, f"{self.package}@{self.version}"], check=True, timeout=INSTALL_SECONDS, cwd=folder)
            done.touch()
        return program

    async def run(self, program: Path, place: Place, folder: Path) -> tuple[int | None, str]:
        """Its exit status and all that it printed; the status is None when it did not end in time.

        It works in a folder that holds a log.
        """
        home, work = folder / "home", folder / "work"
        for path in (home, work):
            path.mkdir()
        (work / LOG).write_text("".join(f"{self.name} {random.randrange(10**9, 10**10)}\n" for _ in range(NUM_LOGGED)))
        node = shutil.which("node")
        assert node is not None
        process = await asyncio.create_subprocess_exec(
            str(program),
            *self.command(place),
            env={
                "PATH": f"{Path(node).parent}:{os.defpath}",
                "HOME": str(home),
                "NO_PROXY": "127.0.0.1",
                "LANG": "C.UTF-8",
                **self.variables(place),
            },
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        printing = asyncio.create_task(process.communicate())
        try:
            await asyncio.wait((printing,), timeout=RUN_SECONDS)
            if printing.done():
                status = process.returncode
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        printed, _ = await printing
        return status, printed.decode(errors="replace")


def _claude_code_variables(place: Place) -> dict[str, str]:
    variables = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_API_KEY": place.key,
        "ANTHROPIC_MODEL": "policy",
        "ANTHROPIC_SMALL_FAST_MODEL": "policy",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if place.compact_at is not None:
        window, for_summary = 200_000, 20_000  # it keeps the second free and takes no window below 100,000
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
        variables["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(100 * place.compact_at / (window - for_summary))
    return variables


def _codex_command(place: Place) -> list[str]:
    provider = f'{{name="policy", base_url="{place.url}/v1", env_key="POLICY_KEY", wire_api="responses"}}'
    settings = ['model_provider="policy"', 'model="policy"', f"model_providers.policy={provider}"]
    settings += ["check_for_update_on_startup=false", "analytics.enabled=false"]
    if place.compact_at is not None:
        settings.append(f"model_auto_compact_token_limit={place.compact_at}")
    flags = [word for setting in settings for word in ("-c", setting)]
    return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *flags, TASK]


def _opencode_variables(place: Place) -> dict[str, str]:
    output = 32_000
    context = 400_000 if place.compact_at is None else place.compact_at + output
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{place.url}/v1", "apiKey": place.key},
        "models": {"policy": {"limit": {"context": context, "output": output}}},
    }
    config = {
        "provider": {"moltflow": provider},
        "model": "moltflow/policy",
        "small_model": "moltflow/policy",
        "autoupdate": False,
        "share": "disabled",
    }
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


HARNESSES = [
    Harness(
        name="claude-code",
        package="@anthropic-ai/claude-code",
        version="2.1.197",
        binary="claude",
        command=lambda place: ["-p", TASK, "--allowedTools", "Bash", "--output-format", "json"],
        variables=_claude_code_variables,
        shell_tools=("Bash",),
    ),
    Harness(
        name="codex",
        package="@openai/codex",
        version="0.171.0",
        binary="codex",
        command=_codex_command,
        variables=lambda place: {"POLICY_KEY": place.key},
        shell_tools=("exec_command", "shell_command", "shell"),
    ),
    Harness(
        name="opencode",
        package="opencode-ai",
        version="1.18.33",
        binary="opencode",
        command=lambda place: ["run", TASK],
        variables=_opencode_variables,
        shell_tools=("bash",),
    ),
]
