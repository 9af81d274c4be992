#!/usr/bin/env python3
"""Pack SGLang 0.5.16, what it imports and what refitfsm imports into one archive for a GPU machine.

The target needs no package registry: it has Linux on x86-64, Python 3.12, torch 2.11 for CUDA 13, Triton 3.6,
nvcc and the usual scientific packages; it unpacks the archive into a folder and puts that on PYTHONPATH.
SGLang 0.5.16 is the older of the two dialects (no update sessions). Kernels that a small dense model never
calls are left out, so a server must use the triton attention and pytorch sampling backends, as
`tests/gpu/server.py` does.

    python3 tests/gpu/bundle.py

writes .cache/gpu/site.tar.xz beneath the checkout (about 5 minutes on two cores), or does nothing when the
archive there is current. It uses the standard library, pip and, where present, `strip`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_OUT = ROOT / ".cache" / "gpu"
ARCHIVE_NAME = "site.tar.xz"
STAMP_NAME = "site.key"
MAX_BYTES = 60_000_000
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
LAYOUT = 1  # raise it when the way of packing changes

# pip matches these tags exactly, so each glibc in use by some wheel is named.
GLIBC_TAGS = (
    *(f"manylinux_2_{minor}" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)),
    "manylinux2014",
    "manylinux2010",
    "manylinux1",
)

LEFT_OUT = (
    "/tests/",
    "/test/",
    "/__pycache__/",
    "/multimodal_gen/",
    "flash_ops.abi3",
    "infllm_ops",
    "sgl_kernel/sm100",
    "libxgrammar.a",
    "flashmla_ops",
)
KEPT_AS_BUILT = ("sgl_kernel", "torch_memory_saver")  # device code and preloaded hooks: never stripped


def pins() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines())
    return [line for line in lines if line]


def key(requirements: list[str]) -> str:
    """Names the archive's content: the pins, what is left out, the way of packing."""
    text = "\n".join([str(LAYOUT), *requirements, *LEFT_OUT, *KEPT_AS_BUILT])
    return hashlib.sha256(text.encode()).hexdigest()


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def download(requirements: list[str], folder: Path) -> bool:
    """Fetch the wheels of `requirements` for the target; False when pip finds no wheel for one of them."""
    target = [
        "--python-version=3.12",
        "--implementation=cp",
        *(f"--abi={abi}" for abi in ("cp312", "abi3", "none")),
        *(f"--platform={tag}_x86_64" for tag in GLIBC_TAGS),
        "--platform=any",
    ]
    wheels_only = ["--no-deps", "--only-binary=:all:", *target]
    return pip("download", "-q", *wheels_only, "-d", str(folder), *requirements).returncode == 0


def collect(requirements: list[str], folder: Path) -> None:
    """All wheels of `requirements`; a package that has only a (pure Python) source archive is built here."""
    if download(requirements, folder):
        return
    for requirement in requirements:
        if download([requirement], folder):
            continue
        before = set(folder.iterdir())
        built = pip("wheel", "-q", "--no-deps", "-w", str(folder), requirement)
        reason = (built.stderr.strip().splitlines() or ["no message"])[-1]
        if built.returncode == 0:
            if all(wheel.name.endswith("-any.whl") for wheel in set(folder.iterdir()) - before):
                continue
            reason = "it is built from source, for this machine only"
        raise SystemExit(f"bundle: no wheel of {requirement} for the target: {reason}")


def installed_name(name: str) -> str | None:
    """Where a wheel's member lands in site-packages, or None for what is not needed there."""
    if ".data/" in name:
        head, _, rest = name.partition(".data/")
        scheme, _, rest = rest.partition("/")
        if "/" in head or scheme not in {"purelib", "platlib"}:
            return None
        name = rest
    return None if any(part in "/" + name for part in LEFT_OUT) else name


def stripped(library: bytes) -> bytes:
    """The shared library without its symbols, or unchanged where `strip` is absent or refuses it."""
    strip = shutil.which("strip")
    if strip is None:
        return library
    with tempfile.NamedTemporaryFile() as file:
        file.write(library)
        file.flush()
        done = subprocess.run([strip, "--strip-unneeded", file.name], capture_output=True, check=False)
        return library if done.returncode else Path(file.name).read_bytes()


def members(wheel: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as package:
        for info in package.infolist():
            name = None if info.is_dir() else installed_name(info.filename)
            if name is None:
                continue
            content = package.read(info)
            if ".so" in name and not name.startswith(KEPT_AS_BUILT):
                content = stripped(content)
            yield name, content


def pack(wheels: Path, target: Path) -> None:
    """Write the archive under another name and rename it, so that a broken run leaves none."""
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=5) as archive:
        for wheel in sorted(wheels.glob("*.whl")):
            for name, content in members(wheel):
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(content), 0o755 if ".so" in name else 0o644
                archive.addfile(member, io.BytesIO(content))
    partial.rename(target)


def build(out: Path, extra: list[str]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    target, stamp = out / ARCHIVE_NAME, out / STAMP_NAME
    requirements = [*pins(), *extra]
    wanted = key(requirements)
    if target.is_file() and stamp.is_file() and stamp.read_text() == wanted:
        return target
    stamp.unlink(missing_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary)
        collect(requirements, wheels)
        print(
            f"bundle: {len(list(wheels.glob('*.whl')))} wheels in {time.monotonic() - started:.0f} s",
            flush=True,
        )
        pack(wheels, target)
    size = target.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"bundle: {target} has {size:,} bytes, more than the {MAX_BYTES:,} that may travel")
    stamp.write_text(wanted)
    print(f"bundle: packed in {time.monotonic() - started:.0f} s", flush=True)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Pack SGLang and refitfsm's dependencies for a GPU machine.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the archive")
    parser.add_argument(
        "--add", action="append", default=[], metavar="NAME==VERSION", help="one more package"
    )
    options = parser.parse_args()
    target = build(options.out, options.add)
    print(f"{target} {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
