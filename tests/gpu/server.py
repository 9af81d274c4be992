"""Real SGLang 0.5.16 servers on a GPU machine, from the archive that `bundle.py` packs.

    python3 -m tests.gpu.server --model DIR [--count N] [--tp T] [--flag=--FLAG ...] [-- COMMAND ...]

unpacks the archive, starts N servers side by side and prints their addresses; runs COMMAND with those in
$REFITFSM_SERVERS (separated by commas), or waits for the end of its input; then stops the servers and ends
with COMMAND's status. A first start on a fresh machine compiles kernels for one to three minutes:
`--kernels FILE` unpacks what an earlier one compiled and packs it again at the end.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.real.server import HOST, ServerProcess, free_port, side_by_side

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = ROOT / ".cache" / "gpu" / "site.tar.xz"
SERVERS_VARIABLE = "REFITFSM_SERVERS"
KERNEL_CACHES = (".cache", ".triton")  # beneath the home folder
START_TIMEOUT_S = 420.0


def site(archive: Path = ARCHIVE) -> Path:
    """The folder with the archive's packages, unpacked on first use in this machine's temporary folder."""
    facts = archive.stat()
    target = Path(tempfile.gettempdir()) / f"refitfsm-site-{facts.st_size}-{facts.st_mtime_ns}"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="refitfsm-site-") as partial:
        with tarfile.open(archive) as packed:
            packed.extractall(partial, filter="data")
        with contextlib.suppress(OSError):  # another process was first: its folder is as good
            Path(partial).rename(target)
            Path(partial).mkdir()
    return target


class GpuServer(ServerProcess):
    """SGLang 0.5.16 with the real memory saver on `tp` GPUs from `first_gpu` on.

    Several fit on one GPU: each takes `mem_fraction_static` of its memory at most for weights and KV pool
    together, and `max_total_tokens` bounds the pool. There is no tokenizer: requests carry `input_ids`.
    """

    def __init__(
        self,
        model: Path,
        *,
        packages: Path | None = None,
        tp: int = 1,
        first_gpu: int = 0,
        mem_fraction_static: float | None = 0.05,
        max_total_tokens: int | None = 32_768,
        memory_saver: bool = True,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        port = free_port()
        command = [sys.executable, "-m", "sglang.launch_server", *gpu_flags(model, port, tp, first_gpu)]
        if memory_saver:
            command += ["--enable-memory-saver"]
        if mem_fraction_static is not None:
            command += ["--mem-fraction-static", str(mem_fraction_static)]
        if max_total_tokens is not None:
            command += ["--max-total-tokens", str(max_total_tokens)]
        super().__init__(
            [*command, *flags],
            port=port,
            env=gpu_env(packages or site()) | dict(env or {}),
            ready_path="/health",  # 0.5.16 has no /ready; nothing of a new server is released, so it is safe
            start_timeout_s=start_timeout_s,
        )


def gpu_flags(model: Path, port: int, tp: int, first_gpu: int) -> list[str]:
    """Backends whose kernels are in the archive; no warm-up, so no request of the server's own."""
    valued = {
        "--model-path": str(model),
        "--host": HOST,
        "--port": str(port),
        "--tp": str(tp),
        "--base-gpu-id": str(first_gpu),
        "--attention-backend": "triton",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--cuda-graph-max-bs": "8",
    }
    return [part for item in valued.items() for part in item] + [
        "--skip-tokenizer-init",
        "--skip-server-warmup",
    ]


def gpu_env(packages: Path) -> dict[str, str]:
    """The caller's environment with the archive's packages first. What it says of NCCL stays as it is."""
    inherited = os.environ.get("PYTHONPATH")
    folders = [str(packages), *([inherited] if inherited else [])]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return env | {
        "PYTHONPATH": os.pathsep.join(folders),
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NO_PROXY": HOST,
        "no_proxy": HOST,
    }


@contextlib.contextmanager
def kernels(file: Path | None) -> Iterator[None]:
    """Kernels compiled on an earlier machine, from and back into `file`."""
    if file is not None and file.is_file():
        with tarfile.open(file) as packed:
            packed.extractall(Path.home(), filter="data")
    yield
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(file, "w:xz") as packed:
            for name in KERNEL_CACHES:
                if (Path.home() / name).is_dir():
                    packed.add(Path.home() / name, name)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a command beside real SGLang servers on GPUs.")
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--count", type=int, default=1, help="servers, on GPUs 0, T, 2T ... in turn")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this machine to use")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of each server")
    parser.add_argument("--flag", action="append", default=[], help="one more flag for SGLang: --flag=--FLAG")
    parser.add_argument("--kernels", type=Path, help="archive of compiled kernels, read and written")
    parser.add_argument("command", nargs="*", help="run with the addresses in $" + SERVERS_VARIABLE)
    options = parser.parse_args()
    packages = site()
    groups = max(1, options.gpus // options.tp)
    servers = [
        GpuServer(
            options.model,
            packages=packages,
            tp=options.tp,
            first_gpu=index % groups * options.tp,
            flags=options.flag,
        )
        for index in range(options.count)
    ]
    addresses = ",".join(server.url for server in servers)
    with kernels(options.kernels), side_by_side(*servers):
        print(addresses, flush=True)
        if options.command:
            env = os.environ | {SERVERS_VARIABLE: addresses}
            return subprocess.run(options.command, env=env, check=False).returncode
        sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
